package supervise

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"ulysses/internal/flight"
	"ulysses/internal/status"
)

// cluster knows the nodes of a Slurm allocation. Outside of one, attempts use the same command.
type cluster struct {
	nodes   []string // of the allocation; nil outside of Slurm
	suspect []string // nodes on which a rank has died
	states  func(nodes []string) (map[string]string, error)
	expand  func(list string) []string // the names of a list such as n[1-3,5]
	again   bool                       // the job has been started before
}

func newCluster() *cluster {
	c := &cluster{states: nodeStates, expand: hostnames}
	if list := os.Getenv("SLURM_JOB_NODELIST"); list != "" {
		c.nodes = hostnames(list)
	}
	return c
}

// hostnames returns the names of a list of Slurm such as n[1-3,5], or of a file with such lists;
// nil if there is no Slurm.
func hostnames(list string) []string {
	out, err := exec.Command("scontrol", "show", "hostnames", list).Output()
	if err != nil {
		return nil
	}
	return strings.Fields(string(out))
}

// nodeStates returns Slurm's states of nodes.
func nodeStates(nodes []string) (map[string]string, error) {
	cmd := exec.Command("sinfo", "-h", "-N", "-n", strings.Join(nodes, ","), "-o", "%N %T")
	timer := time.AfterFunc(30*time.Second, func() { cmd.Process.Kill() })
	defer timer.Stop()
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	states := map[string]string{}
	for _, line := range strings.Split(string(out), "\n") {
		if name, state, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			states[name] = state
		}
	}
	return states, nil
}

// dead reports whether a node in this state runs nothing. Slurm marks nodes that do not respond
// with "*".
func dead(state string) bool {
	return strings.HasSuffix(state, "*") || strings.HasPrefix(state, "down") || strings.HasPrefix(state, "fail") ||
		strings.HasPrefix(state, "drain")
}

// exclude notes the hosts of ranks that have died. The next attempt uses other nodes, if there are
// enough. killed says that the program did not end the rank itself. Either a signal killed it, or
// the PMIx library ended it because another rank was gone (srun of Slurm 24.11 then ends with 14).
// The launcher may have killed the others at once, so that they look alike.
func (c *cluster) exclude(d *flight.Diagnosis, killed bool) {
	c.again = true
	for _, x := range d.Culprits {
		node := c.nodeOf(x.Host)
		if (killed || d.Ranks[x.Rank].Condition == flight.Gone) && node != "" && !slices.Contains(c.suspect, node) {
			c.suspect = append(c.suspect, node)
		}
	}
}

// nodeOf returns Slurm's name of a host, which may have another domain, or none; "" if it is no
// node of the allocation.
func (c *cluster) nodeOf(host string) string {
	if slices.Contains(c.nodes, host) {
		return host
	}
	short := func(name string) string { name, _, _ = strings.Cut(name, "."); return name }
	for _, n := range c.nodes {
		if short(n) == short(host) {
			return n
		}
	}
	return ""
}

// command returns the words of the launcher and of the program for the next attempt. The first
// attempt, and one outside of Slurm, has the words of the options. Another one under srun gets the
// nodes that are left: as many as the job wants, or fewer, and then a mesh that the program
// chooses.
func (c *cluster) command(o *Options) (launcher, program []string, err error) {
	if !c.again || len(c.nodes) == 0 || filepath.Base(o.Launcher[0]) != "srun" {
		return slices.Clone(o.Launcher), o.Program, nil
	}
	if first := value(o.Launcher, "r", "relative"); first != "" { // srun refuses it beside --nodelist
		o.Log(fmt.Sprintf("srun --relative=%s chooses the nodes: the job starts again on the same nodes", first))
		return slices.Clone(o.Launcher), o.Program, nil
	}
	nodes := c.usable(o.Launcher)
	want := len(nodes)
	if n := count(o.Launcher, "N", "nodes"); n > 0 {
		want = min(n, want)
	}
	states, err := c.states(nodes)
	if err != nil {
		o.Log(fmt.Sprintf("sinfo: %v; the job starts again on the same nodes", err))
		return slices.Clone(o.Launcher), o.Program, nil
	}
	good := slices.DeleteFunc(slices.Clone(nodes), func(n string) bool { return dead(states[n]) })
	if fresh := slices.DeleteFunc(slices.Clone(good),
		func(n string) bool { return slices.Contains(c.suspect, n) }); len(fresh) >= want {
		good = fresh
	}
	if len(good) == 0 {
		return nil, nil, status.Errorf(status.Comm, "supervise: no node of %s is left", strings.Join(nodes, ","))
	}
	good = good[:min(want, len(good))]
	_, own := options(o.Launcher)
	words := append(slices.Clone(o.Launcher[:own]), "--nodes="+strconv.Itoa(len(good)),
		"--nodelist="+strings.Join(good, ","))
	program = o.Program
	before, now := c.tasks(o.Launcher, want), 0
	if before > 0 { // otherwise srun takes the number of the allocation
		now = max(1, before*len(good)/want)
		words = append(words, "--ntasks="+strconv.Itoa(now))
	}
	if len(good) < want {
		program = append(slices.Clone(program), o.Fewer(before, now)...)
	}
	o.Log(fmt.Sprintf("nodes: %s", strings.Join(good, ",")))
	return append(words, o.Launcher[own:]...), program, nil
}

