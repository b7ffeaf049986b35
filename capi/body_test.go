package main

import (
	"fmt"
	"math"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/gdn"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
	"ulysses/testkit/need"
)

// The Go structs have the sizes, names, offsets and types of the C structs.
func TestStructsMatchTheHeader(t *testing.T) {
	for _, l := range layouts {
		if l.c.Size() != l.golang.Size() || l.c.NumField() != l.golang.NumField() {
			t.Errorf("%s has %d bytes and %d fields in C, %d and %d here", l.name, l.c.Size(), l.c.NumField(),
				l.golang.Size(), l.golang.NumField())
			continue
		}
		for i := range l.c.NumField() {
			c, g := l.c.Field(i), l.golang.Field(i)
			// cgo adds an underscore to names that are Go keywords
			if strings.TrimPrefix(c.Name, "_") != g.Name || c.Offset != g.Offset || !alike(c.Type, g.Type) {
				t.Errorf("%s: field %d is %s %v at %d in C, %s %v at %d here", l.name, i, c.Name, c.Type, c.Offset,
					g.Name, g.Type, g.Offset)
			}
		}
	}
}

// alike reports whether a C and a Go type have the same representation: numbers of one kind,
// pointers, a void * that is a uintptr in Go, or arrays of the same length and element.
func alike(c, g reflect.Type) bool {
	address := func(t reflect.Type) bool { return t.Kind() == reflect.Pointer || t.Kind() == reflect.UnsafePointer }
	switch {
	case c.Kind() == reflect.UnsafePointer && g.Kind() == reflect.Uintptr:
		return true
	case address(c) || address(g):
		return address(c) && address(g)
	case c.Kind() == reflect.Array && g.Kind() == reflect.Array:
		return c.Len() == g.Len() && alike(c.Elem(), g.Elem())
	}
	return c.Kind() == g.Kind()
}

// A panic, and arguments in unreadable memory, return ULYSSES_INTERNAL.
func TestPanicsAreRecovered(t *testing.T) {
	refused(t, "a panic", status.Internal, guarded(func() error { panic("test") }))
	wild := uintptr(1 << 20)
	h := newHostOf(t, 1, 2, 1, 1, 1, 0)
	refused(t, "a wild pointer", status.Internal,
		guarded(func() error { return attentionForward(h.plan, h.batch, *(*unsafe.Pointer)(p(&wild))) }))
	must(t, attentionForward(h.plan, h.batch, p(&h.args))) // the context is not locked
}

// must fails the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused checks that err has a status and a message. what names the call.
func refused(t testing.TB, what string, want status.Code, err error) {
	t.Helper()
	if status.Of(err) != want || (want != 0 && err.Error() == "") {
		t.Errorf("%s: status %v (%v), want %v", what, status.Of(err), err, want)
	}
}

// p returns a pointer as the functions of the C interface take it.
func p[T any](x *T) unsafe.Pointer { return unsafe.Pointer(x) }

// aligned returns n bytes at an address that is a multiple of 64.
func aligned(n uint64) unsafe.Pointer {
	b := make([]byte, n+64)
	off := -uintptr(p(&b[0])) & 63
	return p(&b[off])
}

// host is a context of one rank with a plan, a batch, tensors, and the arguments of both passes.
type host struct {
	ctx, plan, batch uintptr
	desc             cAttentionDesc
	lengths          cBatchDesc
	sizes            cSizes
	data             [8][]float32
	t                [8]cTensor // q k v out dout dq dk dv
	shapes           [8][4]int64
	args             cAttentionArgs
	grads            cAttentionGrads
}

