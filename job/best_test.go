package job

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ulysses/backends"
	"ulysses/device"
	"ulysses/internal/status"
)

// evalLine is a line of an evaluation in metrics.jsonl.
type evalLine struct {
	Step   int64
	Loss   *float64 `json:"eval_loss"`
	Tokens int64    `json:"eval_tokens"`
	Best   bool
	A      float64 `json:"eval_near_loss"`
	B      float64 `json:"eval_far.x_loss"`
	NA     int64   `json:"eval_near_tokens"`
	NB     int64   `json:"eval_far.x_tokens"`
	// of an evaluation job
	Checkpoint string
}

func readEvals(t *testing.T, dir string) (all []evalLine) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "out", "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var x evalLine
		if err := json.Unmarshal(line, &x); err != nil {
			t.Fatal(err)
		}
		if x.Loss != nil {
			all = append(all, x)
		}
	}
	return all
}

// stepsOn returns the steps of the checkpoints in a folder.
func stepsOn(t *testing.T, dir string) (steps []int64) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "out", "checkpoints", "step-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		var step int64
		if _, err := fmt.Sscanf(filepath.Base(path), "step-%d", &step); err != nil {
			t.Fatal(err)
		}
		steps = append(steps, step)
	}
	return steps
}

var trackedSets = []string{"train.steps=12", "eval.every=1", "checkpoint.every=3", "checkpoint.keep=1",
	"optimizer.lr=2e-2", "optimizer.schedule=constant"}

// runStopped runs the job of newTracked on two ranks, and stops it by a signal during a step.
func runStopped(dir string, step int64, sets ...string) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	defer signal.Stop(signals)
	stop := sync.OnceFunc(func() { // two signals at a time may count as one
		_ = syscall.Kill(os.Getpid(), syscall.SIGUSR1)
		<-signals                          // the run gets it at the same time
		time.Sleep(100 * time.Millisecond) // the run notes it
	})
	log := onLine(func(line string) {
		if strings.Contains(line, fmt.Sprintf(`"step":%d,`, step-1)) && strings.Contains(line, `"message":"eval"`) {
			stop()
		}
	})
	ask := func(c backends.Choice) (device.Device, string, error) {
		if step == 1 {
			stop()
		}
		return backends.Open(c)
	}
	return Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: append(slices.Clone(trackedSets), sets...), Ranks: 2,
		Stdout: io.Discard, Stderr: log, log: "json",
		open: opener{ask, backends.OpenComm, nil}})
}

// newTracked returns a job with two evaluation sets, of which the loss of "far.x" rises when the
// rate is so large that the model unlearns what it did not see.
func newTracked(t *testing.T, more string) (dir string, run func(ranks int, sets ...string) (string, error)) {
	t.Helper()
	dir, run = newKept(t, trackedSets...)
	put(t, filepath.Join(dir, "near.txt"), strings.Repeat("the dog sat on the mat, and the cat sat on the log. ", 4))
	put(t, filepath.Join(dir, "far.txt"), strings.Repeat("ZQXJ KVWY 0123 %&/( ", 12))
	put(t, filepath.Join(dir, "job.toml"), kept+more+`
[[eval.set]]
name = "near"
path = "near.txt"
[[eval.set]]
name = "far.x"
path = ["far.txt"]
`)
	return dir, run
}

