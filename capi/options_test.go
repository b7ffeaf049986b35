package main

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/near"
	"ulysses/testkit/ref"
)

// The lengths of TestOptions: sequences, tokens of each, query heads, key heads, features.
const optB, optS, optH, optKV, optD = 2, 13, 4, 2, 8

// optionCase is a plan with options, and its documents.
type optionCase struct {
	name  string
	desc  cAttentionDesc
	cu    []int64 // nil = each sequence is one document
	heads int64   // of the block mask: 1 or optH

	overlapped bool // the calls are overlapped passes
}

var optionCases = []optionCase{
	{name: "sinks, softcap", desc: cAttentionDesc{flags: flagCausal | flagSinks, softcap: 1.5}},
	{name: "slopes, window, documents",
		desc: cAttentionDesc{flags: flagCausal | flagAlibi | flagWindow, window_left: 4, window_right: -1},
		cu:   []int64{0, 5, 13, 20, 26}},
	{name: "dropout, sinks", desc: cAttentionDesc{flags: flagSinks, dropout: 0.25}},
	{name: "mask of heads, slopes", desc: cAttentionDesc{flags: flagBlockMask | flagAlibi, block_q: 3, block_k: 4},
		heads: optH},
	{name: "one mask, causal", desc: cAttentionDesc{flags: flagBlockMask | flagCausal, block_q: 2, block_k: 5},
		cu: []int64{0, 13, 15, 26}, heads: 1},
	{name: "keys at once", desc: cAttentionDesc{flags: flagCausal | flagGatherKeys}},
}

// whole has the tensors of a case, [B·S, heads, features], and what the ranks have computed.
type whole struct {
	q, k, v, dout          []float32
	sinks, slopes          []float32
	mask                   []uint8
	out, lse, dq, dk, dv   []float32
	dsinks, dslopes        []float32 // the sums over the ranks
	wantOut, wantLSE       []float64
	wantDQ, wantDK, wantDV []float64
	wantSinks, wantSlopes  []float64
	sum                    sync.Mutex
}

func wave(n int, k float64) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(math.Sin(k*float64(i) + k))
	}
	return x
}

func widened(x []float32) []float64 {
	y := make([]float64, len(x))
	for i := range x {
		y[i] = float64(x[i])
	}
	return y
}

// tensors returns the tensors of a case with the results of the reference.
func (c *optionCase) tensors(seed uint64) *whole {
	const n = optB * optS
	x := &whole{q: wave(n*optH*optD, 1.7), k: wave(n*optKV*optD, 2.3), v: wave(n*optKV*optD, 0.9),
		dout: wave(n*optH*optD, 3.1), out: make([]float32, n*optH*optD), lse: make([]float32, n*optH),
		dq: make([]float32, n*optH*optD), dk: make([]float32, n*optKV*optD), dv: make([]float32, n*optKV*optD),
		dsinks:  make([]float32, optH),
		dslopes: make([]float32, optH)}
	d := &c.desc
	a := ref.Attention{Hq: optH, Hkv: optKV, D: optD, Dv: optD, CuQ: c.cu, Causal: d.flags&flagCausal != 0,
		Scale: 1 / math.Sqrt(optD), Softcap: float64(d.softcap), Dropout: float64(d.dropout), Seed: int64(seed),
		QuerySeq: optS, KeySeq: optS, BlockRows: int64(d.block_q),
		BlockColumns: int64(d.block_k)}
	if a.CuQ == nil {
		a.CuQ = []int64{0, optS, 2 * optS}
	}
	a.CuK = a.CuQ
	if d.flags&flagWindow != 0 {
		a.Window = &ref.Window{Left: d.window_left, Right: d.window_right}
	}
	if d.flags&flagSinks != 0 {
		x.sinks = []float32{0.5, -1.25, 2, 0} // exact in BF16
		a.Sinks = widened(x.sinks)
	}
	if d.flags&flagAlibi != 0 {
		x.slopes = []float32{0.5, 0.25, 0.125, 0.0625}
		a.Slopes = widened(x.slopes)
	}
	if d.flags&flagBlockMask != 0 {
		x.mask = make([]uint8, c.heads*((optS+a.BlockRows-1)/a.BlockRows)*((optS+a.BlockColumns-1)/a.BlockColumns))
		for i := range x.mask {
			x.mask[i] = uint8(i * 5 % 7 % 2)
		}
		a.Mask = x.mask
	}
	q, k, v := widened(x.q), widened(x.k), widened(x.v)
	x.wantOut, x.wantLSE = ref.AttentionForward(&a, q, k, v)
	g := ref.AttentionGradients(&a, q, k, v, x.wantOut, x.wantLSE, widened(x.dout))
	x.wantDQ, x.wantDK, x.wantDV, x.wantSinks, x.wantSlopes = g.DQ, g.DK, g.DV, g.DSinks, g.DSlopes
	return x
}

