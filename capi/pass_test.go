package main

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/testkit/slowlinks"
)

// overlapped runs a forward and a backward pass of attention in their overlapped form; without g,
// only the forward pass. q, k and v get their values when they are projected. calls makes other
// calls of the context between the steps.
func overlapped(plan, batch uintptr, a *cAttentionArgs, g *cAttentionGrads, calls func() error) error {
	var pass uintptr
	projected := [...]struct {
		t     *cTensor
		which int32
	}{{a.q, tensorQ}, {a.k, tensorK}, {a.v, tensorV}}
	var values [3][]float32
	for i, x := range projected {
		all := elementsOf(x.t)
		values[i] = slices.Clone(all)
		for j := range all {
			all[j] = float32(math.NaN())
		}
	}
	project := func(i int) { copy(elementsOf(projected[i].t), values[i]) }
	if err := forwardStart(plan, batch, p(a), p(&pass)); err != nil {
		for i := range projected {
			project(i)
		}
		return err
	}
	for i, x := range projected {
		project(i)
		if err := inOrder(func() error { return passSend(pass, x.which) }, calls); err != nil {
			return err
		}
	}
	if err := passAttend(pass); err != nil || g == nil {
		return err
	}
	return overlappedBackward(plan, batch, a, g, calls)
}

// overlappedBackward is the backward pass of overlapped.
func overlappedBackward(plan, batch uintptr, a *cAttentionArgs, g *cAttentionGrads, calls func() error) error {
	var pass uintptr
	if err := backwardStart(plan, batch, p(a), p(g), p(&pass)); err != nil {
		return err
	}
	return inOrder(calls, func() error { return passAttend(pass) },
		func() error { return passWait(pass, tensorV) }, calls,
		func() error { return passWait(pass, tensorK) }, func() error { return passWait(pass, tensorQ) })
}

// inOrder makes calls until one fails.
func inOrder(calls ...func() error) error {
	for _, call := range calls {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

// elementsOf returns the elements of a dense tensor.
func elementsOf(t *cTensor) []float32 {
	n := int64(1)
	for _, d := range unsafe.Slice(t.shape, t.ndim) {
		n *= d
	}
	return unsafe.Slice((*float32)(t.data), n)
}

// Overlapped passes give bitwise the results of plain calls, with all options and on every mesh:
// several sequences of odd lengths, more ranks than key heads, and ranks without heads.
func TestPassesEqualCalls(t *testing.T) {
	const seed = 5
	for i := range optionCases {
		c, over := optionCases[i], optionCases[i]
		over.overlapped = true
		for _, mesh := range [][2]int{{1, 1}, {2, 1}, {4, 1}, {4, 2}, {6, 3}, {6, 1}} {
			for _, zigzag := range []bool{false, true} {
				name := fmt.Sprintf("%s, %d ranks, ring %d, zigzag %v", c.name, mesh[0], mesh[1], zigzag)
				want, got := c.tensors(seed), c.tensors(seed)
				onRanksWith(t, mesh[0], cOptions{ring: int32(mesh[1])}, func(rank int, ctx uintptr) {
					c.run(t, ctx, want, zigzag, seed)
					over.run(t, ctx, got, zigzag, seed)
				})
				got.check(t, name)
				for _, x := range []struct {
					name      string
					got, want []float32
				}{{"out", got.out, want.out}, {"lse", got.lse, want.lse}, {"dq", got.dq, want.dq},
					{"dk", got.dk, want.dk}, {"dv", got.dv, want.dv}} {
					if !slices.Equal(x.got, x.want) {
						t.Errorf("%s: %s differs from the plain calls", name, x.name)
					}
				}
			}
		}
	}
}

// The backward pass of either form fits the forward pass of the other form.
func TestPassesAndCallsMix(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		r := newRankCalls(t, ctx)
		again := func() []float32 { return slices.Clone(elementsOf(r.attentionGrads.dk)) }
		nothing := func() error { return nil }
		must(t, attentionForward(r.plan, r.batch, p(&r.attention)))
		must(t, attentionBackward(r.plan, r.batch, p(&r.attention), p(&r.attentionGrads)))
		want := again()
		must(t, overlapped(r.plan, r.batch, &r.attention, nil, nothing))
		must(t, attentionBackward(r.plan, r.batch, p(&r.attention), p(&r.attentionGrads)))
		if !slices.Equal(again(), want) {
			t.Errorf("rank %d: the plain backward pass after an overlapped forward pass differs", rank)
		}
		clear(unsafe.Slice((*byte)(r.attention.saved), r.attention.saved_bytes))
		refusedWith(t, "no forward pass", overlappedBackward(r.plan, r.batch, &r.attention, &r.attentionGrads, nothing),
			"saved has not been written by a forward call")
		must(t, attentionForward(r.plan, r.batch, p(&r.attention)))
		must(t, overlappedBackward(r.plan, r.batch, &r.attention, &r.attentionGrads, nothing))
		if !slices.Equal(again(), want) {
			t.Errorf("rank %d: the overlapped backward pass after a plain forward pass differs", rank)
		}
	})
}

