package job

import (
	"slices"
	"strings"
	"testing"
)

// A run with schedule wsd that is made longer before its decay resumes without checkpoint.accept,
// with the losses of a run of the new length. After the decay has begun it is refused.
func TestLongerWSD(t *testing.T) {
	sets := []string{"optimizer.schedule=wsd", "optimizer.warmup=2", "optimizer.decay=4", "checkpoint.every=4",
		"checkpoint.keep=9", "output.overwrite=true"}
	dir, run := newKept(t, append(sets, "train.steps=16")...)
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	dir, run = newKept(t, sets...)
	if _, err := run(2, "train.steps=12"); err != nil {
		t.Fatal(err)
	}
	if _, err := run(2, "train.steps=16"); err == nil ||
		!strings.Contains(err.Error(), "train.steps is 16, it was 12") ||
		!strings.Contains(err.Error(), "the learning rate of step 13 is") {
		t.Errorf("in the decay: %v", err)
	}
	drop(t, dir, 12)
	if _, err := run(2, "train.steps=16"); err != nil {
		t.Fatal(err)
	}
	if got := losses(t, dir); !slices.Equal(got, want) {
		t.Errorf("losses %v, want %v", got, want)
	}
}
