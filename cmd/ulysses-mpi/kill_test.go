//go:build mpi

package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// keeps is a job that writes a checkpoint after each step, in the background, with one file for
// each rank.
const keeps = `seed = 5
[parallel]
ulysses = 2
zero = 3
[model.new]
model_type = "qwen3"
vocab_size = 256
hidden_size = 48
intermediate_size = 80
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
tie_word_embeddings = true
[data]
path = "a.txt"
sequence = 48
global_batch = 4
[train]
steps = 60
[checkpoint]
every = 1
`

// keptJob writes the job and its data into a new folder.
func keptJob(t *testing.T) (dir, job string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{"job.toml": keeps,
		"a.txt": strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 40)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, filepath.Join(dir, "job.toml")
}

// mark is an environment variable of the processes of one run.
const mark = "ULYSSES_TEST_RUN="

// processes returns the processes of a run that are alive, by rank.
func processes(run string) map[int]int {
	pids := map[int]int{}
	all, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(text, []byte(mark+run+"\x00")) {
			continue
		}
		variables := map[string]string{}
		for _, word := range strings.Split(string(text), "\x00") {
			name, value, _ := strings.Cut(word, "=")
			variables[name] = value
		}
		if rank, err := strconv.Atoi(cmp.Or(variables["OMPI_COMM_WORLD_RANK"], variables["SLURM_PROCID"])); err == nil {
			pids[rank], _ = strconv.Atoi(filepath.Base(filepath.Dir(path)))
		}
	}
	return pids
}

// A job whose ranks are killed (SIGKILL) under mpirun at any time ends, and resumes with losses
// that are bitwise equal to an uninterrupted run. make soak kills fifty times.
func TestKillRank(t *testing.T) {
	kills := 3
	fmt.Sscan(os.Getenv("ULYSSES_TEST_KILLS"), &kills)
	const ranks = 4
	dir, job := keptJob(t)
	out := filepath.Join(dir, "out")
	begin := time.Now()
	if code, _, stderr := mpirun(t, fmt.Sprint(ranks), nil, job); code != 0 {
		t.Fatalf("undisturbed: exit %d: %s", code, stderr)
	}
	whole, want := time.Since(begin), losses(t, out)
	if len(want) != 60 {
		t.Fatalf("%d losses", len(want))
	}
	if err := os.RemoveAll(out); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(3, 4))
	killed, finished, resumed := 0, 0, 0
	for run := 0; killed < kills || finished == 0; run++ {
		name := fmt.Sprintf("%d-%d", os.Getpid(), run)
		victim, delay := r.IntN(ranks), time.Duration((0.2+0.8*r.Float64())*float64(whole))
		if killed == kills {
			delay = time.Hour // the last one may finish
		}
		if states, _ := filepath.Glob(filepath.Join(out, "checkpoints", "step-*")); len(states) > 0 {
			resumed++
		}
		begin := time.Now()
		hit, code, stderr := disturb(t, name, job, victim, delay)
		switch {
		case hit && code != 0:
			killed++
		case code != 0:
			t.Fatalf("after %d kills, by itself: exit %d: %s", killed, code, stderr)
		default: // or it was hit when all was done
			finished++
			whole = min(whole, time.Since(begin)) // the first run may have had a busy machine
			if got := losses(t, out); !slices.Equal(got, want) {
				t.Fatalf("after %d kills: %v, want %v", killed, got, want)
			}
			if left, _ := filepath.Glob(filepath.Join(out, "checkpoints", ".*")); len(left) > 0 {
				t.Errorf("after %d kills: left behind: %v", killed, left)
			}
			if err := os.RemoveAll(out); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d ranks killed, %d runs resumed, %d came to their end", killed, resumed, finished)
}

// disturb runs the job and kills a rank after a delay.
func disturb(t *testing.T, run, job string, victim int, delay time.Duration) (hit bool, code int, stderr string) {
	t.Helper()
	cmd := exec.Command("mpirun", "--oversubscribe", "--bind-to", "none", "-n", "4", "-x",
		strings.TrimSuffix(mark, "="), program, job)
	cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"ULYSSES_TEST_AS_PROGRAM=1", mark+run)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var err error
	after, limit := time.After(delay), time.After(5*time.Minute)
wait:
	for {
		select {
		case err = <-ended:
			break wait
		case <-after:
			if pid := processes(run)[victim]; pid == 0 { // it has not begun
				after = time.After(10 * time.Millisecond)
			} else {
				hit = syscall.Kill(pid, syscall.SIGKILL) == nil
			}
		case <-limit:
			cmd.Process.Kill()
			t.Fatalf("still running after 5 minutes; killed a rank: %v\n%s", hit, text.String())
		}
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%v: %s", err, text.String())
	}
	for i := 0; len(processes(run)) > 0; i++ { // the next run is not to meet them
		if i > 1000 {
			t.Fatalf("ranks of %s live on: %v", run, processes(run))
		}
		time.Sleep(10 * time.Millisecond)
	}
	return hit, cmd.ProcessState.ExitCode(), text.String()
}
