//go:build mpi

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ulysses/testkit/need"
)

// TestSlurm runs the quickstart's model under a real Slurm of three virtual nodes: slurm/lab.sh
// starts its daemons on loopback.
func TestSlurm(t *testing.T) {
	t.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	need.Tool(t, "slurmctld", "run make deps-test")
	if os.Getuid() != 0 {
		need.Missing(t, "Slurm's daemons start as root", "run the tests as root")
	}
	// a short path: the daemons' sockets have 108 bytes for it
	lab, err := os.MkdirTemp("/tmp", "lab")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		launch(t, nil, "../../slurm/lab.sh", "down", lab)
		os.RemoveAll(lab)
	})
	if code, _, e := launch(t, nil, "timeout", "60", "../../slurm/lab.sh", "up", lab, "3"); code != 0 {
		t.Fatal("slurm/lab.sh up:", code, e)
	}
	conf := []string{"SLURM_CONF=" + filepath.Join(lab, "etc", "slurm.conf")}

	t.Run("losses", func(t *testing.T) {
		here, there := t.TempDir(), t.TempDir()
		steps := "train.steps=20"
		if code, _, e := mpirun(t, "4", nil, small(here, steps)...); code != 0 {
			t.Fatal(code, e)
		}
		srun := []string{"timeout", "-k", "5", "90", "srun", "-N2", "--ntasks-per-node=2", "--mpi=pmix", program}
		if code, _, e := launch(t, conf, append(srun, small(there, steps)...)...); code != 0 {
			t.Fatal(code, e)
		}
		same(t, "srun", losses(t, there), losses(t, here), 1e-5)
		// Two levels between the nodes give the same bits.
		levels := t.TempDir()
		code, stdout, stderr := launch(t, conf, append(srun, small(levels, steps, "parallel.two_level=on")...)...)
		if code != 0 || !strings.Contains(stderr, "two levels, over 2 nodes of 2 ranks") || !strings.Contains(stdout, " bytes sent inside nodes, ") {
			t.Fatalf("two levels: exit %d\n%s\n%s", code, stdout, stderr)
		}
		same(t, "two levels", losses(t, levels), losses(t, there), 0)
	})
	t.Run("scancel", func(t *testing.T) {
		dir, job := jobFolder(t)
		var said heard
		cmd := begin(t, conf, &said, "srun", "-J", "cancelled", "-N2", "--ntasks-per-node=1", "--mpi=pmix", program, job, "--set", "train.steps=100000")
		until(t, "steps", func() bool { return lines(dir) > 1 })
		if code, _, e := launch(t, conf, "timeout", "30", "scancel", "-n", "cancelled"); code != 0 {
			t.Fatal(code, e)
		}
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 75 || !strings.Contains(said.String(), "resume with: srun -N 2 -n 2 --mpi=pmix ") {
			t.Errorf("exit %d: %s", code, said.String())
		}
		if _, err := os.Stat(filepath.Join(dir, "out", "checkpoints", fmt.Sprintf("step-%08d", lines(dir)))); err != nil {
			t.Error(err)
		}
	})
	t.Run("requeue", func(t *testing.T) {
		dir, job := keptJob(t)
		out, script := filepath.Join(dir, "out"), filepath.Join(dir, "job.sbatch")
		steps := []string{"--set", "train.steps=40"}
		if code, _, e := mpirun(t, "4", nil, append(steps, job)...); code != 0 {
			t.Fatal(code, e)
		}
		want := losses(t, out)
		if err := os.RemoveAll(out); err != nil {
			t.Fatal(err)
		}
		code, _, e := launch(t, conf, append([]string{program, "sbatch", job, "--nodes", "2", "--ntasks-per-node", "2", "-o", script}, steps...)...)
		if code != 0 {
			t.Fatal(code, e)
		}
		log := filepath.Join(dir, "log")
		code, id, e := launch(t, append(conf, "ULYSSES_TEST_AS_PROGRAM=1"), "sbatch", "--parsable", "--output="+log, script)
		if code != 0 {
			t.Fatal(code, e)
		}
		until(t, "steps", func() bool { return lines(dir) > 1 })
		if code, _, e := launch(t, conf, "scancel", "--signal=USR1", strings.TrimSpace(id)); code != 0 {
			t.Fatal(code, e)
		}
		stopped := func() string { b, _ := os.ReadFile(log); return string(b) }
		until(t, "a stop with a checkpoint", func() bool { return strings.Contains(stopped(), "with a checkpoint in ") })
		for range 2 { // a requeued job waits for its credentials to expire
			untilOr(func() bool { _, err := os.Stat(filepath.Join(out, "model")); return err == nil })
		}
		if got := losses(t, out); !slices.Equal(got, want) || strings.Count(stopped(), "resumed step=") != 1 {
			t.Errorf("%d losses, want %d: %s", len(got), len(want), stopped())
		}
	})
	t.Run("a spare node", func(t *testing.T) {
		dir, job := keptJob(t)
		out := filepath.Join(dir, "out")
		if code, _, e := mpirun(t, "4", nil, job); code != 0 {
			t.Fatal(code, e)
		}
		want := losses(t, out)
		if err := os.RemoveAll(out); err != nil {
			t.Fatal(err)
		}
		code, _, stderr := launch(t, append(conf, "ULYSSES_FAULT=kill:3:20", "ULYSSES_TIMEOUT=9s"), "timeout", "-k", "5", "90", "salloc", "-N3", "--ntasks-per-node=2", program, "supervise", job, "--restarts", "2", "--",
			"srun", "-N2", "-n4", "--mpi=pmix", "--kill-on-bad-exit=1")
		if code != 0 || !strings.Contains(stderr, "nodes: n1,n3") || !strings.Contains(stderr, "restart 1 of 2") {
			t.Errorf("exit %d: %s", code, stderr)
		}
		if got := losses(t, out); !slices.Equal(got, want) {
			t.Errorf("losses %v, want %v", got, want)
		}
	})
	t.Run("a lone task without -K", func(t *testing.T) {
		dir, job := keptJob(t)
		begin := time.Now()
		code, _, stderr := launch(t, append(conf, "ULYSSES_FAULT=kill:1:5", "ULYSSES_TIMEOUT=5s"), "timeout", "-k", "5", "90", "srun", "-N2", "--ntasks-per-node=2", "--mpi=pmix", "--kill-on-bad-exit=0", program, job)
		// Slurm's PMIx plugin sees that the task has gone, and ends the step.
		if took := time.Since(begin); code == 0 || !strings.Contains(stderr, "n1: task 1: Killed") || took > 60*time.Second {
			t.Errorf("exit %d after %v: %s", code, took, stderr)
		}
		if code, stdout, stderr := launch(t, nil, program, "diagnose", dir+"/out"); code != 0 || !strings.Contains(stdout, "rank 1 on host n1 ") {
			t.Errorf("diagnose: exit %d: %s%s", code, stdout, stderr)
		}
	})
	t.Run("array", func(t *testing.T) {
		dir, job := keptJob(t)
		script := filepath.Join(dir, "job.sbatch")
		if code, _, e := launch(t, conf, program, "sbatch", job, "--array", "0-3", "-o", script, "--set", "seed=$SLURM_ARRAY_TASK_ID", "--set", "train.steps=3", "--set", "parallel.ulysses=1"); code != 0 {
			t.Fatal(code, e)
		}
		code, _, e := launch(t, conf, "timeout", "90", "sbatch", "--wait", "--output="+filepath.Join(dir, "log-%a"), script)
		if code != 0 {
			t.Fatal(code, e)
		}
		seen := map[float64]bool{}
		for i := range 4 {
			seen[losses(t, fmt.Sprintf("%s/out-%d", dir, i))[2]] = true
		}
		if len(seen) != 4 {
			t.Errorf("the runs of an array have losses in common: %v", seen)
		}
	})
	t.Run("output.dir of one node", func(t *testing.T) {
		_, job := jobFolder(t)
		out := fmt.Sprintf("/dev/shm/ulysses-test-%d", os.Getpid()) // each node has its own
		srun := []string{"timeout", "-k", "5", "90", "srun", "-N2", "--ntasks-per-node=2", "--mpi=pmix", program, job, "--set", "output.dir=" + out}
		code, stdout, stderr := launch(t, conf, srun...)
		want := "output.dir: " + out + " is not shared: rank 2 on n2 does not see a file of rank 0 on n1; choose a folder on a shared file system"
		if code != 2 || strings.Count(stderr, want) != 1 || strings.Contains(stderr, "step=") {
			t.Errorf("exit %d: %s%s", code, stdout, stderr)
		}
	})
	t.Run("wrong launcher", func(t *testing.T) {
		srun := []string{"timeout", "-k", "5", "60", "srun", "-n2", "--mpi=none", program}
		code, _, stderr := launch(t, conf, append(srun, small(t.TempDir(), "train.steps=1")...)...)
		if code == 0 || !strings.Contains(stderr, "--mpi=pmix") {
			t.Errorf("exit %d: %s", code, stderr)
		}
	})
}

// untilOr waits for a condition for 30 s.
func untilOr(true func() bool) {
	for i := 0; i < 3000 && !true(); i++ {
		time.Sleep(10 * time.Millisecond)
	}
}