// newHostOf returns a host with attention over [b, s, heads, d].
func newHostOf(t testing.TB, b, s, hq, hkv, d int64, flags int32, more ...func(*cAttentionDesc)) *host {
	t.Helper()
	h := &host{desc: cAttentionDesc{dtype: typeF32, flags: flags, heads: hq, kv_heads: hkv, head_dim: d},
		lengths: cBatchDesc{batch: b, seq: s}}
	for _, f := range more {
		f(&h.desc)
	}
	h.desc.struct_size, h.lengths.struct_size = uint32(unsafe.Sizeof(h.desc)), uint32(unsafe.Sizeof(h.lengths))
	h.sizes.struct_size = uint32(unsafe.Sizeof(h.sizes))
	o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), threads: 1}
	must(t, newLocal(p(&o), p(&h.ctx)))
	must(t, newPlan(h.ctx, p(&h.desc), p(&h.plan)))
	must(t, newBatch(h.ctx, p(&h.lengths), p(&h.batch)))
	must(t, planSizes(h.plan, h.batch, p(&h.sizes)))
	for i := range h.t {
		heads := hq
		if i == 1 || i == 2 || i == 6 || i == 7 {
			heads = hkv
		}
		h.shapes[i] = [4]int64{b, s, heads, d}
		h.data[i] = make([]float32, b*s*heads*d)
		for j := range h.data[i] {
			h.data[i][j] = float32(math.Sin(float64(j*(i+3)) + float64(i)))
		}
		h.t[i] = cTensor{data: p(&h.data[i][0]), device: onCPU, ndim: 4, code: 2, bits: 32, lanes: 1,
			shape: &h.shapes[i][0]}
	}
	h.args = cAttentionArgs{struct_size: uint32(unsafe.Sizeof(h.args)), q: &h.t[0], k: &h.t[1], v: &h.t[2],
		out: &h.t[3], saved: aligned(h.sizes.saved), saved_bytes: h.sizes.saved, workspace: aligned(h.sizes.workspace),
		workspace_bytes: h.sizes.workspace}
	h.grads = cAttentionGrads{struct_size: uint32(unsafe.Sizeof(h.grads)), dout: &h.t[4], dq: &h.t[5], dk: &h.t[6],
		dv: &h.t[7]}
	t.Cleanup(func() { contextDestroy(h.ctx) })
	return h
}

// The C interface returns the results of package sp, bitwise equal.
func TestAttentionEqualsSP(t *testing.T) {
	h := newHostOf(t, 2, 9, 4, 2, 8, flagCausal)
	must(t, attentionForward(h.plan, h.batch, p(&h.args)))
	must(t, attentionBackward(h.plan, h.batch, p(&h.args), p(&h.grads)))
	d, err := cpu.New(cpu.Options{Workers: 1})
	must(t, err)
	defer d.Close()
	s, _ := d.NewStream()
	c := comm.Local(1)[0]
	plan, err := sp.NewPlan(d, c, sp.Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, Causal: true})
	must(t, err)
	b, err := sp.NewBatch(c, sp.BatchSpec{Batch: 2, Seq: 9})
	must(t, err)
	size := plan.Sizes(b)
	var x [8]tensor.Tensor
	for i := range x {
		x[i] = tensor.OfFloat32(slices.Clone(h.data[i]), h.shapes[i][:]...)
	}
	a := sp.Args{Q: x[0], K: x[1], V: x[2], Out: x[3],
		Saved:     tensor.Of(aligned(uint64(size.Saved)), tensor.U8, size.Saved),
		Workspace: tensor.Of(aligned(uint64(size.Workspace)), tensor.U8, size.Workspace)}
	must(t, plan.Forward(s, b, &a))
	must(t, plan.Backward(s, b, &a, &sp.Grads{DOut: x[4], DQ: x[5], DK: x[6], DV: x[7]}))
	for i := range x {
		if !slices.Equal(x[i].Float32s(), h.data[i]) {
			t.Errorf("tensor %d differs from the result of package sp", i)
		}
	}
}

