package model

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/near"
	"ulysses/testkit/need"
	"ulysses/testkit/ref"
)

func newReference(t testing.TB, cfg *Config) *reference {
	r := &reference{cfg: cfg, w: map[string][]float64{}}
	ranks(t, 1, func(c comm.Comm) error {
		m := newRank(c, cfg, 1, false).Model
		for name, x := range weights(m) {
			r.w[name] = ref.Convert[float64](x)
		}
		for _, b := range m.Biases() {
			r.w[b.Name] = ref.Convert[float64](b.Values)
		}
		return nil
	})
	return r
}

// The loss is the float64 model's, and the gradient of every parameter has its slope in random
// directions.
func TestGradients(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 1, 13)
		r := newReference(t, cfg)
		o := train(t, 1, cfg, s, nil)
		if want := r.loss(s); !(math.Abs(o.Sum-want) <= 2e-6*want) || o.Tokens != s.valid() {
			t.Errorf("loss %v of %d tokens, want %v of %d", o.Sum, o.Tokens, want, s.valid())
		}
		if want := r.balance; !(math.Abs(o.Balance-want) <= 2e-6*want) || (want > 0) != cfg.Balances() {
			t.Errorf("loss of balance %v, want %v", o.Balance, want)
		}
		random := rand.New(rand.NewPCG(3, 4))
		for _, name := range slices.Sorted(maps.Keys(o.grads)) { // The same directions each time.
			g := o.grads[name]
			size := norm2(g)
			if size == 0 || len(g) != len(r.w[name]) {
				t.Fatalf("%s: gradient of size %v", name, size)
			}
			for try := range 3 {
				direction, got := make([]float64, len(g)), 0.0
				for i := range direction {
					direction[i] = float64(1 - 2*random.IntN(2))
					if try == 0 {
						direction[i] = g[i] / size
					}
					got += g[i] * direction[i]
				}
				want := r.slope(s, name, direction)
				if !(math.Abs(got-want) < 1e-5*size) {
					t.Errorf("%s, direction %d: slope %v, want %v (norm %v)", name, try, got, want, size)
				}
			}
		}
	})
}

// Loss and gradients do not depend on the number of ranks, also with fewer tokens than ranks.
func TestRanks(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		for _, s := range []*sequence{documents(cfg.VocabSize, 9, 1, 13, 4), documents(cfg.VocabSize, 3),
			documents(cfg.VocabSize, 32)} {
			one := train(t, 1, cfg, s, nil)
			for _, n := range mpitest.Sizes() {
				o := train(t, n, cfg, s, nil)
				if !(math.Abs(o.Sum-one.Sum) <= 1e-6*math.Abs(one.Sum)) || o.Tokens != one.Tokens ||
					!(math.Abs(o.Balance-one.Balance) <= 1e-6*one.Balance) {
					t.Errorf("%d ranks, %d tokens: %v, one rank has %v", n, len(s.ids), o.Loss, one.Loss)
				}
				for name, g := range o.grads {
					if e := far(g, one.grads[name]); !(e < 2e-5) {
						t.Errorf("%d ranks, %d tokens: gradient of %s has error %.2g", n, len(s.ids), name, e)
					}
				}
			}
		}
	})
}

// The losses and gradients of documents run alone add up to the results of the packed sequence.
func TestDocumentsAreAlone(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 6, 11, 2)
		all := train(t, several(), cfg, s, nil)
		sum, tokens, balance, grads := 0.0, int64(0), 0.0, map[string][]float64{}
		for d, lo := range s.cu[:3] {
			hi := s.cu[d+1]
			o := train(t, 1, cfg,
				&sequence{s.ids[lo:hi], s.targets[lo:hi], s.positions[lo:hi], []int64{0, hi - lo}, s.length()}, nil)
			sum, tokens, balance = sum+o.Sum, tokens+o.Tokens, balance+o.Balance
			for name, g := range o.grads {
				if grads[name] == nil {
					grads[name] = make([]float64, len(g))
				}
				add(grads[name], g)
			}
		}
		if !(math.Abs(all.Sum-sum) <= 1e-6*sum) || all.Tokens != tokens ||
			!(math.Abs(all.Balance-balance) <= 1e-6*balance) {
			t.Errorf("%v, documents alone have %v of %d", all.Loss, sum, tokens)
		}
		for name, g := range all.grads {
			if e := far(g, grads[name]); !(e < 2e-5) {
				t.Errorf("gradient of %s has error %.2g", name, e)
			}
		}
	})
}

