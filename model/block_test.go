package model

import (
	"slices"
	"testing"

	"ulysses/device"
)

// twoPasses is a device that runs AddRMSNorm as Add and RMSNormForward, and counts its calls.
type twoPasses struct {
	device.Device
	calls int64
}

func (d *twoPasses) AddRMSNorm(s device.Stream, a *device.AddRMSNorm) error {
	d.calls++
	if err := d.Add(s, a.Sum, a.A, a.B); err != nil {
		return err
	}
	return d.RMSNormForward(s, &device.RMSNorm{X: a.Sum, W: a.W, Y: a.Y, RStd: a.RStd, Eps: a.Eps, Centre: a.Centre})
}

// Each layer computes the norm before its MLP together with the sum before it. Losses and gradients
// are bitwise equal to separate passes.
func TestAddNorm(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 1, 13)
		for _, a := range []Activations{{}, {Segment: 2, Attention: Recompute, QKV: Recompute, MLP: Recompute}} {
			policy := under(a, Tiles{}, int64(len(s.ids)))
			var d *twoPasses
			want := train(t, 1, cfg, s, func(r *rank) {
				policy(r)
				d = &twoPasses{Device: r.dev}
				r.dev = d
			})
			got := train(t, 1, cfg, s, policy)
			if got.Loss != want.Loss {
				t.Errorf("%v: %v, in two passes %v", a, got.Loss, want.Loss)
			}
			for name, g := range want.grads {
				if !slices.Equal(got.grads[name], g) {
					t.Errorf("%v: gradient of %s differs by %.2g from that in two passes", a, name,
						far(got.grads[name], g))
				}
			}
			layers := cfg.NumHiddenLayers
			if cfg.family.norms.mlp == "" {
				layers = 0
			}
			if d.calls < layers || a.Segment == 0 && d.calls > layers {
				t.Errorf("%v: %d calls of AddRMSNorm, want %d in the forward pass", a, d.calls, layers)
			}
		}
	})
}
