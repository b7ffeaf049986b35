//go:build mpi

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ulysses/testkit/need"
)

// program is this test binary, which TestMain runs as the program.
var program = os.Args[0]

// launch runs a command line with additional environment variables and a time limit. It returns the
// exit code and the output.
func launch(t *testing.T, env []string, argv ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"ULYSSES_TEST_AS_PROGRAM=1"), env...)
	cmd.WaitDelay = 2 * time.Second
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%v: %v\n%s", argv, err, e.String())
	}
	if ctx.Err() != nil {
		t.Fatalf("%v was still running after 5 minutes\n%s\n%s", argv, o.String(), e.String())
	}
	return cmd.ProcessState.ExitCode(), o.String(), e.String()
}

func mpirun(t *testing.T, ranks string, env []string, args ...string) (int, string, string) {
	t.Helper()
	argv := []string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", ranks}
	for _, e := range env { // so that a fault reaches the ranks through any launcher
		argv = append(argv, "-x", strings.SplitN(e, "=", 2)[0])
	}
	return launch(t, env, append(append(argv, program), args...)...)
}

// eachRank returns a command that runs commands[r] on rank r, for mpirun and srun. Several commands
// with ":" between them are no alternative, because mpirun of Open MPI 5.0.7 crashes.
func eachRank(commands ...[]string) []string {
	script := "case ${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID} in\n"
	for r, c := range commands {
		script += fmt.Sprintf("%d) exec", r)
		for _, word := range c {
			script += " '" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
		script += ";;\n"
	}
	return []string{"sh", "-c", script + "esac"}
}

// In a container that forbids ranks to read each other's memory, Open MPI prints a line for each
// message unless it is told so.
func TestForbiddenCopies(t *testing.T) {
	for _, name := range []string{"OMPI_MCA_btl_vader_single_copy_mechanism", "OMPI_MCA_smsc"} { // make sets the first
		t.Setenv(name, "")
		os.Unsetenv(name)
	}
	_, job := jobFolder(t)
	code, _, stderr := mpirun(t, "2", []string{"ULYSSES_TEST_FORBID_COPIES=1"}, job, "--set", "train.steps=2",
		"--set", "data.sequence=256")
	if code != 0 || strings.Contains(stderr, "errno = 1") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// Two ranks train on a machine whose only network interface is the loopback interface.
func TestLoopback(t *testing.T) {
	if out, err := exec.Command("unshare", "--user", "--map-root-user", "--net", "ip", "link", "set", "lo",
		"up").CombinedOutput(); err != nil {
		need.Missing(t, fmt.Sprintf("no right to make a network namespace: %v %s", err, out),
			"allow user namespaces, or run the tests in a container started with --privileged")
	}
	inside := `ip link set lo up && exec "$@"`
	argv := append([]string{"unshare", "--user", "--map-root-user", "--net", "sh", "-c", inside, "sh", "mpirun",
		"--oversubscribe", "--bind-to", "none", "-n", "2", program},
		small(t.TempDir(), "train.steps=1", "parallel.ulysses=2")...)
	if code, _, stderr := launch(t, nil, argv...); code != 0 {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// If MPI_Finalize never returns, the ranks end without it: after the last of them has come there,
// with all results written, with the code of the job and with a warning.
func TestEndOfMPIHangs(t *testing.T) {
	dir := t.TempDir()
	source, shim := filepath.Join(dir, "hang.c"), filepath.Join(dir, "hang.so")
	if err := os.WriteFile(source, []byte("#include <unistd.h>\nint MPI_Finalize(void) { for (;;) pause(); }\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := exec.Command("cc", "-shared", "-fPIC", "-o", shim, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	// The shell shows the exit codes: mpirun fails for a rank that leaves without MPI_Finalize, and
	// may end the other shell before it has shown its own.
	each := `LD_PRELOAD=$0 "$@"; echo "exit $?" >&2`
	argv := []string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2", "sh", "-c", each, shim, program}
	for ulysses, exit := range map[string]string{"2": "exit 0", "4": "exit 2"} {
		out := t.TempDir()
		_, _, stderr := launch(t, []string{"ULYSSES_TIMEOUT=3s"},
			append(argv, small(out, "train.steps=2", "parallel.ulysses="+ulysses)...)...)
		if !strings.Contains(stderr, exit) ||
			!strings.Contains(stderr, "launch: MPI_Finalize has not returned after 3s; the process ends without it") {
			t.Errorf("parallel.ulysses = %s on 2 ranks: not %s and the warning: %s", ulysses, exit, stderr)
		}
		if refused := strings.Count(stderr, "does not divide the 2 ranks"); ulysses == "4" && refused != 1 ||
			ulysses == "2" && len(losses(t, out)) != 2 {
			t.Errorf("parallel.ulysses = %s on 2 ranks: %s", ulysses, stderr)
		}
	}
}

const quick = "../../examples/quickstart.toml"

// small is the quickstart with a few steps of short sequences.
func small(out string, more ...string) []string {
	args := []string{quick, "--set", "output.dir=" + out, "--set", "data.sequence=256", "--set", "eval.split=0.0"}
	for _, m := range more {
		args = append(args, "--set", m)
	}
	return args
}

func losses(t *testing.T, out string) []float64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(out, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	return parseLosses(t, b)
}

// Under mpirun rank 0 writes a plain log without a progress bar, or JSON with --log json.
func TestLogUnderMPI(t *testing.T) {
	for form, want := range map[string]string{"auto": " INF train step=1 of=2 loss=",
		"json": `"step":1,"of":2,"loss":`} {
		code, _, stderr := mpirun(t, "2", nil,
			append(small(t.TempDir(), "train.steps=2", "parallel.ulysses=2"), "--log", form)...)
		if code != 0 || strings.Count(stderr, want) != 1 || strings.ContainsAny(stderr, "\x1b\r") || form == "auto" &&
			strings.Contains(stderr, "{") {
			t.Errorf("%s: exit code %d, not one %q in %q", form, code, want, stderr)
		}
	}
}

// Two, three and four processes have the losses of four goroutine ranks.
func TestProcessesMatchGoroutines(t *testing.T) {
	want := t.TempDir()
	if code, _, e := launch(t, nil,
		append([]string{program, "--ranks", "4"},
			small(want, "train.steps=3", "parallel.ulysses=4")...)...); code != 0 {
		t.Fatal(code, e)
	}
	for _, n := range []string{"2", "3", "4"} {
		out := t.TempDir()
		if code, _, e := mpirun(t, n, nil, small(out, "train.steps=3", "parallel.ulysses=0")...); code != 0 {
			t.Fatalf("%s ranks: exit %d\n%s", n, code, e)
		}
		same(t, n+" ranks", losses(t, out), losses(t, want), 1e-5)
	}
}

// Four processes have PyTorch's losses for one golden of each family, including a data-parallel
// one.
func TestGoldensUnderMPI(t *testing.T) {
	for _, name := range []string{"llama-sgd-packed", "qwen2-adamw-ignored", "qwen3-adamw-dp2", "mixtral-sgd-dp2"} {
		dir, out := filepath.Join("../../testdata/goldens", name), t.TempDir()
		var golden struct{ Losses []float64 }
		b, err := os.ReadFile(filepath.Join(dir, "case.json"))
		if err == nil {
			err = json.Unmarshal(b, &golden)
		}
		if err != nil {
			t.Fatal(err)
		}
		if code, _, e := mpirun(t, "4", nil, filepath.Join(dir, "job.toml"), "--set", "output.dir="+out); code != 0 {
			t.Fatalf("%s: exit %d\n%s", name, code, e)
		}
		same(t, name, losses(t, out), golden.Losses, 3e-5) // of losses near 6: 2e-4
	}
}

// Goroutine ranks end as processes do.
func TestFaultsInOneProcess(t *testing.T) {
	for fault, want := range map[string]struct {
		code int
		says string
	}{"fail:2:2": {10, "rank 2 on "}, "panic:3:1": {10, "rank 3 on "}, "late:1:2": {5, "this rank is late"}} {
		begin := time.Now()
		code, _, stderr := launch(t, []string{"ULYSSES_FAULT=" + fault, "ULYSSES_TIMEOUT=3s"},
			append([]string{program, "--ranks", "4"}, small(t.TempDir(), "train.steps=4")...)...)
		if code != want.code || !strings.Contains(stderr, want.says) || time.Since(begin) > 60*time.Second {
			t.Errorf("%s: exit %d after %v: %s", fault, code, time.Since(begin), stderr)
		}
	}
}

func same(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) || len(got) == 0 {
		t.Fatalf("%s: %d losses, want %d", what, len(got), len(want))
	}
	for i := range got {
		if !(math.Abs(got[i]-want[i]) <= tolerance*want[i]) {
			t.Errorf("%s: step %d: loss %.8f, want %.8f", what, i+1, got[i], want[i])
		}
	}
}

// If one rank is killed or stopped, exits, fails, panics, never returns, or is in another
// collective than the others, the whole job soon ends with an error that names the rank, the host
// and the operation. The records of the ranks name them as well.
func TestFaultsEndTheJob(t *testing.T) {
	host, _ := os.Hostname()
	for _, c := range []struct {
		fault string
		code  int // 0 = any but 0
		want  []string
		later string // what diagnose says
	}{
		{"kill:1:2", 0, []string{"signal 9", "rank 1 on host " + host + " does not respond",
			"3 ranks wait for it in all-reduce #", "terminated: rank "}, "rank 1 on host " + host +
			" does not respond"},
		{"exit:2:2", 0, []string{"rank 2 on host " + host + " does not respond", "3 ranks wait for it in all-reduce #"},
			"rank 2 on host " + host + " does not respond"},
		{"code:1:2", 7, []string{"rank 1 on host " + host + " does not respond", "3 ranks wait for it in all-reduce #"},
			"rank 1 on host " + host + " does not respond"},
		{"fail:2:2", 10, []string{"rank 2 on " + host, "error requested"}, "rank 2 on host " + host +
			" failed: step 2: error requested"},
		{"panic:3:1", 10, []string{"rank 3 on " + host, "panic"}, "rank 3 on host " + host + " failed: panic"},
		{"crash:1:2", 10, []string{"rank 1 on " + host + ": the program crashed", "crash requested"},
			"rank 1 on host " + host},
		{"late:1:2", 5, []string{"rank 1 on host " + host + ": all-", "this rank is late", "waited 4.",
			"the limit is 4s (ULYSSES_TIMEOUT or parallel.timeout)", "rank 1 on host " + host +
				" is late; 3 ranks wait for it in all-reduce #"}, "rank 1 on host " + host + " is late"},
		{"stop:2:2", 5, []string{"rank 2 on host " + host + " does not respond", "waited 4."},
			"rank 2 on host " + host + " does not respond"},
		{"skip:3:2", 5, []string{"rank 3 on host " + host +
			" has called all-reduce where 3 ranks have called barrier: operation #"}, "rank 3 on host " + host +
			" has called"},
		{"other:1:2", 5,
			[]string{"rank 1 on host " + host +
				" has called all-reduce where 3 ranks have called barrier: operation #"}, "rank 1 on host " + host +
				" has called"},
		{"short:3:2", 5,
			[]string{"rank 3 on host " + host +
				" has called all-reduce where 3 ranks have called it with another size or type: operation #"},
			"rank 3 on host " + host + " has called"},
	} {
		t.Run(c.fault, func(t *testing.T) {
			begin, out := time.Now(), t.TempDir()
			env, sets := []string{"ULYSSES_FAULT=" + c.fault, "ULYSSES_TIMEOUT=4s"}, []string{"train.steps=4"}
			if strings.HasPrefix(c.fault, "late") { // the key of the job file does the same
				env, sets = env[:1], append(sets, "parallel.timeout=4s")
			}
			code, _, stderr := mpirun(t, "4", env, small(out, sets...)...)
			if code == 0 || c.code != 0 && code != c.code {
				t.Errorf("exit %d, want %d", code, c.code)
			}
			for _, w := range c.want {
				if !strings.Contains(stderr, w) {
					t.Errorf("stderr does not say %q", w)
				}
			}
			if code, stdout, stderr := launch(t, nil, program, "diagnose", out); code != 0 ||
				!strings.Contains(stdout, c.later) {
				t.Errorf("diagnose: exit %d, not %q: %s%s", code, c.later, stdout, stderr)
			}
			if took := time.Since(begin); took > 60*time.Second {
				t.Errorf("took %v", took)
			}
			if t.Failed() {
				t.Log(stderr)
			}
		})
	}
}

// A loss of NaN or Inf ends the job with one error, which names the first such tensor.
func TestNotANumber(t *testing.T) {
	code, _, stderr := mpirun(t, "4", nil,
		small(t.TempDir(), "train.steps=20", "optimizer.lr=1e18", "optimizer.warmup=0", "optimizer.clip=0.0")...)
	if code != 8 || strings.Count(stderr, "first seen in ") != 1 ||
		!strings.Contains(stderr, "ulysses-mpi: train: step 2: loss ") || !strings.Contains(stderr, "on rank ") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// Processes that do not know of each other under a launcher must not run as N copies of rank 0.
func TestStrangersAreRefused(t *testing.T) {
	code, _, stderr := launch(t, []string{"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=0", "SLURM_JOB_ID=1"},
		append([]string{program}, small(t.TempDir())...)...)
	if code != 5 && code != 1 || !strings.Contains(stderr, "pmix") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	// Variables that another job has left name a rank, and no rank 0 exists that prints the error.
	for _, left := range [][]string{{"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=2"},
		{"OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK=1"}} {
		code, _, stderr := launch(t, left, append([]string{program}, small(t.TempDir())...)...)
		if want := left[0] + " is set, but"; code != 1 || strings.Count(stderr, want) != 1 {
			t.Errorf("%v: exit %d, not %q: %s", left, code, want, stderr)
		}
		if code, stdout, stderr := launch(t, left, program, "version"); code != 0 ||
			!strings.Contains(stdout, "with MPI") {
			t.Errorf("version: %v: exit %d: %s%s", left, code, stdout, stderr)
		}
	}
	plain := filepath.Join(t.TempDir(), "plain")
	if out, err := exec.Command("go", "build", "-o", plain, ".").CombinedOutput(); err != nil {
		t.Fatal(string(out))
	}
	code, _, stderr = launch(t, nil,
		append([]string{"mpirun", "--oversubscribe", "-n", "2", plain}, small(t.TempDir())...)...)
	if code == 0 || !strings.Contains(stderr, "without MPI") {
		t.Errorf("a program without MPI under mpirun: exit %d: %s", code, stderr)
	}
}

// Ranks of a launcher that does not say how many are on a node divide its memory all the same.
func TestLauncherWithoutLocalRanks(t *testing.T) {
	bare := "unset OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_LOCAL_RANK; exec \"$@\""
	argv := append([]string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "3", "sh", "-c", bare, "sh",
		program},
		small(t.TempDir(), "train.steps=1", "parallel.ulysses=1", "model.new.hidden_size=65536")...)
	if code, _, stderr := launch(t, nil, argv...); code != 4 || !strings.Contains(stderr, "GiB free for 3 ranks") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// Processes of one job with different commands are refused: at once if all of them start MPI,
// otherwise after the timeout.
func TestVerbsOfAJobAreOne(t *testing.T) {
	sets := small(t.TempDir(), "train.steps=1")
	for _, x := range []struct {
		other []string
		code  int
		want  string
		least time.Duration
	}{
		{append([]string{program, "verify"}, sets...), 1, "verb is verify on rank 2 and run on rank 0", 0},
		{[]string{"sleep", "99"}, 5,
			"not all 3 tasks of mpirun (Open MPI) have started MPI after 20s (1 task has not started: task 2)",
			20 * time.Second},
	} {
		begin := time.Now()
		run := append([]string{program, "run"}, sets...)
		argv := append([]string{"mpirun", "--oversubscribe", "--bind-to", "none", "-x", "ULYSSES_TIMEOUT", "-n", "3"},
			eachRank(run, run, x.other)...)
		code, _, stderr := launch(t, []string{"ULYSSES_TIMEOUT=9s"}, argv...)
		if took := time.Since(begin); code != x.code || !strings.Contains(stderr, x.want) || took < x.least ||
			took > x.least+60*time.Second {
			t.Errorf("%s %s: exit %d after %v: %s", x.other[0], x.other[1], code, took, stderr)
		}
	}
}

// A rank with a wrong command line prints its name and the reason, which the other ranks do not
// know.
func TestOwnCommandLine(t *testing.T) {
	host, _ := os.Hostname()
	run := append([]string{program}, small(t.TempDir(), "train.steps=1")...)
	argv := []string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "3"}
	begin := time.Now()
	code, _, stderr := launch(t, nil, append(argv, eachRank(run, run, []string{program, quick, "--nope"})...)...)
	want := "ulysses-mpi: rank 2 on " + host + ": unknown flag --nope; see ulysses-mpi --help"
	if took := time.Since(begin); code != 1 || strings.Count(stderr, want) != 1 || took > 60*time.Second {
		t.Errorf("exit %d after %v: %s", code, took, stderr)
	}
	// a fault of all ranks is printed once
	code, _, stderr = mpirun(t, "3", nil, quick, "--ranks", "2")
	if code != 1 || strings.Count(stderr, "--ranks 2: ") != 1 ||
		!strings.Contains(stderr, "ulysses-mpi: --ranks 2: mpirun (Open MPI) has started 3 tasks; leave out --ranks") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

func parseLosses(t *testing.T, jsonl []byte) (out []float64) {
	t.Helper()
	for d := json.NewDecoder(bytes.NewReader(jsonl)); d.More(); {
		var r struct{ Loss *float64 }
		if err := d.Decode(&r); err != nil {
			t.Fatal(err)
		}
		if r.Loss != nil {
			out = append(out, *r.Loss)
		}
	}
	return out
}
