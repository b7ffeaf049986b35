package launch

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"ulysses/internal/units"
	"ulysses/slurm"
)

// presence is a folder in which each task of a launcher has a file from before it starts MPI until
// MPI has started, because MPI_Init waits for all tasks and does not say for which.
type presence struct {
	env slurm.Environment
	dir string
}

// startPrefix is the start of the names of such folders.
const startPrefix = ".start-"

// RemoveLeft removes what tasks that were killed before MPI had started have left in a folder. All
// tasks of this job have started MPI, and this process owns the folder. Another job, which will be
// refused, may lose the names of its missing tasks.
func RemoveLeft(folder string) error {
	entries, err := os.ReadDir(folder)
	for _, e := range entries {
		if err == nil && strings.HasPrefix(e.Name(), startPrefix) {
			err = os.RemoveAll(filepath.Join(folder, e.Name()))
		}
	}
	return err
}

// nameMissing is the time after which tasks that have not started are named.
var nameMissing = 45 * time.Second

// appear writes the file of this task into a folder that all tasks share. It returns nil if the
// folder cannot be written, or if there is none.
func appear(env slurm.Environment, folder string) *presence {
	start := os.Getenv("PMIX_NAMESPACE") // one for each start of mpirun, or step of Slurm
	if start == "" && env.Launcher == "srun" {
		start = env.JobID + "." + env.StepID
	}
	if folder == "" || start == "" {
		return nil
	}
	p := &presence{env: env, dir: filepath.Join(folder, startPrefix+strings.Map(wordOnly, start))}
	made := 0 // folders above dir that MkdirAll creates
	for parent := folder; parent != filepath.Dir(parent); parent = filepath.Dir(parent) {
		if _, err := os.Stat(parent); err == nil {
			break
		}
		made++
	}
	if os.MkdirAll(p.dir, 0o777) != nil || os.WriteFile(p.file(env.Rank), []byte(env.Host), 0o666) != nil ||
		made > 0 && os.WriteFile(p.made(), []byte(strconv.Itoa(made)), 0o666) != nil {
		p.leave()
		return nil
	}
	return p
}

func wordOnly(r rune) rune {
	if r == '.' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
		return r
	}
	return '-'
}

func (p *presence) file(rank int) string { return filepath.Join(p.dir, strconv.Itoa(rank)) }

// made returns the file with the number of folders above dir that a task has created. It is beside
// dir, because the task that leaves last, which finds dir empty, is not always that task.
func (p *presence) made() string { return p.dir + ".made" }

// leave removes the file of this task. The last task also removes the folders that the tasks have
// created, so that a job that is refused leaves no output.dir.
func (p *presence) leave() {
	if p == nil {
		return
	}
	os.Remove(p.file(p.env.Rank))
	if os.Remove(p.dir) != nil { // other tasks have files in it
		return
	}
	text, _ := os.ReadFile(p.made())
	os.Remove(p.made())
	made, _ := strconv.Atoi(string(text)) // 0 without the file
	for dir := filepath.Dir(p.dir); made > 0; made-- {
		os.Remove(dir) // if it is empty
		dir = filepath.Dir(dir)
	}
}

// waiting returns the warning of a task after nameMissing; "" if all tasks have started, or another
// task warns.
func waiting(env slurm.Environment, here *presence, timeout time.Duration) string {
	limit := "without a limit"
	if timeout > 0 {
		limit = fmt.Sprint("for ", timeout)
	}
	ranks, first := here.missing()
	switch {
	case !here.here() && env.Rank <= 1: // also rank 1, because rank 0 may be missing
		return notAll(env, nameMissing, "") + " (this task waits " + limit + ")"
	case first && len(ranks) > 0:
		return fmt.Sprintf("%s; the other tasks wait %s", here.describe(ranks), limit)
	}
	return ""
}

// notAll says that tasks have not started MPI after some time; which, in brackets, names them.
func notAll(env slurm.Environment, after time.Duration, which string) string {
	return fmt.Sprintf("rank %d: not all %d tasks of %s have started MPI after %v%s; start the same command on each task",
		env.Rank, env.Tasks, env.Launcher, after, which)
}

// here reports whether the file of this task is there. It is not if p is nil, or if the folder's
// owner has removed it.
func (p *presence) here() bool {
	if p == nil {
		return false
	}
	_, err := os.Stat(p.file(p.env.Rank))
	return err == nil
}

// missing returns the tasks that have no file, and whether this task is the first that has one.
// Without the file of this task, it returns neither.
func (p *presence) missing() (ranks []int, first bool) {
	if !p.here() {
		return nil, false
	}
	first = true
	for r := range p.env.Tasks {
		if _, err := os.Stat(p.file(r)); err != nil {
			ranks = append(ranks, r)
		} else if r < p.env.Rank {
			first = false
		}
	}
	return ranks, first
}

// describe names tasks that have not started, with their nodes if these are known; "" for none.
func (p *presence) describe(ranks []int) string {
	if len(ranks) == 0 {
		return ""
	}
	const most = 8
	words := make([]string, 0, most)
	nodes := p.nodes()
	for _, r := range ranks[:min(len(ranks), most)] {
		text := fmt.Sprint("task ", r)
		if node := slurm.NodeOf(r, os.Getenv("SLURM_STEP_TASKS_PER_NODE")); node >= 0 && node < len(nodes) {
			text += " on " + nodes[node]
		}
		words = append(words, text)
	}
	text := strings.Join(words, ", ")
	if n := len(ranks) - most; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("%s not started: %s",
		units.Count(int64(len(ranks)), "task")+map[bool]string{true: " has", false: " have"}[len(ranks) == 1], text)
}

// nodes returns the nodes of Slurm's step in the order of their tasks; nil if tasks are not placed
// node by node, or outside of Slurm.
func (p *presence) nodes() []string {
	list, how := os.Getenv("SLURM_STEP_NODELIST"), os.Getenv("SLURM_DISTRIBUTION")
	if p.env.Launcher != "srun" || list == "" || how != "" && !strings.HasPrefix(how, "block") {
		return nil
	}
	cmd := exec.Command("scontrol", "show", "hostnames", list)
	timer := time.AfterFunc(5*time.Second, func() { cmd.Process.Kill() })
	defer timer.Stop()
	out, err := cmd.Output()
	if err != nil {
		return nil
	}
	return strings.Fields(string(out))
}
