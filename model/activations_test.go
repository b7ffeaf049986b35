package model

import (
	"fmt"
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/need"
)

// deeper returns a configuration with so many layers.
func deeper(cfg *Config, layers int64) *Config {
	c, err := cfg.Override(map[string]any{"num_hidden_layers": layers, "layer_types": nil})
	must(err)
	return c
}

// policies are activation policies: each category separately, all together, segments of several
// lengths, groups of heads.
func policies() []Activations {
	all := []Activations{
		{MLP: Recompute}, {QKV: Recompute}, {Attention: Recompute, QKV: Recompute},
		{Attention: Recompute, QKV: Recompute, MLP: Recompute},
		{QKV: Recompute, MLP: Recompute}, {Segment: 2},
		{Segment: 3, Attention: Recompute, QKV: Recompute, MLP: Recompute},
		{Segment: 2, QKV: Recompute, MLP: Recompute}, {Segment: 99, QKV: Recompute, MLP: Recompute},
		{BlockInput: Offload}, {MLP: Offload}, {QKV: Offload}, {Attention: Offload},
		{BlockInput: Offload, Attention: Offload, QKV: Offload, MLP: Offload},
		{BlockInput: Offload, Attention: Offload, QKV: Recompute, MLP: Recompute},
		{BlockInput: Offload, Attention: Recompute, QKV: Recompute, MLP: Recompute, Segment: 2},
		{BlockInput: Offload, Attention: Offload, QKV: Offload, MLP: Offload, Segment: 3},
		{Attention: Offload, QKV: Recompute, MLP: Offload, Segment: 2},
	}
	return all
}

// under sets a rank's tiles and activation policies, and makes arenas of the size that Memory
// returns for them.
func under(a Activations, x Tiles, tokens int64) func(r *rank) {
	return func(r *rank) {
		must(r.SetTiles(x))
		must(r.SetActivations(a))
		lo, hi := comm.Shard(tokens, r.comm.Size(), r.comm.Rank())
		table, err := r.Memory(hi-lo, tokens, true)
		must(err)
		r.c.Arena.Free()
		r.c.Arena, err = device.NewArena(r.dev, "activations", Bytes(table))
		must(err)
		r.c.Host, err = device.NewHostArena(r.dev, "offloaded activations", HostBytes(table))
		must(err)
	}
}

// Losses and gradients are bitwise equal to a pass that keeps everything, on any number of
// ranks, with and without tiles.
func TestActivations(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		cfg = deeper(cfg, 5)
		s := documents(cfg.VocabSize, 9, 1, 13)
		for _, n := range []int{1, several()} {
			for _, x := range []Tiles{{MLP: TileOff, Loss: TileOff}, {MLP: 7, Loss: 7}} {
				want := train(t, n, cfg, s, under(Activations{}, x, int64(len(s.ids))))
				for _, a := range policies() {
					got := train(t, n, cfg, s, under(a, x, int64(len(s.ids))))
					what := fmt.Sprintf("%d ranks, tiles %v, %v", n, x, a)
					if got.Loss != want.Loss {
						t.Errorf("%s: %v, want %v", what, got.Loss, want.Loss)
					}
					for name, g := range want.grads {
						if !slices.Equal(got.grads[name], g) {
							t.Errorf("%s: gradient of %s has error %.2g", what, name, far(got.grads[name], g))
						}
					}
				}
			}
		}
	})
}

// With groups of heads, each head's attention is bitwise equal. Gradients of key heads whose query
// heads are on several ranks are summed in another order.
func TestHeadGroups(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 1, 13)
		groups := cfg.NumKeyValueHeads
		for _, n := range append([]int{1}, mpitest.Sizes()...) {
			want := train(t, n, cfg, s, nil)
			for _, a := range []Activations{{}, {QKV: Recompute},
				{Attention: Recompute, QKV: Recompute, MLP: Recompute}, {Attention: Offload, QKV: Offload}} {
				a.HeadGroups = groups
				got := train(t, n, cfg, s, under(a, Tiles{}, int64(len(s.ids))))
				if got.Loss != want.Loss {
					t.Errorf("%d ranks, %v: %v, want %v", n, a, got.Loss, want.Loss)
				}
				same(t, fmt.Sprintf("%d ranks, %v", n, a), got, want)
				if n == 1 {
					for name, g := range want.grads {
						if !slices.Equal(got.grads[name], g) {
							t.Errorf("%v: gradient of %s has error %.2g", a, name, far(got.grads[name], g))
						}
					}
				}
			}
		}
	})
}