// Two passes of one plan may interleave with each other and with plain calls.
func TestPassesInterleave(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		r := newRankCalls(t, ctx)
		must(t, attentionForward(r.plan, r.batch, p(&r.attention)))
		want := slices.Clone(elementsOf(r.attention.out))
		second := r.attention
		second.q, second.out, second.saved = r.q(), r.q(), aligned(second.saved_bytes)
		for i := range elementsOf(second.q) {
			elementsOf(second.q)[i] = elementsOf(r.attention.q)[i] * 2
		}
		must(t, attentionForward(r.plan, r.batch, p(&second)))
		doubled := slices.Clone(elementsOf(second.out))
		clear(elementsOf(second.out))
		clear(elementsOf(r.attention.out))
		var x, y uintptr
		steps := func(pass *uintptr) []func() error {
			return []func() error{func() error { return passSend(*pass, tensorQ) },
				func() error { return passSend(*pass, tensorK) }, func() error { return passSend(*pass, tensorV) }}
		}
		must(t, forwardStart(r.plan, r.batch, p(&r.attention), p(&x)))
		must(t, forwardStart(r.plan, r.batch, p(&second), p(&y)))
		first, other := steps(&x), steps(&y)
		for i := range first {
			must(t, inOrder(first[i], other[i], func() error { return lossReduceOf(ctx) }))
		}
		must(t, inOrder(func() error { return passAttend(y) }, func() error { return passAttend(x) }))
		if !slices.Equal(elementsOf(r.attention.out), want) || !slices.Equal(elementsOf(second.out), doubled) {
			t.Errorf("rank %d: passes that interleave have other results", rank)
		}
	})
}

// A step out of order, and a step of a pass that ended, are refused on all ranks, and the message
// names the step that is due. The pass goes on. A canceled pass leaves the context usable.
func TestPassOrder(t *testing.T) {
	onRanks(t, 3, 0, func(rank int, ctx uintptr) {
		r := newRankCalls(t, ctx)
		out := elementsOf(r.attention.out)
		must(t, attentionForward(r.plan, r.batch, p(&r.attention)))
		must(t, attentionBackward(r.plan, r.batch, p(&r.attention), p(&r.attentionGrads)))
		want, dq := slices.Clone(out), slices.Clone(elementsOf(r.attentionGrads.dq))
		var pass uintptr
		must(t, forwardStart(r.plan, r.batch, p(&r.attention), p(&pass)))
		refusedWith(t, "k first", passSend(pass, tensorK),
			"ulysses_pass_send(ULYSSES_TENSOR_K) is called out of order; ulysses_pass_send(ULYSSES_TENSOR_Q) is due")
		refusedWith(t, "attention first", passAttend(pass), "ulysses_pass_send(ULYSSES_TENSOR_Q) is due")
		refusedWith(t, "a tensor", passSend(pass, 7), "the tensor is 7")
		refusedWith(t, "out is NULL", forwardStart(r.plan, r.batch, p(&r.attention), nil), "out is NULL")
		refusedWith(t, "a plan in use", planDestroy(r.plan), "a pass of the plan is in progress")
		must(t, passSend(pass, tensorQ))
		other := int32(tensorK)
		if rank == 1 {
			other = tensorV
		}
		refusedWith(t, "another tensor on one rank", passSend(pass, other), "rank 1",
			"ulysses_pass_send(ULYSSES_TENSOR_K) is due")
		must(t, passSend(pass, tensorK))
		refusedWith(t, "a gradient of a forward pass", passWait(pass, tensorV),
			"ulysses_pass_send(ULYSSES_TENSOR_V) is due")
		must(t, passSend(pass, tensorV))
		must(t, passAttend(pass))
		refusedWith(t, "a pass that ended", passAttend(pass), "not the handle of a pass")
		if !slices.Equal(out, want) {
			t.Errorf("rank %d: refused steps have changed the result", rank)
		}
		must(t, backwardStart(r.plan, r.batch, p(&r.attention), p(&r.attentionGrads), p(&pass)))
		refusedWith(t, "a tensor of a backward pass", passSend(pass, tensorQ), "ulysses_pass_attend is due")
		refusedWith(t, "a gradient too soon", passWait(pass, tensorV), "ulysses_pass_attend is due")
		must(t, passAttend(pass))
		refusedWith(t, "q's gradient first", passWait(pass, tensorQ), "ulysses_pass_wait(ULYSSES_TENSOR_V) is due")
		for _, which := range []int32{tensorV, tensorK, tensorQ} {
			must(t, passWait(pass, which))
		}
		if !slices.Equal(elementsOf(r.attentionGrads.dq), dq) {
			t.Errorf("rank %d: refused steps have changed the gradient", rank)
		}
		r.cancel(t)
		must(t, attentionForward(r.plan, r.batch, p(&r.attention)))
		if !slices.Equal(out, want) {
			t.Errorf("rank %d: the result differs after canceled passes", rank)
		}
		must(t, planDestroy(r.plan))
	})
}

