package main

import (
	"slices"
	"unsafe"

	"ulysses/internal/status"
)

func (x *fuzzCall) attention() error { return x.attend(false) }
func (x *fuzzCall) passes() error    { return x.attend(true) }

// attend calls attention, plain or in overlapped passes.
func (x *fuzzCall) attend(pass bool) error {
	x.loose = true
	size := x.sizes(func(s *cSizes) error { return planSizes(x.plan, x.batch, p(s)) })
	a := cAttentionArgs{struct_size: uint32(unsafe.Sizeof(cAttentionArgs{})), q: x.input(x.b, x.rows, x.heads, x.dim),
		k: x.input(x.b, x.kvRows, x.kvHeads, x.dim), v: x.input(x.b, x.kvRows, x.kvHeads, x.vDim),
		out: x.output(x.b, x.rows, x.heads, x.vDim)}
	if x.oneIn(3) {
		a.lse = x.output(x.b, x.rows, x.heads)
	}
	a.saved, a.saved_bytes = x.memory(size.saved)
	if a.workspace, a.workspace_bytes = x.memory(size.workspace); x.oneIn(2) {
		a.workspace, a.workspace_bytes = nil, 0 // use the context's own
	}
	x.corrupt(p(&a), 0, unsafe.Offsetof(a.q))
	err := x.run(func() error {
		if pass {
			return x.pass(func(out unsafe.Pointer) error { return forwardStart(x.plan, x.batch, p(&a), out) })
		}
		return attentionForward(x.plan, x.batch, p(&a))
	})
	if err != nil || x.flags == flagNoBackward || x.oneIn(4) {
		return err
	}
	checkOutputsApart(x.t, x.outputs, x.all)
	x.outputs, x.all = nil, nil
	g := cAttentionGrads{struct_size: uint32(unsafe.Sizeof(cAttentionGrads{})),
		dout: x.input(x.b, x.rows, x.heads, x.vDim), dq: x.output(x.b, x.rows, x.heads, x.dim),
		dk: x.output(x.b, x.kvRows, x.kvHeads, x.dim), dv: x.output(x.b, x.kvRows, x.kvHeads, x.vDim)}
	x.corrupt(p(&g), 0, unsafe.Offsetof(g.dout))
	return x.run(func() error {
		if pass {
			return x.pass(func(out unsafe.Pointer) error { return backwardStart(x.plan, x.batch, p(&a), p(&g), out) })
		}
		return attentionBackward(x.plan, x.batch, p(&a), p(&g))
	})
}

// pass runs an overlapped pass, with random steps before the ones in order.
func (x *fuzzCall) pass(start func(out unsafe.Pointer) error) error {
	var pass uintptr
	steps := [...]func(which int32) error{func(which int32) error { return passSend(pass, which) },
		func(which int32) error { return passWait(pass, which) }, func(int32) error { return passAttend(pass) }}
	try := func(step int, which int32) {
		if err := steps[step](which); err != nil {
			refused(x.t, "a step out of order", status.InvalidArgument, err)
		}
	}
	for canceled := x.oneIn(3); ; canceled = false {
		if err := start(p(&pass)); err != nil {
			return err
		}
		for range x.IntN(20) {
			try(x.IntN(3), x.Int32N(5))
		}
		if canceled && passCancel(pass) == nil {
			continue
		}
		for _, s := range [...][2]int{{0, tensorQ}, {0, tensorK}, {0, tensorV}, {2, 0}, {1, tensorV}, {1, tensorK},
			{1, tensorQ}} {
			try(s[0], int32(s[1]))
		}
		refused(x.t, "a pass that ended", status.InvalidArgument, passCancel(pass))
		return nil
	}
}