// The C interface returns the results of package gdn, bitwise equal.
func TestGatedDeltaRuleEqualsGDN(t *testing.T) {
	const b, s, hk, hv, dk, dv = 2, 70, 2, 4, 16, 8
	h := newHostOf(t, b, s, hv, hv, dv, 0)
	for _, strategy := range []int32{gdnHeads, gdnState} {
		d := cGDNDesc{struct_size: uint32(unsafe.Sizeof(cGDNDesc{})), dtype: typeF32, flags: flagL2Norm | flagStates,
			strategy: strategy, chunk: 16, scale: 0.5, qk_heads: hk, v_heads: hv, qk_dim: dk, v_dim: dv}
		var rule uintptr
		must(t, newGDNPlan(h.ctx, p(&d), p(&rule)))
		must(t, planSizes(rule, h.batch, p(&h.sizes)))
		shapes := [14][]int64{{b, s, hk, dk}, {b, s, hk, dk}, {b, s, hv, dv}, {b, s, hv}, {b, s, hv}, {b, hv, dk, dv},
			{b, s, hv, dv}, {b, hv, dk, dv}, {b, s, hv, dv}, {b, s, hk, dk}, {b, s, hk, dk}, {b, s, hv, dv},
			{b, s, hv}, {b, s, hv}} // q k v g beta state_in out state_out dout dq dk dv dg dbeta
		var ts [14]cTensor
		var x [14]tensor.Tensor
		var data [14][]float32
		for i, shape := range shapes {
			n := int64(1)
			for _, e := range shape {
				n *= e
			}
			data[i] = make([]float32, n)
			for j := range data[i] {
				data[i][j] = float32(math.Sin(float64(j*(i+3)) + float64(i)))
				if i == 3 {
					data[i][j] = -2 * data[i][j] * data[i][j]
				} else if i == 4 {
					data[i][j] *= data[i][j]
				}
			}
			ts[i] = cTensor{data: p(&data[i][0]), device: onCPU, ndim: int32(len(shape)), code: 2, bits: 32, lanes: 1,
				shape: &shapes[i][0]}
			x[i] = tensor.OfFloat32(slices.Clone(data[i]), shape...)
		}
		a := cGDNArgs{struct_size: uint32(unsafe.Sizeof(cGDNArgs{})), q: &ts[0], k: &ts[1], v: &ts[2], g: &ts[3],
			beta: &ts[4], state_in: &ts[5], out: &ts[6], state_out: &ts[7], saved: aligned(h.sizes.saved),
			saved_bytes: h.sizes.saved, workspace: aligned(h.sizes.workspace),
			workspace_bytes: h.sizes.workspace}
		g := cGDNGrads{struct_size: uint32(unsafe.Sizeof(cGDNGrads{})), dout: &ts[8], dq: &ts[9], dk: &ts[10],
			dv: &ts[11], dg: &ts[12], dbeta: &ts[13]}
		must(t, gdnForward(rule, h.batch, p(&a)))
		must(t, gdnBackward(rule, h.batch, p(&a), p(&g)))

		dev, err := cpu.New(cpu.Options{Workers: 1})
		must(t, err)
		defer dev.Close()
		stream, _ := dev.NewStream()
		c := comm.Local(1)[0]
		plan, err := gdn.NewPlan(dev, c,
			gdn.Layer{KeyHeads: hk, ValueHeads: hv, KeyDim: dk, ValueDim: dv, L2Norm: true, Chunk: 16, Scale: 0.5,
				Strategy: gdn.Strategy(strategy)})
		must(t, err)
		batch, err := sp.NewBatch(c, sp.BatchSpec{Batch: b, Seq: s})
		must(t, err)
		size := plan.Sizes(batch)
		args := gdn.Args{Q: x[0], K: x[1], V: x[2], G: x[3], Beta: x[4], StateIn: x[5], Out: x[6], StateOut: x[7],
			Saved:     tensor.Of(aligned(uint64(size.Saved)), tensor.U8, size.Saved),
			Workspace: tensor.Of(aligned(uint64(size.Workspace)), tensor.U8, size.Workspace)}
		must(t, plan.Forward(stream, batch, &args))
		must(t, plan.Backward(stream, batch, &args,
			&gdn.Grads{DOut: x[8], DQ: x[9], DK: x[10], DV: x[11], DG: x[12], DBeta: x[13]}))
		for i := range x {
			if !slices.Equal(x[i].Float32s(), data[i]) {
				t.Errorf("strategy %d: tensor %d differs from the result of package gdn", strategy, i)
			}
		}
		refused(t, "attention with a plan of the gated delta rule", status.InvalidArgument,
			attentionForward(rule, h.batch, p(&h.args)))
		refused(t, "the gated delta rule with a plan of attention", status.InvalidArgument,
			gdnForward(h.plan, h.batch, p(&a)))
	}
}

// Calls of attention allocate no Go memory.
func TestCallsAllocateNothing(t *testing.T) {
	need.ExactAllocations(t)
	h := newHostOf(t, 1, 6, 2, 1, 4, flagCausal)
	const calls = 10000
	body := func() {
		must(t, guarded(func() error { return attentionForward(h.plan, h.batch, p(&h.args)) }))
		must(t, guarded(func() error { return attentionBackward(h.plan, h.batch, p(&h.args), p(&h.grads)) }))
	}
	body()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range calls / 2 {
		body()
	}
	runtime.ReadMemStats(&after)
	if n := after.Mallocs - before.Mallocs; n > calls/100 {
		t.Errorf("%d allocations in %d calls", n, calls)
	} else {
		t.Logf("%d allocations in %d calls", n, calls)
	}
}