// arrayOf returns a tensor and its elements. They are on the heap, because the context keeps their
// addresses after a call.
//
//go:noinline
func arrayOf(shape ...int64) (*cTensor, []float32) {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	data, shape := make([]float32, max(1, n)), slices.Clone(shape)
	return &cTensor{data: p(&data[0]), device: onCPU, ndim: int32(len(shape)), code: 2, bits: 32, lanes: 1,
		shape: &shape[0]}, data
}

// run computes attention and its gradients on a rank, and stores them in the whole tensors.
func (c *optionCase) run(t *testing.T, ctx uintptr, x *whole, zigzag bool, seed uint64) {
	var plan, batch uintptr
	d := c.desc
	d.struct_size, d.dtype, d.heads, d.kv_heads, d.head_dim = uint32(unsafe.Sizeof(d)), typeF32, optH, optKV, optD
	must(t, newPlan(ctx, p(&d), p(&plan)))
	l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: optB, seq: optS}
	if c.cu != nil {
		l.docs, l.cu_seqlens = int64(len(c.cu)-1), &c.cu[0]
	}
	if zigzag {
		l.flags = flagZigzag
	}
	must(t, newBatch(ctx, p(&l), p(&batch)))
	info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
	must(t, batchQuery(batch, p(&info)))

	// each calls f with the ranges of this rank's rows in a tensor with width elements of a row
	each := func(width int64, f func(mine, all int64, n int64)) {
		at := int64(0)
		for b := range int64(optB) {
			for i := range info.ranges {
				n := (info.hi[i] - info.lo[i]) * width
				f(at, (b*optS+info.lo[i])*width, n)
				at += n
			}
		}
	}
	mine := func(heads, d int64, all []float32) (*cTensor, []float32) {
		x, data := arrayOf(optB, info.rows, heads, d)
		if all != nil {
			each(heads*d, func(at, from, n int64) { copy(data[at:at+n], all[from:from+n]) })
		}
		return x, data
	}
	vector := func(v []float32, out bool) *cTensor {
		if v == nil {
			return nil
		}
		x, data := arrayOf(optH)
		if !out {
			copy(data, v)
		}
		return x
	}
	size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
	must(t, planSizes(plan, batch, p(&size)))
	a := cAttentionArgs{struct_size: uint32(unsafe.Sizeof(cAttentionArgs{})), sinks: vector(x.sinks, false),
		alibi: vector(x.slopes, false), dropout_seed: seed, saved: aligned(size.saved), saved_bytes: size.saved,
		workspace:       aligned(size.workspace),
		workspace_bytes: size.workspace}
	if x.mask != nil {
		shape := []int64{c.heads, (optS + int64(d.block_q) - 1) / int64(d.block_q),
			(optS + int64(d.block_k) - 1) / int64(d.block_k)}
		a.block_mask = &cTensor{data: p(&x.mask[0]), device: onCPU, ndim: 3, code: 1, bits: 8, lanes: 1,
			shape: &shape[0]}
	}
	g := cAttentionGrads{struct_size: uint32(unsafe.Sizeof(cAttentionGrads{})), dsinks: vector(x.sinks, true),
		dalibi: vector(x.slopes, true)}
	a.q, _ = mine(optH, optD, x.q)
	a.k, _ = mine(optKV, optD, x.k)
	a.v, _ = mine(optKV, optD, x.v)
	g.dout, _ = mine(optH, optD, x.dout)
	var out, lse, dq, dk, dv []float32
	a.out, out = mine(optH, optD, nil)
	a.lse, lse = mine(optH, 1, nil)
	a.lse.ndim = 3
	g.dq, dq = mine(optH, optD, nil)
	g.dk, dk = mine(optKV, optD, nil)
	g.dv, dv = mine(optKV, optD, nil)
	if c.overlapped {
		must(t, overlapped(plan, batch, &a, &g, func() error { return lossReduceOf(ctx) }))
	} else {
		must(t, attentionForward(plan, batch, p(&a)))
		must(t, attentionBackward(plan, batch, p(&a), p(&g)))
	}
	for _, r := range []struct {
		from, to []float32
		width    int64
	}{{out, x.out, optH * optD}, {lse, x.lse, optH}, {dq, x.dq, optH * optD}, {dk, x.dk, optKV * optD},
		{dv, x.dv, optKV * optD}} {
		each(r.width, func(at, to, n int64) { copy(r.to[to:to+n], r.from[at:at+n]) })
	}
	x.sum.Lock()
	defer x.sum.Unlock()
	for i := range optH {
		if x.sinks != nil {
			x.dsinks[i] += unsafe.Slice((*float32)(g.dsinks.data), optH)[i]
		}
		if x.slopes != nil {
			x.dslopes[i] += unsafe.Slice((*float32)(g.dalibi.data), optH)[i]
		}
	}
}

