package model

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/tensor"
)

// firstReady returns the index of the first parameter of the MLP of layer 1 whose gradient is
// complete: the matrix down, or that of the first expert.
func (r *rank) firstReady() int {
	if x, ok := r.blocks[1].mlp.(*experts); ok {
		return slices.Index(x.Params(), x.down.w[0])
	}
	return slices.Index(r.blocks[1].mlp.Params(), r.blocks[1].mlp.(*mlp).down.w[0])
}

// A pass with Inspect passes every layer's output and every gradient to it once, in order, and has
// the same results as without.
func TestInspect(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 13)
		ranks(t, several(), func(c comm.Comm) error {
			r := newRank(c, cfg, int64(len(s.ids)), true)
			defer r.close()
			r.set(weights(r.Model))
			want, err := r.ForwardBackward(r.c, shard(c, s))
			if err != nil {
				return err
			}
			var seen []string
			r.c.Inspect = func(at string, x tensor.Tensor) error {
				if x.IsNil() || !(math.Abs(float64(first(x))) < 1e6) {
					return fmt.Errorf("%s: %v", at, x)
				}
				seen = append(seen, at)
				return nil
			}
			got, err := r.ForwardBackward(r.c, shard(c, s))
			if err != nil {
				return err
			}
			if got != want {
				t.Errorf("loss %v with Inspect, %v without", got, want)
			}
			place := -1
			for _, at := range []string{"embed: output", "layer 0: residual after mlp", "layer 1: residual after mlp",
				"head: norm's output",
				"head: loss of each token", "layer 1: gradient of " + r.blocks[1].mlp.Params()[r.firstReady()].Name,
				"layer 1: gradient before mlp",
				"layer 0: gradient of " + r.blocks[0].mlp.Params()[0].Name,
				"embed: gradient of model.embed_tokens.weight"} {
				i := slices.Index(seen, at)
				if i <= place {
					t.Errorf("%q is inspected at position %d, after %d: %q", at, i, place, seen)
				}
				place = i
			}
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					n := 0
					for _, at := range seen {
						if at == g.Name+": gradient of "+p.Name || p == r.embed && at == "head: gradient of "+p.Name {
							n++
						}
					}
					if n != 1 {
						t.Errorf("gradient of %s is inspected %d times", p.Name, n)
					}
				}
			}
			return nil
		})
	})
}

func first(x tensor.Tensor) float32 {
	if x.Numel() == 0 {
		return 0
	}
	return x.Float32s()[0]
}
