package train

import (
	"slices"
	"testing"

	"ulysses/tensor"
	"ulysses/testkit/near"
)

// A gradient is scaled to the norm optimizer.clip if its norm is larger. A smaller gradient is not
// scaled: the weights are bitwise equal to the weights without a clip. The step of SGD is
// proportional to the scaled gradient; that of AdamW shows no scale.
func TestClip(t *testing.T) {
	clipped := func(clip float64) outcome {
		return run{model: "llama", ranks: 2, ulysses: 1, optimizer: "sgd", compute: tensor.F32, steps: 1,
			clip: clip}.train(t)
	}
	want := clipped(-1)
	norm := want.norms[0]
	for _, clip := range []float64{norm * 1.01, norm * 100} {
		if got := clipped(clip); !slices.Equal(got.weights, want.weights) || got.norms[0] != norm {
			t.Errorf("a clip of %v changes the step of a gradient of norm %v", clip, norm)
		}
	}
	// What a clip takes from the step is rate·(1 - clip/norm)·gradient.
	taken := func(share float64) []float64 {
		got := clipped(norm * share)
		if got.norms[0] != norm {
			t.Errorf("the norm is %v, without a clip %v", got.norms[0], norm)
		}
		d := make([]float64, len(want.weights))
		for i, w := range want.weights {
			d[i] = (float64(got.weights[i]) - float64(w)) / (1 - share)
		}
		return d
	}
	half := taken(0.5)
	near.Relative(t, "gradients of clips", taken(0.25), half, 1e-4)
	length := 0.0
	for _, x := range half {
		length += x * x
	}
	// The first of three steps of warmup to the rate 0.3.
	near.Value(t, "the square of the whole step", length, 0.1*0.1*norm*norm, 1e-3*0.1*0.1*norm*norm)
}
