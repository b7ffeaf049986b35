//go:build mpi

package main

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"ulysses/testkit/need"
)

// watchdog is the limit of a collective in the runs with injected faults.
const watchdog = 5 * time.Second

// injected is a fault of one rank of four under a launcher.
type injected struct {
	kind     string
	launcher string // mpirun or srun
	rank     int
	step     int
	seed     uint64
}

// outcome is how a run with a fault has ended.
type outcome struct {
	code   int
	took   time.Duration // since the fault
	text   string        // of the run and of diagnose
	faults []string      // of what every run must do
}

// class is a kind of fault.
type class struct {
	says string // a pattern of what names the culprit: RANK and HOST are replaced
	code int    // the exit code; 0 = any but 0
	// the run before its launch: it may change the command lines of the ranks
	before func(f *fixture) error
	// a disturbance while the run goes on
	during func(f *fixture) error
	wraps  bool // under a supervisor
	ends   bool // the run comes to its end
}

const operation = `(all-reduce|all-gather|all-to-all|reduce-scatter|broadcast|barrier|split) #\d+ on axis `

// classes has the kinds of faults. Those without functions are made by ULYSSES_FAULT.
var classes = map[string]class{
	"kill":  {says: "rank RANK on host HOST (does not respond|is late)(.|\n)*" + operation},
	"stop":  {says: "rank RANK on host HOST (does not respond|is late)(.|\n)*" + operation},
	"exit":  {says: "rank RANK on host HOST (does not respond|is late)(.|\n)*" + operation},
	"code":  {says: "rank RANK on host HOST (does not respond|is late)(.|\n)*" + operation},
	"late":  {says: "rank RANK on host HOST is late; 3 ranks wait for it in " + operation},
	"skip":  {says: "rank RANK on host HOST has called .* where 3 ranks have called barrier"},
	"other": {says: "rank RANK on host HOST has called .* where 3 ranks have called barrier"},
	"short": {says: "rank RANK on host HOST has called all-reduce where 3 ranks have called it with another size"},
	"fail":  {says: "rank RANK on HOST failed: step STEP: error requested", code: 10},
	"panic": {says: "rank RANK on HOST failed: panic: panic requested", code: 10},
	"crash": {says: "rank RANK on HOST: the program crashed", code: 10},

	"full disk": {
		says: `checkpoint of step \d+ on host HOSTS: \S*rank-0000\d\.safetensors: cannot be written: .*: no space left on device`,
		code: 7, before: (*fixture).fullDisk},
	"job file": {says: "rank RANK on host HOST has another file than rank 0", code: 2,
		before: (*fixture).otherJobFile},
	"model": {says: "data.path: \\S*a.txt differs between rank 0 on \\S+ and rank RANK on HOST", code: 2,
		before: (*fixture).otherData},
	"program": {says: "program is .* on rank RANK and .* on rank 0.*rank RANK is on host HOST", code: 1,
		before: (*fixture).otherProgram},

	"slow": {says: "rank RANK on host HOST has been slower than the others for 30 steps", ends: true},

	"early signal": {
		says:   `stopped after step \d+ of 60 \((SIGTERM|SIGUSR1)( on rank RANK, host HOST)?\)|rank RANK[^0-9](.|\n)*signal 15|task RANK: (Terminated|User defined)|user-defined signal`,
		during: (*fixture).earlySignal},
	"late signal": {says: `stopped after step \d+ of 60 \((SIGTERM|SIGUSR1|SIGINT)( on rank RANK, host HOST)?\)`,
		code: 75, during: (*fixture).lateSignal},
	"stop all": {says: "no rank has shown a sign of life", during: (*fixture).stopAll, wraps: true},
}

// fixture is a job with a fault.
type fixture struct {
	injected
	t        *testing.T
	env      []string // of the launcher
	dir, job string
	name     string     // mark of the processes
	commands [][]string // command line of each rank
	began    time.Time  // of the fault; zero = the last step
	running  func() bool
}

func (f *fixture) fullDisk() error {
	states := filepath.Join(f.dir, "out", "checkpoints")
	if err := os.MkdirAll(states, 0o777); err != nil {
		return err
	}
	f.t.Cleanup(func() { syscall.Unmount(states, syscall.MNT_DETACH) })
	if err := syscall.Mount("tmpfs", states, "tmpfs", 0, "size=300k"); err != nil {
		return err
	}
	for i := range f.commands { // the last checkpoint must succeed
		f.commands[i] = append(f.commands[i], "--set", "train.steps=6")
	}
	return nil
}

// elsewhere gives the rank a copy of the job's folder at the same path, in a mount namespace of its
// own. change is a shell command in it.
func (f *fixture) elsewhere(change string) error {
	script := `mkdir -p "$1.out" && mount --bind "$1/out" "$1.out" && cp -r "$1" "$1.copy" && mount --bind "$1.copy" "$1" && mount --bind "$1.out" "$1/out" && cd "$1" && ` +
		change + ` && shift && exec "$@"`
	if err := os.MkdirAll(filepath.Join(f.dir, "out"), 0o777); err != nil {
		return err
	}
	f.commands[f.rank] = append([]string{"unshare", "--mount", "--propagation", "private", "sh", "-c", script,
		"sh", f.dir},
		f.commands[f.rank]...)
	return nil
}

