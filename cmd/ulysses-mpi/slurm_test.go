//go:build mpi

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"ulysses/testkit/need"
)

// TestSlurm runs the quickstart's model under a real Slurm of three virtual nodes: slurm/lab.sh
// starts its daemons on loopback.
func TestSlurm(t *testing.T) {
	conf := startSlurm(t, "3")

	t.Run("losses", func(t *testing.T) {
		here, there := t.TempDir(), t.TempDir()
		steps := "train.steps=20"
		if code, _, e := mpirun(t, "8", nil, small(here, steps)...); code != 0 {
			t.Fatal(code, e)
		}
		srun := []string{"timeout", "-k", "5", "240", "srun", "-N2", "--ntasks-per-node=4", "--mpi=pmix", program}
		if code, _, e := launch(t, conf, append(srun, small(there, steps)...)...); code != 0 {
			t.Fatal(code, e)
		}
		same(t, "srun", losses(t, there), losses(t, here), 1e-5)
		// Two levels between the nodes give the same bits.
		srun[6] = "--ntasks-per-node=2"
		direct, levels := t.TempDir(), t.TempDir()
		if code, _, e := launch(t, conf, append(srun, small(direct, "train.steps=6")...)...); code != 0 {
			t.Fatal(code, e)
		}
		code, stdout, stderr := launch(t, conf,
			append(srun, small(levels, "train.steps=6", "parallel.two_level=on")...)...)
		if code != 0 || !strings.Contains(stderr, "two levels, over 2 nodes of 2 ranks") ||
			!strings.Contains(stdout, " bytes sent inside nodes, ") {
			t.Fatalf("two levels: exit %d\n%s\n%s", code, stdout, stderr)
		}
		same(t, "two levels", losses(t, levels), losses(t, direct), 0)
	})
	t.Run("scancel", func(t *testing.T) {
		want := undisturbed(t, "--set", "train.steps=40")
		for _, signal := range []string{"", "--signal=TERM"} {
			dir, job := keptJob(t)
			srun := []string{"srun", "-J", "cancelled", "-N2", "--ntasks-per-node=2", "--mpi=pmix", program, job,
				"--set", "train.steps=40"}
			var said heard
			cmd := begin(t, append(conf, "ULYSSES_FAULT=slow:1:2"), &said, srun...)
			until(t, "steps", func() bool { return lines(dir) > 3 })
			if code, _, e := launch(t, conf,
				append([]string{"timeout", "30", "scancel"},
					strings.Fields(signal+" -n cancelled")...)...); code != 0 {
				t.Fatal(code, e)
			}
			cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != 75 ||
				!strings.Contains(said.String(), "resume with: srun -N 2 -n 4 --mpi=pmix ") ||
				!strings.Contains(said.String(), " (SIGTERM) with a checkpoint") {
				t.Errorf("exit %d: %s", code, said.String())
			}
			if code, _, e := launch(t, conf, srun...); code != 0 {
				t.Fatal(code, e)
			}
			if got := losses(t, dir+"/out"); !slices.Equal(got, want) {
				t.Errorf("losses %v, want %v", got, want)
			}
		}
	})
	// At Slurm's signal before the time limit the job stops with a checkpoint, starts again, and
	// has the losses of an undisturbed run. An evaluation that depends on it follows.
	t.Run("time limit", func(t *testing.T) {
		// Steps of a second until the signal, which comes 15 to 45 s after the start: Slurm's
		// prolog and a program that is being loaded would die of it.
		steps := []string{"--set", "train.steps=100", "--set", "checkpoint.every=20"}
		want := undisturbed(t, steps...)
		dir, job := keptJob(t)
		out, script, log := filepath.Join(dir, "out"), filepath.Join(dir, "job.sbatch"), filepath.Join(dir, "log")
		code, _, e := launch(t, conf,
			append([]string{program, "sbatch", job, "--nodes", "2", "--ntasks-per-node", "2", "--time", "2:00", "-o",
				script}, append(steps, "--", "--signal=USR1@75")...)...)
		if code != 0 {
			t.Fatal(code, e)
		}
		code, id, e := launch(t, append(conf, "ULYSSES_TEST_AS_PROGRAM=1", "ULYSSES_FAULT=slow:1:2:1s"), "sbatch",
			"--parsable", "--output="+log, script)
		if code != 0 {
			t.Fatal(code, e)
		}
		next := filepath.Join(dir, "eval.sbatch")
		evaluation := fmt.Sprintf(
			"#!/bin/bash\nexec srun --mpi=pmix %s %s --set kind=eval --set model.path=%s --set data.path=%s --set output.dir=%s\n",
			program, evalJob(t), filepath.Join(out, "model"), filepath.Join(dir, "a.txt"), filepath.Join(dir, "eval"))
		if err := os.WriteFile(next, []byte(evaluation), 0o700); err != nil {
			t.Fatal(err)
		}
		if code, _, e := launch(t, append(conf, "ULYSSES_TEST_AS_PROGRAM=1"), "sbatch", "-n2", "--dependency=afterok:"+
			strings.TrimSpace(id), "--output="+log+".eval", next); code != 0 {
			t.Fatal(code, e)
		}
		text := func(suffix string) string { b, _ := os.ReadFile(log + suffix); return string(b) }
		for range 16 { // a requeued job waits for its credentials to expire
			untilOr(func() bool { return strings.Contains(text(".eval"), "held-out loss") })
		}
		if got := losses(t, out); !slices.Equal(got, want) || !strings.Contains(text(""), "resumed step=") ||
			!strings.Contains(text(""), " (SIGUSR1) with a checkpoint in ") {
			t.Errorf("%d losses, want %d, equal: %v: %s", len(got), len(want), slices.Equal(got, want), text(""))
		}
		if !strings.Contains(text(".eval"), "held-out loss") {
			_, jobs, _ := launch(t, conf, "sh", "-c",
				"scontrol show job; tail -n 60 $(dirname $SLURM_CONF)/../log/slurm*.log")
			t.Errorf("the evaluation: %s\n%s", text(".eval"), jobs)
		}
	})
	t.Run("other numbers of ranks", func(t *testing.T) {
		batch := []string{"--set", "data.global_batch=12", "--set", "checkpoint.accept=train.steps"}
		whole, job := keptJob(t)
		if code, _, e := mpirun(t, "4", nil,
			append(batch, "--set", "train.steps=12", "--set", "optimizer.schedule=constant", job)...); code != 0 {
			t.Fatal(code, e)
		}
		dir, job := keptJob(t)
		for i, tasks := range []string{"4", "2", "3"} { // on each of two nodes
			argv := []string{"timeout", "-k", "5", "240", "srun", "-N2", "--ntasks-per-node=" + tasks, "--mpi=pmix",
				program, job, "--set", fmt.Sprint("train.steps=", 4*(i+1)), "--set", "optimizer.schedule=constant"}
			if code, _, e := launch(t, conf, append(argv, batch...)...); code != 0 {
				t.Fatal(tasks, code, e)
			}
		}
		same(t, "8, 4, 6 ranks", losses(t, dir+"/out"), losses(t, whole+"/out"), 1e-5)
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
		code, _, stderr := launch(t, append(conf, "ULYSSES_FAULT=kill:3:20", "ULYSSES_TIMEOUT=9s"), "timeout", "-k",
			"5", "240", "salloc", "-N3", "--ntasks-per-node=2", program, "supervise", job, "--restarts", "2", "--",
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
		code, _, stderr := launch(t, append(conf, "ULYSSES_FAULT=kill:1:5", "ULYSSES_TIMEOUT=5s"), "timeout", "-k", "5",
			"240", "srun", "-N2", "--ntasks-per-node=2", "--mpi=pmix", "--kill-on-bad-exit=0", program, job)
		killed1 := regexp.MustCompile(`n1: tasks? (0-)?1: Killed`)
		// Slurm's PMIx plugin sees that the task has gone, and ends the step.
		if took := time.Since(begin); code == 0 || !killed1.MatchString(stderr) || took > 60*time.Second {
			t.Errorf("exit %d after %v: %s", code, took, stderr)
		}
		if code, stdout, stderr := launch(t, nil, program, "diagnose", dir+"/out"); code != 0 ||
			!strings.Contains(stdout, "rank 1 on host n1 ") {
			t.Errorf("diagnose: exit %d: %s%s", code, stdout, stderr)
		}
	})
	// Without -K, Slurm lets the other tasks wait for one that does not start MPI.
	t.Run("a fault of one task", func(t *testing.T) {
		srun := []string{"timeout", "-k", "5", "40", "srun", "-w", "n1,n2", "--ntasks-per-node=2", "--mpi=pmix"}
		one := `[ $SLURM_PROCID = 2 ] && export ULYSSES_TIMEOUT=soon; exec "$@"`
		argv := append(append(srun, "sh", "-c", one, "sh", program), small(t.TempDir(), "train.steps=1")...)
		code, _, stderr := launch(t, conf, argv...)
		const want = "ulysses-mpi: rank 2 on n2: ULYSSES_TIMEOUT=soon: not a duration; "
		if code != 1 || strings.Count(stderr, want) != 1 {
			t.Errorf("exit %d: %s", code, stderr)
		}
	})
	t.Run("array", func(t *testing.T) {
		dir, job := keptJob(t)
		spaced, script := filepath.Join(dir, "it's #1 job.toml"), filepath.Join(dir, "job.sbatch")
		if err := os.Rename(job, spaced); err != nil {
			t.Fatal(err)
		}
		if code, _, e := launch(t, conf, program, "sbatch", spaced, "--array", "0-3", "-o", script, "--set",
			"seed=$SLURM_ARRAY_TASK_ID", "--set", "train.steps=3", "--set", "parallel.ulysses=1", "--",
			"--comment=two words"); code != 0 {
			t.Fatal(code, e)
		}
		code, _, e := launch(t, conf, "timeout", "240", "sbatch", "--wait",
			"--output="+filepath.Join(dir, "log-%a"), script)
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
		srun := []string{"timeout", "-k", "5", "240", "srun", "-w", "n1,n2", "--ntasks-per-node=2", "--mpi=pmix",
			program, job, "--set", "output.dir=" + out}
		code, stdout, stderr := launch(t, conf, srun...)
		want := "output.dir: " + out +
			" is not shared: rank 2 on n2 does not see a file of rank 0 on n1; choose a folder on a shared file system"
		if code != 2 || strings.Count(stderr, want) != 1 || strings.Contains(stderr, "step=") {
			t.Errorf("exit %d: %s%s", code, stdout, stderr)
		}
	})
	t.Run("doctor", func(t *testing.T) {
		srun := []string{"timeout", "-k", "5", "240", "srun", "-w", "n1,n2", "--ntasks-per-node=2", "--mpi=pmix"}
		script, folders := wrong(t, "cd ../b")
		doctor := append(srun, script, "doctor", "--cluster", "job.toml", "--set", "output.dir="+folders[0])
		code, stdout, stderr := launch(t, conf, doctor...)
		if found := slow.ReplaceAllString(stdout, ""); !strings.Contains(found, "\nn1 ") ||
			!strings.Contains(found, "\nn2 ") || strings.Count(found, "\n\n") != 1 || code != 0 &&
			len(found) == len(stdout) {
			t.Errorf("exit %d: %s%s", code, stdout, stderr)
		}
		if err := os.Remove(filepath.Join(folders[1], "text.txt")); err != nil {
			t.Fatal(err)
		}
		out := fmt.Sprintf("/dev/shm/ulysses-doctor-%d", os.Getpid()) // each node has its own
		code, stdout, stderr = launch(t, conf,
			append(srun, "sh", "-c",
				fmt.Sprintf(
					"mkdir -p %s/$SLURMD_NODENAME; exec %s doctor --cluster job.toml --set output.dir=%[1]s/n1",
					out, script))...)
		for _, want := range []string{"\ndata.path: rank 2 on n2: text.txt: no such file", "\noutput.dir: " + out +
			"/n1 is not shared: rank 2 on n2 does not see a file of rank 0 on n1"} {
			if code != 7 || !strings.Contains(stdout, want) {
				t.Errorf("exit %d, not %q: %s%s", code, want, stdout, stderr)
			}
		}
	})
	t.Run("placement", func(t *testing.T) {
		srun := []string{"timeout", "-k", "5", "240", "srun", "-w", "n1,n2", "--ntasks-per-node=2", "--mpi=pmix"}
		const warning = "launch: ranks 0 to 1 share a sequence and are on n1, n2, but a node has room for them; start neighbouring ranks on one node (srun --distribution=block"
		for how, want := range map[string]int{"block": 0, "cyclic": 1} {
			argv := append(append(srun, "--distribution="+how, program),
				small(t.TempDir(), "train.steps=1", "parallel.ulysses=2")...)
			if code, _, stderr := launch(t, conf, argv...); code != 0 || strings.Count(stderr, warning) != want {
				t.Errorf("%s: exit %d, not %d warnings: %s", how, code, want, stderr)
			}
		}
		argv := []string{"timeout", "-k", "5", "240", "srun", "-w", "n1,n2", "-n3", "--distribution=block",
			"--mpi=pmix", program}
		code, _, stderr := launch(t, conf,
			append(argv, small(t.TempDir(), "train.steps=1", "parallel.ulysses=1")...)...)
		if code != 0 || !strings.Contains(stderr, "launch: n1 has 2 ranks and n2 has 1 rank") {
			t.Errorf("3 ranks on 2 nodes: exit %d: %s", code, stderr)
		}
	})
	t.Run("MPICH", func(t *testing.T) {
		built := withMPICH(t)
		here, there := t.TempDir(), t.TempDir()
		steps := []string{"train.steps=3", "parallel.ulysses=2"}
		if code, _, e := mpirun(t, "2", nil, small(here, steps...)...); code != 0 {
			t.Fatal(code, e)
		}
		// MPICH is slow if there are more ranks than cores, because ranks that wait do not yield.
		srun := []string{"timeout", "-k", "5", "240", "srun", "-N2", "--ntasks-per-node=1"}
		if code, _, e := launch(t, conf,
			append(append(srun, "--mpi=pmi2", built), small(there, steps...)...)...); code != 0 {
			t.Fatal(code, e)
		}
		same(t, "srun --mpi=pmi2", losses(t, there), losses(t, here), 0)
		code, _, stderr := launch(t, conf,
			append(append(srun, "--mpi=pmix", built), small(t.TempDir(), steps...)...)...)
		if code == 0 || !strings.Contains(stderr, "launch: srun started 2 tasks, but MPI found 1 rank") {
			t.Errorf("exit %d: %s", code, stderr)
		}
	})
	t.Run("wrong launcher", func(t *testing.T) {
		srun := []string{"timeout", "-k", "5", "240", "srun", "-n2", "--mpi=none", program}
		code, _, stderr := launch(t, conf, append(srun, small(t.TempDir(), "train.steps=1")...)...)
		if code == 0 || !strings.Contains(stderr, "--mpi=pmix") {
			t.Errorf("exit %d: %s", code, stderr)
		}
	})
}

// startSlurm starts virtual nodes for a test, and returns the environment of their clients.
func startSlurm(t *testing.T, nodes string) []string {
	t.Helper()
	t.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	need.Tool(t, "slurmctld", "run make deps-test")
	need.Namespaces(t) // Slurm's daemons also start as root
	// a short path: the daemons' sockets have 108 bytes for it
	lab, err := os.MkdirTemp("/tmp", "lab")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		launch(t, nil, "../../slurm/lab.sh", "down", lab)
		os.RemoveAll(lab)
	})
	if code, _, e := launch(t, nil, "timeout", "60", "../../slurm/lab.sh", "up", lab, nodes); code != 0 {
		t.Fatal("slurm/lab.sh up:", code, e)
	}
	return []string{"SLURM_CONF=" + filepath.Join(lab, "etc", "slurm.conf")}
}

// undisturbed returns the losses of keptJob on four ranks.
func undisturbed(t *testing.T, sets ...string) []float64 {
	t.Helper()
	dir, job := keptJob(t)
	if code, _, e := mpirun(t, "4", nil, append([]string{job}, sets...)...); code != 0 {
		t.Fatal(code, e)
	}
	return losses(t, dir+"/out")
}

// evalJob returns a job file for evaluations.
func evalJob(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "eval.toml")
	if err := os.WriteFile(path, []byte("[parallel]\nulysses = 1\n[data]\nsequence = 48\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// untilOr waits for a condition for 30 s.
func untilOr(true func() bool) {
	for i := 0; i < 3000 && !true(); i++ {
		time.Sleep(10 * time.Millisecond)
	}
}
