package model

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/fake"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/need"
	"ulysses/tile"
)

// inTiles sets a rank's tiles, and makes an arena of the size that Memory returns for them.
func inTiles(x Tiles, tokens int64) func(r *rank) { return under(Activations{}, x, tokens) }

// ignoring sets a sequence's targets from lo to hi to none.
func ignoring(s *sequence, lo, hi int) *sequence {
	s.targets = slices.Clone(s.targets)
	for i := lo; i < hi; i++ {
		s.targets[i] = -100
	}
	return s
}

// lengths are tile sizes: one token, some, many, and more than there are.
var lengths = []int64{1, 7, 64, 1000}

// With tiles of MLP and loss, the loss is bitwise equal, gradients are equal up to the rounding of
// their sums, and the weights after an SGD step are within 1e-7: in several layers, on ranks with
// unequal shards, without tokens, without targets.
func TestTiles(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		for _, s := range []*sequence{
			documents(cfg.VocabSize, 9, 1, 13),
			documents(cfg.VocabSize, 3), // fewer than ranks
			// no target on rank 0 of two, on ranks 0 and 1 of four
			ignoring(documents(cfg.VocabSize, 150), 0, 76),
		} {
			for _, n := range append([]int{1}, mpitest.Sizes()...) {
				want := train(t, n, cfg, s, func(r *rank) { must(r.SetTiles(Tiles{MLP: TileOff, Loss: TileOff})) })
				for _, rows := range lengths {
					got := train(t, n, cfg, s, inTiles(Tiles{MLP: rows, Loss: rows}, int64(len(s.ids))))
					if got.Loss != want.Loss {
						t.Errorf("%d tokens, %d ranks, tiles of %d: %v, want %v", len(s.ids), n, rows, got.Loss,
							want.Loss)
					}
					same(t, fmt.Sprintf("%d tokens, %d ranks, tiles of %d", len(s.ids), n, rows), got, want)
				}
			}
		}
	})
}

// same compares gradients, and the weights after an SGD step.
func same(t *testing.T, what string, got, want outcome) {
	t.Helper()
	const lr = 0.1
	for name, g := range want.grads {
		if e := far(got.grads[name], g); !(e < 2e-5) {
			t.Errorf("%s: gradient of %s has error %.2g", what, name, e)
		}
		for i := range g {
			if d := lr * math.Abs(got.grads[name][i]-g[i]) / float64(max(1, want.Tokens)); !(d <= 1e-7) {
				t.Fatalf("%s: weight %d of %s has error %.2g after a step", what, i, name, d)
			}
		}
	}
}

// Passes in tiles use exactly the planned memory, also evaluations with the same loss. They
// allocate nothing and save no gate and up.
func TestTilesMemory(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 150, 31)
		var want Loss // of training and of evaluation
		for _, backward := range []bool{true, false} {
			ranks(t, 1, func(c comm.Comm) error {
				var before int64
				for _, x := range []Tiles{{MLP: TileOff, Loss: TileOff}, {MLP: TileOff, Loss: 64}, {MLP: 64, Loss: 64},
					{MLP: 7, Loss: 7}, {MLP: 1, Loss: 1}} {
					r := newRank(c, cfg, 1, backward)
					defer r.close()
					must(r.SetTiles(x))
					table, err := r.Memory(181, 181, backward)
					must(err)
					// gate and up of two layers
					if size := Bytes(table); before > 0 && size > before || backward && x.MLP == 64 &&
						size > before-2*2*4*40*181 {
						t.Errorf("backward %v, tiles %v: %d bytes, with larger ones %d", backward, x, size, before)
					}
					before = Bytes(table)
					r.c.Arena, err = device.NewArena(r.dev, "activations", before)
					must(err)
					pass, b := r.Forward, shard(c, s)
					if backward {
						pass = r.ForwardBackward
					}
					r.set(weights(r.Model))
					got, err := pass(r.c, b)
					if err != nil {
						return err
					}
					if want.Tokens == 0 {
						want = got
					} else if !backward { // only training has the loss of balance
						got.Balance = want.Balance
					}
					if got != want {
						t.Errorf("backward %v, tiles %v: loss %v, want %v", backward, x, got, want)
					}
					if r.c.Arena.Peak() != before || r.c.Arena.Mark() != 0 {
						t.Errorf("backward %v, tiles %v: peak %d, planned %d, still in use %d", backward, x,
							r.c.Arena.Peak(), before, r.c.Arena.Mark())
					}
					if a := testing.AllocsPerRun(3, func() { pass(r.c, b) }); a > 0 && !need.Instrumented {
						t.Errorf("backward %v, tiles %v: %v allocations in a pass", backward, x, a)
					}
					// a shorter batch in the same memory
					if _, err := pass(r.c, shard(c, documents(cfg.VocabSize, 100))); err != nil {
						return err
					}
				}
				return nil
			})
		}
	})
}

