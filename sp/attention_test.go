package sp

import (
	"fmt"
	"math"
	"runtime"
	"testing"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/need"
	"ulysses/testkit/ref"
)

// layerRun has a plan, a batch and their tensors: this rank's rows, or all rows if the communicator
// has one rank.
type layerRun struct {
	p    *Plan
	x    *Batch
	a    Args
	g    Grads
	over Overlap
}

const (
	nameQ = iota
	nameK
	nameV
	nameDOut
)

// prepare fills the tensors of a layer, which all have gaps. Head 0 is query head h0 and key head
// k0 of the global tensors.
func prepare(b *bench, c comm.Comm, l Layer, s BatchSpec, h0, k0 int64) *layerRun {
	p, err := NewPlan(b.dev, c, l)
	must(err)
	x, err := NewBatch(c, s)
	must(err)
	n, rows, kvRows, size := s.Batch, x.Rows(), x.KVRows(), p.Sizes(x)
	r := &layerRun{p: p, x: x}
	r.a = Args{Q: b.gapped(n, rows, l.Heads, l.Dim), K: b.gapped(n, kvRows, l.KVHeads, l.Dim),
		V: b.gapped(n, kvRows, l.KVHeads, l.VDim), Out: b.gapped(n, rows, l.Heads, l.VDim),
		LSE: b.gapped(n, rows, l.Heads, 1).Select(3, 0), Saved: b.bytes(size.Saved), Workspace: b.bytes(size.Workspace)}
	r.g = Grads{DOut: b.gapped(n, rows, l.Heads, l.VDim), DQ: b.gapped(n, rows, l.Heads, l.Dim),
		DK: b.gapped(n, kvRows, l.KVHeads, l.Dim), DV: b.gapped(n, kvRows, l.KVHeads, l.VDim)}
	fill(r.a.Q, nameQ, x.Lo(), h0)
	fill(r.a.K, nameK, x.KVLo(), k0)
	fill(r.a.V, nameV, x.KVLo(), k0)
	fill(r.g.DOut, nameDOut, x.Lo(), h0)
	return r
}

func (r *layerRun) forwardBackward(b *bench) error {
	if err := r.p.Forward(b.stream, r.x, &r.a); err != nil {
		return err
	}
	return r.p.Backward(b.stream, r.x, &r.a, &r.g)
}

// out, lse and dq on any number of ranks are bitwise equal to the results of one rank. So are dk
// and dv of a key head whose query heads are on one rank. For other key heads they are the sums of
// the ranks' partial gradients, in rank order.
func TestRanksGiveTheBitsOfOne(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		r := prepare(b, c, lc.layer, lc.batch, 0, 0)
		if err := r.forwardBackward(b); err != nil {
			return err
		}
		one := prepare(b, alone(), lc.layer, lc.batch, 0, 0)
		must(one.forwardBackward(b))
		lo, kvLo := r.x.Lo(), r.x.KVLo()
		for _, x := range []struct {
			name       string
			got, whole tensor.Tensor
		}{{"out", r.a.Out, one.a.Out}, {"lse", addUnitAxis(r.a.LSE), addUnitAxis(one.a.LSE)},
			{"dq", r.g.DQ, one.g.DQ}} {
			if err := sameBits(x.name, x.got, x.whole, lo); err != nil {
				return err
			}
		}
		for kv := range lc.layer.KVHeads {
			if err := sameKeyGradient(b, r, one, lc, kv, kvLo); err != nil {
				return err
			}
		}
		return b.gapsIntact()
	})
}

