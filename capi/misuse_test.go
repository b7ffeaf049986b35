package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"ulysses/cuda"
	"ulysses/internal/status"
)

// refusedWith checks that err is an invalid argument whose message, as the host gets it, has these
// words and no names that only the Go code has.
func refusedWith(t *testing.T, what string, err error, words ...string) {
	t.Helper()
	refused(t, what, status.InvalidArgument, err)
	if err == nil {
		return
	}
	buffer := make([]byte, errorBytes)
	finish("ulysses_f", err, (text)(unsafe.Pointer(&buffer[0])))
	message, _, _ := strings.Cut(string(buffer), "\x00")
	for _, w := range words {
		if !strings.Contains(message, w) {
			t.Errorf("%s: %q has no %q", what, message, w)
		}
	}
	for _, w := range []string{"sp.", "gdn.", "comm.", "hash", "cu_seqlens_k", " dim "} {
		if strings.Contains(message, w) {
			t.Errorf("%s: %q has %q", what, message, w)
		}
	}
}

// All ranks refuse positions that do not count 0, 1, 2, ... in each document. The message names the
// first such position. A rank without rows gives no positions.
func TestInvalidPositions(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		all := []int64{0, 1, 2, 3, 4, 9, 6, 7}
		l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: 1, seq: 8, positions: &all[4*rank]}
		var b uintptr
		refusedWith(t, "a jump", newBatch(ctx, p(&l), p(&b)),
			"positions[1] on rank 1 (token 5 of sequence 0) is 9, and 5 or 0 is due")
		all = []int64{3, 4, 5, 6, 7, 8, 9, 10}
		l.positions = &all[4*rank]
		refusedWith(t, "a start", newBatch(ctx, p(&l), p(&b)),
			"positions[0] on rank 0 (token 0 of sequence 0) is 3, and 0 is due")
		all = []int64{0, 1, 2, 0, 1, 0, 1, 2}
		l.positions = &all[4*rank]
		must(t, newBatch(ctx, p(&l), p(&b)))
		if rank == 1 {
			l.positions = nil
		}
		refusedWith(t, "positions on one rank", newBatch(ctx, p(&l), p(&b)),
			"positions is NULL on rank 1 and given on rank 0")
		l.seq, l.rows = 0, int64(8-8*rank)
		l.positions = &all[0]
		if rank == 1 {
			l.positions = nil
		}
		must(t, newBatch(ctx, p(&l), p(&b)))
	})
}

// All ranks refuse documents in memory that one rank cannot read, and the context accepts the next
// call.
func TestUnreadableDocuments(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		wild := uintptr(1 << 20)
		unreadable := *(**int64)(p(&wild))
		cu, positions := []int64{0, 3, 8}, []int64{0, 1, 2, 3}
		given := func(list *int64) *int64 {
			if rank == 1 {
				return unreadable
			}
			return list
		}
		var b uintptr
		l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: 1, seq: 8}
		packed, cross, placed := l, l, l
		packed.docs, packed.cu_seqlens = 2, given(&cu[0])
		cross.docs, cross.cu_seqlens, cross.kv_seq, cross.kv_cu_seqlens = 2, &cu[0], 8, given(&cu[0])
		placed.positions = given(&positions[0])
		for i, d := range []cBatchDesc{packed, cross, placed} {
			refused(t, []string{"cu_seqlens", "kv_cu_seqlens", "positions"}[i], status.Internal,
				newBatch(ctx, p(&d), p(&b)))
			must(t, newBatch(ctx, p(&l), p(&b)))
		}
	})
}

// If the ranks' descriptions differ, the message has the header's name of the first field or entry
// that differs, and both values.
func TestDifferencesAreNamed(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		r := int64(rank)
		d := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32, heads: 4,
			head_dim: 8 + r}
		rule := cGDNDesc{struct_size: uint32(unsafe.Sizeof(cGDNDesc{})), dtype: typeF32, qk_heads: 2, v_heads: 4,
			qk_dim: 8, v_dim: 8 + r}
		var plan, b uintptr
		refusedWith(t, "head_dim", newPlan(ctx, p(&d), p(&plan)), "head_dim is 9 on rank 1 and 8 on rank 0")
		refusedWith(t, "v_dim", newGDNPlan(ctx, p(&rule), p(&plan)), "v_dim is 9 on rank 1 and 8 on rank 0")
		rule.v_dim, rule.conv_width = 8, 3+r
		refusedWith(t, "conv_width", newGDNPlan(ctx, p(&rule), p(&plan)), "conv_width is 4 on rank 1 and 3 on rank 0")
		d.head_dim, d.kv_heads = 8, 3
		refusedWith(t, "kv_heads", newPlan(ctx, p(&d), p(&plan)), "heads is 4 and kv_heads 3")
		cu, kv := []int64{0, 3, 5 + r, 9}, []int64{0, 2, 4 - r, 6}
		l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: 1, seq: 9, docs: 3, cu_seqlens: &cu[0]}
		refusedWith(t, "cu_seqlens", newBatch(ctx, p(&l), p(&b)), "cu_seqlens[2] is 6 on rank 1 and 5 on rank 0")
		cu[2] = 5
		l.kv_seq, l.kv_cu_seqlens = 6, &kv[0]
		refusedWith(t, "kv_cu_seqlens", newBatch(ctx, p(&l), p(&b)), "kv_cu_seqlens[2] is 3 on rank 1 and 4 on rank 0")
		l.kv_cu_seqlens = nil
		refusedWith(t, "no documents of keys", newBatch(ctx, p(&l), p(&b)), "give kv_cu_seqlens")
	})
}