// cancel cancels passes at each step, and as many at the same time as are possible.
func (r *rankCalls) cancel(t *testing.T) {
	var passes [maxPasses]uintptr
	for i := range passes {
		must(t, forwardStart(r.plan, r.batch, p(&r.attention), p(&passes[i])))
		for _, which := range []int32{tensorQ, tensorK, tensorV}[:min(3, i%5)] {
			must(t, passSend(passes[i], which))
		}
	}
	var one uintptr
	refusedWith(t, "too many passes", forwardStart(r.plan, r.batch, p(&r.attention), p(&one)),
		"16 passes are in progress")
	for _, pass := range passes {
		must(t, passCancel(pass))
	}
	refusedWith(t, "a pass that was canceled", passCancel(passes[0]), "not the handle of a pass")
	for steps := range 3 {
		must(t, backwardStart(r.plan, r.batch, p(&r.attention), p(&r.attentionGrads), p(&one)))
		if steps > 0 {
			must(t, passAttend(one))
		}
		if steps > 1 {
			must(t, passWait(one, tensorV))
		}
		must(t, passCancel(one))
	}
}

// A context that was destroyed has no passes. With ULYSSES_OWN_WORKSPACES, a pass needs a
// workspace.
func TestPassesOfContexts(t *testing.T) {
	h := newHostOf(t, 1, 6, 2, 1, 4, 0)
	var pass uintptr
	must(t, forwardStart(h.plan, h.batch, p(&h.args), p(&pass)))
	must(t, batchDestroy(h.batch))
	must(t, contextDestroy(h.ctx))
	refused(t, "a pass of a context that was destroyed", status.InvalidArgument, passSend(pass, tensorQ))
	onRanks(t, 2, flagOwnWorkspaces, func(rank int, ctx uintptr) {
		d := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32, heads: callHeads,
			head_dim: callDim}
		l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: 1, seq: 8}
		var plan, batch, pass uintptr
		must(t, newPlan(ctx, p(&d), p(&plan)))
		must(t, newBatch(ctx, p(&l), p(&batch)))
		x := func() *cTensor { return tensorOf(1, 4, callHeads, callDim) }
		a := cAttentionArgs{struct_size: uint32(unsafe.Sizeof(cAttentionArgs{})), q: x(), k: x(), v: x(), out: x()}
		refusedWith(t, "no workspace", forwardStart(plan, batch, p(&a), p(&pass)), "workspace is NULL",
			"ULYSSES_OWN_WORKSPACES")
		size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
		must(t, planSizes(plan, batch, p(&size)))
		a.workspace, a.workspace_bytes = aligned(size.workspace), size.workspace
		must(t, overlapped(plan, batch, &a, nil, func() error { return lossReduceOf(ctx) }))
	})
}

// A layer with ULYSSES_OVERLAP gives bitwise the results of one without, on several ranks, with
// norms, biases, rotation, sinks, slopes and more ranks than key heads.
func TestLayerOverlap(t *testing.T) {
	size := layerSize{batch: 2, seq: 7, heads: 4, kvHeads: 2, dim: 8, hidden: 12}
	for _, mesh := range [][2]int{{1, 1}, {2, 1}, {4, 1}, {4, 2}} {
		onRanksWith(t, mesh[0], cOptions{ring: int32(mesh[1])}, func(rank int, ctx uintptr) {
			var out [2]map[string][]float32
			for i, flags := range [2]int32{0, flagOverlap} {
				x := newLayer(t, ctx, size, flags)
				must(t, x.pass())
				out[i] = x.out
			}
			for name, want := range out[0] {
				if !slices.Equal(out[1][name], want) || slices.Max(want) == slices.Min(want) {
					t.Errorf("%v: rank %d: %s differs with ULYSSES_OVERLAP, or is zero", mesh, rank, name)
				}
			}
		})
	}
}

type layerSize struct{ batch, seq, heads, kvHeads, dim, hidden int64 }

// layerCall is a layer with all options of a layer: its arguments on a rank, and its outputs by
// name.
type layerCall struct {
	plan, batch uintptr
	a           cAttentionLayerArgs
	g           cAttentionLayerGrads
	out         map[string][]float32
}

