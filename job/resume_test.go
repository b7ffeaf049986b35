package job

import (
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Changed settings that affect later steps are refused together, with the learning rates under both
// settings, until checkpoint.accept lists them. Changed settings without an effect are not refused.
func TestResumeWithOtherSettings(t *testing.T) {
	for _, x := range []struct {
		name string
		sets []string
		keys string // keys that the error lists for accept
		want []string
	}{
		{"longer", []string{"train.steps=8"}, `"train.steps"`,
			[]string{"train.steps is 8, it was 6", "the learning rate of step 7 is 0.000286475",
				"with the checkpoint's settings 0;", "that of step 6 was 0"}},
		{"shorter", []string{"train.steps=5"}, `"train.steps"`, []string{"train.steps is 5, it was 6"}},
		{"all", []string{"optimizer.lr=1e-3", "optimizer.betas=[0.8, 0.9]", "optimizer.schedule=linear",
			"optimizer.warmup=3", "optimizer.min_lr=1e-5", "optimizer.eps=1e-6",
			"optimizer.weight_decay=0.1", "optimizer.clip=2", "train.steps=0", "train.epochs=20"},
			`"optimizer.betas", "optimizer.clip", "optimizer.eps", "optimizer.lr", "optimizer.min_lr", "optimizer.schedule", "optimizer.warmup", "optimizer.weight_decay", "train.steps"`,
			[]string{"optimizer.lr is 0.001, it was 0.003", "optimizer.betas is [0.8, 0.9], it was [0.9, 0.95]",
				"optimizer.schedule is linear, it was cosine",
				"optimizer.warmup is 3, it was 2", "optimizer.min_lr is 1e-05, it was 0",
				"optimizer.eps is 1e-06, it was 1e-08",
				"optimizer.weight_decay is 0.1, it was 0", "optimizer.clip is 2, it was 1", "train.steps is "}},
	} {
		t.Run(x.name, func(t *testing.T) {
			dir, run := newKept(t)
			if _, err := run(2); err != nil {
				t.Fatal(err)
			}
			for _, sets := range [][]string{x.sets, append([]string{"seed=6"}, x.sets...)} {
				for _, ranks := range []int{1, 2} {
					_, err := run(ranks, sets...)
					expectFault(t, err, status.InvalidConfig, x.want[:1])
					if len(sets) == len(x.sets) {
						expectFault(t, err, status.InvalidConfig,
							append(x.want, "set checkpoint.accept = ["+x.keys+"]"))
					}
				}
			}
			if len(losses(t, dir)) != 6 {
				t.Fatalf("losses %v", losses(t, dir))
			}
			if _, err := run(2, append([]string{"checkpoint.accept=[" + x.keys + "]"}, x.sets...)...); err != nil {
				t.Error(err)
			}
		})
	}
	dir, run := newKept(t, "optimizer.schedule=constant")
	if _, err := run(1); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	for _, sets := range [][]string{{"train.steps=8"},
		{"train.steps=9", "optimizer.min_lr=1e-5", "checkpoint.accept=optimizer.lr"}} {
		if _, err := run(1, sets...); err != nil || !slices.Equal(losses(t, dir)[:6], want) {
			t.Errorf("%v: %v, losses %v, before %v", sets, err, losses(t, dir), want)
		}
	}
	if n := len(losses(t, dir)); n != 9 {
		t.Errorf("%d steps", n)
	}
	_, err := run(1, "checkpoint.accept=optimizer.learning_rate")
	expectFault(t, err, status.InvalidConfig,
		[]string{"checkpoint.accept", "optimizer.learning_rate", "optimizer.warmup"})
}

// A finished run goes on with a schedule of its own for the steps that follow: optimizer.begin. The
// log has the rates, and the checkpoint records the schedule.
func TestNewSchedule(t *testing.T) {
	dir, run := newKept(t)
	_, err := run(1, "optimizer.begin=2")
	expectFault(t, err, status.InvalidConfig, []string{"optimizer.begin: 2, and the run has no checkpoint"})
	_, err = run(1, "optimizer.begin=6")
	expectFault(t, err, status.InvalidConfig, []string{"optimizer.begin = 6: no step of the run is left"})
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	more := []string{"train.steps=10", "optimizer.begin=6", "optimizer.schedule=linear", "optimizer.lr=1e-3",
		"optimizer.warmup=2"}
	_, err = run(2, more...)
	accept := `"optimizer.begin", "optimizer.lr", "optimizer.schedule", "train.steps"`
	expectFault(t, err, status.InvalidConfig,
		[]string{"optimizer.begin is 6, it was 0", "the learning rate of step 7 is 0.0005",
			"set checkpoint.accept = [" + accept + "]"})
	_, err = run(2, append([]string{"checkpoint.accept=[" + accept + "]", "optimizer.begin=7"}, more[0])...)
	expectFault(t, err, status.InvalidConfig,
		[]string{"optimizer.begin = 7: checkpoint ",
			"is of step 6, before the schedule begins; set optimizer.begin = 6"})
	if _, err := run(2, append([]string{"checkpoint.accept=[" + accept + "]"}, more...)...); err != nil {
		t.Fatal(err)
	}
	var rates []float64
	for _, r := range readMetrics(t, filepath.Join(dir, "out", "metrics.jsonl")) {
		rates = append(rates, r.LR)
	}
	if want := []float64{5e-4, 1e-3, 1e-3, 0}; len(rates) != 10 || !slices.Equal(rates[6:], want) {
		t.Errorf("rates %v, want %v", rates, want)
	}
	drop(t, dir, 10)
	if _, err := run(1, more...); err != nil || len(losses(t, dir)) != 10 {
		t.Errorf("resumed within the new schedule: %v", err)
	}
}

// A checkpoint of format 1 has neither a checksum of its manifest nor settings. It is read, and the
// log names what is not compared.
func TestResumeFormat1(t *testing.T) {
	dir, run := newKept(t)
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	drop(t, dir, 6)
	state := filepath.Join(dir, "out", "checkpoints", "step-00000004")
	if err := older(state); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	err := Run(Options{Path: filepath.Join(dir, "job.toml"), Ranks: 2, Stdout: io.Discard, Stderr: &log})
	if err != nil || !slices.Equal(losses(t, dir), want) ||
		!strings.Contains(log.String(), "of an older program (format 1)") {
		t.Errorf("%v, losses %v, want %v: %s", err, losses(t, dir), want, log.String())
	}
	drop(t, dir, 6)
	if err := errors.Join(edit("step", 3)(state), edit("updates", 3)(state)); err != nil {
		t.Fatal(err)
	}
	_, err = run(2)
	expectFault(t, err, status.InvalidConfig,
		[]string{"no checkpoint in", "is whole", "its name says step 4, its manifest.json step 3",
			`checkpoint.resume = "off"`})
}