// A backward pass refuses saved memory that no forward pass with its plan and batch has written, on
// all ranks. Saved memory may be moved, and a plan with the same description may read it.
func TestTagsOfSavedMemory(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		d := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32, heads: 4, head_dim: 8}
		l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: 1, seq: 8}
		size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
		cu := []int64{0, 3, 8}
		var plan, causal, twin, batch, packed uintptr
		must(t, newPlan(ctx, p(&d), p(&plan)))
		must(t, newPlan(ctx, p(&d), p(&twin)))
		d.flags = flagCausal
		must(t, newPlan(ctx, p(&d), p(&causal)))
		must(t, newBatch(ctx, p(&l), p(&batch)))
		l.docs, l.cu_seqlens = 2, &cu[0]
		must(t, newBatch(ctx, p(&l), p(&packed)))
		must(t, planSizes(plan, batch, p(&size)))
		x := func() *cTensor { return tensorOf(1, 4, 4, 8) }
		a := cAttentionArgs{struct_size: uint32(unsafe.Sizeof(cAttentionArgs{})), q: x(), k: x(), v: x(), out: x(),
			saved: aligned(size.saved), saved_bytes: size.saved}
		g := cAttentionGrads{struct_size: uint32(unsafe.Sizeof(cAttentionGrads{})), dout: x(), dq: x(),
			dk: x(), dv: x()}
		must(t, attentionForward(plan, batch, p(&a)))
		moved := a
		moved.saved = aligned(size.saved)
		copy(unsafe.Slice((*byte)(moved.saved), size.saved), unsafe.Slice((*byte)(a.saved), size.saved))
		must(t, attentionBackward(plan, batch, p(&moved), p(&g)))
		must(t, attentionBackward(twin, batch, p(&a), p(&g)))
		refusedWith(t, "another plan", attentionBackward(causal, batch, p(&a), p(&g)),
			"saved is of a forward call with another plan")
		refusedWith(t, "another batch", attentionBackward(plan, packed, p(&a), p(&g)),
			"saved is of a forward call with another plan, batch")
		if rank == 1 {
			unsafe.Slice((*byte)(a.saved), 8)[3]++
		}
		refusedWith(t, "garbage on one rank", attentionBackward(plan, batch, p(&a), p(&g)), "rank 1",
			"saved has not been written by a forward call")
		a.saved_bytes--
		refusedWith(t, "too little", attentionForward(plan, batch, p(&a)), "saved has", "are needed")
		must(t, attentionBackward(plan, batch, p(&moved), p(&g)))
	})
}

// Messages of the layer of the gated delta rule name what the plan lacks, and the sizes with the
// tag of saved memory.
func TestGatedDeltaLayerMisuse(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		r := newRankCalls(t, ctx)
		a, g := r.gdnLayers[0], r.gdnLayerGrads
		forward := func(plan uintptr) error { return gdnLayerForward(plan, r.batch, p(&a)) }
		d, rule, plain := r.rule, uintptr(0), uintptr(0)
		d.flags, d.conv_width = 0, 0
		must(t, newGDNPlan(ctx, p(&d), p(&rule)))
		refusedWith(t, "a plan of the rule", forward(rule), "conv_width of the plan is 0")
		refusedWith(t, "sizes of a plan of the rule", gdnLayerSizes(rule, r.batch, p(&r.size)),
			"conv_width of the plan is 0")
		refusedWith(t, "sizes of a plan of attention", gdnLayerSizes(r.plan, r.batch, p(&r.size)),
			"the plan is of attention")
		d.conv_width = callWidth
		must(t, newGDNPlan(ctx, p(&d), p(&plain)))
		refusedWith(t, "z without the flag", forward(plain), "z is given and the plan has no ULYSSES_GATED_NORM")
		a.z, a.norm, a.eps = nil, nil, 1e-5
		refusedWith(t, "eps without the flag", forward(plain), "eps is 1e-05", "ULYSSES_GATED_NORM")
		a.eps = 0
		must(t, forward(plain))
		refusedWith(t, "dz without the flag", gdnLayerBackward(plain, r.batch, p(&a), p(&g)), "dz or dnorm is given")
		g.dz = nil
		must(t, gdnLayerBackward(plain, r.batch, p(&a), p(&g)))
		refusedWith(t, "saved by another plan",
			gdnLayerBackward(r.rules[0], r.batch, p(&r.gdnLayers[0]), p(&r.gdnLayerGrads)),
			"another plan, batch or layer")
		must(t, gdnLayerSizes(plain, r.batch, p(&r.size)))
		a.saved_bytes = r.size.saved - 1
		refusedWith(t, "too little", forward(plain),
			fmt.Sprintf("saved has %d bytes and %d are needed", r.size.saved-1, r.size.saved))
		a.saved_bytes = r.size.saved
		a.conv = tensorOf(callChannels, callWidth+1)
		refusedWith(t, "conv", forward(plain), "conv is", "it must be")
	})
}