func (x *fuzzCall) reshard() error {
	n := 1 + x.IntN(4)
	x.loose = true
	in, out := make([]*cTensor, maxReshard+1), make([]*cTensor, maxReshard+1)
	shared := make([]int32, maxReshard+1)
	bytes := x.oneIn(3)
	for i := range n {
		heads, rows := x.heads, x.rows
		if x.oneIn(3) {
			heads, rows, shared[i] = x.kvHeads, x.kvRows, 1
		}
		in[i], out[i] = x.input(x.b, rows, heads, x.dim), x.output(x.b, rows, heads, x.dim)
		if bytes && in[i] != nil && out[i] != nil {
			in[i].code, in[i].bits, out[i].code, out[i].bits = 1, 8, 1, 8
		}
	}
	a := cReshardArgs{struct_size: uint32(unsafe.Sizeof(cReshardArgs{})), n: int32(x.bounded(int64(n), maxReshard+1)),
		in: &in[0], out: &out[0], shared: &shared[0]}
	x.corrupt(p(&a), 0, unsafe.Offsetof(a.n))
	toHeads := x.oneIn(2)
	if !toHeads && !bytes && x.oneIn(2) {
		a.sum_copies = int32(x.number(1))
	}
	var need uint64
	x.mustAccept(x.run(func() error { return reshardWorkspace(x.plan, x.batch, p(&a), int32(b2i(toHeads)), p(&need)) }))
	a.workspace, a.workspace_bytes = x.memory(need)
	if x.oneIn(2) {
		return x.run(func() error { return reshard(x.plan, x.batch, p(&a), toHeads) })
	}
	var q uintptr
	if err := x.run(func() error { return reshardStart(x.plan, x.batch, p(&a), toHeads, p(&q)) }); err != nil {
		return err
	}
	return x.run(func() error { return requestWait(q) })
}

func (x *fuzzCall) halo() error {
	n := x.number(1 + x.Int64N(4))
	if x.oneIn(2) {
		n = -n
	}
	a := cHaloArgs{struct_size: uint32(unsafe.Sizeof(cHaloArgs{})), n: n, x: x.input(x.b, x.rows, x.dim),
		halo: x.input(x.b, max(n, -n), x.dim)}
	x.corrupt(p(&a), 0, unsafe.Offsetof(a.n))
	var need uint64
	x.mustAccept(x.run(func() error { return haloWorkspace(x.host.ctx, x.batch, p(&a), p(&need)) }))
	a.workspace, a.workspace_bytes = x.memory(need)
	if x.oneIn(2) {
		x.outputs = x.all[1:]
		return x.run(func() error { return callHalo("ulysses_halo_forward", x.host.ctx, x.batch, p(&a), true) })
	}
	x.outputs = x.all[:1]
	return x.run(func() error { return callHalo("ulysses_halo_backward", x.host.ctx, x.batch, p(&a), false) })
}

func (x *fuzzCall) layer() error {
	if x.flags == flagCross { // a layer refuses the plan
		x.mayFail = true
	}
	x.hidden = 1 + x.Int64N(5)
	h, q, k, v := x.hidden, x.heads*x.dim, x.kvHeads*x.dim, x.kvHeads*x.vDim
	a := cAttentionLayerArgs{struct_size: uint32(unsafe.Sizeof(cAttentionLayerArgs{})), hidden: x.number(h),
		x: x.input(x.b, x.rows, h), wq: x.input(q, h), wk: x.input(k, h), wv: x.input(v, h),
		wo: x.input(h, x.heads*x.vDim), y: x.output(x.b, x.rows, h)}
	if x.oneIn(2) {
		a.bq, a.bk, a.bv, a.bo = x.input(q), x.input(k), x.input(v), x.input(h)
	}
	if x.oneIn(2) {
		a.q_norm, a.k_norm = x.input(x.dim), x.input(x.dim)
	}
	if half := x.dim / 2; half > 0 && x.oneIn(2) {
		a.cos, a.sin = x.input(x.b*x.rows, half), x.input(x.b*x.rows, half)
	}
	x.corrupt(p(&a), 0, unsafe.Offsetof(a.hidden))
	size := x.sizes(func(s *cSizes) error { return attentionLayerSizes(x.plan, x.batch, p(&a), p(s)) })
	a.saved, a.saved_bytes = x.memory(size.saved)
	a.workspace, a.workspace_bytes = x.memory(size.workspace)
	err := x.run(func() error { return attentionLayerForward(x.plan, x.batch, p(&a)) })
	if err != nil || x.flags == flagNoBackward {
		return err
	}
	checkOutputsApart(x.t, x.outputs, x.all)
	x.outputs = nil
	x.all = slices.DeleteFunc(x.all, func(t *cTensor) bool { return t == a.y })
	g := cAttentionLayerGrads{struct_size: uint32(unsafe.Sizeof(cAttentionLayerGrads{})), dy: x.input(x.b, x.rows, h),
		dx: x.output(x.b, x.rows, h), dwq: x.output(q, h), dwv: x.output(v, h), dwo: x.output(h, x.heads*x.vDim)}
	if a.bq != nil && x.oneIn(2) {
		g.dbq = x.output(q)
	}
	if a.q_norm != nil && x.oneIn(2) {
		g.dq_norm = x.output(x.dim)
	}
	x.corrupt(p(&g), 0, unsafe.Offsetof(g.dy))
	return x.run(func() error { return attentionLayerBackward(x.plan, x.batch, p(&a), p(&g)) })
}