// A token changes no bit of the loss of earlier tokens and of other documents.
func TestNoTokenIsSeenTooEarly(t *testing.T) {
	cfg := configs(t)["llama"]
	s := documents(cfg.VocabSize, 12, 8)
	loss := func(first, last int64, changed int) float64 {
		x := &sequence{slices.Clone(s.ids), make([]int32, len(s.ids)), s.positions, s.cu, 0}
		for i := range x.targets {
			x.targets[i] = -100
			if int64(i) >= first && int64(i) < last {
				x.targets[i] = s.targets[i]
			}
		}
		if changed >= 0 {
			x.ids[changed] = (x.ids[changed] + 1) % 23
		}
		return train(t, several(), cfg, x, nil).Sum
	}
	if loss(0, 7, -1) != loss(0, 7, 7) {
		t.Error("token 7 changes a loss before it")
	}
	if loss(12, 20, -1) != loss(12, 20, 3) || loss(0, 12, -1) != loss(0, 12, 15) {
		t.Error("a token changes a loss in another document")
	}
	if loss(0, 12, -1) == loss(0, 12, 3) {
		t.Error("token 3 changes nothing: this test cannot fail")
	}
}

// The loss is bitwise equal for every tile size, and the gradient is close.
func TestLossTiles(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 14)
		one := train(t, 1, cfg, s, nil)
		for _, tile := range []int64{1, 5, 22, 23, 100} {
			o := train(t, 1, cfg, s, func(r *rank) { must(r.SetTiles(Tiles{Loss: tile})) })
			if o.Loss != one.Loss {
				t.Errorf("tile of %d: %v, want %v", tile, o.Loss, one.Loss)
			}
			for name, g := range o.grads {
				if e := far(g, one.grads[name]); !(e < 2e-5) {
					t.Errorf("tile of %d: gradient of %s has error %.2g", tile, name, e)
				}
			}
		}
	})
}

// An evaluation gives a loss that is bitwise equal to training's and needs less memory. Gradients
// are added to, and scale with GradScale.
func TestForwardAndAccumulation(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 14)
		one := train(t, 1, cfg, s, nil)
		ranks(t, 1, func(c comm.Comm) error {
			r := newRank(c, cfg, int64(len(s.ids)), true)
			r.set(weights(r.Model))
			b := shard(c, s)
			loss, err := r.Forward(r.c, b)
			loss.Balance = one.Balance // only training computes it
			if err != nil || loss != one.Loss {
				t.Errorf("evaluation: %v (%v), training: %v", loss, err, one.Loss)
			}
			b.GradScale = 0.25
			for range 4 {
				if _, err := r.ForwardBackward(r.c, b); err != nil {
					return err
				}
			}
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					if e := far(ref.Convert[float64](p.Grad.Float32s()), one.grads[p.Name]); !(e < 2e-5) {
						t.Errorf("gradient of %s in four parts has error %.2g", p.Name, e)
					}
				}
			}
			return nil
		})
	})
}

// A pass uses exactly the memory of the plan, and allocates nothing elsewhere.
func TestMemory(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		for _, n := range append(mpitest.Sizes(), 1) {
			s := documents(cfg.VocabSize, 12, 1, 1, 9, 8)
			ranks(t, n, func(c comm.Comm) error {
				for _, backward := range []bool{true, false} {
					r := newRank(c, cfg, int64(len(s.ids)), backward)
					r.Init(1)
					b := shard(c, s)
					pass := r.Forward
					if backward {
						pass = r.ForwardBackward
					}
					for range 2 {
						if _, err := pass(r.c, b); err != nil {
							return err
						}
					}
					if r.c.Arena.Peak() != r.c.Arena.Bytes() || r.c.Arena.Mark() != 0 {
						return fmt.Errorf("backward %v: peak %d, planned %d, still in use %d", backward,
							r.c.Arena.Peak(), r.c.Arena.Bytes(), r.c.Arena.Mark())
					}
					if n == 1 {
						if a := testing.AllocsPerRun(3, func() { pass(r.c, b) }); a > 0 && !need.Instrumented {
							return fmt.Errorf("backward %v: %v allocations in a pass", backward, a)
						}
					}
				}
				return nil
			})
		}
	})
}