// Each evaluation set has its own loss; eval_loss is that of all tokens together. The checkpoint of
// the smallest loss stays when others are removed, the run ends when the loss does not fall any
// more, and every mesh decides the same.
func TestBestAndPatience(t *testing.T) {
	var want []evalLine
	for _, mesh := range [][]string{{"1"}, {"4", "parallel.ulysses=2", "parallel.zero=3"},
		{"2", "parallel.ulysses=1", "parallel.zero=1"}} {
		dir, run := newTracked(t, "")
		sets := append(slices.Clone(mesh[1:]), "checkpoint.best=true", "eval.metric=far.x", "eval.patience=3")
		var ranks int
		fmt.Sscan(mesh[0], &ranks)
		out, err := run(ranks, sets...)
		if err != nil {
			t.Fatal(err)
		}
		all := readEvals(t, dir)
		best, last := 0, all[len(all)-1]
		for i, x := range all {
			if pooled := (x.A*float64(x.NA) + x.B*float64(x.NB)) / float64(x.NA+
				x.NB); !(math.Abs(pooled-*x.Loss) < 1e-9) ||
				x.Tokens != x.NA+x.NB || x.NA == 0 || x.A == x.B {
				t.Errorf("%v: line %+v: the loss of all tokens is %g", mesh, x, pooled)
			}
			if x.Best != (i == 0 || x.B < all[best].B) {
				t.Errorf("%v: best is %v in line %+v", mesh, x.Best, x)
			}
			if x.Best {
				best = i
			}
		}
		b := all[best]
		if last.Step != b.Step+3 || last.Step >= 12 || b.Step < 2 {
			t.Errorf("%v: the best evaluation was after step %d, and the run ended after step %d", mesh, b.Step,
				last.Step)
		}
		if want == nil {
			want = all
		}
		if len(all) != len(want) || !(math.Abs(all[best].B-want[best].B) < 1e-4) {
			t.Errorf("%v: evaluations %+v, on one rank %+v", mesh, all, want)
		}
		if got := stepsOn(t, dir); !slices.Equal(got, []int64{b.Step, last.Step}) {
			t.Errorf("%v: checkpoints of steps %v, want %d and %d", mesh, got, b.Step, last.Step)
		}
		path := filepath.Join(dir, "out", "checkpoints", fmt.Sprintf("step-%08d", b.Step))
		for _, words := range []string{fmt.Sprintf("held-out loss %.4f of far.x after step %d: %s", b.B, b.Step, path),
			"the held-out loss of far.x has not improved in 3 evaluations (eval.patience)"} {
			if !strings.Contains(out, words) {
				t.Errorf("%v: the output does not say %q:\n%s", mesh, words, out)
			}
		}
		page, err := os.ReadFile(filepath.Join(dir, "out", "report.html"))
		if err != nil || !strings.Contains(string(page), "best held-out loss") ||
			!strings.Contains(string(page), "of far.x") || !strings.Contains(string(page), "(best so far)") {
			t.Errorf("%v: report.html does not have the best evaluation: %v", mesh, err)
		}
		// the run is over, until it may have more patience
		if out, err = run(1, append(sets[len(mesh)-1:], "parallel.ulysses=1")...); err != nil ||
			!strings.Contains(out, "nothing left to do: the run ended early") || len(readEvals(t, dir)) != len(all) {
			t.Errorf("%v: again: %v: %s", mesh, err, out)
		}
		if _, err = run(1, "checkpoint.best=true", "eval.metric=far.x", "eval.patience=4"); err != nil ||
			len(readEvals(t, dir)) != len(all)+1 {
			t.Errorf("%v: with more patience: %v, %d evaluations, before %d", mesh, err, len(readEvals(t, dir)),
				len(all))
		}
		// other metrics are not compared with the best of this one
		if _, err = run(1, "checkpoint.best=true", "eval.metric=near", "eval.patience=12"); err != nil ||
			readEvals(t, dir)[len(all)+1].Step != 6 && !readEvals(t, dir)[len(all)+1].Best {
			t.Errorf("%v: another metric: %v: %+v", mesh, err, readEvals(t, dir))
		}
	}
}

// A resumed run makes the same decisions as one that was not interrupted. The evaluation of the
// step after which a signal stopped the run is made by the resumed run.
func TestResumeBest(t *testing.T) {
	tracked := []string{"checkpoint.best=true", "eval.metric=far.x", "eval.patience=3"}
	dir, run := newTracked(t, "")
	if _, err := run(2, tracked...); err != nil {
		t.Fatal(err)
	}
	want, kept := readEvals(t, dir), stepsOn(t, dir)
	for stop := int64(1); stop <= 4; stop++ {
		dir, run := newTracked(t, "")
		if err := runStopped(dir, stop, tracked...); status.Of(err) != status.Preempted {
			t.Fatalf("stopped after step %d: %v", stop, err)
		}
		if n := len(readEvals(t, dir)); n != int(stop)-1 {
			t.Errorf("%d evaluations before the stop after step %d", n, stop)
		}
		if _, err := run(2, tracked...); err != nil {
			t.Fatal(err)
		}
		if got := readEvals(t, dir); fmt.Sprint(plainEvals(got)) != fmt.Sprint(plainEvals(want)) ||
			!slices.Equal(stepsOn(t, dir), kept) {
			t.Errorf("stopped after step %d: %v with checkpoints %v, want %v with %v", stop, plainEvals(got),
				stepsOn(t, dir), plainEvals(want), kept)
		}
	}
	// without its checkpoint, the best evaluation is found anew
	best := filepath.Join(dir, "out", "checkpoints", fmt.Sprintf("step-%08d", kept[0]))
	if err := os.RemoveAll(best); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: append(slices.Clone(trackedSets), tracked...),
		Ranks: 2, Stdout: io.Discard, Stderr: &log})
	if err != nil || !strings.Contains(log.String(),
		fmt.Sprintf("there is no checkpoint of the best evaluation, after step %d", kept[0])) {
		t.Errorf("%v: %s", err, log.String())
	}
}