// Flags of a reshard are 0 or 1, on every rank.
func TestReshardFlags(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		r := newRankCalls(t, ctx)
		var bytes uint64
		for _, direction := range []int32{-1, 2, 7} {
			refusedWith(t, "to_heads", reshardWorkspace(r.plan, r.batch, p(&r.toHeads), direction, p(&bytes)),
				fmt.Sprintf("to_heads is %d; give 1", direction))
		}
		r.shared[1] = int32(1 + rank)
		refusedWith(t, "shared", reshard(r.plan, r.batch, p(&r.toHeads), true), "rank 1: ", "shared[1] is 2;")
		r.shared[1] = 1
		must(t, reshard(r.plan, r.batch, p(&r.toHeads), true))
	})
}

// Ranks agree on the type of a reshard also if it has as many tensors as possible.
func TestReshardTypeOfManyTensors(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		r := newRankCalls(t, ctx)
		var ins, outs [maxReshard]*cTensor
		for i := range ins {
			ins[i], outs[i] = r.q(), tensorOf(1, callSeq, r.size.head_hi-r.size.head_lo, callDim)
			ins[i].code, outs[i].code = uint8(rank*2), uint8(rank*2) // I32 on rank 0, F32 on rank 1
		}
		a := cReshardArgs{struct_size: uint32(unsafe.Sizeof(cReshardArgs{})), n: maxReshard, in: &ins[0], out: &outs[0]}
		refusedWith(t, "types", reshard(r.plan, r.batch, p(&a), true), "the type of in[0]", "rank 1")
		must(t, reshard(r.plan, r.batch, p(&r.toHeads), true))
	})
}

// With a plug-in and without a GPU, CUDA is among the built devices and not among the usable ones,
// and the reason is given.
func TestUsableDevices(t *testing.T) {
	t.Setenv("ULYSSES_CUDA_PLUGIN", "/plugins/libulysses_cuda.so")
	t.Setenv("CUDA_VISIBLE_DEVICES", "") // as without a GPU
	built, usable, why := devices()
	if !slices.Equal(built, []string{"cpu", "cuda"}) || !slices.Equal(usable, []string{"cpu"}) ||
		why["cuda"] != cuda.WhyUnusable("/plugins/libulysses_cuda.so") || why["cuda"] == "" {
		t.Errorf("built %q, usable %q, reasons %q", built, usable, why)
	}
}

// All ranks refuse saved memory if the plan has ULYSSES_NO_BACKWARD, also too little of it.
func TestSavedWithoutBackward(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		r := newRankCalls(t, ctx)
		r.desc.flags |= flagNoBackward
		r.rule.flags |= flagNoBackward
		must(t, newPlan(ctx, p(&r.desc), p(&r.plan)))
		must(t, newGDNPlan(ctx, p(&r.rule), p(&r.rules[0])))
		const bytes = 128
		for _, saved := range []*uint64{&r.attention.saved_bytes, &r.layer.saved_bytes, &r.gdn[0].saved_bytes,
			&r.gdnLayers[0].saved_bytes} {
			*saved = bytes
		}
		var pass uintptr
		for _, x := range []struct {
			what string
			call func() error
		}{
			{"attention", func() error { return attentionForward(r.plan, r.batch, p(&r.attention)) }},
			{"a pass", func() error { return forwardStart(r.plan, r.batch, p(&r.attention), p(&pass)) }},
			{"local", func() error { return localForward(r.plan, r.batch, p(&r.attention), p(&pass), 0) }},
			{"a layer", func() error { return attentionLayerForward(r.plan, r.batch, p(&r.layer)) }},
			{"the rule", func() error { return gdnForward(r.rules[0], r.batch, p(&r.gdn[0])) }},
			{"a layer of the rule", func() error { return gdnLayerForward(r.rules[0], r.batch, p(&r.gdnLayers[0])) }},
		} {
			refusedWith(t, x.what, guarded(x.call), "saved is given, and the plan has ULYSSES_NO_BACKWARD")
		}
	})
}