// lender records the calls that a trainer gets.
type lender struct {
	t     *testing.T
	m     *Model
	held  map[int]bool
	ready map[string]int
	order []Use
}

func (l *lender) Pass(order []Use) error { l.order = order; return nil }

func (l *lender) Gather(group int, _ device.Stream) error {
	if len(l.order) == 0 || l.order[0].Group != group || len(l.held) > 1 {
		l.t.Errorf("group %d is gathered while %v are in use; next in the order are %v", group, l.held, l.order)
	} else {
		l.order = l.order[1:]
	}
	l.held[group] = true
	return nil
}
func (l *lender) Release(group int, _ device.Stream) error {
	if !l.held[group] {
		l.t.Errorf("group %d is released but not in use", group)
	}
	delete(l.held, group)
	return nil
}
func (l *lender) GradReady(p *Param, _ device.Stream) error { l.ready[p.Name]++; return nil }

// Groups are released, every gradient is reported once and is complete then, and an error of the
// trainer ends the pass.
func TestWeights(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 14)
		one := train(t, 1, cfg, s, nil)
		train(t, 1, cfg, s, func(r *rank) {
			l := &lender{t: t, m: r.Model, held: map[int]bool{}, ready: map[string]int{}}
			r.c.Weights = l
			check := &complete{lender: l, want: one}
			r.c.Weights = check
			if _, err := r.ForwardBackward(r.c, shard(comm.Local(1)[0], s)); err != nil {
				t.Fatal(err)
			}
			if len(l.held) != 0 || len(l.order) != 0 {
				t.Errorf("groups %v are not released, %v were not gathered", l.held, l.order)
			}
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					if l.ready[p.Name] != 1 {
						t.Errorf("gradient of %s is reported %d times", p.Name, l.ready[p.Name])
					}
					clear(p.Grad.Float32s())
				}
			}
			r.c.Weights = refusing{}
			if _, err := r.ForwardBackward(r.c, shard(comm.Local(1)[0], s)); status.Of(err) != status.Comm {
				t.Errorf("the pass returned %v instead of the trainer's error", err)
			}
			r.c.Weights = nil
		})
	})
}

type complete struct {
	*lender
	want outcome
}

// whole attaches weights without a trainer.
func (m *Model) whole(half Portion) (tensor.Tensor, error) {
	return span(half.Params[0].Owned.Full(), half.Numel()), nil
}

func (l *complete) GradReady(p *Param, s device.Stream) error {
	if e := far(ref.Convert[float64](p.Grad.Float32s()), l.want.grads[p.Name]); e != 0 {
		l.t.Errorf("gradient of %s is reported before it is complete: error %.2g", p.Name, e)
	}
	return l.lender.GradReady(p, s)
}

type refusing struct{}

func (refusing) Pass([]Use) error { return nil }
func (refusing) Gather(group int, _ device.Stream) error {
	if group == 2 {
		return status.Errorf(status.Comm, "no weights")
	}
	return nil
}
func (refusing) Release(int, device.Stream) error      { return nil }
func (refusing) GradReady(*Param, device.Stream) error { return nil }

