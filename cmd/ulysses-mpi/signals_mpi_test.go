//go:build mpi

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A signal to one of several processes stops all of them after the same step, with a checkpoint of
// that step.
func TestSignalToOneRank(t *testing.T) {
	for victim, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGTERM, syscall.SIGINT} {
		dir, job := jobFolder(t)
		name := fmt.Sprintf("%d-signal-%d", os.Getpid(), victim)
		var said heard
		cmd := begin(t, []string{mark + name}, &said, "mpirun", "--oversubscribe", "--bind-to", "none", "-n", "3",
			program, job, "--set", "parallel.ulysses=1", "--set", "data.global_batch=3",
			"--set", "train.steps=100000")
		until(t, "steps", func() bool { return lines(dir) > 1 })
		if err := syscall.Kill(processes(name)[victim], s); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 75 ||
			strings.Count(said.String(), "resume with: mpirun --oversubscribe --bind-to none -n 3 ") != 1 {
			t.Errorf("%v: exit %d: %s", s, code, said.String())
		}
		if _, err := os.Stat(filepath.Join(dir, "out", "checkpoints",
			fmt.Sprintf("step-%08d", lines(dir)))); err != nil {
			t.Errorf("%v: %v", s, err)
		}
	}
}

// The SIGTERM that mpirun sends reaches the ranks early enough if mpirun was told to wait; that of
// Open MPI 5 does not wait. SIGUSR1, which mpirun forwards, reaches them as well.
func TestSignalToLauncher(t *testing.T) {
	_, version, _ := launch(t, nil, "mpirun", "--version")
	for _, x := range []struct {
		s    syscall.Signal
		args []string
	}{{syscall.SIGUSR1, nil}, {syscall.SIGTERM, []string{"--mca", "odls_base_sigkill_timeout", "3"}},
		{syscall.SIGINT, []string{"--mca", "odls_base_sigkill_timeout", "3"}}} {
		if x.args != nil && !strings.Contains(version, "(Open MPI) 4") {
			continue
		}
		dir, job := jobFolder(t)
		var said heard
		argv := append(append([]string{"mpirun", "--oversubscribe", "--bind-to", "none"}, x.args...), "-n", "2",
			program, job, "--set", "train.steps=100000")
		cmd := begin(t, nil, &said, argv...)
		until(t, "steps", func() bool { return lines(dir) > 1 })
		cmd.Process.Signal(x.s)
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code == 0 || !strings.Contains(said.String(), "resume with: mpirun ") {
			t.Errorf("%v: exit %d: %s", x.s, code, said.String())
		}
		if _, err := os.Stat(filepath.Join(dir, "out", "checkpoints",
			fmt.Sprintf("step-%08d", lines(dir)))); err != nil {
			t.Errorf("%v: %v", x.s, err)
		}
	}
}

// A signal that arrives while MPI waits for a process that has not started is kept: the run stops
// after its first step.
func TestSignalBeforeMPI(t *testing.T) {
	dir, job := jobFolder(t)
	name, gate := fmt.Sprintf("%d-early", os.Getpid()), filepath.Join(dir, "gate")
	var said heard
	late := []string{"sh", "-c", `while [ ! -e "$GATE" ]; do sleep 0.05; done; exec "$0" "$1"`, program, job}
	argv := append([]string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2"},
		eachRank([]string{program, job}, late)...)
	cmd := begin(t, []string{mark + name, "GATE=" + gate}, &said, argv...)
	until(t, "rank 0 is inside MPI_Init", func() bool {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", processes(name)[0]))
		return strings.Contains(string(text), "mca_") // a component of Open MPI or PMIx
	})
	if err := syscall.Kill(processes(name)[0], syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(gate, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 75 || lines(dir) != 1 ||
		!strings.Contains(said.String(), "stopped after step 1 of 400") {
		t.Errorf("exit %d after %d steps: %s", code, lines(dir), said.String())
	}
}

// A rank that gets SIGTERM while it waits for a dead peer prints the call in which it waits and
// ends, long before ULYSSES_TIMEOUT.
func TestSignalWhilePeerIsLost(t *testing.T) {
	dir, job := jobFolder(t)
	name := fmt.Sprintf("%d-lost", os.Getpid())
	var said heard
	cmd := begin(t, []string{mark + name, "ULYSSES_FAULT=late:1:4", "ULYSSES_TIMEOUT=0"}, &said, "mpirun",
		"--oversubscribe", "--bind-to", "none", "-n", "2", program, job)
	until(t, "the step that has no end", func() bool { return lines(dir) == 3 })
	if err := syscall.Kill(processes(name)[0], syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 143 ||
		!strings.Contains(said.String(), "terminated: rank 0 on host ") {
		t.Errorf("exit %d: %s", code, said.String())
	}
}
