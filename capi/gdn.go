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

// Limits beyond attention's keep states of all documents and chunks far below 2^63 bytes.
const (
	maxDelta     = int64(1) << 12 // features of a head
	maxState     = int64(1) << 32 // elements of a document's state, over all heads
	maxDeltaWork = int64(1) << 48 // tokens × heads × features
)

// describeGDN checks a description of the gated delta rule and makes it a layer.
func (c *context) describeGDN(op string, desc unsafe.Pointer) (l gdn.Layer, d cGDNDesc, err error) {
	if d, err = read[cGDNDesc](op, "desc", desc); err != nil {
		return l, d, err
	}
	known := int32(flagL2Norm | flagStates | flagDeterministic | flagNoBackward)
	dtype, ok := dtypes[uint16(d.dtype)]
	switch {
	case d.flags&^known != 0:
		return l, d, invalid("%s: flags %#x: the gated delta rule does not know %#x", op, d.flags, d.flags&^known)
	case min(d.qk_heads, d.v_heads, d.qk_dim, d.v_dim) < 1 || max(d.qk_heads, d.v_heads) > maxHeads || max(d.qk_dim, d.v_dim) > maxDelta ||
		d.v_heads*d.qk_dim*d.v_dim > maxState:
		return l, d, invalid("%s: qk_heads %d, v_heads %d, qk_dim %d, v_dim %d: 1 to %d heads, 1 to %d features of a head, and 2^32 elements of a state at most", op, d.qk_heads, d.v_heads,
			d.qk_dim, d.v_dim, maxHeads, maxDelta)
	case !ok || d.dtype>>16 != 0:
		return l, d, invalid("%s: dtype %#x: use ULYSSES_F32 or ULYSSES_BF16", op, d.dtype)
	case d.strategy < gdnAuto || d.strategy > gdnState:
		return l, d, invalid("%s: strategy %d: use ULYSSES_GDN_AUTO, ULYSSES_GDN_HEADS or ULYSSES_GDN_STATE", op, d.strategy)
	case d.chunk < 0 || d.chunk > 1<<16:
		return l, d, invalid("%s: chunk %d: 16 to 2^16 tokens, or 0 for the device's choice", op, d.chunk)
	case math.IsNaN(float64(d.scale)) || math.IsInf(float64(d.scale), 0):
		return l, d, invalid("%s: scale %v: a finite number, or 0 for 1/sqrt(qk_dim)", op, d.scale)
	case d.max_tokens < 0 || d.max_tokens > maxTokens || d.max_tokens > maxDeltaWork/max(d.qk_dim, d.v_dim)/max(d.v_heads, d.qk_heads):
		return l, d, invalid("%s: max_tokens %d: 0 or more, and times heads and features below 2^48", op, d.max_tokens)
	}
	info := c.dev.Info()
	switch {
	case !slices.Contains(info.Compute, dtype):
		return l, d, unbuilt("%s: dtype is %v: the device %s computes in %v: use one of these", op, dtype, info.Kind, info.Compute)
	case d.v_heads%d.qk_heads != 0:
		return l, d, invalid("%s: v_heads is %d and qk_heads %d: v_heads must be a multiple of qk_heads", op, d.v_heads, d.qk_heads)
	case d.chunk != 0 && d.chunk < 16:
		return l, d, invalid("%s: chunk is %d: give 16 or more, or 0 for the device's choice", op, d.chunk)
	case info.DeltaHead > 0 && max(d.qk_dim, d.v_dim) > info.DeltaHead:
		return l, d, unbuilt("%s: qk_dim is %d and v_dim %d: the device %s has a gated delta rule for heads of %d features at most: use narrower heads, or ULYSSES_CPU", op, d.qk_dim, d.v_dim,
			info.Kind, info.DeltaHead)
	}
	return gdn.Layer{KeyHeads: d.qk_heads, ValueHeads: d.v_heads, KeyDim: d.qk_dim, ValueDim: d.v_dim, DType: dtype, Scale: float64(d.scale), Chunk: int64(d.chunk),
		L2Norm: d.flags&flagL2Norm != 0, NoBackward: d.flags&flagNoBackward != 0, Tokens: d.max_tokens,
		Strategy: [...]gdn.Strategy{gdnAuto: gdn.Auto, gdnHeads: gdn.Heads, gdnState: gdn.State}[d.strategy]}, d, nil
}

func newGDNPlan(h uintptr, desc, out unsafe.Pointer) error {
	const op = "ulysses_gdn_plan"
	c, err := togetherOn(op, h)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return c.makeGDNPlan(op, desc, out) })
}

