package model

import (
	"fmt"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
)

// divided divides the experts among groups of n neighbouring ranks, under policies and tiles. The
// ledger counts what a rank sends to its group.
func divided(n int, a Activations, x Tiles, tokens int64, ledger *comm.Ledger) func(r *rank) {
	return func(r *rank) {
		group, err := r.comm.Split(r.comm.Rank()/n, r.comm.Rank())
		must(err)
		must(r.divideExperts(comm.NewCounted(group, "experts", ledger, clock.New(), nil)))
		must(r.SetTiles(x))
		must(r.SetActivations(a))
		table, err := r.Memory(r.MostTokens(tokens), tokens, true)
		must(err)
		r.c.Arena.Free()
		r.c.Arena, err = device.NewArena(r.dev, "activations", Bytes(table))
		must(err)
		r.c.Host, err = device.NewHostArena(r.dev, "offloaded activations", HostBytes(table))
		must(err)
	}
}

// groupsOf returns the sizes above 1 of groups that n ranks are divided into.
func groupsOf(n int) (sizes []int) {
	for k := 2; k <= n; k++ {
		if n%k == 0 {
			sizes = append(sizes, k)
		}
	}
	return sizes
}

// With experts divided among ranks, losses have the bits of the same ranks with all experts,
// and gradients differ by the rounding of their sums: for every family, size of a group, policy and
// tile, also with fewer tokens than ranks, and with experts that do not divide evenly.
func TestDispatch(t *testing.T) {
	for _, name := range []string{"mixtral", "qwen3_moe", "qwen3_5_moe", "gpt_oss_moe"} {
		t.Run(name, func(t *testing.T) {
			cfg := configs(t)[name]
			for _, s := range []*sequence{documents(cfg.VocabSize, 9, 1, 13), documents(cfg.VocabSize, 3)} {
				one := train(t, 1, cfg, s, nil)
				for _, n := range mpitest.Sizes() {
					want := train(t, n, cfg, s, nil)
					for _, k := range groupsOf(n) {
						if int64(k) > cfg.Experts.Count {
							continue
						}
						for _, x := range []struct {
							Activations
							Tiles
						}{{}, {Activations{MLP: Recompute, QKV: Recompute, Segment: 2}, Tiles{}},
							{Activations{MLP: Offload}, Tiles{MLP: 2}}} {
							got := train(t, n, cfg, s, divided(k, x.Activations, x.Tiles, int64(len(s.ids)), nil))
							what := fmt.Sprintf("%d ranks, experts over %d, %v %v", n, k, x.Activations, x.Tiles)
							if got.Loss != want.Loss {
								t.Errorf("%s: %v, want %v", what, got.Loss, want.Loss)
							}
							for name, g := range got.grads {
								if e := far(g, one.grads[name]); !(e < 2e-5) {
									t.Errorf("%s: gradient of %s has error %.2g", what, name, e)
								}
							}
						}
					}
				}
			}
		})
	}
}

// All tokens choose the experts of one rank. The bytes that ranks send are the bytes of the formula
// and what the model counts.
func TestDispatchBytes(t *testing.T) {
	const k, element = 2, 4
	cfg := routed(t, 5, k)
	h, layers := cfg.HiddenSize, cfg.SparseLayers()
	s := documents(cfg.VocabSize, 9, 1, 13)
	for _, n := range mpitest.Sizes() {
		for _, size := range groupsOf(n) {
			if size > 5 {
				continue
			}
			ranks(t, n, func(c comm.Comm) error {
				r := newRank(c, cfg, int64(len(s.ids)), true)
				defer r.close()
				r.set(weights(r.Model))
				for _, b := range r.blocks { // equal logits: the first experts, which the first rank has
					clear(b.mlp.(*experts).router.Value.Float32s())
				}
				ledger := comm.NewLedger()
				divided(size, Activations{}, Tiles{}, int64(len(s.ids)), ledger)(r)
				if _, err := r.ForwardBackward(r.c, shard(c, s)); err != nil {
					return err
				}
				rows := func(rank int) int64 {
					lo, hi := comm.Shard(int64(len(s.ids)), c.Size(), rank)
					return (hi - lo) * k
				}
				// forward x; backward x, dy and the weight
				want := layers * rows(c.Rank()) * (3*h*element + element)
				if first := c.Rank() / size * size; c.Rank() == first {
					// forward y; backward dx and the gradient of the weight
					want = 0
					for other := first + 1; other < first+size; other++ {
						want += layers * rows(other) * (2*h*element + element)
					}
				}
				sent := int64(0)
				for _, e := range ledger.Entries() {
					if e.Op == comm.OpAllToAll {
						sent += e.Bytes
					}
				}
				if sent != want || r.ExpertBytesSent() != want {
					t.Errorf("rank %d of %d, experts over %d: %d bytes were sent, %d are counted, want %d", c.Rank(), n,
						size, sent, r.ExpertBytesSent(), want)
				}
				return nil
			})
		}
	}
}

