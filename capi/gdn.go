package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"ulysses/comm"
	"ulysses/gdn"
	"ulysses/sp"
	"ulysses/tensor"
)

// Limits of the gated delta rule. With them, the sizes of states in bytes cannot overflow.
const (
	maxGDNDim    = int64(1) << 12 // features of a head
	maxState     = int64(1) << 32 // elements of the state of a document, all heads together
	maxGDNWork   = int64(1) << 48 // tokens × heads × features
	maxConvWidth = int64(256)     // tokens
)

// readGDNDesc reads and checks a description of the gated delta rule and returns its layer.
func (c *context) readGDNDesc(op string, desc unsafe.Pointer) (l gdn.Layer, d cGDNDesc, err error) {
	if d, err = readStruct[cGDNDesc](op, "desc", desc); err != nil {
		return l, d, err
	}
	known := int32(flagL2Norm | flagStates | flagDeterministic | flagNoBackward | flagGatedNorm)
	dtype, ok := dtypes[uint16(d.dtype)]
	switch {
	case d.flags&^known != 0:
		return l, d, invalid("%s: flags is %#x; the gated delta rule has no flag %#x", op, d.flags, d.flags&^known)
	case min(d.qk_heads, d.v_heads, d.qk_dim, d.v_dim) < 1 || max(d.qk_heads, d.v_heads) > maxHeads ||
		max(d.qk_dim, d.v_dim) > maxGDNDim ||
		d.v_heads*d.qk_dim*d.v_dim > maxState:
		return l, d, invalid(
			"%s: qk_heads is %d, v_heads %d, qk_dim %d and v_dim %d; give 1 to %d heads, 1 to %d features of a head, and at most 2^32 elements of a state",
			op, d.qk_heads, d.v_heads,
			d.qk_dim, d.v_dim, maxHeads, maxGDNDim)
	case !ok || d.dtype>>16 != 0:
		return l, d, invalid("%s: dtype is %#x; use ULYSSES_F32 or ULYSSES_BF16", op, d.dtype)
	case d.strategy < gdnAuto || d.strategy > gdnState:
		return l, d, invalid("%s: strategy is %d; use ULYSSES_GDN_AUTO, ULYSSES_GDN_HEADS or ULYSSES_GDN_STATE", op,
			d.strategy)
	case d.chunk < 0 || d.chunk > 1<<16:
		return l, d, invalid("%s: chunk is %d; give 16 to 65536 tokens, or 0 for the device's default", op, d.chunk)
	case math.IsNaN(float64(d.scale)) || math.IsInf(float64(d.scale), 0):
		return l, d, invalid("%s: scale is %v; give a finite number, or 0 for 1/sqrt(qk_dim)", op, d.scale)
	case d.max_tokens < 0 || d.max_tokens > maxTokens ||
		d.max_tokens > maxGDNWork/max(d.qk_dim, d.v_dim)/max(d.v_heads, d.qk_heads):
		return l, d, invalid("%s: max_tokens is %d; give 0 or more, and a product with heads and features below 2^48",
			op, d.max_tokens)
	case d.conv_width < 0 || d.conv_width > maxConvWidth:
		return l, d, invalid("%s: conv_width is %d; give 1 to %d tokens, or 0 for no layer", op, d.conv_width,
			maxConvWidth)
	case d.flags&flagGatedNorm != 0 && d.conv_width == 0:
		return l, d, invalid(
			"%s: ULYSSES_GATED_NORM is set and conv_width is 0; the norm belongs to a layer: set conv_width, or leave the flag out",
			op)
	}
	info := c.dev.Info()
	switch {
	case !slices.Contains(info.Compute, dtype):
		return l, d, unsupported("%s: dtype is %v; the device %s computes in %v", op, dtype, info.Kind, info.Compute)
	case d.v_heads%d.qk_heads != 0:
		return l, d, invalid("%s: v_heads is %d and qk_heads %d; v_heads must be a multiple of qk_heads", op, d.v_heads,
			d.qk_heads)
	case d.chunk != 0 && d.chunk < 16:
		return l, d, invalid("%s: chunk is %d; give 16 tokens or more, or 0 for the device's default", op, d.chunk)
	case info.DeltaHead > 0 && max(d.qk_dim, d.v_dim) > info.DeltaHead:
		return l, d, unsupported(
			"%s: qk_dim is %d and v_dim %d; on the device %s the gated delta rule has heads of %d features at most: use smaller heads, or ULYSSES_CPU",
			op, d.qk_dim, d.v_dim,
			info.Kind, info.DeltaHead)
	}
	return gdn.Layer{KeyHeads: d.qk_heads, ValueHeads: d.v_heads, KeyDim: d.qk_dim, ValueDim: d.v_dim, DType: dtype,
		Scale: float64(d.scale), Chunk: int64(d.chunk), L2Norm: d.flags&flagL2Norm != 0,
		NoBackward: d.flags&flagNoBackward != 0, Deterministic: d.flags&flagDeterministic != 0, Tokens: d.max_tokens,
		ConvWidth: d.conv_width,
		GatedNorm: d.flags&flagGatedNorm != 0,
		Strategy:  [...]gdn.Strategy{gdnAuto: gdn.Auto, gdnHeads: gdn.Heads, gdnState: gdn.State}[d.strategy]}, d, nil
}

