package main

import (
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"unsafe"

	"ulysses/internal/status"
)

// draws makes descriptors that are right but for a few faults: those that are wrong all over are
// refused at the first look.
type draws struct {
	*rand.Rand
	faults int // still to be made
	arena  []byte
	slot   int64
	loose  bool // tensors need not be dense
}

func (d *draws) byte() byte { return byte(d.Uint32()) }

// one reports true once in n draws.
func (d *draws) one(n int) bool { return d.IntN(n) == 0 }

// wrong says that something is to be wrong here.
func (d *draws) wrong() bool {
	if d.faults == 0 || !d.one(30) {
		return false
	}
	d.faults--
	return true
}

// number is the right one, or a fault.
func (d *draws) number(right int64) int64 {
	if !d.wrong() {
		return right
	}
	switch d.IntN(8) {
	case 0:
		return 0
	case 1:
		return right + 1
	case 2:
		return right - 1
	case 3:
		return -right
	case 4:
		return d.Int64N(32)
	case 5:
		return int64(1) << d.IntN(63)
	case 6:
		return -int64(1) << d.IntN(64)
	}
	return int64(d.Uint64())
}

// small is number kept within what a test can pay for, or far beyond what anyone can.
func (d *draws) small(right, most int64) int64 {
	if n := d.number(right); n <= most || n > 1<<44 {
		return n
	}
	return most
}

// put writes a few of a struct's bytes over with any others.
func (d *draws) put(p unsafe.Pointer, from, to uintptr) {
	if d.wrong() {
		for range 1 + d.IntN(3) {
			unsafe.Slice((*byte)(p), to)[from+uintptr(d.IntN(int(to-from)))] = d.byte()
		}
	}
}

// place is somewhere in the arena, with room for bytes behind it.
func (d *draws) place(bytes int64) unsafe.Pointer {
	const room = 1 << 20
	at := d.slot * room // apart, unless the bytes say otherwise
	d.slot++
	if d.wrong() {
		at = int64(d.byte()%64)*room + int64(d.byte())
	}
	if bytes > int64(len(d.arena))-at {
		at = 0
	}
	return unsafe.Pointer(&d.arena[at])
}

// drawn is a tensor's memory beyond the struct.
type drawn struct {
	t              cTensor
	shape, strides [12]int64
}

// tensor is nearly one of a shape. Its memory holds what it says, or it must be refused.
func (d *draws) tensor(shape ...int64) *cTensor {
	if d.wrong() {
		return nil
	}
	x := &drawn{t: cTensor{device: onCPU, code: 2, bits: 32, lanes: 1, ndim: int32(d.number(int64(len(shape)))), byte_offset: uint64(d.number(d.Int64N(3) * 4))}}
	x.t.shape, x.t.strides = &x.shape[0], &x.strides[0]
	step := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		x.shape[i], x.strides[i] = d.number(shape[i]), d.number(step)
		if step *= max(shape[i], 1); d.loose && d.one(4) {
			step += int64(d.IntN(3))
		}
	}
	if !d.loose && d.one(4) || d.wrong() {
		x.t.strides = nil
	}
	d.put(p(&x.t), unsafe.Offsetof(x.t.device), unsafe.Offsetof(x.t.ndim))
	d.put(p(&x.t), unsafe.Offsetof(x.t.code), unsafe.Offsetof(x.t.shape))
	if d.wrong() {
		x.t.shape = nil
	}
	reach := reach(x)
	x.t.data = d.place(reach)
	if reach > int64(len(d.arena)) || d.wrong() { // nobody has so much
		x.t.data = nil
	}
	return &x.t
}

// reach is the bytes that a tensor says it has behind data, much where that is beyond counting.
func reach(x *drawn) int64 {
	n, step := float64(8), 1.0
	for i := min(len(x.shape), max(0, int(x.t.ndim))) - 1; i >= 0; i-- {
		s := step
		if x.t.strides != nil {
			s = float64(x.strides[i])
		}
		n += max(0, float64(x.shape[i])) * max(0, s) * 8
		step *= max(1, float64(x.shape[i]))
	}
	return int64(min(n+float64(x.t.byte_offset), 1<<60))
}

// memory is plain bytes, nearly enough.
func (d *draws) memory(need uint64) (unsafe.Pointer, uint64) {
	if need == 0 && d.one(2) || d.wrong() {
		return nil, uint64(d.number(0))
	}
	bytes := uint64(d.number(int64(need)))
	if bytes > uint64(len(d.arena)) && bytes < 1<<48 {
		bytes = need
	}
	return d.place(int64(need)), bytes
}