// usable returns the nodes of the allocation that the launcher does not exclude, first the nodes
// that it names.
func (c *cluster) usable(launcher []string) []string {
	listed := func(names ...string) (nodes []string) {
		if list := value(launcher, names...); list != "" {
			nodes = c.expand(list)
		}
		return nodes
	}
	excluded, named := listed("x", "exclude"), listed("w", "nodelist")
	var first, others []string
	for _, n := range c.nodes {
		switch {
		case slices.Contains(excluded, n):
		case slices.Contains(named, n):
			first = append(first, n)
		default:
			others = append(others, n)
		}
	}
	return append(first, others...)
}

// tasks returns the number of tasks of the first attempt, on so many nodes; 0 = unknown.
func (c *cluster) tasks(launcher []string, nodes int) int {
	if n := count(launcher, "n", "ntasks"); n > 0 {
		return n
	}
	if n, err := strconv.Atoi(os.Getenv("SLURM_NTASKS")); err == nil && n > 0 {
		return n
	}
	return nodes * count(launcher, "ntasks-per-node")
}

// bare are the options of srun that have no value, or one behind "=" alone (srun --help).
const bare = " preserve-env hold immediate no-kill kill-on-bad-exit label multi-prog nice overcommit overlap propagate pty quit-on-interrupt quiet reboot oversubscribe send-libs spread-job unbuffered use-min-nodes verbose disable-status contiguous no-allocate exact exclusive resv-ports compress interactive "

// option is a word of srun that begins with "-", and its value, if it has one.
type option struct{ name, value string }

// options returns srun's own options, and the number of words that they and srun take. The words
// after them are a program that starts the rank, such as numactl.
func options(words []string) (own []option, at int) {
	for at = 1; at < len(words) && len(words[at]) > 1 && words[at][0] == '-' && words[at] != "--"; {
		name, long := strings.CutPrefix(words[at], "--")
		value, given := "", true
		if long {
			if name, value, given = strings.Cut(name, "="); !given {
				given = strings.Contains(bare, " "+name+" ")
			}
		} else { // The letters at the start have no value. The next one's is behind it, or the next word.
			rest := strings.TrimLeft(name[1:], "EHIkKlOQsuvXZ")
			if name = rest; len(rest) > 0 {
				name, value = rest[:1], rest[1:]
				given = value != "" || name[0] >= '0' && name[0] <= '9'
			}
		}
		if at++; !given && at < len(words) {
			value = words[at]
			at++
		}
		own = append(own, option{name, value})
	}
	return own, min(at, len(words))
}

// value returns the value of an option of srun: -N 2, -N2, --nodes 2 or --nodes=2. The last one
// counts; "" = not given.
func value(launcher []string, names ...string) (last string) {
	own, _ := options(launcher)
	for _, o := range own {
		if slices.Contains(names, o.name) {
			last = o.value
		}
	}
	return last
}

// count returns the number that is the value of an option of srun, and 0 if it has none. Of a range
// such as 2-4, srun takes as many as there are.
func count(launcher []string, names ...string) int {
	text := value(launcher, names...)
	if _, most, ok := strings.Cut(text, "-"); ok {
		text = most
	}
	n, _ := strconv.Atoi(text)
	return max(n, 0)
}