// The evaluation with which a resumed run begins is in metrics.jsonl once, also if the run is
// resumed from the same checkpoint again.
func TestEvaluationOfAResumeIsWrittenOnce(t *testing.T) {
	tracked := []string{"eval.patience=1", "optimizer.lr=0.0"} // the second evaluation ends the run
	dir, run := newTracked(t, "")
	if err := runStopped(dir, 2, tracked...); status.Of(err) != status.Preempted {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := run(2, tracked...); err != nil {
			t.Fatal(err)
		}
		if all := readEvals(t, dir); len(all) != 2 || all[0].Step != 1 || all[1].Step != 2 {
			t.Errorf("evaluations %v, want those after steps 1 and 2", plainEvals(all))
		}
	}
}

// Evaluations of a set without targets are not compared: none is the best, and none ends the run.
func TestSetWithoutTargets(t *testing.T) {
	dir, _ := newTracked(t, "")
	put(t, filepath.Join(dir, "far.txt"), "x")
	var log bytes.Buffer
	err := Run(Options{Path: filepath.Join(dir, "job.toml"),
		Sets: append(slices.Clone(trackedSets), "train.steps=4", "eval.metric=far.x", "eval.patience=2",
			"checkpoint.best=true"),
		Ranks: 2, Stdout: io.Discard, Stderr: &log})
	all := readEvals(t, dir)
	if err != nil || len(all) != 4 || strings.Count(log.String(), "no token of the set far.x is a target") != 4 {
		t.Errorf("%v, %d evaluations: %s", err, len(all), log.String())
	}
	for _, x := range all {
		if x.Best || x.NB != 0 || x.NA == 0 {
			t.Errorf("line %+v", x)
		}
	}
}

// plainEvals returns what must be equal in a resumed run.
func plainEvals(all []evalLine) (plain []string) {
	for _, x := range all {
		plain = append(plain, fmt.Sprint(x.Step, *x.Loss, x.A, x.B, x.Best))
	}
	return plain
}

// If the checkpoint of a better evaluation cannot be written, the one of the former best stays, and
// the run continues. With room again, the run resumes from it and ends as if nothing had happened.
func TestBestOnAFullDisk(t *testing.T) {
	tracked := []string{"checkpoint.best=true", "eval.metric=far.x", "eval.patience=3", "checkpoint.every=0"}
	dir, run := newTracked(t, "")
	if _, err := run(2, tracked...); err != nil {
		t.Fatal(err)
	}
	want, kept := readEvals(t, dir), stepsOn(t, dir)
	if len(kept) != 2 || kept[0] != 1 || kept[1] < 3 { // the newest one besides the best stays
		t.Fatalf("checkpoints of steps %v: %v", kept, plainEvals(want))
	}
	dir, run = newTracked(t, "")
	states := filepath.Join(dir, "out", "checkpoints")
	if err := os.MkdirAll(states, 0o755); err != nil {
		t.Fatal(err)
	}
	mount := func(flags uintptr, options string) error {
		return syscall.Mount("tmpfs", states, "tmpfs", flags, options)
	}
	if err := mount(0, "size=300k"); err != nil { // for one checkpoint
		needsMounts(t, err)
	}
	defer syscall.Unmount(states, syscall.MNT_DETACH)
	out, err := run(2, tracked...)
	if err != nil || !slices.Equal(stepsOn(t, dir), []int64{1}) ||
		!strings.Contains(out, fmt.Sprintf("of far.x after step %d\n", kept[1])) {
		t.Errorf("%v: checkpoints of steps %v: %s", err, stepsOn(t, dir), out)
	}
	if got := readEvals(t, dir); fmt.Sprint(plainEvals(got)) != fmt.Sprint(plainEvals(want)) {
		t.Errorf("the run did not continue: %v, want %v", plainEvals(got), plainEvals(want))
	}
	if err := mount(syscall.MS_REMOUNT, "size=8m"); err != nil {
		t.Fatal(err)
	}
	if _, err := run(2, tracked...); err != nil ||
		fmt.Sprint(plainEvals(readEvals(t, dir))) != fmt.Sprint(plainEvals(want)) ||
		!slices.Equal(stepsOn(t, dir), kept) {
		t.Errorf("with room again: %v, %v with checkpoints %v, want %v with %v", err, plainEvals(readEvals(t, dir)),
			stepsOn(t, dir), plainEvals(want), kept)
	}
}
