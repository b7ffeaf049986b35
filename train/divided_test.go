package train

import (
	"fmt"
	"math"
	"testing"

	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
)

// expertRuns returns runs with experts that are divided among groups of every size, on every mesh
// of up to four ranks and with every ZeRO stage.
func expertRuns() (list []run) {
	// ulysses, ring, data
	for _, mesh := range [][3]int{{1, 1, 2}, {2, 1, 1}, {1, 1, 4}, {2, 1, 2}, {4, 1, 1}, {1, 2, 1}, {2, 2, 1}} {
		ranks := mesh[0] * mesh[1] * mesh[2]
		for experts := 2; experts <= ranks; experts++ {
			if ranks%experts > 0 {
				continue
			}
			for zero := range 4 {
				list = append(list,
					run{model: "moe", ranks: ranks, ulysses: mesh[0], ring: mesh[1], experts: experts, zero: zero})
			}
		}
	}
	return list
}

// Five steps give the losses, the gradient norms and the weights of one rank: with experts divided
// among ranks of one sequence, of several and of both, with every ZeRO stage, tiles and policies of
// activations, with parts of the model frozen, and with ranks that have no targets. Memory is as
// planned, and bytes equal the formulas (run.with).
func TestExperts(t *testing.T) {
	dataset := ignoredData(t)
	for _, frozen := range [][]string{nil, {"*.experts.*"},
		{"*self_attn*", "*norm*", "*.mlp.gate.*", "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.*"}} {
		train := func(x run) outcome {
			x.optimizer, x.compute, x.steps, x.lr, x.freeze = "sgd", tensor.F32, 5, 0.1, frozen
			dataset := dataset
			replicas := x.ranks / (x.ulysses * max(1, x.ring))
			dataset.Batch, dataset.Accumulate = int64(4/replicas), 3
			return x.trainOn(t, dataset)
		}
		want := train(run{model: "moe", ranks: 1, ulysses: 1})
		if !(want.losses[4] < want.losses[0]) {
			t.Fatalf("the loss does not decrease: %v", want.losses)
		}
		for i, x := range expertRuns() {
			if frozen != nil && i%3 > 0 {
				continue
			}
			x.tiles = []model.Tiles{{}, {MLP: 3, Loss: 7}}[i%2]
			x.memory = []MemoryConfig{{},
				{BlockInput: "recompute", Attention: "recompute", QKV: "recompute", MLP: "recompute"},
				{MLP: "recompute", Segment: 2}}[i%3]
			got := train(x)
			what := fmt.Sprintf("ulysses %d x ring %d of %d ranks, experts %d, zero %d, tiles %v, frozen %q", x.ulysses,
				x.ring, x.ranks, x.experts, x.zero, x.tiles, frozen)
			for i := range want.losses {
				if !(math.Abs(got.losses[i]-want.losses[i]) <= 1e-5) ||
					!(math.Abs(got.norms[i]-want.norms[i]) <= 1e-5*want.norms[i]) {
					t.Errorf("%s: step %d has loss %v and norm %v, want %v and %v", what, i+1, got.losses[i],
						got.norms[i], want.losses[i], want.norms[i])
				}
			}
			if d := worst32(got.weights, want.weights); !(d <= 3e-7) {
				t.Errorf("%s: weights differ by %.2g", what, d)
			}
		}
	}
}

// The same on devices with memory and streams of their own, where collectives overlap, with AdamW
// and offloaded states.
func TestExpertsOnDevices(t *testing.T) {
	late, plugin := devicetest.Fake("late", fake.Options{}), devicetest.CUDA(t, "cuda", false)
	dataset := ignoredData(t)
	dataset.Batch, dataset.Accumulate = 2, 3
	for _, on := range []devicetest.Kind{late, plugin} {
		for zero := range 4 {
			if on.Name == plugin.Name && zero%3 > 0 {
				continue
			}
			train := func(x run) outcome {
				x.model, x.optimizer, x.compute, x.steps, x.on, x.zero = "moe", "adamw", tensor.F32, 3, &on, zero
				return x.trainOn(t, dataset)
			}
			want := train(run{ranks: 4, ulysses: 2})
			for _, experts := range []int{2, 4} {
				for _, offload := range []Offload{{}, {Step: StepStreamed}} {
					if on.Name == plugin.Name && (experts == 4) != (offload.Step == StepStreamed) {
						continue
					}
					got := train(run{ranks: 4, ulysses: 2, experts: experts, offload: offload})
					for i, l := range want.losses {
						if !(math.Abs(got.losses[i]-l) <= 1e-5) {
							t.Errorf("%s, zero %d, experts %d: loss %v at step %d, want %v", on.Name, zero, experts,
								got.losses[i], i+1, l)
						}
					}
				}
			}
		}
	}
}

func worst32(a, b []float32) (d float64) {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	for i := range a {
		e := math.Abs(float64(a[i]) - float64(b[i]))
		if math.IsNaN(e) {
			return math.Inf(1)
		}
		d = max(d, e)
	}
	return d
}