func (c *context) makeGDNPlan(op string, desc, out unsafe.Pointer) error {
	l, d, err := c.describeGDN(op, desc)
	if err = c.settle(cmp.Or(cleared(op, out), err)); err != nil {
		return err
	}
	if err := comm.Same(c.comm, op, append(integers(
		named{"dtype", int64(d.dtype)}, named{"strategy", int64(d.strategy)}, named{"chunk", int64(d.chunk)}, named{"qk_heads", d.qk_heads},
		named{"v_heads", d.v_heads}, named{"qk_dim", d.qk_dim}, named{"v_dim", d.v_dim}, named{"max_tokens", d.max_tokens}), append(flagFields(d.flags), real("scale", d.scale))...)...); err != nil {
		return err
	}
	p := &plan{ctx: c, max: d.max_tokens, states: d.flags&flagStates != 0, identity: identity(2).withText(fmt.Sprint(d))}
	if p.gdn, err = gdn.NewPlan(c.dev, c.comm, l); err != nil {
		return err
	}
	// Reshards of such a plan cut heads as the plan does.
	p.sp, err = sp.NewPlan(c.dev, c.comm, sp.Layer{Heads: l.ValueHeads, KVHeads: l.KeyHeads, Dim: l.KeyDim, VDim: l.ValueDim, DType: l.DType, NoBackward: true})
	if err != nil {
		return err
	}
	p.gdn.Admit, p.sp.Admit = c.admit, c.admit
	return p.admit(op, out, p.gdn.Strategy().String(), p.gdn.String())
}

// deltaOf returns the batch of a collective call on a plan of the gated delta rule.
func (p *plan) deltaOf(op string, b *batch) (*sp.Batch, error) {
	if p.gdn == nil {
		return nil, invalid("%s: the plan is of attention: give one of ulysses_gdn_plan", op)
	}
	return p.batchOf(op, b)
}

// gdnCommon reads what both passes have in common: states and memory.
func (r *tensors) gdnCommon(p *plan, b *sp.Batch, a *cGDNArgs, forward bool) {
	x := &r.c.gdnArgs
	if a.reserved != 0 && r.err == nil {
		r.err = invalid("%s: args.reserved is %d: leave it 0", r.op, a.reserved)
	}
	r.states(p, &x.StateIn, "state_in", a.state_in, false)
	r.saved(&x.Saved, a.saved, uint64(a.saved_bytes), forward)
	r.workspace(&x.Workspace, a.workspace, uint64(a.workspace_bytes), p.unreserved(b))
}

// states reads states of documents, which a plan must have been told of.
func (r *tensors) states(p *plan, dst *tensor.Tensor, name string, t *cTensor, out bool) {
	if t != nil && !p.states && r.err == nil {
		r.err = invalid("%s: %s is given and the plan was made without ULYSSES_STATES: set the flag, or leave it NULL", r.op, name)
	}
	r.optional(dst, name, t, 4, out)
}

func gdnForward(ph, bh uintptr, args unsafe.Pointer) error {
	const op = "ulysses_gdn_forward"
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.deltaForward(op, b, args) })
}

func (p *plan) deltaForward(op string, whole *batch, args unsafe.Pointer) error {
	c := p.ctx
	b, err := p.deltaOf(op, whole)
	if err != nil {
		return err
	}
	a, err := read[cGDNArgs](op, "args", args)
	if err != nil {
		return err
	}
	c.mustGiven("state_in given", a.state_in)
	c.mustGiven("state_out given", a.state_out)
	r := tensors{c: c, op: op}
	x := &c.gdnArgs
	r.get(&x.Q, "q", a.q, 4, false)
	r.get(&x.K, "k", a.k, 4, false)
	r.get(&x.V, "v", a.v, 4, false)
	r.get(&x.G, "g", a.g, 3, false)
	r.get(&x.Beta, "beta", a.beta, 3, false)
	r.get(&x.Out, "out", a.out, 4, true)
	r.states(p, &x.StateOut, "state_out", a.state_out, true)
	r.gdnCommon(p, b, &a, true)
	if r.err == nil {
		r.err = c.overlaps(op)
	}
	if r.err != nil {
		return r.err
	}
	if err := c.join(op, a.stream); err != nil {
		return err
	}
	c.saves(savesDelta, p, whole, 0)
	return c.seal(c.part(p.gdn.Forward(c.stream, b, x)))
}

func gdnBackward(ph, bh uintptr, args, grads unsafe.Pointer) error {
	const op = "ulysses_gdn_backward"
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.deltaBackward(op, b, args, grads) })
}

func (p *plan) deltaBackward(op string, whole *batch, args, grads unsafe.Pointer) error {
	c := p.ctx
	b, err := p.deltaOf(op, whole)
	if err != nil {
		return err
	}
	a, err := read[cGDNArgs](op, "args", args)
	if err != nil {
		return err
	}
	g, err := read[cGDNGrads](op, "grads", grads)
	if err != nil {
		return err
	}
	if g.reserved != 0 {
		return invalid("%s: grads.reserved is %d: leave it 0", op, g.reserved)
	}
	c.mustGiven("state_in given", a.state_in)
	c.mustGiven("dstate_in given", g.dstate_in)
	c.mustGiven("dstate_out given", g.dstate_out)
	r := tensors{c: c, op: op}
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
	if r.err == nil {
		r.err = c.overlaps(op)
	}
	c.saves(savesDelta, p, whole, 0)
	if r.err == nil {
		r.err = c.sealed(op)
	}
	if r.err != nil {
		return r.err
	}
	if err := c.join(op, a.stream); err != nil {
		return err
	}
	return c.part(p.gdn.Backward(c.stream, b, &c.gdnArgs, x))
}