// A pass uses exactly the planned memory on the device and on the host, sends the predicted bytes
// and allocates nothing; so does an evaluation after it.
func TestActivationsMemory(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		cfg = deeper(cfg, 4)
		s := documents(cfg.VocabSize, 50, 31)
		for _, a := range append(policies(),
			Activations{QKV: Recompute, MLP: Recompute, HeadGroups: cfg.NumKeyValueHeads}) {
			for _, n := range []int{1, several()} {
				ranks(t, n, func(c comm.Comm) error {
					ledger := comm.NewLedger()
					counted := comm.NewCounted(c, "sequence", ledger, nil, nil)
					r := newRank(counted, cfg, 81, true)
					defer r.close()
					under(a, Tiles{}, 81)(r)
					r.set(weights(r.Model))
					b := shard(counted, s)
					f, back := r.BytesSent(b.SP)
					if _, err := r.ForwardBackward(r.c, b); err != nil {
						return err
					}
					if sent := ledger.Get("sequence", comm.OpAllToAll).Bytes; sent != f+back {
						t.Errorf("%v, %d ranks: %d bytes sent, formula %d", a, n, sent, f+back)
					}
					for _, x := range []*device.Arena{r.c.Arena, r.c.Host} {
						if x.Mark() != 0 || c.Rank() == 0 && x.Peak() != x.Bytes() && x.Bytes() > 1 {
							t.Errorf("%v, %d ranks: %s: peak %d, planned %d, still in use %d", a, n, x.Name(), x.Peak(),
								x.Bytes(), x.Mark())
						}
					}
					if n == 1 {
						if x := testing.AllocsPerRun(2, func() { r.ForwardBackward(r.c, b) }); x > 0 &&
							!need.Instrumented {
							t.Errorf("%v: %v allocations in a pass", a, x)
						}
						loss, err := r.Forward(r.c, b)
						again, _ := r.ForwardBackward(r.c, b)
						again.Balance = 0 // an evaluation has no loss of balance
						if err != nil || again != loss {
							t.Errorf("%v: loss %v after an evaluation's %v: %v", a, again, loss, err)
						}
					}
					return nil
				})
			}
		}
	})
}

// A layer saves the bytes of the kept categories: only its input if everything is
// recomputed, and the input of every other layer with segments of two.
func TestActivationsBytes(t *testing.T) {
	base := configs(t)["llama"]
	const tokens = 64 * 48 // so that nothing is padded
	peak := func(cfg *Config, a Activations) (saved map[string]int64) {
		ranks(t, 1, func(c comm.Comm) error {
			r := newRank(c, cfg, 1, true)
			defer r.close()
			must(r.SetTiles(Tiles{MLP: 64, Loss: 64}))
			must(r.SetActivations(a))
			table, err := r.Memory(tokens, tokens, true)
			must(err)
			saved = map[string]int64{"all": Bytes(table), "host": HostBytes(table)}
			for _, x := range table {
				saved[x.Name] = x.Bytes
			}
			return nil
		})
		return saved
	}
	slope := func(a Activations) (all, host int64) { // of a layer, bytes a token
		few, many := peak(deeper(base, 8), a), peak(deeper(base, 12), a)
		return (many["all"] - few["all"]) / 4 / tokens, (many["host"] - few["host"]) / 4 / tokens
	}
	cfg := base
	input, out, lse := 4*cfg.HiddenSize, 4*cfg.NumAttentionHeads*cfg.HeadDim, 4*cfg.NumAttentionHeads
	frugal := Activations{Attention: Recompute, QKV: Recompute, MLP: Recompute}
	for _, x := range []struct {
		name      string
		a         Activations
		all, host int64
	}{
		{"everything recomputed", frugal, input, 0},
		{"attention kept", Activations{QKV: Recompute, MLP: Recompute}, input + out + lse, 0},
		{"mlp kept, in tiles", Activations{Attention: Recompute, QKV: Recompute}, 2 * input, 0},
		{"inputs offloaded", Activations{BlockInput: Offload, Attention: Recompute, QKV: Recompute, MLP: Recompute},
			0, input},
		{"inputs and attention offloaded",
			Activations{BlockInput: Offload, Attention: Offload, QKV: Recompute, MLP: Recompute}, 0, input + out + lse},
		{"segments of two", Activations{Segment: 2, Attention: Recompute, QKV: Recompute, MLP: Recompute},
			input / 2, 0},
		{"segments of four, offloaded",
			Activations{Segment: 4, BlockInput: Offload, Attention: Recompute, QKV: Recompute, MLP: Recompute}, 0,
			input / 4},
	} {
		if all, host := slope(x.a); all != x.all || host != x.host {
			t.Errorf("%s: a layer needs %d bytes per token and %d on the host, want %d and %d", x.name, all, host,
				x.all, x.host)
		}
	}
	whole := peak(deeper(base, 4), frugal)["all"]
	frugal.HeadGroups = 2
	if chunks := peak(deeper(base, 4), frugal)["all"]; chunks >= whole {
		t.Errorf("%d bytes with heads in two groups, %d in one", chunks, whole)
	}
}

// Invalid policies are errors with the values.
func TestActivationsRefusals(t *testing.T) {
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, configs(t)["llama"], 1, true)
		defer r.close()
		for _, a := range []Activations{{BlockInput: Recompute}, {Attention: Recompute}, {Segment: -1}, {HeadGroups: 4},
			{HeadGroups: -1},
			{Attention: Recompute, QKV: Offload}} {
			if err := r.SetActivations(a); status.Of(err) != status.InvalidArgument {
				t.Errorf("%v: %v", a, err)
			}
		}
		if r.Activations() != (Activations{}) {
			t.Errorf("%v after refusals", r.Activations())
		}
		return nil
	})
}

// On a test device, which runs streams late and in random order, a pass that offloads is bitwise
// equal to the CPU.
func TestActivationsOnALateDevice(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		cfg = deeper(cfg, 5)
		s := documents(cfg.VocabSize, 9, 1, 13)
		for _, n := range []int{1, several()} {
			want := train(t, n, cfg, s, nil)
			for _, a := range policies() {
				got := trainLate(t, n, cfg, tensor.F32, s, a)
				for name, g := range want.grads {
					if !slices.Equal(got.grads[name], g) {
						t.Errorf("%d ranks, %v: gradient of %s has error %.2g", n, a, name, far(got.grads[name], g))
					}
				}
			}
		}
	})
}