// The memory of logits and loss does not grow with the sequence, except one number per token, its
// loss.
func TestLossMemoryIsFlat(t *testing.T) {
	cfg, err := ConfigFromMap(map[string]any{"model_type": "llama", "vocab_size": 128256, "hidden_size": 64,
		"intermediate_size": 64,
		"num_hidden_layers": 1, "num_attention_heads": 1})
	must(err)
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, configs(t)["llama"], 1, false)
		m, err := New(r.dev, c, cfg, Options{})
		must(err)
		peak := func(rows int64, loss int64) int64 {
			must(m.SetTiles(Tiles{Loss: loss}))
			arena, ids := device.Sketch(r.dev, "loss"), tensor.Of(nil, tensor.I32, rows)
			var p pass
			p.begin(m, &Ctx{Arena: arena}, &Batch{Targets: ids}, rows, sizes{}, true)
			p.act, p.rstd = p.temp(rows, 64), p.tempF32(rows)
			x, before := p.temp(rows, 64), arena.Mark()
			m.head.run(&p, x, m.sum)
			must(p.err)
			return arena.Peak() - before - 4*rows // its loss
		}
		for _, rows := range []int64{2048, 16384, 131072, 1048576} {
			auto, whole := peak(rows, TileAuto), peak(rows, TileOff)
			t.Logf("vocabulary 128256, %7d tokens: logits and loss take %5.1f MiB in tiles of %d, %9.1f MiB at once",
				rows, float64(auto)/(1<<20), m.head.tileTokens(r.dev, Tiles{}, tensor.F32), float64(whole)/(1<<20))
			if auto != peak(2048, TileAuto) || whole != rows*128256*4 {
				t.Errorf("%d tokens: %d bytes in tiles, %d without; 2048 tokens need %d in tiles", rows, auto, whole,
					peak(2048, TileAuto))
			}
		}
		return nil
	})
}

// On a GPU, tiles are so large that reading the weights is not most of the time.
func TestTilesOfDevices(t *testing.T) {
	cfg := *configs(t)["llama"]
	cfg.HiddenSize, cfg.IntermediateSize, cfg.VocabSize = 4096, 14336, 128256
	host, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer host.Close()
	gpu, err := fake.Open(fake.Options{})
	must(err)
	defer gpu.Close()
	for _, x := range []struct {
		dev       device.Device
		mlp, loss int64
	}{{host, 390, 130}, {gpu, 4096, 2092}} {
		m := &Model{Config: &cfg, dev: x.dev, compute: tensor.F32,
			head: newHead(&cfg, nil,
				newParam("lm_head.weight", cfg.DType, normal, []string{"", ""}, cfg.VocabSize, cfg.HiddenSize))}
		if mlp, loss := m.MLPTile(), m.head.tileTokens(x.dev, m.tiles, m.compute); mlp != x.mlp || loss != x.loss {
			t.Errorf("%s: tiles of %d tokens in the MLP and %d in the loss, want %d and %d", x.dev.Info().Kind, mlp,
				loss, x.mlp, x.loss)
		}
	}
}