// check compares what the ranks have computed with the reference.
func (x *whole) check(t *testing.T, name string) {
	t.Helper()
	const most = 2e-5
	lse, want := slices.Clone(x.lse), slices.Clone(x.wantLSE)
	for i := range want {
		if math.IsInf(want[i], -1) && math.IsInf(float64(lse[i]), -1) { // a query without keys
			lse[i], want[i] = 0, 0
		}
	}
	near.Relative(t, name+": out", x.out, x.wantOut, most)
	near.Relative(t, name+": lse", lse, want, most)
	near.Relative(t, name+": dq", x.dq, x.wantDQ, most)
	near.Relative(t, name+": dk", x.dk, x.wantDK, most)
	near.Relative(t, name+": dv", x.dv, x.wantDV, most)
	if x.sinks != nil {
		near.Relative(t, name+": dsinks", x.dsinks, x.wantSinks, most)
	}
	if x.slopes != nil {
		near.Relative(t, name+": dalibi", x.dslopes, x.wantSlopes, most)
	}
}

// The options of attention have the results of the reference on every mesh, with rows in order and
// in a zigzag.
func TestOptions(t *testing.T) {
	const seed = 1 << 63 // a seed is unsigned
	for i := range optionCases {
		c := &optionCases[i]
		for _, mesh := range [][2]int{{1, 1}, {2, 1}, {2, 2}, {3, 3}, {4, 2}, {6, 1}, {6, 3}} {
			for _, zigzag := range []bool{false, true} {
				x := c.tensors(seed)
				onRanksWith(t, mesh[0], cOptions{ring: int32(mesh[1])}, func(rank int, ctx uintptr) {
					c.run(t, ctx, x, zigzag, seed)
				})
				x.check(t, fmt.Sprintf("%s, %d ranks, ring %d, zigzag %v", c.name, mesh[0], mesh[1], zigzag))
			}
		}
	}
}

// cString returns a string of C.
func cString(p unsafe.Pointer) string {
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// A batch with a zigzag says which rows a rank has, and gathers and returns positions in that
// order.
func TestZigzagBatches(t *testing.T) {
	var rows [6][]int64
	onRanksWith(t, 6, cOptions{ring: 3}, func(rank int, ctx uintptr) {
		who := cContextInfo{struct_size: uint32(unsafe.Sizeof(cContextInfo{}))}
		must(t, contextQuery(ctx, p(&who)))
		if who.ulysses != 2 || who.ring != 3 {
			t.Errorf("the context has ulysses %d and ring %d", who.ulysses, who.ring)
		}
		l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), flags: flagZigzag, batch: 2, seq: 25}
		var batch uintptr
		must(t, newBatch(ctx, p(&l), p(&batch)))
		info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
		must(t, batchQuery(batch, p(&info)))
		for i := range info.ranges {
			for at := info.lo[i]; at < info.hi[i]; at++ {
				rows[rank] = append(rows[rank], at)
			}
		}
		if n := int64(len(rows[rank])); n != info.rows || info.max_rows < n || info.gathered_rows < n ||
			info.gathered_rows > 10 {
			t.Errorf("rank %d: %d rows in ranges, %+v", rank, n, info)
		}
		positions := make([]int64, 2*info.rows)
		must(t, batchPositions(batch, p(&positions[0])))
		if !slices.Equal(positions[:info.rows], rows[rank]) || !slices.Equal(positions[info.rows:], rows[rank]) {
			t.Errorf("rank %d: positions %v of rows %v", rank, positions, rows[rank])
		}
		// Positions of two documents in the second sequence give the same batch as starts do.
		for i, at := range rows[rank] {
			if at >= 8 {
				positions[info.rows+int64(i)] -= 8
			}
		}
		l.positions = &positions[0]
		var documents uintptr
		must(t, newBatch(ctx, p(&l), p(&documents)))
		must(t, batchQuery(documents, p(&info)))
		again := make([]int64, len(positions))
		must(t, batchPositions(documents, p(&again[0])))
		if info.docs != 3 || !slices.Equal(again, positions) {
			t.Errorf("rank %d: %d documents, positions %v, want %v", rank, info.docs, again, positions)
		}
		positions[0] += 3 * int64(b2i(rank == 1))
		refused(t, "a position out of order", status.InvalidArgument, newBatch(ctx, p(&l), p(&documents)))
	})
	all := slices.Sorted(slices.Values(slices.Concat(rows[:]...)))
	for i, at := range all {
		if int64(i) != at {
			t.Fatalf("the ranks have the rows %v", rows)
		}
	}
}