func (f *fixture) otherJobFile() error { return f.elsewhere("echo '# old' >> job.toml") }
func (f *fixture) otherData() error    { return f.elsewhere("sed -i 's/cat/cow/' a.txt") }

// otherProgram gives the rank a program with another build ID.
func (f *fixture) otherProgram() error {
	text, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	e, err := elf.NewFile(bytes.NewReader(text))
	if err != nil {
		return err
	}
	note := e.Section(".note.go.buildid")
	if note == nil {
		return fmt.Errorf("%s has no build ID", program)
	}
	text[note.Offset+note.Size-2] ^= 1
	other := filepath.Join(f.dir, "other")
	if err := os.WriteFile(other, text, 0o700); err != nil {
		return err
	}
	f.commands[f.rank][0] = other
	return nil
}

// pid waits for the process of the rank; 0 if the run has ended.
func (f *fixture) pid() int {
	for f.running() {
		pid := processes(f.name)[f.rank]
		// Slurm runs a prolog with the environment of the task before the program
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil &&
			filepath.Base(exe) == filepath.Base(program) {
			return pid
		}
		time.Sleep(5 * time.Millisecond)
	}
	return 0
}

func (f *fixture) signal(pid int, s syscall.Signal) error {
	if pid == 0 {
		return fmt.Errorf("rank %d was not found", f.rank)
	}
	f.began = time.Now()
	return syscall.Kill(pid, s)
}

// earlySignal sends a signal before the first step. Signals that come before the program catches
// them have their default action.
func (f *fixture) earlySignal() error {
	pid := f.pid()
	r := rand.New(rand.NewPCG(f.seed, 1))
	time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
	return f.signal(pid, []syscall.Signal{syscall.SIGTERM, syscall.SIGUSR1}[r.IntN(2)])
}

func (f *fixture) lateSignal() error {
	for f.running() && lines(f.dir) < f.step {
		time.Sleep(2 * time.Millisecond)
	}
	return f.signal(f.pid(), []syscall.Signal{syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGINT}[f.seed%3])
}

func (f *fixture) stopAll() error {
	for f.running() && lines(f.dir) < f.step {
		time.Sleep(2 * time.Millisecond)
	}
	f.began = time.Now()
	for _, pid := range processes(f.name) {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			return err
		}
	}
	return nil
}

// argv returns the command line of the run.
func (f *fixture) argv() []string {
	argv := []string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "4"}
	if f.launcher == "srun" {
		argv = []string{"srun", "-N2", "--ntasks-per-node=2", "--mpi=pmix", "--kill-on-bad-exit=1"}
	}
	switch {
	case slices.ContainsFunc(f.commands, func(c []string) bool { return !slices.Equal(c, f.commands[0]) }):
		return append(argv, eachRank(f.commands...)...)
	case classes[f.kind].wraps:
		return slices.Concat([]string{program, "supervise", f.job, "--"}, argv)
	}
	return append(argv, f.commands[0]...)
}

