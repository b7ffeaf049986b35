package main

import (
	"unsafe"

	"ulysses/sp"
)

func attentionForward(ph, bh uintptr, args unsafe.Pointer) error {
	const op = "ulysses_attention_forward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.forward(op, b, args) })
}

func (p *plan) forward(op string, both *batch, args unsafe.Pointer) error {
	c, r := p.ctx, reader{c: p.ctx, op: op}
	b, a, err := p.forwardArgs(&r, both, args)
	if err != nil {
		return err
	}
	r.workspace(&c.args.Workspace, a.workspace, a.workspace_bytes, p.unreserved(b))
	if err := r.finish(attentionSaved, p, both, 0, false); err != nil {
		return err
	}
	if err := c.beginOptions(op, p, b); err != nil {
		return err
	}
	return c.writeTag(c.enqueue(op, a.stream, func() error {
		if err := c.widenOptions(); err != nil {
			return err
		}
		return p.sp.Forward(c.stream, b, &c.args)
	}))
}

// forwardArgs returns the lengths and the arguments of a forward pass, and reads its tensors into
// c.args, without the workspace.
func (p *plan) forwardArgs(r *reader, both *batch, args unsafe.Pointer) (b *sp.Batch, a cAttentionArgs, err error) {
	if b, a, err = p.attentionArgs(r.op, both, args, true); err != nil {
		return b, a, err
	}
	r.c.requireEqualPresence("lse given", a.lse)
	r.attentionTensors(&a)
	r.optional(&r.c.args.LSE, "lse", a.lse, 3, true)
	r.options(p, b, a.sinks, a.alibi, a.block_mask, a.dropout_seed)
	r.saved(&r.c.args.Saved, a.saved, a.saved_bytes, true)
	return b, a, r.err
}

func attentionBackward(ph, bh uintptr, args, grads unsafe.Pointer) error {
	const op = "ulysses_attention_backward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.backward(op, b, args, grads) })
}

func (p *plan) backward(op string, both *batch, args, grads unsafe.Pointer) error {
	c, r := p.ctx, reader{c: p.ctx, op: op}
	b, a, err := p.backwardArgs(&r, both, args, grads)
	if err != nil {
		return err
	}
	r.workspace(&c.args.Workspace, a.workspace, a.workspace_bytes, p.unreserved(b))
	if err := r.finish(attentionSaved, p, both, 0, true); err != nil {
		return err
	}
	if err := c.beginOptions(op, p, b); err != nil {
		return err
	}
	return c.enqueue(op, a.stream, func() error {
		if err := c.widenOptions(); err != nil {
			return err
		}
		if err := p.sp.Backward(c.stream, b, &c.args, &c.grads); err != nil {
			return err
		}
		return c.endOptions()
	})
}

// backwardArgs is forwardArgs for a backward pass. It reads the gradients into c.grads.
func (p *plan) backwardArgs(r *reader, both *batch, args, grads unsafe.Pointer) (b *sp.Batch, a cAttentionArgs,
	err error) {
	if b, a, err = p.attentionArgs(r.op, both, args, true); err != nil {
		return b, a, err
	}
	g, err := readAttentionGrads(r.op, grads)
	if err != nil {
		return b, a, err
	}
	r.c.args = sp.Args{}
	r.attentionGradients(&g)
	r.options(p, b, a.sinks, a.alibi, a.block_mask, a.dropout_seed)
	r.optionGrads(p, g.dsinks, g.dalibi, false)
	r.saved(&r.c.args.Saved, a.saved, a.saved_bytes, false)
	return b, a, r.err
}

// attentionArgs returns the lengths and the arguments of a call on a plan of attention. device is
// true if the call runs the device's attention instead of the caller's.
func (p *plan) attentionArgs(op string, both *batch, args unsafe.Pointer, device bool) (b *sp.Batch, a cAttentionArgs,
	err error) {
	if b, err = p.attentionBatch(op, both, device); err == nil {
		a, err = readAttentionArgs(op, args)
	}
	if err == nil && !device && (a.sinks != nil || a.alibi != nil || a.block_mask != nil) {
		err = invalid("%s: sinks, alibi or block_mask is given, and the callback does not get it; leave them NULL, and pass them to the callback as user",
			op)
	}
	return b, a, err
}

// readAttentionArgs reads the arguments of attention.
func readAttentionArgs(op string, p unsafe.Pointer) (a cAttentionArgs, err error) {
	if a, err = readStruct[cAttentionArgs](op, "args", p); err != nil {
		return a, err
	}
	if a.reserved != 0 {
		return a, invalid("%s: args.reserved is %d; leave it 0", op, a.reserved)
	}
	return a, nil
}

// readAttentionGrads reads the gradients of attention.
func readAttentionGrads(op string, p unsafe.Pointer) (g cAttentionGrads, err error) {
	if g, err = readStruct[cAttentionGrads](op, "grads", p); err != nil {
		return g, err
	}
	if g.reserved != 0 {
		return g, invalid("%s: grads.reserved is %d; leave it 0", op, g.reserved)
	}
	return g, nil
}

// attentionTensors reads q, k, v and out of a forward pass into c.args.
func (r *reader) attentionTensors(a *cAttentionArgs) {
	x := &r.c.args
	r.get(&x.Q, "q", a.q, 4, false)
	r.get(&x.K, "k", a.k, 4, false)
	r.get(&x.V, "v", a.v, 4, false)
	r.get(&x.Out, "out", a.out, 4, true)
}

// attentionGradients reads dout, dq, dk and dv of a backward pass into c.grads.
func (r *reader) attentionGradients(g *cAttentionGrads) {
	x := &r.c.grads
	r.get(&x.DOut, "dout", g.dout, 4, false)
	r.get(&x.DQ, "dq", g.dq, 4, true)
	r.get(&x.DK, "dk", g.dk, 4, true)
	r.get(&x.DV, "dv", g.dv, 4, true)
}