// What cannot work with a ring or a zigzag is refused on all ranks, with its name.
func TestRingRefusals(t *testing.T) {
	onRanksWith(t, 4, cOptions{ring: 2}, func(rank int, ctx uintptr) {
		r := newRankCalls(t, ctx)
		var text string
		must(t, func() error {
			s, err := planJSON(r.plan)
			if err == nil {
				text = cString(unsafe.Pointer(s))
			}
			return err
		}())
		var description struct {
			Ring, Ulysses int64
			Form          string
		}
		if err := json.Unmarshal([]byte(text), &description); err != nil || description.Ring != 2 ||
			description.Ulysses != 2 || description.Form != "ring" {
			t.Errorf("%s: %v", text, err)
		}
		must(t, guarded(func() error { return gdnForward(r.rules[0], r.batch, p(&r.gdn[0])) }))
		must(t, guarded(func() error { return callHalo("ulysses_halo_forward", ctx, r.batch, p(&r.halo), true) }))
		l := r.lengths
		l.flags = flagZigzag
		var zigzag uintptr
		must(t, newBatch(ctx, p(&l), p(&zigzag)))
		says := func(what string, want string, code status.Code, err error) {
			refused(t, what, code, err)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want it to say %q", what, err, want)
			}
		}
		says("gdn with a zigzag", "ULYSSES_ZIGZAG", status.Unsupported,
			guarded(func() error { return gdnForward(r.rules[0], zigzag, p(&r.gdn[0])) }))
		says("a halo with a zigzag", "ULYSSES_ZIGZAG", status.Unsupported,
			guarded(func() error { return callHalo("ulysses_halo_forward", ctx, zigzag, p(&r.halo), true) }))
		says("the caller's own attention with a ring", "ring 2", status.Unsupported,
			guarded(func() error { return localForward(r.plan, r.batch, p(&r.attention), p(&r), 0) }))
		l.seq, l.rows = 0, 3
		says("a zigzag of own rows", "ULYSSES_ZIGZAG", status.InvalidArgument, newBatch(ctx, p(&l), p(&zigzag)))
	})
	var ctx uintptr
	for _, o := range []cOptions{{ring: 2}, {ring: 1, ulysses: 2}, {ring: -1}} {
		o.struct_size, o.threads = uint32(unsafe.Sizeof(o)), 1
		refused(t, fmt.Sprintf("ring %d, ulysses %d on one rank", o.ring, o.ulysses), status.InvalidArgument,
			newLocal(p(&o), p(&ctx)))
	}
}