// sameKeyGradient compares dk and dv of one key head with the gradients on one rank.
func sameKeyGradient(b *bench, r, one *layerRun, lc layerCase, kv, kvLo int64) error {
	var tensors []*layerRun // of each rank that has query heads of the group
	group := lc.layer.Heads / lc.layer.KVHeads
	for _, q := range r.p.query {
		q = span{max(q.lo, kv*group), min(q.hi, (kv+1)*group)}
		if q.n() > 0 {
			l := lc.layer
			l.Heads, l.KVHeads = q.n(), 1
			part := prepare(b, alone(), l, lc.batch, q.lo, kv)
			must(part.forwardBackward(b))
			tensors = append(tensors, part)
		}
	}
	pick := func(t tensor.Tensor) tensor.Tensor { return t.Slice(2, kv, kv+1) }
	for _, x := range []struct {
		name       string
		got, whole tensor.Tensor
		part       func(*layerRun) tensor.Tensor
	}{
		{"dk", pick(r.g.DK), pick(one.g.DK), func(p *layerRun) tensor.Tensor { return p.g.DK }},
		{"dv", pick(r.g.DV), pick(one.g.DV), func(p *layerRun) tensor.Tensor { return p.g.DV }},
	} {
		if len(tensors) == 1 {
			if err := sameBits(x.name, x.got, x.whole, kvLo); err != nil {
				return err
			}
			continue
		}
		var err error
		delta, largest := 0.0, 0.0
		each(x.got, func(n, i, h, d int64, got *float32) {
			sum := *at(x.part(tensors[0]), n, kvLo+i, 0, d)
			for _, p := range tensors[1:] {
				sum += *at(x.part(p), n, kvLo+i, 0, d)
			}
			if err == nil && math.Float32bits(sum) != math.Float32bits(*got) {
				err = fmt.Errorf("%s[%d, %d] of key head %d is %v; the %d partial ones sum to %v", x.name, n, i, kv,
					*got, len(tensors), sum)
			}
			delta = max(delta, math.Abs(float64(*got)-float64(*at(x.whole, n, kvLo+i, h, d))))
		})
		each(x.whole, func(_, _, _, _ int64, v *float32) { largest = max(largest, math.Abs(float64(*v))) })
		if err == nil && !(delta <= 1e-6*largest) {
			err = fmt.Errorf("%s of key head %d is %.3g from one rank's, of %.3g", x.name, kv, delta, largest)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Results are within 2e-5 of float64 and have at most twice the error of a plain F32
// implementation, in max|Δ|/max|ref|.
func TestAgainstFloat64(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		r := prepare(b, c, lc.layer, lc.batch, 0, 0)
		if err := r.forwardBackward(b); err != nil {
			return err
		}
		cuQ, cuK := r.x.Documents()
		g := r.p.layer.reference(cuQ, cuK)
		exact, plain := reference[float64](g, r.x), reference[float32](g, r.x)
		for i, x := range []struct {
			name  string
			got   tensor.Tensor
			heads int64
			lo, n int64
		}{
			{"out", r.a.Out, lc.layer.Heads, r.x.Lo(), r.x.Seq()},
			{"lse", addUnitAxis(r.a.LSE), lc.layer.Heads, r.x.Lo(), r.x.Seq()},
			{"dq", r.g.DQ, lc.layer.Heads, r.x.Lo(), r.x.Seq()},
			{"dk", r.g.DK, lc.layer.KVHeads, r.x.KVLo(), r.x.KVSeq()},
			{"dv", r.g.DV, lc.layer.KVHeads, r.x.KVLo(), r.x.KVSeq()},
		} {
			largest, mine, theirs := 0.0, 0.0, 0.0
			for j, e := range exact[i] {
				if !math.IsInf(e, 0) {
					largest, theirs = max(largest, math.Abs(e)), max(theirs, math.Abs(float64(plain[i][j])-e))
				}
			}
			var err error
			each(x.got, func(n, row, h, d int64, v *float32) {
				e := exact[i][((n*x.n+x.lo+row)*x.heads+h)*x.got.Shape[3]+d]
				delta := math.Abs(float64(*v) - e)
				if math.IsInf(e, -1) && math.IsInf(float64(*v), -1) {
					delta = 0
				}
				if !(delta <= math.Inf(1)) {
					err = fmt.Errorf("%s[%d, %d, %d, %d] is %v, want %v", x.name, n, row, h, d, *v, e)
				}
				mine = max(mine, delta)
			})
			if err != nil {
				return err
			}
			// Inputs are below 1, so one rounding of a number near 1 is allowed. It is the only
			// bound for gradients that are zero up to rounding.
			rounding := max(1, largest) / (1 << 23)
			if limit := min(max(2e-5*largest, rounding), max(2*theirs, rounding)); !(mine <= limit) {
				return fmt.Errorf("%s: error %.3g of %.3g, a plain f32 implementation has %.3g", x.name, mine,
					largest, theirs)
			}
		}
		return nil
	})
}

// reference returns the layer as an operation of testkit/ref.
func (l Layer) reference(cuQ, cuK []int64) *ref.Attention {
	g := &ref.Attention{Hq: l.Heads, Hkv: l.KVHeads, D: l.Dim, Dv: l.VDim, CuQ: cuQ, CuK: cuK, Causal: l.Causal,
		Scale: l.Scale}
	if l.Window != nil {
		g.Window = &ref.Window{Left: l.Window.Left, Right: l.Window.Right}
	}
	return g
}

// reference returns out, lse, dq, dk and dv of the global batch, token-major.
func reference[T ref.Float](g *ref.Attention, x *Batch) [5][]T {
	return referenceOf[T](g, x, func(v float32) float32 { return v })
}

// referenceOf is reference with inputs that round has rounded.
func referenceOf[T ref.Float](g *ref.Attention, x *Batch, round func(float32) float32) [5][]T {
	whole := func(name uint64, seq, heads, dim int64) []T {
		var v []T
		for n := range x.Batch() {
			for i := range seq {
				for h := range heads {
					for d := range dim {
						v = append(v, T(round(value(name, n, i, h, d))))
					}
				}
			}
		}
		return v
	}
	q, k := whole(nameQ, x.Seq(), g.Hq, g.D), whole(nameK, x.KVSeq(), g.Hkv, g.D)
	v, dout := whole(nameV, x.KVSeq(), g.Hkv, g.Dv), whole(nameDOut, x.Seq(), g.Hq, g.Dv)
	out, lse := ref.AttentionForward(g, q, k, v)
	dq, dk, dv := ref.AttentionBackward(g, q, k, v, out, lse, dout)
	return [5][]T{out, lse, dq, dk, dv}
}

// The bytes that all-to-alls send are equal to the plan's prediction.
func TestBytesSent(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		count := &counted{Comm: c}
		r := prepare(b, count, lc.layer, lc.batch, 0, 0)
		forward, backward := r.p.BytesSent(r.x)
		lse := r.p.LSEBytesSent(r.x)
		must(r.p.Forward(b.stream, r.x, &r.a))
		if count.bytes != forward+lse {
			return fmt.Errorf("forward with lse sent %d bytes, planned %d", count.bytes, forward+lse)
		}
		count.bytes, r.a.LSE = 0, tensor.Tensor{}
		must(r.p.Forward(b.stream, r.x, &r.a))
		if count.bytes != forward {
			return fmt.Errorf("forward sent %d bytes, planned %d", count.bytes, forward)
		}
		count.bytes = 0
		must(r.p.Backward(b.stream, r.x, &r.a, &r.g))
		if count.bytes != backward {
			return fmt.Errorf("backward sent %d bytes, planned %d", count.bytes, backward)
		}
		if want := 6 * min(1, c.Size()-1); count.calls != want {
			return fmt.Errorf("%d exchanges, want %d", count.calls, want)
		}
		return nil
	})
}

