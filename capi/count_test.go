package main

import (
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"ulysses/comm"
)

// tensorOf returns a tensor of this shape with numbers around 0, in Go memory.
func tensorOf(shape ...int64) *cTensor {
	x := &struct {
		t     cTensor
		shape [4]int64
	}{}
	n := int64(1)
	for i, e := range shape {
		x.shape[i] = e
		n *= e
	}
	data := make([]float32, n+1)
	for i := range data {
		data[i] = float32(i*7%19)/19 - 0.5
	}
	x.t = cTensor{data: p(&data[0]), device: onCPU, ndim: int32(len(shape)), code: 2, bits: 32, lanes: 1, shape: &x.shape[0]}
	return &x.t
}

// callsOfStep allocates the arguments of one call of each function that a training step uses, on
// one rank of a context. It returns a function that makes all calls once.
func callsOfStep(t *testing.T, ctx uintptr) func() {
	const b, s, hq, hkv, d, hidden = 1, 9, 4, 2, 8, 12
	desc := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32, flags: flagCausal, heads: hq, kv_heads: hkv, head_dim: d}
	rule := cGDNDesc{struct_size: uint32(unsafe.Sizeof(cGDNDesc{})), dtype: typeF32, flags: flagStates, strategy: gdnState, qk_heads: hkv, v_heads: hq, qk_dim: d, v_dim: d}
	lengths := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: b, seq: s}
	info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
	var plan, states, heads, batch uintptr
	must(t, newPlan(ctx, p(&desc), p(&plan)))
	must(t, newGDNPlan(ctx, p(&rule), p(&states)))
	rule.strategy = gdnHeads
	must(t, newGDNPlan(ctx, p(&rule), p(&heads)))
	must(t, newBatch(ctx, p(&lengths), p(&batch)))
	must(t, batchQuery(batch, p(&info)))
	n := info.rows
	sizes := func(f func(s *cSizes) error) (size cSizes, saved, workspace unsafe.Pointer) {
		size.struct_size = uint32(unsafe.Sizeof(size))
		must(t, f(&size))
		return size, aligned(size.saved + 64), aligned(size.workspace + 64)
	}
	q := func() *cTensor { return tensorOf(b, n, hq, d) }
	k := func() *cTensor { return tensorOf(b, n, hkv, d) }
	x := func() *cTensor { return tensorOf(b, n, hidden) }

	a := cAttentionArgs{struct_size: uint32(unsafe.Sizeof(cAttentionArgs{})), q: q(), k: k(), v: k(), out: q(), lse: tensorOf(b, n, hq)}
	size, saved, workspace := sizes(func(s *cSizes) error { return planSizes(plan, batch, p(s)) })
	a.saved, a.saved_bytes, a.workspace, a.workspace_bytes = saved, size.saved, workspace, size.workspace
	g := cAttentionGrads{struct_size: uint32(unsafe.Sizeof(cAttentionGrads{})), dout: q(), dq: q(), dk: k(), dv: k()}

	ins, outs := [2]*cTensor{q(), k()}, [2]*cTensor{tensorOf(b, s, size.head_hi-size.head_lo, d), tensorOf(b, s, size.shared_hi-size.shared_lo, d)}
	shared := [2]int32{0, 1}
	there := cReshardArgs{struct_size: uint32(unsafe.Sizeof(cReshardArgs{})), n: 2, in: &ins[0], out: &outs[0], shared: &shared[0]}
	back := there
	back.in, back.out, back.sum_copies = &outs[0], &ins[0], 1
	for _, r := range []*cReshardArgs{&there, &back} {
		must(t, reshardWorkspace(plan, batch, p(r), r == &there, p(&r.workspace_bytes)))
		r.workspace = aligned(r.workspace_bytes + 64)
	}
	halo := cHaloArgs{struct_size: uint32(unsafe.Sizeof(cHaloArgs{})), n: 3, x: x(), halo: tensorOf(b, 3, hidden)}
	must(t, haloWorkspace(ctx, batch, p(&halo), p(&halo.workspace_bytes)))
	halo.workspace = aligned(halo.workspace_bytes + 64)

	layer := cAttentionLayerArgs{struct_size: uint32(unsafe.Sizeof(cAttentionLayerArgs{})), hidden: hidden, x: x(), wq: tensorOf(hq*d, hidden), wk: tensorOf(hkv*d, hidden), wv: tensorOf(hkv*d, hidden),
		wo: tensorOf(hidden, hq*d), bq: tensorOf(hq * d), q_norm: tensorOf(d), k_norm: tensorOf(d), cos: tensorOf(n, d/2), sin: tensorOf(n, d/2), y: x()}
	size, saved, workspace = sizes(func(s *cSizes) error { return attentionLayerSizes(plan, batch, p(&layer), p(s)) })
	layer.saved, layer.saved_bytes, layer.workspace, layer.workspace_bytes = saved, size.saved, workspace, size.workspace
	layerGrads := cAttentionLayerGrads{struct_size: uint32(unsafe.Sizeof(cAttentionLayerGrads{})), dy: x(), dx: x(), dwq: tensorOf(hq*d, hidden), dbq: tensorOf(hq * d), dk_norm: tensorOf(d)}

	deltas := [2]cGDNArgs{}
	plans := [2]uintptr{states, heads}
	for i := range deltas {
		size, saved, workspace = sizes(func(s *cSizes) error { return planSizes(plans[i], batch, p(s)) })
		deltas[i] = cGDNArgs{struct_size: uint32(unsafe.Sizeof(cGDNArgs{})), q: k(), k: k(), v: q(), g: tensorOf(b, n, hq), beta: tensorOf(b, n, hq), state_in: tensorOf(b, hq, d, d), out: q(),
			state_out: tensorOf(b, hq, d, d), saved: saved, saved_bytes: size.saved, workspace: workspace, workspace_bytes: size.workspace}
		gates := unsafe.Slice((*float32)(deltas[i].g.data), n*hq)
		for j := range gates {
			gates[j] -= 1
		}
	}
	delta := cGDNGrads{struct_size: uint32(unsafe.Sizeof(cGDNGrads{})), dout: q(), dq: k(), dk: k(), dv: q(), dg: tensorOf(b, n, hq), dbeta: tensorOf(b, n, hq), dstate_out: tensorOf(b, hq, d, d),
		dstate_in: tensorOf(b, hq, d, d)}
	sum, count := 1.0, int64(1)
	var request uintptr
	calls := []func() error{
		func() error { return attentionForward(plan, batch, p(&a)) }, func() error { return attentionBackward(plan, batch, p(&a), p(&g)) },
		func() error { return reshard(plan, batch, p(&there), true) }, func() error { return reshard(plan, batch, p(&back), false) },
		func() error { return reshardStart(plan, batch, p(&there), true, p(&request)) }, func() error { return requestWait(request) },
		func() error { return callHalo("ulysses_halo_forward", ctx, batch, p(&halo), true) }, func() error { return callHalo("ulysses_halo_backward", ctx, batch, p(&halo), false) },
		func() error { return attentionLayerForward(plan, batch, p(&layer)) }, func() error { return attentionLayerBackward(plan, batch, p(&layer), p(&layerGrads)) },
		func() error { return gdnForward(states, batch, p(&deltas[0])) }, func() error { return gdnBackward(states, batch, p(&deltas[0]), p(&delta)) },
		func() error { return gdnForward(heads, batch, p(&deltas[1])) }, func() error { return gdnBackward(heads, batch, p(&deltas[1]), p(&delta)) },
		func() error { sum, count = 1, 1; return lossReduce(ctx, p(&sum), p(&count), nil) },
	}
	return func() {
		for _, call := range calls {
			if err := guarded(call); err != nil {
				panic(err)
			}
		}
	}
}

// Calls allocate no Go memory, on one rank and on two: allocations are counted over 1,000 steps.
func TestNoCallAllocates(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		steps := make([]func(), ranks)
		var wait sync.WaitGroup
		on := func(f func(rank int)) {
			for rank := range ranks {
				wait.Add(1)
				go func() {
					defer wait.Done()
					f(rank)
				}()
			}
			wait.Wait()
		}
		comms := comm.Local(ranks)
		on(func(rank int) {
			var ctx uintptr
			o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), threads: 1}
			must(t, newOnComm("TestNoCallAllocates", comms[rank], true, p(&o), p(&ctx)))
			steps[rank] = callsOfStep(t, ctx)
			for range 20 {
				steps[rank]()
			}
		})
		const times = 1000
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		on(func(rank int) {
			for range times {
				steps[rank]()
			}
		})
		runtime.ReadMemStats(&after)
		if n := after.Mallocs - before.Mallocs; n > times/10 {
			t.Errorf("%d ranks: %d allocations in %d calls", ranks, n, 15*times*ranks)
		} else {
			t.Logf("%d ranks: %d allocations in %d calls", ranks, n, 15*times*ranks)
		}
	}
}