// gdnPlan makes a plan of the gated delta rule of its own, for the same batch. It returns the batch
// and whether backward passes are possible.
func (x *fuzzCall) gdnPlan(flags int32, width int64) (plan uintptr, info cBatchInfo, keep bool, err error) {
	x.loose = true
	if x.flags == flagCross { // the batch has other lengths of keys
		x.mayFail = true
	}
	desc := cGDNDesc{struct_size: uint32(unsafe.Sizeof(cGDNDesc{})), dtype: typeF32, flags: flags,
		strategy: int32(x.IntN(3)), chunk: int32(x.bounded(16*x.Int64N(3), 64)), qk_heads: x.bounded(x.kvHeads, 64),
		v_heads: x.bounded(x.heads, 64), qk_dim: x.bounded(x.dim, 64), v_dim: x.bounded(x.vDim, 64),
		max_tokens: x.bounded(x.Int64N(9), 1<<10), conv_width: width}
	if keep = x.flags != flagNoBackward; !keep {
		desc.flags |= flagNoBackward
	}
	x.corrupt(p(&desc), 0, unsafe.Offsetof(desc.qk_heads))
	if err = x.run(func() error { return newGDNPlan(x.host.ctx, p(&desc), p(&plan)) }); err != nil {
		return plan, info, keep, err
	}
	info.struct_size = uint32(unsafe.Sizeof(info))
	must(x.t, batchQuery(x.batch, p(&info)))
	x.mayFail = x.mayFail || info.kv_rows != info.rows
	return plan, info, keep, nil
}

// gdnSizes is sizes for a plan of gdnPlan.
func (x *fuzzCall) gdnSizes(f func(size *cSizes) error) *cSizes {
	size := x.sizes(f)
	if size.workspace == 0 {
		x.mayFail = true // too large for the test, or the plan and the batch do not fit
	}
	return size
}