// newLayer creates the plan, the batch and the arguments of a layer. Collective.
func newLayer(t testing.TB, ctx uintptr, n layerSize, flags int32) *layerCall {
	x := &layerCall{out: map[string][]float32{}}
	desc := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32,
		flags: flags | flagCausal | flagSinks | flagAlibi, heads: n.heads, kv_heads: n.kvHeads, head_dim: n.dim}
	l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: n.batch, seq: n.seq}
	must(t, newPlan(ctx, p(&desc), p(&x.plan)))
	must(t, newBatch(ctx, p(&l), p(&x.batch)))
	info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
	must(t, batchQuery(x.batch, p(&info)))
	written := func(name string, shape ...int64) *cTensor {
		y, data := arrayOf(shape...)
		x.out[name] = data
		return y
	}
	b, rows, q, k, d, hidden := n.batch, info.rows, n.heads*n.dim, n.kvHeads*n.dim, n.dim, n.hidden
	x.a = cAttentionLayerArgs{struct_size: uint32(unsafe.Sizeof(x.a)), hidden: hidden, x: tensorOf(b, rows, hidden),
		wq: tensorOf(q, hidden), wk: tensorOf(k, hidden), wv: tensorOf(k, hidden),
		wo: tensorOf(hidden, q), bq: tensorOf(q), bk: tensorOf(k), bv: tensorOf(k), bo: tensorOf(hidden),
		q_norm: tensorOf(d), k_norm: tensorOf(d), cos: tensorOf(b*rows, d/2), sin: tensorOf(b*rows, d/2),
		y: written("y", b, rows, hidden), sinks: tensorOf(n.heads), alibi: tensorOf(n.heads)}
	x.g = cAttentionLayerGrads{struct_size: uint32(unsafe.Sizeof(x.g)), dy: tensorOf(b, rows, hidden),
		dx: written("dx", b, rows, hidden), dwq: written("dwq", q, hidden), dwk: written("dwk", k, hidden),
		dwv: written("dwv", k, hidden), dwo: written("dwo", hidden, q), dbq: written("dbq", q), dbk: written("dbk", k),
		dbv: written("dbv", k), dbo: written("dbo", hidden), dq_norm: written("dq_norm", d),
		dk_norm: written("dk_norm", d), dsinks: written("dsinks", n.heads),
		dalibi: written("dalibi", n.heads)}
	size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
	must(t, attentionLayerSizes(x.plan, x.batch, p(&x.a), p(&size)))
	x.a.saved, x.a.saved_bytes = aligned(size.saved), size.saved
	x.a.workspace, x.a.workspace_bytes = aligned(size.workspace), size.workspace
	return x
}

// pass runs the layer forward and backward. Collective.
func (x *layerCall) pass() error {
	if err := attentionLayerForward(x.plan, x.batch, p(&x.a)); err != nil {
		return err
	}
	return attentionLayerBackward(x.plan, x.batch, p(&x.a), p(&x.g))
}

// BenchmarkLayerOverlap times a layer, forward and backward, without and with ULYSSES_OVERLAP in
// turn, on two goroutine ranks whose links have a latency of 50 us and the given bandwidth.
func BenchmarkLayerOverlap(b *testing.B) {
	size := layerSize{batch: 1, seq: 2048, heads: 8, kvHeads: 8, dim: 64, hidden: 512}
	for _, bandwidth := range []float64{1e8, 2e8, 1e9} {
		b.Run(fmt.Sprintf("%.0f MB a second", bandwidth/1e6), func(b *testing.B) {
			comms := comm.Local(2)
			var times [2][]float64 // plain, overlapped
			var wait sync.WaitGroup
			for rank := range comms {
				wait.Go(func() {
					slow, err := slowlinks.New(comms[rank],
						slowlinks.Links{Latency: 50 * time.Microsecond, Bandwidth: bandwidth}, nil)
					must(b, err)
					o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), threads: 1}
					var ctx uintptr
					must(b, newOnComm("BenchmarkLayerOverlap", slow, true, p(&o), p(&ctx)))
					layers := [2]*layerCall{newLayer(b, ctx, size, 0), newLayer(b, ctx, size, flagOverlap)}
					for i := range b.N + 1 { // the first is not timed
						for k, x := range layers {
							must(b, lossReduceOf(ctx)) // a barrier
							from := time.Now()
							must(b, x.pass())
							must(b, lossReduceOf(ctx))
							if rank == 0 && i > 0 {
								times[k] = append(times[k], time.Since(from).Seconds()*1e3)
							}
						}
					}
				})
			}
			wait.Wait()
			for k, name := range [2]string{"plain", "overlapped"} {
				slices.Sort(times[k])
				b.ReportMetric(times[k][0], name+"-least-ms")
				b.ReportMetric(times[k][len(times[k])/2], name+"-median-ms")
			}
		})
	}
}