// Experts are divided among ranks that have different sequences, of which one has many tokens, one
// has few and others have none: the sum of the gradients is that of one rank with each sequence.
func TestDispatchSequences(t *testing.T) {
	for _, name := range []string{"mixtral", "qwen3_5_moe"} {
		cfg := configs(t)[name]
		sequences := []*sequence{documents(cfg.VocabSize, 9, 1, 13), documents(cfg.VocabSize, 2)}
		var want [2]outcome
		for i, s := range sequences {
			want[i] = train(t, 1, cfg, s, nil)
		}
		for _, n := range mpitest.Sizes() {
			if n == 1 || int64(n) > cfg.Experts.Count {
				continue
			}
			ranks(t, n, func(world comm.Comm) error {
				r := newRank(comm.Local(1)[0], cfg, 23, true)
				defer r.close()
				r.set(weights(r.Model))
				must(r.divideExperts(world))
				table, err := r.Memory(23, 23, true)
				must(err)
				r.c.Arena.Free()
				r.c.Arena, err = device.NewArena(r.dev, "activations", Bytes(table))
				must(err)
				r.c.Weights = attached{}
				var loss Loss
				if i := world.Rank(); i < 2 { // an evaluation, in which other ranks may have no sequence
					loss, err = r.Forward(r.c, shard(r.comm, sequences[i]))
					if loss.Sum != want[i].Sum {
						t.Errorf("%s, %d ranks: loss %v, want %v", name, n, loss.Sum, want[i].Sum)
					}
				} else {
					err = r.Idle(r.c)
				}
				must(err)
				if loss, err = r.ForwardBackward(r.c, shard(r.comm, sequences[world.Rank()%2])); err != nil {
					return err
				}
				if i := world.Rank() % 2; loss.Sum != want[i].Sum {
					t.Errorf("%s, %d ranks: loss %v, want %v", name, n, loss.Sum, want[i].Sum)
				}
				for g, grads := range r.grads {
					if err := world.AllReduce(nil, tensor.OfFloat32(grads, int64(len(grads))), comm.Sum); err != nil {
						return err
					}
					for _, p := range r.Groups()[g].Params {
						sum := make([]float64, p.Numel())
						for rank := range n {
							for j, x := range want[rank%2].grads[p.Name] {
								sum[j] += x
							}
						}
						if e := far(float64s(p.Grad.View(p.Numel()).Float32s()), sum); !(e < 2e-5) {
							t.Errorf("%s, %d ranks: gradient of %s has error %.2g", name, n, p.Name, e)
						}
					}
				}
				return nil
			})
		}
	}
}

// attached are weights that are always attached.
type attached struct{}

func (attached) Pass([]Use) error                      { return nil }
func (attached) Gather(int, device.Stream) error       { return nil }
func (attached) Release(int, device.Stream) error      { return nil }
func (attached) GradReady(*Param, device.Stream) error { return nil }

func float64s(x []float32) []float64 {
	y := make([]float64, len(x))
	for i := range x {
		y[i] = float64(x[i])
	}
	return y
}

// More ranks than experts, and a model without experts, are refused.
func TestDispatchRefusals(t *testing.T) {
	for name, want := range map[string]string{"mixtral": "parallel.experts = 6: the model has 5 experts",
		"llama": "parallel.experts = 6: the model has no experts"} {
		ranks := comm.Local(6)
		dev, err := cpu.New(cpu.Options{Workers: 1})
		must(err)
		defer dev.Close()
		if _, err := New(dev, comm.Local(1)[0], configs(t)[name],
			Options{Experts: ranks[0]}); status.Of(err) != status.InvalidConfig ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	dev, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer dev.Close()
	m, err := New(dev, comm.Local(1)[0], configs(t)["mixtral"], Options{Experts: comm.Local(2)[0]})
	must(err)
	defer m.Close()
	// a round has all tokens of both ranks, with two experts each
	if _, err := m.Memory(1<<29-1, 1<<29-1, true); err != nil {
		t.Error(err)
	}
	want := "536870912 tokens of each of 2 ranks with 2 experts each are 2147483648 rows in a round, and at most 2147483647 are numbered; set tile.mlp to 536870911 tokens"
	if _, err := m.Memory(1<<29, 1<<29, true); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), want) {
		t.Error(err)
	}
}
