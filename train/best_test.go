package train

import (
	"math"
	"strings"
	"testing"

	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/internal/clock"
)

// Losses of other evaluations are not compared, also if only their sequences have another length.
// The warning has the metric, and not the digest of the data.
func TestOtherEvaluations(t *testing.T) {
	c := &Checkpoints{Best: true}
	for of, want := range map[string]string{
		"eval.metric = books, b19a5bcf56e17657": "after step 7 (eval.metric = books), and the comparison begins anew",
		"4dbd6c4eca9a50b7":                      "after step 7, and the comparison begins anew",
	} {
		best, note, err := c.continueBest(&checkpoint.Best{Of: of, Loss: 3, Step: 7}, &Track{Of: "other"})
		if best != nil || err != nil || !strings.HasSuffix(note, want) ||
			!strings.Contains(note, "the length of their sequences") {
			t.Errorf("%s: %v, %q, %v", of, best, note, err)
		}
	}
}

// Any smaller loss is the best one. Patience counts the evaluations that are not smaller than the
// best so far by more than the threshold; NaN, Inf and an evaluation without targets are no
// improvement, and the last is not counted.
func TestThreshold(t *testing.T) {
	mesh, err := comm.NewMesh(comm.Local(1)[0], 1, 1, comm.NewLedger(), clock.New(), nil)
	if err != nil {
		t.Fatal(err)
	}
	trainer := &Trainer{Setup: Setup{Mesh: mesh, Track: &Track{Metric: "a", Patience: 3, Threshold: 0.25}}}
	for i, x := range []struct {
		loss    float64
		targets int64
		best    bool
		without int64
	}{
		{math.NaN(), 8, false, 1}, {3, 8, true, 0}, {2.875, 8, true, 1}, {2.5, 8, true, 0}, {2.375, 8, true, 1},
		{2.125, 8, true, 2}, {1, 0, false, 2}, {1.75, 8, true, 0}, {1.75, 8, false, 1}, {math.Inf(-1), 8, false, 2},
		{1.5, 8, true, 3},
	} {
		// the metric is of set a alone
		r := &EvalRecord{Step: int64(i + 1), EvalLoss: Float(9 - i), EvalTokens: 99,
			Sets: []SetLoss{{"b", Float(9 - i), 99}, {"a", Float(x.loss), x.targets}}}
		if err := trainer.compare(r); err != nil {
			t.Fatal(err)
		}
		if b := &trainer.best; r.Best != x.best || trainer.improved != x.best || b.Without != x.without ||
			x.best && (b.Loss != x.loss || b.Step != r.Step) || trainer.EndedEarly() != (x.without == 3) {
			t.Errorf("evaluation %d, loss %v: best %v, %+v, ended %v; want best %v after %d without an improvement",
				i+1, x.loss, r.Best, *b, trainer.EndedEarly(), x.best, x.without)
		}
	}
}