// gdn calls the gated delta rule.
func (x *fuzzCall) gdn() error {
	plan, info, keep, err := x.gdnPlan(flagStates, 0)
	if err != nil {
		return err
	}
	defer planDestroy(plan)
	size := x.gdnSizes(func(s *cSizes) error { return planSizes(plan, x.batch, p(s)) })
	keys, values, gates := [4]int64{x.b, x.rows, x.kvHeads, x.dim}, [4]int64{x.b, x.rows, x.heads, x.vDim},
		[3]int64{x.b, x.rows, x.heads}
	states := [4]int64{info.docs, x.heads, x.dim, x.vDim}
	a := cGDNArgs{struct_size: uint32(unsafe.Sizeof(cGDNArgs{})), q: x.input(keys[:]...), k: x.input(keys[:]...),
		v: x.input(values[:]...), g: x.input(gates[:]...), beta: x.input(gates[:]...),
		out: x.output(values[:]...)}
	x.loose = false
	if x.oneIn(2) {
		a.state_in = x.input(states[:]...)
	}
	if x.oneIn(2) {
		a.state_out = x.output(states[:]...)
	}
	a.saved, a.saved_bytes = x.memory(size.saved)
	if a.workspace, a.workspace_bytes = x.memory(size.workspace); x.oneIn(2) {
		a.workspace, a.workspace_bytes = nil, 0
	}
	x.corrupt(p(&a), 0, unsafe.Offsetof(a.q))
	err = x.run(func() error { return gdnForward(plan, x.batch, p(&a)) })
	if err != nil || !keep || x.oneIn(4) {
		return err
	}
	checkOutputsApart(x.t, x.outputs, x.all)
	x.outputs, x.all, x.loose = nil, nil, true
	g := cGDNGrads{struct_size: uint32(unsafe.Sizeof(cGDNGrads{})), dout: x.input(values[:]...),
		dq: x.output(keys[:]...), dk: x.output(keys[:]...), dv: x.output(values[:]...), dg: x.output(gates[:]...),
		dbeta: x.output(gates[:]...)}
	x.loose = false
	if a.state_in != nil && x.oneIn(2) {
		g.dstate_in = x.output(states[:]...)
	}
	if x.oneIn(2) {
		g.dstate_out = x.input(states[:]...)
	}
	x.corrupt(p(&g), 0, unsafe.Offsetof(g.dout))
	return x.run(func() error { return gdnBackward(plan, x.batch, p(&a), p(&g)) })
}

// gdnLayer calls a whole layer of the gated delta rule.
func (x *fuzzCall) gdnLayer() error {
	width, flags := x.bounded(1+x.Int64N(4), 64), int32(0)
	if x.oneIn(2) {
		flags = flagGatedNorm
	}
	plan, _, keep, err := x.gdnPlan(flags, width)
	if err != nil {
		return err
	}
	defer planDestroy(plan)
	size := x.gdnSizes(func(s *cSizes) error { return gdnLayerSizes(plan, x.batch, p(s)) })
	channels := 2*x.kvHeads*x.dim + x.heads*x.vDim
	qkv, gates, values := [3]int64{x.b, x.rows, channels}, [3]int64{x.b, x.rows, x.heads},
		[4]int64{x.b, x.rows, x.heads, x.vDim}
	a := cGDNLayerArgs{struct_size: uint32(unsafe.Sizeof(cGDNLayerArgs{})), qkv: x.input(qkv[:]...),
		a: x.input(gates[:]...), b: x.input(gates[:]...), out: x.output(values[:]...)}
	if flags != 0 {
		a.z = x.input(values[:]...)
	}
	x.loose = false
	a.conv, a.a_log, a.dt_bias = x.input(channels, width), x.input(x.heads), x.input(x.heads)
	if flags != 0 {
		a.norm = x.input(x.vDim)
	}
	a.saved, a.saved_bytes = x.memory(size.saved)
	if a.workspace, a.workspace_bytes = x.memory(size.workspace); x.oneIn(2) {
		a.workspace, a.workspace_bytes = nil, 0
	}
	x.corrupt(p(&a), 0, unsafe.Offsetof(a.qkv))
	err = x.run(func() error { return gdnLayerForward(plan, x.batch, p(&a)) })
	if err != nil || !keep || x.oneIn(4) {
		return err
	}
	checkOutputsApart(x.t, x.outputs, x.all)
	x.outputs, x.all, x.loose = nil, nil, true
	g := cGDNLayerGrads{struct_size: uint32(unsafe.Sizeof(cGDNLayerGrads{})), dout: x.input(values[:]...),
		dqkv: x.output(qkv[:]...), da: x.output(gates[:]...), db: x.output(gates[:]...)}
	if flags != 0 {
		g.dz = x.output(values[:]...)
	}
	x.loose = false
	if x.oneIn(2) {
		g.dconv, g.da_log, g.ddt_bias = x.output(channels, width), x.output(x.heads), x.output(x.heads)
	}
	x.corrupt(p(&g), 0, unsafe.Offsetof(g.dout))
	return x.run(func() error { return gdnLayerBackward(plan, x.batch, p(&a), p(&g)) })
}