func newGDNPlan(h uintptr, desc, out unsafe.Pointer) error {
	const op = "ulysses_gdn_plan"
	return onContext(op, h, func(c *context) error { return c.createGDNPlan(op, desc, out) })
}

func (c *context) createGDNPlan(op string, desc, out unsafe.Pointer) error {
	l, d, err := c.readGDNDesc(op, desc)
	if err = c.agreeAlways(cmp.Or(clearOut(op, out), err)); err != nil {
		return err
	}
	if err := comm.Same(c.comm, op, append(intFields(
		namedInt{"dtype", int64(d.dtype)}, namedInt{"strategy", int64(d.strategy)}, namedInt{"chunk", int64(d.chunk)},
		namedInt{"qk_heads", d.qk_heads}, namedInt{"v_heads", d.v_heads}, namedInt{"qk_dim", d.qk_dim},
		namedInt{"v_dim", d.v_dim}, namedInt{"max_tokens", d.max_tokens}, namedInt{"conv_width", d.conv_width}),
		append(flagFields(d.flags),
			floatField("scale", d.scale))...)...); err != nil {
		return err
	}
	p := &plan{ctx: c, maxTokens: d.max_tokens, states: d.flags&flagStates != 0,
		identity: identity(2).withText(fmt.Sprint(d))}
	if p.gdn, err = gdn.NewPlan(c.dev, c.comm, l); err != nil {
		return err
	}
	// ulysses_seq_to_heads with this plan: value heads are heads, key heads are shared heads.
	p.sp, err = sp.NewPlan(c.dev, c.comm,
		sp.Layer{Heads: l.ValueHeads, KVHeads: l.KeyHeads, Dim: l.KeyDim, VDim: l.ValueDim, DType: l.DType,
			NoBackward: true})
	if err != nil {
		return err
	}
	p.gdn.Admit, p.sp.Admit = c.admit, c.admit
	return p.publish(op, out, p.gdn.Strategy().String(), p.gdn.String())
}

// gdnBatch returns the lengths of a collective call on a plan of the gated delta rule.
func (p *plan) gdnBatch(op string, b *batch) (*sp.Batch, error) {
	if err := p.checkIsGDN(op); err != nil {
		return nil, err
	}
	return p.batchOf(op, b)
}

// checkIsGDN returns an error for a plan of attention.
func (p *plan) checkIsGDN(op string) error {
	if p.gdn == nil {
		return invalid("%s: the plan is of attention; give a plan of ulysses_gdn_plan", op)
	}
	return nil
}

// gdnCommon reads the arguments of both passes: the incoming states and the memory.
func (r *reader) gdnCommon(p *plan, b *sp.Batch, a *cGDNArgs, forward bool) {
	x := &r.c.gdnArgs
	if a.reserved != 0 && r.err == nil {
		r.err = invalid("%s: args.reserved is %d; leave it 0", r.op, a.reserved)
	}
	r.states(p, &x.StateIn, "state_in", a.state_in, false)
	r.saved(&x.Saved, a.saved, a.saved_bytes, forward)
	r.workspace(&x.Workspace, a.workspace, a.workspace_bytes, p.unreserved(b))
}