// Every gradient is reported once, after its last tile, also if a rank's last tiles are empty or it
// has no tokens.
func TestTilesWeights(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		for _, s := range []*sequence{documents(cfg.VocabSize, 9, 14), documents(cfg.VocabSize, 3)} {
			tiles := inTiles(Tiles{MLP: 7, Loss: 7}, int64(len(s.ids)))
			one := train(t, 1, cfg, s, tiles)
			train(t, 1, cfg, s, func(r *rank) {
				tiles(r)
				l := &lender{t: t, m: r.Model, held: map[int]bool{}, ready: map[string]int{}}
				r.c.Weights = &complete{lender: l, want: one}
				if _, err := r.ForwardBackward(r.c, shard(comm.Local(1)[0], s)); err != nil {
					t.Fatal(err)
				}
				once(t, r, l)
				r.c.Weights = nil
			})
			for _, n := range mpitest.Sizes() {
				train(t, n, cfg, s, func(r *rank) {
					must(r.SetTiles(Tiles{MLP: 2, Loss: 2}))
					l := &lender{t: t, m: r.Model, held: map[int]bool{}, ready: map[string]int{}}
					r.c.Weights = l
					if _, err := r.ForwardBackward(r.c, shard(r.comm, s)); err != nil {
						t.Error(err)
					}
					once(t, r, l)
					r.c.Weights = nil
					_, most := comm.Shard(int64(len(s.ids)), n, 0)
					if got, want := r.head.compute.Plan.Count, tile.Count(most, 2); got != want {
						t.Errorf("%d tokens: rank %d of %d has %d tiles, want %d as the other ranks", len(s.ids),
							r.comm.Rank(), n, got, want)
					}
				})
			}
		}
	})
}

func once(t *testing.T, r *rank, l *lender) {
	for _, g := range r.Groups() {
		for _, p := range g.Params {
			if l.ready[p.Name] != 1 {
				t.Errorf("gradient of %s is reported %d times", p.Name, l.ready[p.Name])
			}
			clear(p.Grad.Float32s())
		}
	}
}

// On a test device, tiles give results that are bitwise equal to the CPU's, and in BF16 close ones.
func TestTilesOnLateDevice(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s, x := documents(cfg.VocabSize, 9, 1, 13), Tiles{MLP: 7, Loss: 5}
		for _, n := range append([]int{1}, mpitest.Sizes()...) {
			want, got := train(t, n, cfg, s, inTiles(x, 23)), trainLate(t, n, cfg, tensor.F32, s, x)
			if got.Loss != want.Loss {
				t.Errorf("%d ranks: %v, on the CPU %v", n, got.Loss, want.Loss)
			}
			for name, g := range want.grads {
				if !slices.Equal(got.grads[name], g) {
					t.Errorf("%d ranks: gradient of %s has error %.2g", n, name, far(got.grads[name], g))
				}
			}
		}
		want, got := trainLate(t, 1, cfg, tensor.BF16, s), trainLate(t, 1, cfg, tensor.BF16, s, x)
		if got.Loss != want.Loss {
			t.Errorf("BF16: %v, untiled %v", got.Loss, want.Loss)
		}
		for name, g := range want.grads {
			if e := far(got.grads[name], g); !(e < 2e-5) {
				t.Errorf("BF16: gradient of %s has error %.2g", name, e)
			}
		}
	})
}

// Invalid tiles are errors.
func TestTilesRefusals(t *testing.T) {
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, configs(t)["llama"], 1, false)
		for _, x := range []Tiles{{MLP: -2}, {Loss: -7}, {GDN: -2}} {
			if err := r.SetTiles(x); status.Of(err) != status.InvalidArgument || r.Tiles() != (Tiles{}) {
				t.Errorf("%v: %v, now %v", x, err, r.Tiles())
			}
		}
		return nil
	})
}
