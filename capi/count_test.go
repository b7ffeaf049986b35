package main

import (
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"ulysses/comm"
	"ulysses/testkit/need"
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
	x.t = cTensor{data: p(&data[0]), device: onCPU, ndim: int32(len(shape)), code: 2, bits: 32, lanes: 1,
		shape: &x.shape[0]}
	return &x.t
}

// callsOfStep returns a function that calls each function of a training step once, with workspaces,
// on one rank of a context. Collective.
func callsOfStep(t *testing.T, ctx uintptr) func() {
	r := newRankCalls(t, ctx)
	var size cSizes
	workspaceOf := func(query func(s *cSizes) error) (unsafe.Pointer, uint64) {
		size.struct_size = uint32(unsafe.Sizeof(size))
		must(t, query(&size))
		return aligned(size.workspace + 64), size.workspace
	}
	r.attention.lse = r.gates()
	r.attention.workspace, r.attention.workspace_bytes = workspaceOf(func(s *cSizes) error {
		return planSizes(r.plan, r.batch, p(s))
	})
	for _, a := range []*cReshardArgs{&r.toHeads, &r.toSeq} {
		must(t, reshardWorkspace(r.plan, r.batch, p(a), int32(b2i(a == &r.toHeads)), p(&a.workspace_bytes)))
		a.workspace = aligned(a.workspace_bytes + 64)
	}
	must(t, haloWorkspace(ctx, r.batch, p(&r.halo), p(&r.halo.workspace_bytes)))
	r.halo.workspace = aligned(r.halo.workspace_bytes + 64)
	r.layer.bq, r.layer.q_norm, r.layer.k_norm = tensorOf(callHeads*callDim), tensorOf(callDim), tensorOf(callDim)
	r.layer.cos, r.layer.sin = tensorOf(r.rows, callDim/2), tensorOf(r.rows, callDim/2)
	r.layerGrads.dbq, r.layerGrads.dk_norm = tensorOf(callHeads*callDim), tensorOf(callDim)
	r.layer.workspace, r.layer.workspace_bytes = workspaceOf(func(s *cSizes) error {
		return attentionLayerSizes(r.plan, r.batch, p(&r.layer), p(s))
	})
	r.layer.saved, r.layer.saved_bytes = aligned(size.saved+64), size.saved
	for i := range r.gdn {
		r.gdn[i].state_in, r.gdn[i].state_out = r.states(), r.states()
		r.gdn[i].workspace, r.gdn[i].workspace_bytes = workspaceOf(func(s *cSizes) error {
			return planSizes(r.rules[i], r.batch, p(s))
		})
		decays := unsafe.Slice((*float32)(r.gdn[i].g.data), r.rows*callHeads)
		for j := range decays {
			decays[j] -= 1
		}
	}
	r.gdnGrads.dstate_out, r.gdnGrads.dstate_in = r.states(), r.states()
	for i := range r.gdnLayers {
		r.gdnLayers[i].workspace, r.gdnLayers[i].workspace_bytes = workspaceOf(func(s *cSizes) error {
			return gdnLayerSizes(r.rules[i], r.batch, p(s))
		})
	}
	sum, count := 1.0, int64(1)
	var request uintptr
	calls := []func() error{
		func() error { return attentionForward(r.plan, r.batch, p(&r.attention)) },
		func() error { return attentionBackward(r.plan, r.batch, p(&r.attention), p(&r.attentionGrads)) },
		func() error { return reshard(r.plan, r.batch, p(&r.toHeads), true) },
		func() error { return reshard(r.plan, r.batch, p(&r.toSeq), false) },
		func() error { return reshardStart(r.plan, r.batch, p(&r.toHeads), true, p(&request)) },
		func() error { return requestWait(request) },
		func() error { return callHalo("ulysses_halo_forward", ctx, r.batch, p(&r.halo), true) },
		func() error { return callHalo("ulysses_halo_backward", ctx, r.batch, p(&r.halo), false) },
		func() error { return forwardStart(r.plan, r.batch, p(&r.attention), p(&request)) },
		func() error { return passSend(request, tensorQ) },
		func() error { return passSend(request, tensorK) },
		func() error { return passSend(request, tensorV) },
		func() error { return passAttend(request) },
		func() error {
			return backwardStart(r.plan, r.batch, p(&r.attention), p(&r.attentionGrads), p(&request))
		},
		func() error { return passAttend(request) },
		func() error { return passWait(request, tensorV) },
		func() error { return passWait(request, tensorK) },
		func() error { return passWait(request, tensorQ) },
		func() error { return attentionLayerForward(r.plan, r.batch, p(&r.layer)) },
		func() error { return attentionLayerBackward(r.plan, r.batch, p(&r.layer), p(&r.layerGrads)) },
		func() error { return gdnForward(r.rules[0], r.batch, p(&r.gdn[0])) },
		func() error { return gdnBackward(r.rules[0], r.batch, p(&r.gdn[0]), p(&r.gdnGrads)) },
		func() error { return gdnForward(r.rules[1], r.batch, p(&r.gdn[1])) },
		func() error { return gdnBackward(r.rules[1], r.batch, p(&r.gdn[1]), p(&r.gdnGrads)) },
		func() error { return gdnLayerForward(r.rules[0], r.batch, p(&r.gdnLayers[0])) },
		func() error {
			return gdnLayerBackward(r.rules[0], r.batch, p(&r.gdnLayers[0]), p(&r.gdnLayerGrads))
		},
		func() error { return gdnLayerForward(r.rules[1], r.batch, p(&r.gdnLayers[1])) },
		func() error {
			return gdnLayerBackward(r.rules[1], r.batch, p(&r.gdnLayers[1]), p(&r.gdnLayerGrads))
		},
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
	need.ExactAllocations(t)
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
			t.Errorf("%d ranks: %d allocations in %d steps", ranks, n, times*ranks)
		} else {
			t.Logf("%d ranks: %d allocations in %d steps", ranks, n, times*ranks)
		}
	}
}