// A call with an invalid tensor returns an error, and the call after it succeeds.
func TestInvalidTensors(t *testing.T) {
	h := newHostOf(t, 2, 5, 2, 2, 4, 0)
	strides := [4]int64{40, 8, 4, 1}
	negative := [4]int64{-1, 5, 2, 4}
	huge := [4]int64{1 << 40, 1 << 40, 2, 4}
	for _, c := range []struct {
		name  string
		spoil func(q *cTensor)
	}{
		{"device", func(q *cTensor) { q.device = onCUDA }}, {"no device", func(q *cTensor) { q.device = 0 }},
		{"data", func(q *cTensor) { q.data = nil }},
		{"shape", func(q *cTensor) { q.shape = nil }}, {"axes", func(q *cTensor) { q.ndim = 2 }},
		{"many axes", func(q *cTensor) { q.ndim = 1 << 30 }},
		{"negative axes", func(q *cTensor) { q.ndim = -1 }}, {"lanes", func(q *cTensor) { q.lanes = 4 }},
		{"type", func(q *cTensor) { q.code = 0 }},
		{"bits", func(q *cTensor) { q.bits = 16 }}, {"extent", func(q *cTensor) { q.shape = &negative[0] }},
		{"huge", func(q *cTensor) { q.shape = &huge[0] }},
		{"other shape", func(q *cTensor) { s := [4]int64{2, 5, 2, 3}; q.shape = &s[0] }},
		{"stride 0", func(q *cTensor) { s := strides; s[1] = 0; q.strides = &s[0] }},
		{"negative stride", func(q *cTensor) { s := strides; s[0] = -40; q.strides = &s[0] }},
		{"huge stride", func(q *cTensor) { s := strides; s[0] = 1 << 60; q.strides = &s[0] }},
		{"last axis", func(q *cTensor) { s := [4]int64{80, 16, 8, 2}; q.strides = &s[0] }},
		{"offset", func(q *cTensor) { q.byte_offset = 1 << 60 }},
		{"odd address", func(q *cTensor) { q.byte_offset = 2 }},
	} {
		for i := range 4 {
			valid := h.t[i]
			c.spoil(&h.t[i])
			refused(t, fmt.Sprintf("%s of tensor %d", c.name, i), status.InvalidArgument,
				attentionForward(h.plan, h.batch, p(&h.args)))
			h.t[i] = valid
		}
	}
	for i, spoil := range []func(a *cAttentionArgs){
		func(a *cAttentionArgs) { a.q = nil }, func(a *cAttentionArgs) { a.out = nil }, func(a *cAttentionArgs) {
			a.out = a.v
		}, func(a *cAttentionArgs) { a.saved_bytes-- },
		func(a *cAttentionArgs) { a.workspace_bytes-- }, func(a *cAttentionArgs) { a.saved = unsafe.Add(a.saved, 4) },
		func(a *cAttentionArgs) { a.saved = nil },
		func(a *cAttentionArgs) { a.workspace = nil }, func(a *cAttentionArgs) { a.workspace = a.saved },
		func(a *cAttentionArgs) { a.saved_bytes = 1 << 63 },
		func(a *cAttentionArgs) { a.struct_size = 2 }, func(a *cAttentionArgs) { a.reserved = 1 },
		func(a *cAttentionArgs) { a.lse = a.q },
	} {
		a := h.args
		spoil(&a)
		refused(t, fmt.Sprintf("arguments %d", i), status.InvalidArgument, attentionForward(h.plan, h.batch, p(&a)))
	}
	sinks := h.args
	sinks.sinks = &h.t[0]
	refused(t, "sinks", status.InvalidArgument, attentionForward(h.plan, h.batch, p(&sinks)))
	must(t, attentionForward(h.plan, h.batch, p(&h.args)))
	refused(t, "dq over dk", status.InvalidArgument,
		func() error { g := h.grads; g.dq = g.dk; return attentionBackward(h.plan, h.batch, p(&h.args), p(&g)) }())
	must(t, attentionBackward(h.plan, h.batch, p(&h.args), p(&h.grads)))
}

// Lengths that no machine has memory for are refused before a table of documents is allocated.
// Structs that end within a field are refused.
func TestInvalidBatches(t *testing.T) {
	h := newHostOf(t, 1, 4, 1, 1, 4, 0)
	cu, late := []int64{0, 4}, []int64{4, 4}
	for _, l := range []cBatchDesc{{batch: 1 << 39, seq: 1}, {batch: 1 << 25, rows: 1},
		{batch: 1, seq: 1 << 40, docs: 1 << 38, cu_seqlens: &cu[0]}, {batch: 1 << 41, seq: 1},
		{batch: 1, seq: 1, rows: 2},
		{batch: 1, seq: 4, docs: -1}, {batch: 1, seq: 4, docs: 1, cu_seqlens: &late[0]}, {batch: 0, seq: 4},
		{batch: 1}} {
		l.struct_size = h.lengths.struct_size
		var b uintptr
		refused(t, fmt.Sprintf("batch %d, seq %d, rows %d, docs %d", l.batch, l.seq, l.rows, l.docs),
			status.InvalidArgument, newBatch(h.ctx, p(&l), p(&b)))
	}
	a := h.args
	for a.struct_size = 4; a.struct_size < uint32(unsafe.Sizeof(a)); a.struct_size += 4 {
		if status.Of(guarded(func() error { return attentionForward(h.plan, h.batch, p(&a)) })) == status.Internal {
			t.Errorf("arguments of %d bytes: the call panicked", a.struct_size)
		}
	}
}