// Weights of a new model depend only on seed and name, and are normally distributed.
func TestInit(t *testing.T) {
	cfg := configs(t)["qwen2"]
	init := func(seed uint64) (x map[string][]float32) {
		ranks(t, 1, func(c comm.Comm) error {
			r := newRank(c, cfg, 1, false)
			x = map[string][]float32{}
			if err := r.Init(seed); err != nil {
				return err
			}
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					x[p.Name] = slices.Clone(p.Value.Float32s())
				}
			}
			return nil
		})
		return x
	}
	a, b, other := init(1), init(1), init(2)
	for name := range a {
		if !slices.Equal(a[name], b[name]) {
			t.Errorf("%s differs in a second initialization", name)
		}
	}
	q := a["model.layers.0.self_attn.q_proj.weight"]
	if slices.Equal(q, other["model.layers.0.self_attn.q_proj.weight"]) ||
		slices.Equal(q, a["model.layers.1.self_attn.q_proj.weight"]) {
		t.Error("seed or name does not matter")
	}
	if a["model.norm.weight"][3] != 1 || a["model.layers.0.self_attn.q_proj.bias"][3] != 0 {
		t.Error("norms do not start at 1, or biases at 0")
	}
	x := ref.Convert[float64](slices.Concat(q, a["model.embed_tokens.weight"], a["model.layers.0.mlp.up_proj.weight"]))
	mean, deviation := ref.Sum(x)/float64(len(x)), norm2(x)/math.Sqrt(float64(len(x)))
	near.Value(t, "mean of the initial weights", mean, 0.0, 0.03)
	near.Value(t, "deviation of the initial weights", deviation, 0.3, 0.02)
	fourth := 0.0
	for _, v := range x {
		fourth += math.Pow(v/0.3, 4) / float64(len(x))
	}
	near.Value(t, "fourth moment, which is 3 for a normal distribution", fourth, 3.0, 0.5)
}

// A hybrid model is initialized as in transformers: A_log as ln of uniform(0.01, 16), dt_bias as 1,
// weights of norms, stored as their distance from 1, as 0.
func TestInitHybrid(t *testing.T) {
	cfg, err := configs(t)["qwen3_5"].Override(map[string]any{"linear_num_value_heads": 2000,
		"linear_value_head_dim": 1})
	must(err)
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, cfg, 1, false)
		must(r.Init(1))
		for _, g := range r.Groups() {
			for _, p := range g.Params {
				x := p.Value.View(p.Numel()).Float32s()
				switch {
				case strings.HasSuffix(p.Name, "A_log"):
					sum, least, most := 0.0, math.Inf(1), 0.0
					for _, v := range x {
						a := math.Exp(float64(v))
						sum, least, most = sum+a, min(least, a), max(most, a)
					}
					if mean := sum / float64(len(x)); !(math.Abs(mean-8) <= 0.5) || least < 0.0099 || least > 0.2 ||
						most > 16.001 || most < 15.8 {
						t.Errorf("%s: exp has mean %g, from %g to %g", p.Name, mean, least, most)
					}
				case strings.HasSuffix(p.Name, "dt_bias") || strings.HasSuffix(p.Name, "linear_attn.norm.weight"):
					if slices.Min(x) != 1 || slices.Max(x) != 1 {
						t.Errorf("%s does not start at 1", p.Name)
					}
				case strings.Contains(p.Name, "norm"):
					if slices.Min(x) != 0 || slices.Max(x) != 0 {
						t.Errorf("%s does not start at 0", p.Name)
					}
				case strings.HasSuffix(p.Name, "conv1d.weight"):
					d := norm2(ref.Convert[float64](x)) / math.Sqrt(float64(len(x)))
					if !(math.Abs(d-cfg.InitializerRange) <= 0.02) {
						t.Errorf("%s: deviation %g", p.Name, d)
					}
				}
			}
		}
		return nil
	})
}

// Invalid arguments of a pass are errors.
func TestPassRefusals(t *testing.T) {
	cfg := configs(t)["llama"]
	s := documents(cfg.VocabSize, 9)
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, cfg, 9, true)
		b := shard(c, s)
		b.IDs = tensor.OfInt32(make([]int32, 8), 8)
		if _, err := r.ForwardBackward(r.c, b); status.Of(err) != status.InvalidArgument {
			t.Errorf("8 ids for 9 tokens: %v", err)
		}
		small, err := device.NewArena(r.dev, "activations", r.c.Arena.Bytes()-64)
		must(err)
		if _, err := r.ForwardBackward(&Ctx{Stream: r.c.Stream, Arena: small},
			shard(c, s)); status.Of(err) != status.OutOfMemory {
			t.Errorf("a small arena: %v", err)
		}
		r.Groups()[1].Bind(tensor.OfFloat32(r.values[1], int64(len(r.values[1]))), tensor.Tensor{}, tensor.Tensor{})
		if _, err := r.ForwardBackward(r.c, shard(c, s)); status.Of(err) != status.InvalidArgument {
			t.Errorf("no gradients: %v", err)
		}
		return nil
	})
}
