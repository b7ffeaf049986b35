package train

import (
	"slices"
	"testing"

	"ulysses/model"
	"ulysses/tensor"
)

// A skipped step moves no biases of experts, and the next step does not count its choices.
func TestSkippedStepOfBiases(t *testing.T) {
	const bad = 2
	var m *model.Model
	var last []float32
	const most = 2 * 2 * 4 * 48 // choices of a step: two layers, two experts of each token
	biases := func() (all []float32) {
		for _, b := range m.Biases() {
			all = append(all, b.Values...)
		}
		return all
	}
	x := run{model: "moe", ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.F32, steps: 4, onNaN: "skip",
		biasRate: 0.25, made: func(of *model.Model) { m, last = of, make([]float32, 2*5) }}
	x.probe = func(w Weights, step int64) error {
		sum := 0.0
		for _, n := range m.Choices() {
			sum += n
		}
		if !(sum <= most && sum > 0.9*most) {
			t.Errorf("step %d: %v choices, at most %v", step, sum, most)
		}
		if step == bad {
			return spoilGradient(w)
		}
		return nil
	}
	x.after = func(_ Weights, step int64) error {
		now := biases()
		if slices.Equal(now, last) != (step == bad) {
			t.Errorf("step %d: the biases are %v, before %v", step, now, last)
		}
		last = now
		return nil
	}
	x.train(t)
}
