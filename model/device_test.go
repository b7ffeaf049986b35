package model

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/fake"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/ref"
)

// lateRank is a model on a test device, whose memory the host cannot read and whose operations run
// late.
type lateRank struct {
	*Model
	dev     *fake.Device
	c       *Ctx
	arena   *device.Arena // of everything but activations
	host    comm.Comm
	masters []tensor.Tensor // by group; values where these are F32
	grads   []tensor.Tensor
}

func newLate(host comm.Comm, cfg *Config, compute tensor.DType, tokens int64, set ...any) *lateRank {
	dev, err := fake.Open(fake.Options{Seed: uint64(host.Rank())})
	must(err)
	m, err := New(dev, fake.Communicator(dev, host), cfg, Options{Compute: compute})
	must(err)
	m.SetSequences(mostDocuments)
	setBiases(m)
	for _, x := range set {
		switch x := x.(type) {
		case Tiles:
			must(m.SetTiles(x))
		case Activations:
			must(m.SetActivations(x))
		}
	}
	r := &lateRank{Model: m, dev: dev, host: host}
	r.arena, err = device.NewArena(dev, "weights", 16*m.Numel()+1<<20)
	must(err)
	for _, g := range m.Groups() {
		master, values := r.tensor(tensor.F32, g.Numel()), tensor.Tensor{}
		grads := r.tensor(tensor.F32, g.Numel())
		r.masters, r.grads = append(r.masters, master), append(r.grads, grads)
		if compute == tensor.F32 {
			values, master = master, values
		} else {
			values = r.tensor(compute, g.Numel())
		}
		g.Bind(values, master, grads)
	}
	s, err := dev.NewStream()
	must(err)
	lo, hi := comm.Shard(tokens, host.Size(), host.Rank())
	table, err := m.Memory(hi-lo, tokens, true)
	must(err)
	arena, err := device.NewArena(dev, "activations", Bytes(table))
	must(err)
	r.c = &Ctx{Stream: s, Arena: arena}
	r.c.Host, err = device.NewHostArena(dev, "offloaded activations", HostBytes(table))
	must(err)
	return r
}

func (r *lateRank) close() {
	r.c.Arena.Free()
	r.c.Host.Free()
	r.arena.Free()
	r.Close()
	r.dev.Close()
}

func (r *lateRank) tensor(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t, err := r.arena.Tensor(dtype, shape...)
	must(err)
	return t
}

// set writes values to all parameters.
func (r *lateRank) set(w map[string][]float32) {
	for _, g := range r.Groups() {
		for _, p := range g.Params {
			must(r.upload(r.c.Stream, p, make([]float32, p.Numel()), func(at int64, dst []float32) error {
				copy(dst, w[p.Name][at:])
				return nil
			}))
		}
	}
}

// shard returns this rank's shard of a sequence, on the device.
func (r *lateRank) shard(s *sequence) *Batch {
	b := shard(r.host, s)
	for _, t := range []*tensor.Tensor{&b.IDs, &b.Targets, &b.Positions, &b.Sequences} {
		x := r.tensor(tensor.I32, t.Numel())
		must(r.dev.Copy(r.c.Stream, x, *t))
		*t = x
	}
	return b
}

// read copies a tensor to the host, in F32.
func (r *lateRank) read(t tensor.Tensor) []float32 {
	x := make([]float32, t.Numel())
	must(r.dev.Copy(r.c.Stream, tensor.OfFloat32(x, t.Dims()...), t))
	must(r.c.Stream.Sync())
	return x
}

// trainLate is train on test devices.
func trainLate(t *testing.T, n int, cfg *Config, compute tensor.DType, s *sequence, set ...any) (o outcome) {
	t.Helper()
	ranks(t, n, func(host comm.Comm) error {
		r := newLate(host, cfg, compute, int64(len(s.ids)), set...)
		defer r.close()
		r.set(weights(r.Model))
		loss, err := r.ForwardBackward(r.c, r.shard(s))
		if err != nil {
			return err
		}
		if r.c.Arena.Peak() != r.c.Arena.Bytes() || r.c.Arena.Mark() != 0 {
			t.Errorf("peak %d, planned %d, still in use %d", r.c.Arena.Peak(), r.c.Arena.Bytes(), r.c.Arena.Mark())
		}
		all := []float64{loss.Sum, float64(loss.Tokens), loss.Balance}
		for _, g := range r.grads {
			all = append(all, ref.Convert[float64](r.read(g))...)
		}
		must(host.AllReduce(nil, tensor.OfFloat64(all, int64(len(all))), comm.Sum))
		if host.Rank() > 0 && len(mpitest.Sizes()) > 1 {
			return nil // goroutines: one outcome is enough
		}
		o = outcome{Loss{all[0], int64(all[1]), all[2]}, map[string][]float64{}}
		all = all[3:]
		for _, g := range r.Groups() {
			for _, p := range g.Params {
				o.grads[p.Name], all = all[:p.Numel()], all[p.Numel():]
			}
		}
		return nil
	})
	return o
}

// In F32, a test device gives results that are bitwise equal to the CPU's: no code depends on
// operations that are complete when they return.
func TestLateDevice(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 1, 13)
		for _, n := range append([]int{1}, mpitest.Sizes()...) {
			want, got := train(t, n, cfg, s, nil), trainLate(t, n, cfg, tensor.F32, s)
			if got.Loss != want.Loss {
				t.Errorf("%d ranks: %v, on the CPU %v", n, got.Loss, want.Loss)
			}
			for name, g := range want.grads {
				if !slices.Equal(got.grads[name], g) {
					t.Errorf("%d ranks: gradient of %s has error %.2g", n, name, far(got.grads[name], g))
				}
			}
		}
	})
}