// run runs the job with the fault and checks what holds for every kind: it ends, not with 0, the
// text names the culprit, and the last checkpoint loads.
func (f *fixture) run(k class) (x outcome) {
	wrong := func(format string, args ...any) { x.faults = append(x.faults, fmt.Sprintf(format, args...)) }
	for range 4 {
		f.commands = append(f.commands, []string{program, "run", f.job})
	}
	f.env = append(f.env, mark+f.name, "ULYSSES_TIMEOUT="+watchdog.String())
	if k.before == nil && k.during == nil {
		f.env = append(f.env, fmt.Sprintf("ULYSSES_FAULT=%s:%d:%d", f.kind, f.rank, f.step))
	}
	if k.before != nil {
		if err := k.before(f); err != nil {
			wrong("%v", err)
			return x
		}
	}
	var said heard
	argv := f.argv()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"ULYSSES_TEST_AS_PROGRAM=1"), f.env...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &said, &said, 2*time.Second
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		wrong("%v", err)
		return x
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	f.running = func() bool {
		select {
		case <-ended:
			return false
		default:
			return true
		}
	}
	if k.during != nil {
		if err := k.during(f); err != nil {
			wrong("%v", err)
		}
	}
	select {
	case <-ended:
	case <-time.After(3 * time.Minute):
		wrong("a hang")
		cmd.Process.Kill()
		<-ended
	}
	if f.began.IsZero() { // the last step, or the beginning
		f.began = begin
		if info, err := os.Stat(filepath.Join(f.dir, "out", "metrics.jsonl")); err == nil {
			f.began = info.ModTime()
		}
	}
	x.took, x.code = time.Since(f.began), cmd.ProcessState.ExitCode()
	for i := 0; len(processes(f.name)) > 0; i++ {
		if i == 1000 {
			wrong("processes live on: %v", processes(f.name))
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	x.text = said.String()
	if _, err := os.Stat(filepath.Join(f.dir, "out", "flight")); err == nil {
		_, out, e := launch(f.t, nil, program, "diagnose", filepath.Join(f.dir, "out"))
		x.text += out + e
	}
	// srun returns the highest code of a task, which is 137 if it has killed others
	if (x.code == 0) != k.ends || k.code != 0 && x.code != k.code && !(f.launcher == "srun" && x.code == 137) {
		wrong("exit %d", x.code)
	}
	if states, _ := filepath.Glob(filepath.Join(f.dir, "out", "checkpoints", "step-*")); len(states) > 0 {
		code, out, e := launch(f.t, nil, program, "export", filepath.Join(f.dir, "out", "checkpoints"),
			filepath.Join(f.dir, "model"))
		if code != 0 || strings.Contains(out, "skipped") {
			wrong("the last checkpoint does not load: exit %d: %s%s", code, out, e)
		}
	}
	return x
}

// names reports whether the text names the culprit.
func (f *fixture) names(k class, text string) bool {
	host, _ := os.Hostname()
	if f.launcher == "srun" {
		host = fmt.Sprintf("n%d", f.rank/2+1)
	}
	pattern := strings.NewReplacer("RANK", fmt.Sprint(f.rank), "HOSTS", `(n\d|`+regexp.QuoteMeta(host)+")", "HOST",
		regexp.QuoteMeta(host), "STEP", fmt.Sprint(f.step)).Replace(k.says)
	return regexp.MustCompile(pattern).MatchString(text)
}

// TestInjectedFaults injects faults at random: every run ends, not with exit code 0, the text names
// the rank, its host and the operation, and the last checkpoint loads. ULYSSES_TEST_FAULTS is the
// number of faults (make soak-faults: 300, half of them under srun), ULYSSES_TEST_SEED another draw
// of ranks and steps. Times are only reported.
func TestInjectedFaults(t *testing.T) {
	count, srun := 8, false
	if n := os.Getenv("ULYSSES_TEST_FAULTS"); n != "" {
		fmt.Sscan(n, &count)
		srun = true
	}
	need.Namespaces(t)
	launchers, slurm := []string{"mpirun"}, []string(nil)
	if srun {
		if os.Getenv("SLURM_BASE_PORT") == "" {
			t.Setenv("SLURM_BASE_PORT", "28000") // TestSlurm may run as well
		}
		slurm = startSlurm(t, "2")
		launchers = append(launchers, "srun")
	}
	var kinds []string
	for kind := range classes {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	if !srun { // kinds that have no test of their own
		kinds = []string{"full disk", "job file", "model", "program", "early signal", "short", "late", "stop"}
	}
	seed := uint64(300)
	fmt.Sscan(os.Getenv("ULYSSES_TEST_SEED"), &seed)
	r := rand.New(rand.NewPCG(21, seed))
	type tally struct{ Runs, Wrong, Named, InTime int }
	sums := map[string]*tally{}
	var longest time.Duration
	for i := range count {
		f := &fixture{injected: injected{kind: kinds[i%len(kinds)], launcher: launchers[i/len(kinds)%len(launchers)],
			rank: r.IntN(4), step: 1 + r.IntN(40), seed: r.Uint64()}, t: t}
		k := classes[f.kind]
		if f.kind == "slow" { // three windows of ten steps must follow
			f.step = 1 + r.IntN(20)
		}
		if f.kind == "full disk" { // Slurm's nodes have mount namespaces of their own
			f.launcher = "mpirun"
		}
		if f.kind == "job file" || f.kind == "model" || f.kind == "program" { // rank 0 is right
			f.rank = 1 + r.IntN(3)
		}
		f.dir, f.job = keptJob(t)
		f.name = fmt.Sprintf("fault-%d-%d", os.Getpid(), i)
		if f.launcher == "srun" {
			f.env = slurm
		}
		x := f.run(k)
		label := f.launcher + " " + f.kind
		if sums[label] == nil {
			sums[label] = new(tally)
		}
		s := sums[label]
		s.Runs++
		named := f.names(k, x.text)
		if named {
			s.Named++
		}
		if k.ends || x.took <= watchdog+5*time.Second {
			s.InTime++
		}
		if !k.ends {
			longest = max(longest, x.took)
		}
		if len(x.faults) > 0 {
			s.Wrong++
		}
		if len(x.faults) > 0 || !named {
			t.Logf("%+v: named %v, %v after %v: %v\n%s", f.injected, named, x.code, x.took, x.faults, x.text)
		}
		if !srun && (len(x.faults) > 0 || !named) {
			t.Errorf("%+v", f.injected)
		}
	}
	total := tally{}
	for _, s := range sums {
		total.Runs, total.Wrong, total.Named, total.InTime = total.Runs+s.Runs, total.Wrong+s.Wrong,
			total.Named+s.Named, total.InTime+s.InTime
	}
	report, _ := json.MarshalIndent(map[string]any{"total": total, "kinds": sums, "longest_seconds": longest.Seconds()},
		"", " ")
	t.Logf("%s", report)
	if total.Wrong > 0 || total.Named*100 < total.Runs*95 {
		t.Errorf("%d of %d runs wrong, %d name the culprit", total.Wrong, total.Runs, total.Named)
	}
}
