package job

import (
	"math"
	"testing"

	"ulysses/train"
)

// A NaN among the logits stays in the largest difference, whatever tokens follow.
func TestLogitsWithNaN(t *testing.T) {
	table := func(first float32) *tokenTable {
		return &tokenTable{vocab: 2, tokens: []train.TokenResult{
			{Target: -100, Logits: []float32{first, 1}}, {Index: 1, Target: -100, Logits: []float32{1, 2}}}}
	}
	d, err := table(0).differences(table(float32(math.NaN())))
	if err != nil || d.Logits == nil || !math.IsNaN(float64(*d.Logits)) {
		t.Errorf("%+v, %v: want NaN", d, err)
	}
}
