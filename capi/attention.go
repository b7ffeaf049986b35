package main

import (
	"unsafe"

	"ulysses/internal/notbuilt"
	"ulysses/sp"
	"ulysses/tensor"
)

// tensors reads what a call brings into places, in order, and stops at the first fault.
type tensors struct {
	c   *context
	op  string
	err error
}

// get reads one; out says that the call writes it.
func (r *tensors) get(dst *tensor.Tensor, name string, p *cTensor, axes int, out bool) {
	*dst = tensor.Tensor{}
	if r.err != nil {
		return
	}
	if *dst, r.err = r.c.tensorIn(r.op, name, p, axes); r.err == nil {
		r.c.note(name, *dst, out)
	}
}

// optional is get for what may be NULL.
func (r *tensors) optional(dst *tensor.Tensor, name string, p *cTensor, axes int, out bool) {
	*dst = tensor.Tensor{}
	if p != nil {
		r.get(dst, name, p, axes, out)
	}
}

// memory reads saved, and the workspace or the context's own.
func (r *tensors) memory(saved, workspace *tensor.Tensor, a *cAttentionArgs, need int64, savedIsOut bool) {
	r.saved(saved, a.saved, uint64(a.saved_bytes), savedIsOut)
	r.workspace(workspace, a.workspace, uint64(a.workspace_bytes), need)
}

func (r *tensors) saved(dst *tensor.Tensor, p unsafe.Pointer, bytes uint64, out bool) {
	*dst = tensor.Tensor{}
	if r.err == nil {
		if *dst, r.err = r.c.block(r.op, "saved", p, bytes); r.err == nil {
			r.c.note("saved", *dst, out)
			*dst, r.err = r.c.untagged(r.op, *dst)
		}
	}
}

func (r *tensors) workspace(dst *tensor.Tensor, p unsafe.Pointer, bytes uint64, need int64) {
	*dst = tensor.Tensor{}
	if r.err == nil {
		if *dst, r.err = r.c.workspace(r.op, p, bytes, need); r.err == nil {
			r.c.note("workspace", *dst, true)
		}
	}
}

// readArgs reads attention's arguments; what no plan can ask for yet is refused by name.
func readArgs(op string, p unsafe.Pointer) (a cAttentionArgs, err error) {
	if a, err = read[cAttentionArgs](op, "args", p); err != nil {
		return a, err
	}
	switch {
	case a.sinks != nil:
		return a, unbuilt("%s: sinks: %s", op, notbuilt.Sinks.Text("leave it NULL"))
	case a.alibi != nil:
		return a, unbuilt("%s: alibi: %s", op, notbuilt.ALiBi.Text("leave it NULL"))
	case a.block_mask != nil:
		return a, unbuilt("%s: block_mask: %s", op, notbuilt.BlockMasks.Text("leave it NULL"))
	case a.dropout_seed != 0:
		return a, unbuilt("%s: dropout_seed: %s", op, notbuilt.Dropout.Text("leave it 0"))
	case a.reserved != 0:
		return a, invalid("%s: args.reserved is %d: leave it 0", op, a.reserved)
	}
	return a, nil
}

// unreserved returns the bytes of workspace that plans and batches have not reserved for a call.
func (p *plan) unreserved(b *sp.Batch) int64 {
	if !p.ctx.hostOwns {
		return 0
	}
	return p.sizesOf(b).Workspace
}

func attentionForward(ph, bh uintptr, args unsafe.Pointer) error {
	const op = "ulysses_attention_forward"
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.forward(op, b, args) })
}

func (p *plan) forward(op string, whole *batch, args unsafe.Pointer) error {
	c := p.ctx
	b, err := p.attentionOf(op, whole, true)
	if err != nil {
		return err
	}
	a, err := readArgs(op, args)
	if err != nil {
		return err
	}
	c.mustGiven("lse given", a.lse)
	r := tensors{c: c, op: op}
	r.forward(&a)
	r.optional(&c.args.LSE, "lse", a.lse, 3, true)
	r.memory(&c.args.Saved, &c.args.Workspace, &a, p.unreserved(b), true)
	if r.err == nil {
		r.err = c.overlaps(op)
	}
	if r.err != nil {
		return r.err
	}
	if err := c.join(op, a.stream); err != nil {
		return err
	}
	c.saves(savesAttention, p, whole, 0)
	return c.seal(c.part(p.sp.Forward(c.stream, b, &c.args)))
}

func attentionBackward(ph, bh uintptr, args, grads unsafe.Pointer) error {
	const op = "ulysses_attention_backward"
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.backward(op, b, args, grads) })
}

func (p *plan) backward(op string, whole *batch, args, grads unsafe.Pointer) error {
	c := p.ctx
	b, err := p.attentionOf(op, whole, true)
	if err != nil {
		return err
	}
	a, err := readArgs(op, args)
	if err != nil {
		return err
	}
	g, err := readGrads(op, grads)
	if err != nil {
		return err
	}
	r := tensors{c: c, op: op}
	c.args = sp.Args{}
	r.backward(&g)
	r.memory(&c.args.Saved, &c.args.Workspace, &a, p.unreserved(b), false)
	if r.err == nil {
		r.err = c.overlaps(op)
	}
	c.saves(savesAttention, p, whole, 0)
	if r.err == nil {
		r.err = c.sealed(op)
	}
	if r.err != nil {
		return r.err
	}
	if err := c.join(op, a.stream); err != nil {
		return err
	}
	return c.part(p.sp.Backward(c.stream, b, &c.args, &c.grads))
}

// forward reads what a forward pass brings, backward what a backward pass does, into the context's
// arguments.
func (r *tensors) forward(a *cAttentionArgs) {
	x := &r.c.args
	r.get(&x.Q, "q", a.q, 4, false)
	r.get(&x.K, "k", a.k, 4, false)
	r.get(&x.V, "v", a.v, 4, false)
	r.get(&x.Out, "out", a.out, 4, true)
}

func (r *tensors) backward(g *cAttentionGrads) {
	x := &r.c.grads
	r.get(&x.DOut, "dout", g.dout, 4, false)
	r.get(&x.DQ, "dq", g.dq, 4, true)
	r.get(&x.DK, "dk", g.dk, 4, true)
	r.get(&x.DV, "dv", g.dv, 4, true)
}

func readGrads(op string, p unsafe.Pointer) (g cAttentionGrads, err error) {
	if g, err = read[cAttentionGrads](op, "grads", p); err != nil {
		return g, err
	}
	switch {
	case g.dsinks != nil:
		return g, unbuilt("%s: dsinks: %s", op, notbuilt.Sinks.Text("leave it NULL"))
	case g.reserved != 0:
		return g, invalid("%s: grads.reserved is %d: leave it 0", op, g.reserved)
	}
	return g, nil
}