// apartInMemory holds an accepted call to its word: what it wrote lay apart from all else.
func apartInMemory(t *testing.T, out, all []*cTensor) {
	t.Helper()
	owner := map[uintptr]int{}
	for i, x := range append(slices.Clone(out), all...) {
		if x == nil || i >= len(out) && slices.Contains(out, x) {
			continue
		}
		y := (*drawn)(unsafe.Pointer(x))
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

// Descriptors with any faults end in a status: never in a crash, and never in a panic that guarded
// had to catch. What is accepted keeps to the memory that it was given.
func FuzzDescriptors(f *testing.F) {
	for i := range byte(200) {
		f.Add(uint64(i), i, i/7%5)
	}
	arena, err := syscall.Mmap(-1, 0, 64<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	must(f, err)
	h := newHostOf(f, 1, 4, 2, 2, 4, 0)
	f.Fuzz(func(t *testing.T, seed uint64, which, faults byte) {
		x := fuzzed{flawed: faults%5 > 0, draws: &draws{Rand: rand.New(rand.NewPCG(seed, 1)), faults: int(faults % 5), arena: arena}, t: t, h: h}
		x.describe()
		defer planDestroy(x.plan)
		defer batchDestroy(x.batch)
		if x.plan == 0 || x.batch == 0 {
			x.plan, x.batch, x.flags = h.plan, h.batch, 0
			x.heads, x.kvHeads, x.dim, x.vDim, x.b, x.rows, x.kvRows = 2, 2, 4, 4, 1, 4, 4
		}
		calls := [...]func() error{x.attention, x.reshard, x.halo, x.layer, x.gdn, x.queries, x.foreign}
		if err := calls[int(which)%len(calls)](); err == nil {
			apartInMemory(t, x.out, x.all)
		} else if !x.flawed {
			t.Errorf("a call with nothing wrong was refused: %v", err)
		}
		// The context goes on, whatever it was asked.
		must(t, attentionForward(h.plan, h.batch, p(&h.args)))
	})
}

// fuzzed is one run: a plan and a batch, and a call with them.
type fuzzed struct {
	*draws
	t                                          *testing.T
	h                                          *host
	plan, batch                                uintptr
	heads, kvHeads, dim, vDim, b, rows, kvRows int64
	hidden                                     int64
	flags                                      int32
	flawed                                     bool // faults were to be made
	out, all                                   []*cTensor
}

// done is a call's error; a fault that had to be caught fails.
func (x *fuzzed) done(f func() error) error {
	err := guarded(f)
	if status.Of(err) == status.Internal {
		x.t.Fatal(err)
	}
	return err
}

func (x *fuzzed) in(shape ...int64) *cTensor {
	t := x.tensor(shape...)
	x.all = append(x.all, t)
	return t
}

func (x *fuzzed) to(shape ...int64) *cTensor {
	t := x.in(shape...)
	x.out = append(x.out, t)
	return t
}

// numbers is a list of n numbers, or fewer where nobody could have so many.
func (x *fuzzed) numbers(n int64, each func(i int64) int64) *int64 {
	if n < 1 || n > 1<<16 || x.wrong() {
		return nil
	}
	list := make([]int64, n)
	for i := range list {
		list[i] = x.number(each(int64(i)))
	}
	return &list[0]
}

func (x *fuzzed) describe() {
	x.kvHeads, x.dim, x.b, x.rows = 1+x.Int64N(3), 1+x.Int64N(9), 1+x.Int64N(3), 1+x.Int64N(7)
	x.heads, x.vDim, x.kvRows = x.kvHeads*(1+x.Int64N(3)), x.dim+x.Int64N(3), x.rows
	x.flags = []int32{0, flagCausal, flagWindow | flagCausal, flagCross, flagNoBackward}[x.IntN(5)]
	desc := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32, flags: x.flags, heads: x.small(x.heads, 64), kv_heads: x.small(x.kvHeads, 64),
		head_dim: x.small(x.dim, 256), v_dim: x.small(x.vDim, 256), max_tokens: x.small(x.Int64N(9), 1<<10)}
	if x.flags&flagWindow != 0 {
		desc.window_left = x.number(2)
	}
	x.put(p(&desc), 0, unsafe.Offsetof(desc.heads))
	x.made(x.done(func() error { return newPlan(x.h.ctx, p(&desc), p(&x.plan)) }))

	l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: x.small(x.b, 64), seq: x.small(x.rows, 64), rows: x.small(0, 64)}
	if x.one(3) {
		l.seq, l.rows = 0, x.rows
	}
	if x.flags == flagCross {
		x.kvRows = 1 + x.Int64N(5)
		l.kv_seq = x.small(x.kvRows, 64)
	}
	x.put(p(&l), 0, unsafe.Offsetof(l.batch))
	if x.one(2) {
		l.docs = x.small(x.b, 1<<14)
		l.cu_seqlens = x.numbers(l.docs+1, func(i int64) int64 { return i * x.rows })
		if x.flags == flagCross {
			l.kv_cu_seqlens = x.numbers(l.docs+1, func(i int64) int64 { return i * x.kvRows })
		}
	}
	if x.flags != flagCross && x.one(3) {
		l.positions = x.numbers(l.batch*(l.seq+l.rows), func(i int64) int64 { return i % x.rows })
	}
	x.made(x.done(func() error { return newBatch(x.h.ctx, p(&l), p(&x.batch)) }))
}

// made holds a description without faults to being accepted.
func (x *fuzzed) made(err error) {
	if err != nil && !x.flawed {
		x.t.Errorf("a description with nothing wrong was refused: %v", err)
	}
}

func (x *fuzzed) sizes(f func(size *cSizes) error) *cSizes {
	size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
	x.done(func() error { return f(&size) })
	if max(size.workspace, size.saved) > 1<<20 {
		size = cSizes{}
	}
	return &size
}

func (x *fuzzed) attention() error {
	x.loose = true
	size := x.sizes(func(s *cSizes) error { return planSizes(x.plan, x.batch, p(s)) })
	a := cAttentionArgs{struct_size: uint32(unsafe.Sizeof(cAttentionArgs{})), q: x.in(x.b, x.rows, x.heads, x.dim), k: x.in(x.b, x.kvRows, x.kvHeads, x.dim),
		v: x.in(x.b, x.kvRows, x.kvHeads, x.vDim), out: x.to(x.b, x.rows, x.heads, x.vDim)}
	if x.one(3) {
		a.lse = x.to(x.b, x.rows, x.heads)
	}
	a.saved, a.saved_bytes = x.memory(size.saved)
	if a.workspace, a.workspace_bytes = x.memory(size.workspace); x.one(2) {
		a.workspace, a.workspace_bytes = nil, 0 // the context's own
	}
	x.put(p(&a), 0, unsafe.Offsetof(a.q))
	err := x.done(func() error { return attentionForward(x.plan, x.batch, p(&a)) })
	if err != nil || x.flags == flagNoBackward || x.one(4) {
		return err
	}
	apartInMemory(x.t, x.out, x.all)
	x.out, x.all = nil, nil
	g := cAttentionGrads{struct_size: uint32(unsafe.Sizeof(cAttentionGrads{})), dout: x.in(x.b, x.rows, x.heads, x.vDim), dq: x.to(x.b, x.rows, x.heads, x.dim),
		dk: x.to(x.b, x.kvRows, x.kvHeads, x.dim), dv: x.to(x.b, x.kvRows, x.kvHeads, x.vDim)}
	x.put(p(&g), 0, unsafe.Offsetof(g.dout))
	return x.done(func() error { return attentionBackward(x.plan, x.batch, p(&a), p(&g)) })
}

func (x *fuzzed) reshard() error {
	n := 1 + x.IntN(4)
	x.loose = true
	in, out := make([]*cTensor, maxReshard+1), make([]*cTensor, maxReshard+1)
	shared := make([]int32, maxReshard+1)
	bytes := x.one(3)
	for i := range n {
		heads, rows := x.heads, x.rows
		if x.one(3) {
			heads, rows, shared[i] = x.kvHeads, x.kvRows, 1
		}
		in[i], out[i] = x.in(x.b, rows, heads, x.dim), x.to(x.b, rows, heads, x.dim)
		if bytes && in[i] != nil && out[i] != nil {
			in[i].code, in[i].bits, out[i].code, out[i].bits = 1, 8, 1, 8
		}
	}
	a := cReshardArgs{struct_size: uint32(unsafe.Sizeof(cReshardArgs{})), n: int32(x.small(int64(n), maxReshard+1)), in: &in[0], out: &out[0], shared: &shared[0]}
	x.put(p(&a), 0, unsafe.Offsetof(a.n))
	toHeads := x.one(2)
	if !toHeads && !bytes && x.one(2) {
		a.sum_copies = int32(x.number(1))
	}
	var need uint64
	x.made(x.done(func() error { return reshardWorkspace(x.plan, x.batch, p(&a), toHeads, p(&need)) }))
	a.workspace, a.workspace_bytes = x.memory(need)
	if x.one(2) {
		return x.done(func() error { return reshard(x.plan, x.batch, p(&a), toHeads) })
	}
	var q uintptr
	if err := x.done(func() error { return reshardStart(x.plan, x.batch, p(&a), toHeads, p(&q)) }); err != nil {
		return err
	}
	return x.done(func() error { return requestWait(q) })
}

func (x *fuzzed) halo() error {
	n := x.number(1 + x.Int64N(4))
	if x.one(2) {
		n = -n
	}
	a := cHaloArgs{struct_size: uint32(unsafe.Sizeof(cHaloArgs{})), n: n, x: x.in(x.b, x.rows, x.dim), halo: x.in(x.b, max(n, -n), x.dim)}
	x.put(p(&a), 0, unsafe.Offsetof(a.n))
	var need uint64
	x.made(x.done(func() error { return haloWorkspace(x.h.ctx, x.batch, p(&a), p(&need)) }))
	a.workspace, a.workspace_bytes = x.memory(need)
	if x.one(2) {
		x.out = x.all[1:]
		return x.done(func() error { return callHalo("ulysses_halo_forward", x.h.ctx, x.batch, p(&a), true) })
	}
	x.out = x.all[:1]
	return x.done(func() error { return callHalo("ulysses_halo_backward", x.h.ctx, x.batch, p(&a), false) })
}

func (x *fuzzed) layer() error {
	if x.flags == flagCross { // refused, and nothing else of it is looked at
		x.flawed = true
	}
	x.hidden = 1 + x.Int64N(5)
	h, q, k, v := x.hidden, x.heads*x.dim, x.kvHeads*x.dim, x.kvHeads*x.vDim
	a := cAttentionLayerArgs{struct_size: uint32(unsafe.Sizeof(cAttentionLayerArgs{})), hidden: x.number(h), x: x.in(x.b, x.rows, h), wq: x.in(q, h), wk: x.in(k, h), wv: x.in(v, h),
		wo: x.in(h, x.heads*x.vDim), y: x.to(x.b, x.rows, h)}
	if x.one(2) {
		a.bq, a.bk, a.bv, a.bo = x.in(q), x.in(k), x.in(v), x.in(h)
	}
	if x.one(2) {
		a.q_norm, a.k_norm = x.in(x.dim), x.in(x.dim)
	}
	if half := x.dim / 2; half > 0 && x.one(2) {
		a.cos, a.sin = x.in(x.b*x.rows, half), x.in(x.b*x.rows, half)
	}
	x.put(p(&a), 0, unsafe.Offsetof(a.hidden))
	size := x.sizes(func(s *cSizes) error { return attentionLayerSizes(x.plan, x.batch, p(&a), p(s)) })
	a.saved, a.saved_bytes = x.memory(size.saved)
	a.workspace, a.workspace_bytes = x.memory(size.workspace)
	err := x.done(func() error { return attentionLayerForward(x.plan, x.batch, p(&a)) })
	if err != nil || x.flags == flagNoBackward {
		return err
	}
	apartInMemory(x.t, x.out, x.all)
	x.out = nil
	x.all = slices.DeleteFunc(x.all, func(t *cTensor) bool { return t == a.y })
	g := cAttentionLayerGrads{struct_size: uint32(unsafe.Sizeof(cAttentionLayerGrads{})), dy: x.in(x.b, x.rows, h), dx: x.to(x.b, x.rows, h), dwq: x.to(q, h), dwv: x.to(v, h), dwo: x.to(h, x.heads*x.vDim)}
	if a.bq != nil && x.one(2) {
		g.dbq = x.to(q)
	}
	if a.q_norm != nil && x.one(2) {
		g.dq_norm = x.to(x.dim)
	}
	x.put(p(&g), 0, unsafe.Offsetof(g.dy))
	return x.done(func() error { return attentionLayerBackward(x.plan, x.batch, p(&a), p(&g)) })
}

// gdn is the gated delta rule on a plan of its own; the batch is of attention too.
func (x *fuzzed) gdn() error {
	x.loose = true
	if x.flags == flagCross { // keys of their own
		x.flawed = true
	}
	keep := x.flags != flagNoBackward
	desc := cGDNDesc{struct_size: uint32(unsafe.Sizeof(cGDNDesc{})), dtype: typeF32, flags: flagStates, strategy: int32(x.IntN(3)), chunk: int32(x.small(16*x.Int64N(3), 64)), qk_heads: x.small(x.kvHeads, 64),
		v_heads: x.small(x.heads, 64), qk_dim: x.small(x.dim, 64), v_dim: x.small(x.vDim, 64), max_tokens: x.small(x.Int64N(9), 1<<10)}
	if !keep {
		desc.flags |= flagNoBackward
	}
	x.put(p(&desc), 0, unsafe.Offsetof(desc.qk_heads))
	var plan uintptr
	if err := x.done(func() error { return newGDNPlan(x.h.ctx, p(&desc), p(&plan)) }); err != nil {
		return err
	}
	defer planDestroy(plan)
	info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
	must(x.t, batchQuery(x.batch, p(&info)))
	x.flawed = x.flawed || info.kv_rows != info.rows
	size := x.sizes(func(s *cSizes) error { return planSizes(plan, x.batch, p(s)) })
	if size.workspace == 0 {
		x.flawed = true // it does not fit in here, or not together
	}
	keys, values, gates := [4]int64{x.b, x.rows, x.kvHeads, x.dim}, [4]int64{x.b, x.rows, x.heads, x.vDim}, [3]int64{x.b, x.rows, x.heads}
	states := [4]int64{info.docs, x.heads, x.dim, x.vDim}
	a := cGDNArgs{struct_size: uint32(unsafe.Sizeof(cGDNArgs{})), q: x.in(keys[:]...), k: x.in(keys[:]...), v: x.in(values[:]...), g: x.in(gates[:]...), beta: x.in(gates[:]...),
		out: x.to(values[:]...)}
	x.loose = false
	if x.one(2) {
		a.state_in = x.in(states[:]...)
	}
	if x.one(2) {
		a.state_out = x.to(states[:]...)
	}
	a.saved, a.saved_bytes = x.memory(size.saved)
	if a.workspace, a.workspace_bytes = x.memory(size.workspace); x.one(2) {
		a.workspace, a.workspace_bytes = nil, 0
	}
	x.put(p(&a), 0, unsafe.Offsetof(a.q))
	err := x.done(func() error { return gdnForward(plan, x.batch, p(&a)) })
	if err != nil || !keep || x.one(4) {
		return err
	}
	apartInMemory(x.t, x.out, x.all)
	x.out, x.all, x.loose = nil, nil, true
	g := cGDNGrads{struct_size: uint32(unsafe.Sizeof(cGDNGrads{})), dout: x.in(values[:]...), dq: x.to(keys[:]...), dk: x.to(keys[:]...), dv: x.to(values[:]...), dg: x.to(gates[:]...),
		dbeta: x.to(gates[:]...)}
	x.loose = false
	if a.state_in != nil && x.one(2) {
		g.dstate_in = x.to(states[:]...)
	}
	if x.one(2) {
		g.dstate_out = x.in(states[:]...)
	}
	x.put(p(&g), 0, unsafe.Offsetof(g.dout))
	return x.done(func() error { return gdnBackward(plan, x.batch, p(&a), p(&g)) })
}

// queries asks for what takes no tensors.
func (x *fuzzed) queries() error {
	info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
	x.put(p(&info), 0, 4)
	// a larger struct would be the caller's lie
	info.struct_size = min(info.struct_size, uint32(unsafe.Sizeof(cBatchInfo{})))
	if x.done(func() error { return batchQuery(x.batch, p(&info)) }) == nil && info.struct_size == uint32(unsafe.Sizeof(info)) {
		positions := make([]int64, max(1, info.rows*64))
		x.made(x.done(func() error { return batchPositions(x.batch, p(&positions[0])) }))
	}
	sum, count, mean := x.Float64(), x.number(3), 0.0
	x.made(x.done(func() error { return lossReduce(x.h.ctx, p(&sum), p(&count), p(&mean)) }))
	x.sizes(func(s *cSizes) error { return localSizesQuery(x.plan, x.batch, p(s)) })
	x.sizes(func(s *cSizes) error { return planSizes(x.plan, 0, p(s)) })
	return nil
}

// foreign passes handles where others belong.
func (x *fuzzed) foreign() error {
	list := []uintptr{x.plan, x.batch, x.h.ctx, uintptr(x.byte()) << 4, uintptr(x.Uint64())}
	a, b := list[x.IntN(5)], list[x.IntN(5)]
	if a == x.plan && b == x.batch {
		return nil
	}
	if x.done(func() error { return attentionForward(a, b, p(&x.h.args)) }) == nil || x.done(func() error { return requestWait(a) }) == nil {
		x.t.Errorf("handles %#x and %#x were taken for a plan and a batch, or a request", a, b)
	}
	x.done(func() error { return batchPositions(b, nil) })
	return nil
}