// Buffers for the longest batch serve other batches in any order, also for a forward that saves
// nothing.
func TestOneBufferServesAllLengths(t *testing.T) {
	specs := []BatchSpec{{Batch: 2, Seq: 70}, {Batch: 1, Seq: 3},
		{Batch: 2, Seq: 64, CuSeqlens: []int64{0, 5, 6, 64, 128}},
		{Batch: 1, Seq: 2}, {Batch: 1, Seq: 131, CuSeqlens: []int64{0, 1, 2, 3, 130, 131}}, {Batch: 2, Seq: 41}}
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			b := newBench()
			defer b.close()
			l := Layer{Heads: 6, KVHeads: 2, Dim: 16, VDim: 16, Causal: true}
			p, err := NewPlan(b.dev, c, l)
			must(err)
			size, err := p.MaxSizes(2, 131, 131)
			must(err)
			saved, ws := b.bytes(size.Saved), b.bytes(size.Workspace)
			for _, s := range specs {
				want := prepare(b, c, l, s, 0, 0)
				must(want.forwardBackward(b))
				for _, save := range []bool{true, false} {
					got := prepare(b, c, l, s, 0, 0)
					if got.a.Workspace = ws; save {
						got.a.Saved = saved
						must(got.forwardBackward(b))
						if err := sameBits("dk", got.g.DK, want.g.DK, 0); err != nil {
							return err
						}
					} else {
						got.a.Saved = tensor.Tensor{}
						must(got.p.Forward(b.stream, got.x, &got.a))
						refused(t, c, got.p.Backward(b.stream, got.x, &got.a, &got.g),
							"saved is missing, or the plan was made without a backward pass")
					}
					if err := sameBits("out", got.a.Out, want.a.Out, 0); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
}

// MaxSizes does not decrease when an extent increases.
func TestMaxSizes(t *testing.T) {
	b := newBench()
	defer b.close()
	for _, l := range []Layer{{Heads: 4, KVHeads: 2, Dim: 64, VDim: 64, Causal: true},
		{Heads: 3, KVHeads: 1, Dim: 5, VDim: 9}} {
		p, err := NewPlan(b.dev, alone(), l)
		must(err)
		last := Sizes{}
		for n := int64(1); n < 5000; n += 1 + n/16 {
			size, err := p.MaxSizes(1, n, n)
			must(err)
			if size.Saved < last.Saved || size.Workspace < last.Workspace {
				t.Fatalf("%v: sizes %v at %d tokens, %v before", l, size, n, last)
			}
			last = size
			// The sizes are enough for any documents.
			for _, length := range []int64{1, 10, n / 2, n - 1, n} {
				var cu []int64
				for at := int64(0); at < n; at += max(1, length) {
					cu = append(cu, at)
				}
				x, err := newBatch(0, 1, BatchSpec{Batch: 1, Seq: n, CuSeqlens: append(cu, n)})
				must(err)
				if packed := p.Sizes(x); packed.Workspace > size.Workspace || packed.Saved > size.Saved {
					t.Fatalf("%v: %d tokens in documents of %d need %v, at most %v", l, n, length, packed, size)
				}
			}
		}
	}
}

// A layer without a backward pass saves nothing, and its Backward returns an error.
func TestNoBackward(t *testing.T) {
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			b := newBench()
			defer b.close()
			l, s := Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, Causal: true}, BatchSpec{Batch: 1, Seq: 30}
			want := prepare(b, c, l, s, 0, 0)
			must(want.p.Forward(b.stream, want.x, &want.a))
			l.NoBackward = true
			got := prepare(b, c, l, s, 0, 0)
			if got.p.Sizes(got.x).Saved != 0 {
				return fmt.Errorf("saves %d bytes", got.p.Sizes(got.x).Saved)
			}
			got.a.Saved = b.bytes(64)
			refused(t, c, got.p.Forward(b.stream, got.x, &got.a), "saved is given, and the plan was made without")
			got.a.Saved = tensor.Tensor{}
			must(got.p.Forward(b.stream, got.x, &got.a))
			refused(t, c, got.p.Backward(b.stream, got.x, &got.a, &got.g),
				"saved is missing, or the plan was made without a backward pass")
			return sameBits("out", got.a.Out, want.a.Out, 0)
		})
	}
}

