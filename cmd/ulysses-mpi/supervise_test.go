//go:build mpi

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// supervised returns the command line that runs a job on four ranks under supervision.
func supervised(job string, more ...string) []string {
	words := append([]string{program, "supervise", job}, more...)
	return append(words, "--", "mpirun", "--oversubscribe", "--bind-to", "none", "-n", "4")
}

// A job one of whose ranks is killed starts again under supervision, and has the losses of an
// undisturbed run. A job that is refused does not start again.
func TestSupervisorRestarts(t *testing.T) {
	dir, job := keptJob(t)
	out := filepath.Join(dir, "out")
	if code, _, stderr := mpirun(t, "4", nil, job); code != 0 {
		t.Fatal(code, stderr)
	}
	want := losses(t, out)
	if err := os.RemoveAll(out); err != nil {
		t.Fatal(err)
	}
	code, _, stderr := launch(t, []string{"ULYSSES_FAULT=kill:1:20", "ULYSSES_TIMEOUT=9s"},
		supervised(job, "--restarts", "2")...)
	if code != 0 || strings.Count(stderr, "restart 1 of 2 from the newest checkpoint") != 1 ||
		strings.Contains(stderr, "restart 2") || !strings.Contains(stderr, "rank 1 on host ") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if got := losses(t, out); !slices.Equal(got, want) {
		t.Errorf("losses %v, want %v", got, want)
	}
	// only the first start begins afresh
	code, _, stderr = launch(t, []string{"ULYSSES_FAULT=kill:1:20", "ULYSSES_TIMEOUT=9s"},
		supervised(job, "--restarts", "2", "--force", "--set", "checkpoint.resume=off")...)
	if code != 0 || strings.Count(stderr, "restart 1 of 2 from the newest checkpoint") != 1 ||
		strings.Count(stderr, "resumed") != 1 {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if got := losses(t, out); !slices.Equal(got, want) {
		t.Errorf("losses %v, want %v", got, want)
	}
	begin := time.Now()
	code, _, stderr = launch(t, nil, supervised(job, "--restarts", "2", "--set", "checkpoint.resume=off")...)
	if code != 2 || strings.Contains(stderr, "restart") || !strings.Contains(stderr, "has results of another run") {
		t.Errorf("a refused job: exit %d after %v: %s", code, time.Since(begin), stderr)
	}
	// without a restart left, the exit code is that of the job
	code, _, stderr = launch(t, []string{"ULYSSES_FAULT=code:2:3"},
		supervised(job, "--set", "output.overwrite=true", "--set", "checkpoint.resume=off")...)
	if code != 7 {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// A run that has not finished is a fault for the supervisor even if the launcher ends with 0, as
// mpiexec of MPICH does if a rank has exited with 0.
func TestSupervisorBehindZero(t *testing.T) {
	dir, job := keptJob(t)
	argv := []string{program, "supervise", job, "--restarts", "1", "--", "sh", "-c",
		`mpirun --oversubscribe --bind-to none -n 2 "$@"; exit 0`, "sh"}
	for fault, want := range map[string]string{"kill:1:20": "exit code is taken as 5", "code:1:99": ""} {
		if err := os.RemoveAll(filepath.Join(dir, "out")); err != nil {
			t.Fatal(err)
		}
		code, _, stderr := launch(t, []string{"ULYSSES_FAULT=" + fault, "ULYSSES_TIMEOUT=9s"}, argv...)
		if code != 0 || strings.Contains(stderr, "restart 1 of 1") != (want != "") || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit %d: %s", fault, code, stderr)
		}
		if _, err := os.Stat(filepath.Join(dir, "out", "model", "model.safetensors")); err != nil {
			t.Errorf("%s: %v: %s", fault, err, stderr)
		}
	}
}

// A job starts again under supervision also if the reader of its output has exited, as tee does at
// the end of a session.
func TestSupervisorWithoutReader(t *testing.T) {
	dir, job := keptJob(t)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := begin(t, []string{"ULYSSES_FAULT=kill:1:20", "ULYSSES_TIMEOUT=9s"}, write,
		supervised(job, "--restarts", "1")...)
	read.Close()
	write.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "out", "model", "model.safetensors")); err != nil {
		t.Error(err)
	}
}

// A job all of whose ranks are frozen is ended from outside, in the time of the watchdog and 5 s.
func TestSupervisorEndsFrozenJob(t *testing.T) {
	dir, job := keptJob(t)
	run := fmt.Sprint("frozen-", os.Getpid())
	var said heard
	cmd := begin(t, []string{mark + run, "ULYSSES_TIMEOUT=4s"}, &said,
		supervised(job, "--set", "train.steps=100000", "--set", "checkpoint.accept=train.steps")...)
	until(t, "steps", func() bool { return lines(dir) > 3 })
	pids := processes(run)
	if len(pids) != 4 {
		t.Fatalf("%d ranks", len(pids))
	}
	froze := time.Now()
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	cmd.Wait()
	took := time.Since(froze)
	if code := cmd.ProcessState.ExitCode(); code == 0 || code == 75 ||
		!strings.Contains(said.String(), "no rank has shown a sign of life for 4s") {
		t.Errorf("exit %d: %s", code, said.String())
	}
	if took > 60*time.Second {
		t.Errorf("it took %v", took)
	}
	allGone(t, run)
}

// allGone checks that the processes of a run end.
func allGone(t *testing.T, run string) {
	t.Helper()
	pids := processes(run)
	for range 500 {
		if len(pids) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
		pids = processes(run)
	}
	for _, pid := range pids {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	t.Errorf("processes live on: %v", pids)
}

// A signal to the supervisor stops the job with a checkpoint, also one that comes twice at the same
// moment. SIGQUIT ends the job at once. The supervisor never leaves without the job.
func TestSupervisorStops(t *testing.T) {
	dir, job := keptJob(t)
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGHUP, syscall.SIGQUIT} {
		var said heard
		run := fmt.Sprint("supervised-", os.Getpid(), "-", int(s))
		cmd := begin(t, []string{mark + run}, &said,
			supervised(job, "--restarts", "3", "--force", "--set", "train.steps=100000", "--set",
				"checkpoint.resume=off")...)
		os.Remove(filepath.Join(dir, "out", "metrics.jsonl"))
		until(t, "steps", func() bool { return lines(dir) > 3 })
		for range 2 {
			if err := cmd.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond)
		}
		cmd.Wait()
		code, crashed := cmd.ProcessState.ExitCode(), strings.Contains(said.String(), "the program crashed")
		if s != syscall.SIGQUIT && (code != 75 || !strings.Contains(said.String(), "with a checkpoint in ")) ||
			code == 0 || crashed {
			t.Errorf("%v: exit %d: %s", s, code, said.String())
		}
		allGone(t, run)
	}
}

// Several supervisors would start the job several times, in the same output.dir.
func TestSuperviseUnderALauncher(t *testing.T) {
	_, job := keptJob(t)
	code, _, stderr := mpirun(t, "2", nil, "supervise", job, "--", "false")
	const want = "supervise: mpirun (Open MPI) has started 2 tasks, and each would start the job; "
	if code != 1 || strings.Count(stderr, want) != 1 {
		t.Errorf("exit %d: %s", code, stderr)
	}
}
