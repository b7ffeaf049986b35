package job

import (
	"strings"
	"testing"
)

// A rank that is slower than the others for thirty steps is named, once, with the phase.
func TestStragglers(t *testing.T) {
	var said []string
	x := &stragglers{slow: make([]int, 4), named: make([]bool, 4), warn: func(text string) {
		said = append(said, text)
	}}
	usual := pace{Host: "n0", Phases: map[string]float64{"attention": 1, "linear": 2}}
	slow := pace{Host: "n1", Phases: map[string]float64{"attention": 2.5, "linear": 2.1}}
	all := []pace{usual, usual, slow, usual}
	for range 2 {
		x.compare(all)
	}
	x.compare([]pace{usual, usual, usual, usual}) // it was a short time
	for range 2 {
		x.compare(all)
	}
	if len(said) > 0 {
		t.Errorf("too early: %q", said)
	}
	for range 3 {
		x.compare(all)
	}
	want := "rank 2 on host n1 has been slower than the others for 30 steps, and they wait for it: its own work takes 4.6 s of a step, the median of all ranks is 3 s; most of the difference is in attention (2.5 s, median 1 s)"
	if len(said) != 1 || !strings.HasPrefix(said[0], want) {
		t.Errorf("%q", said)
	}
	if got := median([]float64{3, 1, 2, 9}); got != 2 {
		t.Error(got)
	}
}

// A run names the rank that is slow.
func TestStragglerOfARun(t *testing.T) {
	t.Setenv("ULYSSES_FAULT", "slow:1:2")
	dir, _ := newKept(t)
	out, err := child(dir, "ULYSSES_TEST_SETS=train.steps=40 checkpoint.every=0").CombinedOutput()
	if err != nil || strings.Count(string(out), "rank 1 on host ") != 1 ||
		!strings.Contains(string(out), "slower than the others for 30 steps") ||
		!strings.Contains(string(out), "most of the difference is in data (0.2") {
		t.Errorf("%v: %s", err, out)
	}
}