// In BF16, loss and gradients are close to those in F32, on any number of ranks.
func TestBF16(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		s := documents(cfg.VocabSize, 9, 1, 13)
		if e := cfg.Experts.Count; e > 0 { // with all experts, no rounding changes the choice of one
			var err error
			all := map[string]any{cfg.family.experts.perTokenField(): e}
			if cfg.Experts.Groups > 1 {
				all["topk_group"] = cfg.Experts.Groups
			}
			cfg, err = cfg.Override(all)
			must(err)
		}
		want := train(t, 1, cfg, s, nil)
		one := map[string]float64{} // errors of one rank
		for _, n := range append([]int{1}, mpitest.Sizes()...) {
			got := trainLate(t, n, cfg, tensor.BF16, s)
			if !(math.Abs(got.Sum-want.Sum) < 1e-2*want.Sum) || got.Tokens != want.Tokens {
				t.Errorf("%d ranks: %v, in F32 %v", n, got.Loss, want.Loss)
			}
			if got.Sum == want.Sum {
				t.Errorf("%d ranks: nothing was rounded", n)
			}
			for name, g := range want.grads {
				off := make([]float64, len(g))
				for i := range g {
					off[i] = got.grads[name][i] - g[i]
				}
				// A chain of a dozen roundings of 2^-9, in numbers that partly cancel: the error is
				// largest in biases of keys, whose gradient is almost zero. Several ranks round
				// other sums, and may err as much as one.
				size, e := norm2(g), norm2(off)
				if !(e < max(0.1*size+1e-4*norm2(want.grads["model.norm.weight"]), 1.1*one[name])) {
					t.Errorf("%d ranks: gradient of %s has error %.2g of %.2g, one rank %.2g", n, name, e, size,
						one[name])
				}
				if n == 1 {
					one[name] = e
				}
			}
		}
	})
}

// Activations in BF16 have about half the size; the logits and attention's statistics have the same
// size as in F32.
func TestMemoryOfBF16(t *testing.T) {
	cfg := configs(t)["llama"]
	ranks(t, 1, func(c comm.Comm) error {
		bytes := map[tensor.DType]map[string]int64{}
		for _, compute := range []tensor.DType{tensor.F32, tensor.BF16} {
			r := newLate(c, cfg, compute, 1)
			table, err := r.Memory(4096, 4096, true)
			must(err)
			bytes[compute] = map[string]int64{}
			for _, x := range table {
				bytes[compute][x.Name] = x.Bytes
				if x.Name == "saved: attention" {
					bytes[compute][x.Name] -= cfg.NumHiddenLayers * 4 * cfg.NumAttentionHeads * 4096
				}
			}
			r.close()
		}
		for name, full := range bytes[tensor.F32] {
			if share := float64(bytes[tensor.BF16][name]) / float64(full); name != "working memory" &&
				!(share >= 0.49 && share <= 0.55) {
				t.Errorf("%s: %d bytes, in F32 %d", name, bytes[tensor.BF16][name], full)
			}
		}
		return nil
	})
}

// Master weights are initialized, loaded and saved; values are rounded from them.
func TestMasters(t *testing.T) {
	// more elements than the upload buffer has
	cfg, err := configs(t)["qwen3"].Override(map[string]any{"vocab_size": 4000})
	must(err)
	ranks(t, 1, func(c comm.Comm) error {
		r := newLate(c, cfg, tensor.BF16, 1)
		defer r.close()
		must(r.Init(1))
		plain := newRank(c, cfg, 1, false)
		must(plain.Init(1))
		dir := filepath.Join(t.TempDir(), "model")
		must(r.Save(dir, Source{}, r.whole))
		folder, err := OpenFolder(dir, nil)
		must(err)
		defer folder.Close()
		loaded := newLate(c, folder.Config, tensor.BF16, 1)
		defer loaded.close()
		must(folder.Load(loaded.Model))
		other := map[string]*Param{}
		for _, g := range loaded.Groups() {
			for _, p := range g.Params {
				other[p.Name] = p
			}
		}
		for i, g := range r.Groups() {
			for j, p := range g.Params {
				want := plain.Groups()[i].Params[j].Value.View(p.Numel()).Float32s()
				rounded := slices.Clone(want)
				for k, v := range rounded {
					rounded[k] = tensor.BF16ToF32(tensor.F32ToBF16(v))
				}
				if !slices.Equal(r.read(p.Owned.Master), want) ||
					!slices.Equal(r.read(p.Value.View(p.Numel())), rounded) {
					t.Errorf("%s: master and value differ from the initial values", p.Name)
				}
				q := other[p.Name]
				if !slices.Equal(loaded.read(q.Owned.Master), want) ||
					!slices.Equal(loaded.read(q.Value.View(p.Numel())), rounded) {
					t.Errorf("%s: master and value differ from the saved values", p.Name)
				}
			}
		}
		_, err = os.Stat(filepath.Join(dir, "config.json"))
		return err
	})
}

// Ids in memory that the device cannot read are an error. A type in which the device does not
// compute is an error.
func TestPlaces(t *testing.T) {
	cfg := configs(t)["llama"]
	s := documents(cfg.VocabSize, 5)
	ranks(t, 1, func(c comm.Comm) error {
		r := newLate(c, cfg, tensor.F32, 5)
		defer r.close()
		b := r.shard(s)
		b.Targets = shard(c, s).Targets
		if _, err := r.ForwardBackward(r.c, b); status.Of(err) != status.InvalidArgument {
			t.Errorf("targets on the host: %v", err)
		}
		if _, err := New(newRank(c, cfg, 1, false).dev, c, cfg,
			Options{Compute: tensor.F16}); status.Of(err) != status.Unsupported {
			t.Errorf("F16: %v", err)
		}
		return nil
	})
}
