//go:build mpi

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/testkit/need"
)

// TestSlurm runs the quickstart's model under a real Slurm of two virtual nodes: slurm/lab.sh
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
	if code, _, e := launch(t, nil, "timeout", "60", "../../slurm/lab.sh", "up", lab); code != 0 {
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