// A batch with more tokens than a call of attention can have is refused at once.
func TestLongestBatch(t *testing.T) {
	h := newHostOf(t, 1, 4, 1, 1, 4, flagCausal)
	for _, l := range []cBatchDesc{{batch: 1, seq: 1<<31 + 1}, {batch: 1, seq: 1 << 34}, {batch: 1, seq: 1 << 40},
		{batch: 3, seq: 1 << 30}} {
		l.struct_size = h.lengths.struct_size
		var b uintptr
		err := newBatch(h.ctx, p(&l), p(&b))
		if status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), strconv.FormatInt(l.seq, 10)) ||
			!strings.Contains(err.Error(), "2147483648") {
			t.Errorf("batch %d, seq %d: %v", l.batch, l.seq, err)
		}
	}
}

// q, k and v as views of one buffer, [B, S, 3, H, D] or [S, B, 3, H, D], give the results of dense
// tensors.
func TestLayoutsAreStrides(t *testing.T) {
	const b, s, n, d = 2, 5, 2, 4
	h := newHostOf(t, b, s, n, n, d, flagCausal)
	must(t, attentionForward(h.plan, h.batch, p(&h.args)))
	must(t, attentionBackward(h.plan, h.batch, p(&h.args), p(&h.grads)))
	// B,S,3,H,D and S,B,3,H,D
	for _, strides := range [][4]int64{{s * 3 * n * d, 3 * n * d, d, 1}, {3 * n * d, b * 3 * n * d, d, 1}} {
		in, grad := make([]float32, b*s*3*n*d), make([]float32, b*s*3*n*d)
		x := *h
		st := strides
		each := func(do func(i, dense, wide int64)) {
			for i := range int64(3) {
				for k := range int64(b * s * n * d) {
					do(i, k, k/(s*n*d)*st[0]+k/(n*d)%s*st[1]+i*n*d+k%(n*d))
				}
			}
		}
		each(func(i, dense, wide int64) { in[wide] = h.data[i][dense] })
		for i := range 3 {
			x.t[i].data, x.t[i].strides = p(&in[i*n*d]), &st[0]
			x.t[5+i].data, x.t[5+i].strides = p(&grad[i*n*d]), &st[0]
		}
		x.args.q, x.args.k, x.args.v, x.grads.dq, x.grads.dk, x.grads.dv = &x.t[0], &x.t[1], &x.t[2], &x.t[5],
			&x.t[6], &x.t[7]
		must(t, attentionForward(h.plan, h.batch, p(&x.args)))
		must(t, attentionBackward(h.plan, h.batch, p(&x.args), p(&x.grads)))
		each(func(i, dense, wide int64) {
			if grad[wide] != h.data[5+i][dense] {
				t.Fatalf("strides %v: gradient %d at %d: %v, dense %v", st, i, dense, grad[wide], h.data[5+i][dense])
			}
		})
		x.t[6].data = p(&grad[d]) // dk over the second half of dq
		refused(t, "views that overlap", status.InvalidArgument,
			attentionBackward(h.plan, h.batch, p(&x.args), p(&x.grads)))
	}
}

// A plan serves batches of 200 lengths, and a destroyed batch is refused.
func TestManyLengths(t *testing.T) {
	h := newHostOf(t, 1, 200, 2, 2, 4, flagCausal)
	for s := int64(1); s <= 200; s++ {
		l := cBatchDesc{struct_size: h.lengths.struct_size, batch: 1, seq: s}
		var batch uintptr
		must(t, newBatch(h.ctx, p(&l), p(&batch)))
		for i := range h.shapes {
			h.shapes[i][1] = s
		}
		must(t, attentionForward(h.plan, batch, p(&h.args)))
		must(t, attentionBackward(h.plan, batch, p(&h.args), p(&h.grads)))
		must(t, batchDestroy(batch))
		refused(t, "a batch that was destroyed", status.InvalidArgument, attentionForward(h.plan, batch, p(&h.args)))
	}
}
