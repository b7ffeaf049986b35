package train

import (
	"math"
	"testing"
)

// The rates of a run of 100 steps at its edges, and the shapes of the decay.
func TestRate(t *testing.T) {
	base := OptimizerConfig{LR: 1, MinLR: 0.1, Warmup: 10, Decay: 0.2, DecayShape: "linear"}
	with := func(schedule, shape string) OptimizerConfig {
		o := base
		o.Schedule, o.DecayShape = schedule, shape
		return o
	}
	share := base
	share.Schedule, share.Warmup, share.Decay = "wsd", 0.055, 20 // 6 steps
	later := with("cosine", "")
	later.Begin, later.Warmup = 60, 0.25 // 10 of 40 steps
	again := with("wsd", "linear")
	again.Begin = 40 // the decay has the last 12 of 60 steps
	all := base
	all.Schedule, all.Decay = "wsd", 95 // the decay begins after the warmup
	for _, x := range []struct {
		name string
		o    OptimizerConfig
		step int64
		want float64
	}{
		{"first of the warmup", with("cosine", ""), 0, 0.1},
		{"last of the warmup", with("cosine", ""), 9, 1},
		{"cosine, first", with("cosine", ""), 10, 1},
		{"cosine, last", with("cosine", ""), 99, 0.1},
		{"linear, last", with("linear", ""), 99, 0.1},
		{"constant, last", with("constant", ""), 99, 1},
		{"wsd, stable", with("wsd", "linear"), 79, 1},
		{"wsd, first of the decay", with("wsd", "linear"), 80, 0.1 + 0.9*19/20},
		{"wsd, middle", with("wsd", "linear"), 89, 0.55},
		{"wsd, last", with("wsd", "linear"), 99, 0.1},
		{"wsd, cosine", with("wsd", "cosine"), 84, 0.1 + 0.9*0.5*(1+math.Cos(math.Pi/4))},
		{"wsd, 1-sqrt", with("wsd", "1-sqrt"), 84, 0.1 + 0.9*0.5},
		{"wsd, after the end", with("wsd", "1-sqrt"), 200, 0.1},
		{"a share of the steps: last of the warmup", share, 5, 1},
		{"a share of the steps: before it", share, 4, 5.0 / 6},
		{"a decay in steps", share, 80, 0.1 + 0.9*19/20},
		{"a later begin: first of the warmup", later, 60, 0.1},
		{"a later begin: last of the warmup", later, 69, 1},
		{"a later begin: middle", later, 70 + 29/2, 0.1 + 0.9*0.5*(1+math.Cos(math.Pi*14/29))},
		{"a later begin: last", later, 99, 0.1},
		{"a later begin: stable", again, 87, 1},
		{"a later begin: first of the decay", again, 88, 0.1 + 0.9*11/12},
		{"a decay longer than the rest", all, 10, 0.1 + 0.9*89/90},
	} {
		if got := x.o.Rate(x.step, 100); !(math.Abs(got-x.want) <= 1e-12) {
			t.Errorf("%s: %v, want %v", x.name, got, x.want)
		}
	}
}

// The only step of a schedule is its first step, as in transformers.
func TestRateOfOneStep(t *testing.T) {
	for _, schedule := range []string{"constant", "linear", "cosine", "wsd"} {
		o := OptimizerConfig{LR: 0.5, Schedule: schedule, Decay: 0.1, DecayShape: "linear"}
		if got := o.Rate(0, 1); got != 0.5 {
			t.Errorf("%s: the rate of a run of one step is %v, want 0.5", schedule, got)
		}
		o.Begin = 7
		if got := o.Rate(7, 8); got != 0.5 {
			t.Errorf("%s: the rate of a stage of one step is %v, want 0.5", schedule, got)
		}
	}
}

// A later end changes no rate of schedule wsd before the decay, and sameUntil knows until when.
func TestLongerRun(t *testing.T) {
	for _, o := range []OptimizerConfig{
		{LR: 1, Schedule: "wsd", Warmup: 10, Decay: 0.1, DecayShape: "cosine"},
		{LR: 1, Schedule: "wsd", Warmup: 0.1, Decay: 20, DecayShape: "linear"},
		{LR: 1, Schedule: "wsd", Warmup: 10, Decay: 0.1, DecayShape: "cosine", Begin: 30},
		{LR: 1, Schedule: "constant", Warmup: 0.1},
		{LR: 1, Schedule: "cosine", Warmup: 10},
	} {
		for s := range int64(120) {
			same := true
			for i := range s {
				same = same && o.Rate(i, 100) == o.Rate(i, 150)
			}
			if claimed := o.sameUntil(s, 100, 150); claimed && !same || o.Schedule == "wsd" && o.Warmup == 10 &&
				claimed != same {
				t.Errorf("%+v: sameUntil(%d) = %v, the rates are the same: %v", o, s, claimed, same)
			}
		}
	}
}