// Options that are wrong, or differ from the plan, are refused with the names of the header.
func TestOptionFaults(t *testing.T) {
	h := newHostOf(t, 1, 6, 2, 1, 4, 0)
	nan := float32(math.NaN())
	for _, d := range []cAttentionDesc{{softcap: -1}, {softcap: nan}, {softcap: 1e-38}, {softcap: 3e38}, {dropout: 1},
		{dropout: -0.5}, {dropout: nan}, {block_q: 2, block_k: 2}, {flags: flagBlockMask},
		{flags: flagBlockMask, block_q: 2},
		{flags: flagBlockMask, block_q: -1, block_k: 1}} {
		d.struct_size, d.dtype, d.heads, d.kv_heads, d.head_dim = h.desc.struct_size, typeF32, 2, 1, 4
		var plan uintptr
		refused(t, fmt.Sprintf("%+v", d), status.InvalidArgument, newPlan(h.ctx, p(&d), p(&plan)))
	}
	d := h.desc
	d.flags = flagSinks | flagAlibi | flagBlockMask
	d.block_q, d.block_k = 4, 4
	var plan uintptr
	must(t, newPlan(h.ctx, p(&d), p(&plan)))
	must(t, planSizes(plan, h.batch, p(&h.sizes)))
	sinks, _ := arrayOf(2)
	vector := *sinks
	maskShape := []int64{2, 2, 2}
	mask := cTensor{data: aligned(64), device: onCPU, ndim: 3, code: 1, bits: 8, lanes: 1, shape: &maskShape[0]}
	a := h.args
	a.saved, a.saved_bytes, a.workspace, a.workspace_bytes = aligned(h.sizes.saved), h.sizes.saved,
		aligned(h.sizes.workspace), h.sizes.workspace
	a.sinks, a.alibi, a.block_mask = &vector, &vector, &mask
	must(t, attentionForward(plan, h.batch, p(&a)))
	for _, f := range []struct {
		want  string
		spoil func(a *cAttentionArgs)
	}{
		{"sinks is NULL", func(a *cAttentionArgs) { a.sinks = nil }},
		{"alibi is NULL", func(a *cAttentionArgs) { a.alibi = nil }},
		{"block_mask is NULL", func(a *cAttentionArgs) { a.block_mask = nil }},
		{"sinks is", func(a *cAttentionArgs) { a.sinks = &mask }},
		{"alibi is", func(a *cAttentionArgs) { a.alibi = &h.t[0] }},
		{"block_mask is", func(a *cAttentionArgs) { a.block_mask = &vector }},
		{"block_mask is U8[1, 2, 3]; give a row-major tensor U8[1, 2, 2]", func(a *cAttentionArgs) {
			m := mask
			m.shape = &[]int64{1, 2, 3}[0]
			a.block_mask = &m
		}},
		{"workspace has", func(a *cAttentionArgs) { a.workspace_bytes -= 64 }},
	} {
		b := a
		f.spoil(&b)
		err := attentionForward(plan, h.batch, p(&b))
		refused(t, f.want, status.InvalidArgument, err)
		if err == nil || !strings.Contains(err.Error(), f.want) {
			t.Errorf("%v: want it to say %q", err, f.want)
		}
	}
	g := h.grads
	g.dsinks = &vector // overlaps sinks
	refused(t, "dsinks over sinks", status.InvalidArgument, attentionBackward(plan, h.batch, p(&a), p(&g)))
	other, _ := arrayOf(2)
	g.dsinks = other
	must(t, attentionBackward(plan, h.batch, p(&a), p(&g)))
	g.struct_size = uint32(unsafe.Offsetof(g.dsinks)) // a host without dsinks and dalibi
	must(t, attentionBackward(plan, h.batch, p(&a), p(&g)))
	refused(t, "dsinks without the flag", status.InvalidArgument, func() error {
		must(t, attentionForward(h.plan, h.batch, p(&h.args)))
		g := h.grads
		g.dsinks = other
		return attentionBackward(h.plan, h.batch, p(&h.args), p(&g))
	}())
}

