package main

import (
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"unsafe"

	"ulysses/internal/status"
)

// checkOutputsApart fails if a call was accepted although one of its outputs shares a byte with
// another tensor.
func checkOutputsApart(t *testing.T, out, all []*cTensor) {
	t.Helper()
	owner := map[uintptr]int{}
	for i, x := range append(slices.Clone(out), all...) {
		if x == nil || i >= len(out) && slices.Contains(out, x) {
			continue
		}
		y := (*fuzzTensor)(unsafe.Pointer(x))
		size, n := uintptr(x.bits)/8, int(x.ndim)
		var at func(axis int, p uintptr)
		at = func(axis int, p uintptr) {
			if axis == n {
				for b := range size {
					if j, taken := owner[p+b]; taken && (j < len(out) || i < len(out)) {
						t.Fatalf("tensors %d and %d share a byte, and the call was accepted: %+v", j, i, *x)
					}
					owner[p+b] = i
				}
				return
			}
			stride := uintptr(1)
			for k := axis + 1; k < n; k++ {
				stride *= uintptr(max(1, y.shape[k]))
			}
			if x.strides != nil {
				stride = uintptr(y.strides[axis])
			}
			for k := range uintptr(max(0, y.shape[axis])) {
				at(axis+1, p+k*stride*size)
			}
		}
		at(0, uintptr(x.data)+uintptr(x.byte_offset))
	}
}

// Calls with invalid descriptors return a status: they do not crash, and they do not panic.
// Accepted calls have outputs without overlaps.
func FuzzDescriptors(f *testing.F) {
	for i := range byte(200) {
		f.Add(uint64(i), i, i/7%5)
	}
	arena, err := syscall.Mmap(-1, 0, 64<<20, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE)
	must(f, err)
	h := newHostOf(f, 1, 4, 2, 2, 4, 0)
	f.Fuzz(func(t *testing.T, seed uint64, which, faults byte) {
		x := fuzzCall{mayFail: faults%5 > 0,
			generator: &generator{Rand: rand.New(rand.NewPCG(seed, 1)), faults: int(faults % 5), arena: arena},
			t:         t, host: h}
		x.create()
		defer planDestroy(x.plan)
		defer batchDestroy(x.batch)
		if x.plan == 0 || x.batch == 0 {
			x.plan, x.batch, x.flags = h.plan, h.batch, 0
			x.heads, x.kvHeads, x.dim, x.vDim, x.b, x.rows, x.kvRows = 2, 2, 4, 4, 1, 4, 4
		}
		calls := [...]func() error{x.attention, x.reshard, x.halo, x.layer, x.gdn, x.gdnLayer, x.queries, x.foreign,
			x.passes}
		if err := calls[int(which)%len(calls)](); err == nil {
			checkOutputsApart(t, x.outputs, x.all)
		} else if !x.mayFail {
			t.Errorf("a valid call was refused: %v", err)
		}
		// The context still works.
		must(t, attentionForward(h.plan, h.batch, p(&h.args)))
	})
}

// fuzzCall is one run of the fuzz test: a plan, a batch and a call with them.
type fuzzCall struct {
	*generator
	t                                          *testing.T
	host                                       *host
	plan, batch                                uintptr
	heads, kvHeads, dim, vDim, b, rows, kvRows int64
	hidden                                     int64
	flags                                      int32
	mayFail                                    bool // invalid values may have been made
	outputs, all                               []*cTensor
}

// run calls f and returns its error. A panic fails the test.
func (x *fuzzCall) run(f func() error) error {
	err := guarded(f)
	if status.Of(err) == status.Internal {
		x.t.Fatal(err)
	}
	return err
}

func (x *fuzzCall) input(shape ...int64) *cTensor {
	t := x.tensor(shape...)
	x.all = append(x.all, t)
	return t
}

func (x *fuzzCall) output(shape ...int64) *cTensor {
	t := x.input(shape...)
	x.outputs = append(x.outputs, t)
	return t
}

// list returns an array of n numbers, or NULL for an n that is not a plausible length.
func (x *fuzzCall) list(n int64, each func(i int64) int64) *int64 {
	if n < 1 || n > 1<<16 || x.wrong() {
		return nil
	}
	list := make([]int64, n)
	for i := range list {
		list[i] = x.number(each(int64(i)))
	}
	return &list[0]
}