// states reads the recurrent states of documents, or their gradients. They need ULYSSES_STATES.
func (r *reader) states(p *plan, dst *tensor.Tensor, name string, t *cTensor, out bool) {
	if t != nil && !p.states && r.err == nil {
		r.err = invalid(
			"%s: %s is given and the plan was created without ULYSSES_STATES; set the flag, or leave %[2]s NULL",
			r.op, name)
	}
	r.optional(dst, name, t, 4, out)
}

// gdnArgs returns the lengths and the arguments of a call on a plan of the gated delta rule.
func (p *plan) gdnArgs(op string, both *batch, args unsafe.Pointer) (b *sp.Batch, a cGDNArgs, err error) {
	if b, err = p.gdnBatch(op, both); err == nil {
		a, err = readStruct[cGDNArgs](op, "args", args)
	}
	return b, a, err
}

func gdnForward(ph, bh uintptr, args unsafe.Pointer) error {
	const op = "ulysses_gdn_forward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.gdnForward(op, b, args) })
}

func (p *plan) gdnForward(op string, both *batch, args unsafe.Pointer) error {
	c := p.ctx
	b, a, err := p.gdnArgs(op, both, args)
	if err != nil {
		return err
	}
	c.requireEqualPresence("state_in given", a.state_in)
	c.requireEqualPresence("state_out given", a.state_out)
	r := reader{c: c, op: op}
	x := &c.gdnArgs
	r.get(&x.Q, "q", a.q, 4, false)
	r.get(&x.K, "k", a.k, 4, false)
	r.get(&x.V, "v", a.v, 4, false)
	r.get(&x.G, "g", a.g, 3, false)
	r.get(&x.Beta, "beta", a.beta, 3, false)
	r.get(&x.Out, "out", a.out, 4, true)
	r.states(p, &x.StateOut, "state_out", a.state_out, true)
	r.gdnCommon(p, b, &a, true)
	if err := r.finish(gdnSaved, p, both, 0, false); err != nil {
		return err
	}
	return c.writeTag(c.enqueue(op, a.stream, func() error { return p.gdn.Forward(c.stream, b, x) }))
}

func gdnBackward(ph, bh uintptr, args, grads unsafe.Pointer) error {
	const op = "ulysses_gdn_backward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.gdnBackward(op, b, args, grads) })
}

func (p *plan) gdnBackward(op string, both *batch, args, grads unsafe.Pointer) error {
	c := p.ctx
	b, a, err := p.gdnArgs(op, both, args)
	if err != nil {
		return err
	}
	g, err := readStruct[cGDNGrads](op, "grads", grads)
	if err != nil {
		return err
	}
	if g.reserved != 0 {
		return invalid("%s: grads.reserved is %d; leave it 0", op, g.reserved)
	}
	c.requireEqualPresence("state_in given", a.state_in)
	c.requireEqualPresence("dstate_in given", g.dstate_in)
	c.requireEqualPresence("dstate_out given", g.dstate_out)
	r := reader{c: c, op: op}
	c.gdnArgs = gdn.Args{}
	x := &c.gdnGrads
	r.get(&x.DOut, "dout", g.dout, 4, false)
	r.get(&x.DQ, "dq", g.dq, 4, true)
	r.get(&x.DK, "dk", g.dk, 4, true)
	r.get(&x.DV, "dv", g.dv, 4, true)
	r.get(&x.DG, "dg", g.dg, 3, true)
	r.get(&x.DBeta, "dbeta", g.dbeta, 3, true)
	r.states(p, &x.DStateOut, "dstate_out", g.dstate_out, false)
	r.states(p, &x.DStateIn, "dstate_in", g.dstate_in, true)
	r.gdnCommon(p, b, &a, false)
	if err := r.finish(gdnSaved, p, both, 0, true); err != nil {
		return err
	}
	return c.enqueue(op, a.stream, func() error { return p.gdn.Backward(c.stream, b, &c.gdnArgs, x) })
}