// Sinks, slopes and their gradients may be BF16 with a plan in BF16: they give what F32 gives, and
// gradients are rounded once.
func TestOptionsInBF16(t *testing.T) {
	h := newHostOf(t, 1, 6, 2, 1, 4, 0)
	d := h.desc
	d.flags, d.dtype = flagSinks|flagAlibi, typeBF16
	var plan uintptr
	must(t, newPlan(h.ctx, p(&d), p(&plan)))
	must(t, planSizes(plan, h.batch, p(&h.sizes)))
	half := func(x []float32) *cTensor {
		y, data := arrayOf(2)
		y.code, y.bits = 4, 16
		for i, v := range x {
			unsafe.Slice((*uint16)(p(&data[0])), 2)[i] = uint16(math.Float32bits(v) >> 16)
		}
		return y
	}
	full := func(x []float32) *cTensor {
		y, data := arrayOf(2)
		copy(data, x)
		return y
	}
	for i := range h.t { // BF16 in the memory of F32
		h.t[i].code, h.t[i].bits = 4, 16
		x := unsafe.Slice((*uint16)(h.t[i].data), len(h.data[i]))
		for j := range x {
			x[j] = uint16(math.Float32bits(float32(math.Sin(float64(j*(i+3))))) >> 16)
		}
	}
	values, zeros := []float32{0.5, -0.25}, []float32{0, 0}
	var out [2][]uint16
	var grads [2][4]float32
	for i, of := range []func([]float32) *cTensor{half, full} {
		a := h.args
		a.saved, a.saved_bytes, a.workspace, a.workspace_bytes = aligned(h.sizes.saved), h.sizes.saved,
			aligned(h.sizes.workspace), h.sizes.workspace
		a.sinks, a.alibi = of(values), of(values)
		g := h.grads
		g.dsinks, g.dalibi = of(zeros), of(zeros)
		must(t, attentionForward(plan, h.batch, p(&a)))
		out[i] = slices.Clone(unsafe.Slice((*uint16)(h.t[3].data), len(h.data[3])))
		must(t, attentionBackward(plan, h.batch, p(&a), p(&g)))
		for k, x := range []*cTensor{g.dsinks, g.dalibi} {
			for j := range 2 {
				if i == 0 {
					grads[i][2*k+j] = tensor.BF16ToF32(unsafe.Slice((*uint16)(x.data), 2)[j])
				} else {
					grads[i][2*k+j] = unsafe.Slice((*float32)(x.data), 2)[j]
				}
			}
		}
	}
	if !slices.Equal(out[0], out[1]) {
		t.Error("sinks and slopes in BF16 and in F32 give different outputs")
	}
	for i, x := range grads[1] {
		if x == 0 {
			t.Errorf("gradient %d is 0", i)
		}
		near.Value(t, fmt.Sprintf("gradient %d", i), float64(grads[0][i]), float64(x), math.Abs(float64(x))/256)
	}
}

// A backward pass with another seed than its forward pass is refused on all ranks, and the message
// has both seeds. Without dropout, the seed has no meaning.
func TestDropoutSeedOfBackward(t *testing.T) {
	for _, mesh := range [][2]int{{1, 1}, {2, 1}, {4, 2}} {
		onRanksWith(t, mesh[0], cOptions{ring: int32(mesh[1])}, func(rank int, ctx uintptr) {
			r := newRankCalls(t, ctx)
			r.desc.dropout = 0.5
			var plan uintptr
			must(t, newPlan(ctx, p(&r.desc), p(&plan)))
			for _, pass := range []struct {
				name              string
				seed              *uint64
				forward, backward func(plan uintptr) error
			}{
				{"attention", &r.attention.dropout_seed,
					func(plan uintptr) error { return attentionForward(plan, r.batch, p(&r.attention)) },
					func(plan uintptr) error {
						return attentionBackward(plan, r.batch, p(&r.attention), p(&r.attentionGrads))
					}},
				{"layer", &r.layer.dropout_seed,
					func(plan uintptr) error { return attentionLayerForward(plan, r.batch, p(&r.layer)) },
					func(plan uintptr) error {
						return attentionLayerBackward(plan, r.batch, p(&r.layer), p(&r.layerGrads))
					}},
			} {
				*pass.seed = 1<<63 + 5
				must(t, pass.forward(plan))
				*pass.seed = 6
				err := pass.backward(plan)
				refused(t, pass.name+" with another seed", status.InvalidArgument, err)
				if want := "dropout_seed is 6, and 9223372036854775813 in the forward call"; err == nil ||
					!strings.Contains(err.Error(), want) {
					t.Errorf("%s on rank %d: %v, want it to say %q", pass.name, rank, err, want)
				}
				*pass.seed = 1<<63 + 5
				must(t, pass.backward(plan))
				must(t, pass.forward(r.plan))
				*pass.seed = 6
				must(t, pass.backward(r.plan))
			}
		})
	}
}

// recentPasses finds the last maxRecent passes and no older one. Its memory is bounded.
func TestRecentPasses(t *testing.T) {
	var r recentPasses
	if r.has(0) {
		t.Error("a pass is found before the first one")
	}
	for i := range maxRecent + 3 {
		r.add(identity(i))
		r.add(7) // as often as all others
	}
	last := identity(maxRecent + 2)
	for _, i := range []identity{7, last - maxRecent/2 + 1, last - 1, last} {
		if !r.has(i) {
			t.Errorf("pass %d is not found", i)
		}
	}
	for _, i := range []identity{0, 2, last - maxRecent/2, last + 1} {
		if r.has(i) {
			t.Errorf("pass %d is found", i)
		}
	}
	if len(r.ids) != maxRecent || len(r.passes) != maxRecent/2+1 {
		t.Errorf("%d passes with %d identities", len(r.ids), len(r.passes))
	}
}