// Calls allocate nothing. The count is of the whole process, so ranks are measured between
// barriers. The best of several rounds is used, because the runtime allocates sometimes.
func TestCallsAllocateNothing(t *testing.T) {
	need.ExactAllocations(t)
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			b := newBench()
			defer b.close()
			ring := int64(1)
			if n%2 == 0 && n > 2 { // others test Ulysses alone
				ring = 2
			}
			l := Layer{Heads: 6, KVHeads: 2, Dim: 16, VDim: 16, Causal: true, Ring: ring}
			s := BatchSpec{Batch: 1, Seq: 40, CuSeqlens: []int64{0, 7, 40}, Ring: ring}
			r := prepare(b, comm.NewCounted(c, "sequence", comm.NewLedger(), clock.New(), nil), l, s, 0, 0)
			must(r.forwardBackward(b))
			best := uint64(math.MaxUint64)
			for range 5 {
				var before, after runtime.MemStats
				must(c.Barrier())
				runtime.ReadMemStats(&before)
				must(c.Barrier())
				for range 4 {
					must(r.forwardBackward(b))
				}
				must(c.Barrier())
				runtime.ReadMemStats(&after)
				best = min(best, after.Mallocs-before.Mallocs)
			}
			if best > 0 {
				return fmt.Errorf("%d allocations in 4 forward and backward passes of %d ranks", best, n)
			}
			return nil
		})
	}
}

// Memory that is too small or has another shape is an error before anything is sent.
func TestArgumentsAreChecked(t *testing.T) {
	b := newBench()
	defer b.close()
	l, s := Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, Causal: true}, BatchSpec{Batch: 1, Seq: 30}
	for _, x := range []struct {
		want  string
		spoil func(r *layerRun)
	}{
		{"q is", func(r *layerRun) { r.a.Q = r.a.Q.Slice(1, 0, 29) }},
		{"k is", func(r *layerRun) { r.a.K = r.a.Q }},
		{"v is nil", func(r *layerRun) { r.a.V = tensor.Tensor{} }},
		{"out is", func(r *layerRun) { r.a.Out = r.a.Out.Permute(0, 1, 3, 2) }},
		{"dense", func(r *layerRun) { r.a.Q.Stride[3] = 2 }},
		{"lse is", func(r *layerRun) { r.a.LSE = r.a.LSE.Slice(2, 0, 3) }},
		{"lse is", func(r *layerRun) { r.a.LSE = addUnitAxis(r.a.LSE) }},
		{"saved has", func(r *layerRun) { r.a.Saved = r.a.Saved.Slice(0, 0, r.a.Saved.Numel()-1) }},
		{"workspace has", func(r *layerRun) { r.a.Workspace = r.a.Workspace.Slice(0, 0, r.a.Workspace.Numel()-1) }},
		{"dq is", func(r *layerRun) { r.g.DQ = r.g.DK }},
		{"dout is nil", func(r *layerRun) { r.g.DOut = tensor.Tensor{} }},
	} {
		r := prepare(b, alone(), l, s, 0, 0)
		x.spoil(r)
		refused(t, r.p.comm, r.forwardBackward(b), x.want)
	}
}