// create creates the plan and the batch.
func (x *fuzzCall) create() {
	x.kvHeads, x.dim, x.b, x.rows = 1+x.Int64N(3), 1+x.Int64N(9), 1+x.Int64N(3), 1+x.Int64N(7)
	x.heads, x.vDim, x.kvRows = x.kvHeads*(1+x.Int64N(3)), x.dim+x.Int64N(3), x.rows
	x.flags = []int32{0, flagCausal, flagWindow | flagCausal, flagCross, flagNoBackward}[x.IntN(5)]
	desc := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32, flags: x.flags,
		heads: x.bounded(x.heads, 64), kv_heads: x.bounded(x.kvHeads, 64), head_dim: x.bounded(x.dim, 256),
		v_dim: x.bounded(x.vDim, 256), max_tokens: x.bounded(x.Int64N(9), 1<<10)}
	if x.flags&flagWindow != 0 {
		desc.window_left = x.number(2)
	}
	x.corrupt(p(&desc), 0, unsafe.Offsetof(desc.heads))
	x.mustAccept(x.run(func() error { return newPlan(x.host.ctx, p(&desc), p(&x.plan)) }))

	l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: x.bounded(x.b, 64),
		seq: x.bounded(x.rows, 64), rows: x.bounded(0, 64)}
	if x.oneIn(3) {
		l.seq, l.rows = 0, x.rows
	}
	if x.flags == flagCross {
		x.kvRows = 1 + x.Int64N(5)
		l.kv_seq = x.bounded(x.kvRows, 64)
	}
	x.corrupt(p(&l), 0, unsafe.Offsetof(l.batch))
	if x.oneIn(2) {
		l.docs = x.bounded(x.b, 1<<14)
		l.cu_seqlens = x.list(l.docs+1, func(i int64) int64 { return i * x.rows })
		if x.flags == flagCross {
			l.kv_cu_seqlens = x.list(l.docs+1, func(i int64) int64 { return i * x.kvRows })
		}
	}
	if x.flags != flagCross && x.oneIn(3) {
		l.positions = x.list(l.batch*(l.seq+l.rows), func(i int64) int64 { return i % x.rows })
	}
	x.mustAccept(x.run(func() error { return newBatch(x.host.ctx, p(&l), p(&x.batch)) }))
}

// mustAccept fails if a valid description was refused.
func (x *fuzzCall) mustAccept(err error) {
	if err != nil && !x.mayFail {
		x.t.Errorf("a valid description was refused: %v", err)
	}
}

// sizes returns the result of a query for sizes, or zeros if the test has too little memory.
func (x *fuzzCall) sizes(f func(size *cSizes) error) *cSizes {
	size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
	x.run(func() error { return f(&size) })
	if max(size.workspace, size.saved) > 1<<20 {
		size = cSizes{}
	}
	return &size
}

// queries calls functions without tensors.
func (x *fuzzCall) queries() error {
	info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
	x.corrupt(p(&info), 0, 4)
	// the struct is not larger than this
	info.struct_size = min(info.struct_size, uint32(unsafe.Sizeof(cBatchInfo{})))
	if x.run(func() error { return batchQuery(x.batch, p(&info)) }) == nil &&
		info.struct_size == uint32(unsafe.Sizeof(info)) {
		positions := make([]int64, max(1, info.rows*64))
		x.mustAccept(x.run(func() error { return batchPositions(x.batch, p(&positions[0])) }))
	}
	sum, count, mean := x.Float64(), x.number(3), 0.0
	x.mustAccept(x.run(func() error { return lossReduce(x.host.ctx, p(&sum), p(&count), p(&mean)) }))
	x.sizes(func(s *cSizes) error { return localSizesQuery(x.plan, x.batch, p(s)) })
	x.sizes(func(s *cSizes) error { return planSizes(x.plan, 0, p(s)) })
	return nil
}

// foreign passes handles of other kinds, and invalid handles.
func (x *fuzzCall) foreign() error {
	list := []uintptr{x.plan, x.batch, x.host.ctx, uintptr(x.byte()) << 4, uintptr(x.Uint64())}
	a, b := list[x.IntN(5)], list[x.IntN(5)]
	if a == x.plan && b == x.batch {
		return nil
	}
	if x.run(func() error { return attentionForward(a, b, p(&x.host.args)) }) == nil ||
		x.run(func() error { return requestWait(a) }) == nil {
		x.t.Errorf("handles %#x and %#x were accepted as a plan and a batch, or as a request", a, b)
	}
	x.run(func() error { return batchPositions(b, nil) })
	return nil
}
