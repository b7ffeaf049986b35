package main

import (
	"unsafe"

	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

func attentionLayerBackward(ph, bh uintptr, args, grads unsafe.Pointer) error {
	const op = layerOp + "_backward"
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.backwardLayer(op, b, args, grads) })
}

func (p *plan) backwardLayer(op string, whole *batch, args, grads unsafe.Pointer) error {
	c := p.ctx
	b, err := p.attentionOf(op, whole, true)
	if err != nil {
		return err
	}
	a, x, err := c.readLayer(op, p, b, args)
	if err != nil {
		return err
	}
	g, err := read[cAttentionLayerGrads](op, "grads", grads)
	if err != nil {
		return err
	}
	if g.reserved != 0 {
		return invalid("%s: grads.reserved is %d: leave it 0", op, g.reserved)
	}
	if x.l.NoBackward || a.saved == nil {
		return invalid("%s: the layer was planned, or its forward called, without a backward: keep what it saves", op)
	}
	size := layerSizes(p, b, x.kind)
	r := tensors{c: c, op: op}
	x.tokensOf(&r, &x.x, "x", a.x, false)
	x.weights(&r, &a)
	x.tokensOf(&r, &x.dy, "dy", g.dy, false)
	x.tokensOf(&r, &x.dx, "dx", g.dx, true)
	x.weightGrads(&r, &g)
	r.saved(&x.saved, a.saved, uint64(a.saved_bytes), false)
	r.workspace(&x.workspace, a.workspace, uint64(a.workspace_bytes), size.Workspace)
	if r.err == nil {
		r.err = c.overlaps(op)
	}
	c.saves(savesLayer, p, whole, x.kind.id())
	if r.err == nil {
		r.err = c.sealed(op)
	}
	if r.err != nil {
		return r.err
	}
	if err := sizeOf(op, "workspace", x.workspace, size.Workspace); err != nil {
		return err
	}
	if err := c.savedSize(op, x.saved, size.Saved); err != nil {
		return err
	}
	if err := c.join(op, a.stream); err != nil {
		return err
	}
	return c.part(c.layerBackward(p, b, x))
}

// weightGrads reads the gradients that are wanted, each F32 and of its weight's shape.
func (x *layerPlaces) weightGrads(r *tensors, g *cAttentionLayerGrads) {
	for _, w := range [...]struct {
		dst    *tensor.Tensor
		name   string
		p      *cTensor
		weight *tensor.Tensor
	}{{&x.dwq, "dwq", g.dwq, &x.wq}, {&x.dwk, "dwk", g.dwk, &x.wk}, {&x.dwv, "dwv", g.dwv, &x.wv}, {&x.dwo, "dwo", g.dwo, &x.wo},
		{&x.dbq, "dbq", g.dbq, &x.bq}, {&x.dbk, "dbk", g.dbk, &x.bk}, {&x.dbv, "dbv", g.dbv, &x.bv}, {&x.dbo, "dbo", g.dbo, &x.bo},
		{&x.dqNorm, "dq_norm", g.dq_norm, &x.qNorm}, {&x.dkNorm, "dk_norm", g.dk_norm, &x.kNorm}} {
		*w.dst = tensor.Tensor{}
		if w.p == nil || r.err != nil {
			continue
		}
		if w.weight.IsNil() {
			r.err = invalid("%s: %s is given and the layer has no such weight", r.op, w.name)
			return
		}
		r.get(w.dst, w.name, w.p, 0, true)
		r.dense(w.name, *w.dst, tensor.F32, w.weight.Shape[:w.weight.NDim]...)
	}
}

// layerBackward is layerForward in mirror order.
func (c *context) layerBackward(p *plan, b *sp.Batch, x *layerPlaces) error {
	if err := c.agree(nil); err != nil { // before gradients of weights are added to
		return err
	}
	align := c.dev.Info().Align
	ws := device.Allocator{Mem: x.workspace, Align: align}
	keep := device.Allocator{Mem: x.saved, Align: align}
	attention := p.sp.Sizes(b)
	c.args = sp.Args{Saved: x.keep(&keep, attention.Saved)}
	x.project(&ws)
	x.back(&ws)
	c.args.Workspace = ws.Rest()

	steps := lazy{c: c, x: x}
	steps.weight(x.dwo, x.dbo, x.dy, x.mixed)
	steps.gemm(x.dmixed, x.dy, x.wo, tensor.Tensor{}, false)
	if steps.err != nil {
		return steps.err
	}
	c.grads = sp.Grads{DOut: x.batched(x.dmixed, x.l.Heads), DQ: x.batched(x.q, x.l.Heads), DK: x.batched(x.k, x.l.KVHeads), DV: x.batched(x.v, x.l.KVHeads)}
	if err := p.sp.Backward(c.stream, b, &c.args, &c.grads); err != nil {
		return err
	}
	steps.rotate(true)
	if x.kind.norm {
		steps.normBack(x.q.Split(1, x.l.Heads), x.rawQ.Split(1, x.l.Heads), x.qNorm, x.qRStd, x.dqNorm)
		steps.normBack(x.k.Split(1, x.l.KVHeads), x.rawK.Split(1, x.l.KVHeads), x.kNorm, x.kRStd, x.dkNorm)
	}
	steps.weight(x.dwq, x.dbq, x.q, x.x)
	steps.weight(x.dwk, x.dbk, x.k, x.x)
	steps.weight(x.dwv, x.dbv, x.v, x.x)
	dx := x.dx
	if !x.wide.IsNil() { // three products are added up in F32
		dx = x.wide
	}
	steps.gemm(dx, x.q, x.wq, tensor.Tensor{}, false)
	steps.gemm(dx, x.k, x.wk, tensor.Tensor{}, true)
	steps.gemm(dx, x.v, x.wv, tensor.Tensor{}, true)
	if steps.err == nil && !x.wide.IsNil() {
		steps.err = c.dev.Copy(c.stream, x.dx, x.wide)
	}
	return steps.err
}

// lazy does nothing after the first error.
type lazy struct {
	c   *context
	x   *layerPlaces
	err error
}

func (s *lazy) gemm(c, a, b, bias tensor.Tensor, add bool) {
	if s.err == nil {
		s.x.gemm.A, s.x.gemm.B, s.x.gemm.C, s.x.gemm.Bias, s.x.gemm.Accumulate = a, b, c, bias, add
		s.err = s.c.dev.Gemm(s.c.stream, &s.x.gemm)
	}
}

// weight adds the gradients of a weight and a bias, from dy and what the product read; those that
// nobody wants are left out.
func (s *lazy) weight(dw, db, dy, x tensor.Tensor) {
	if !dw.IsNil() {
		s.gemm(dw, dy.Permute(1, 0), x, tensor.Tensor{}, true)
	}
	if !db.IsNil() && s.err == nil {
		s.err = s.c.dev.ColumnSum(s.c.stream, db, dy)
	}
}

func (s *lazy) norm(y, x, w, rstd tensor.Tensor) {
	if s.err == nil {
		s.x.rms.X, s.x.rms.W, s.x.rms.Y, s.x.rms.RStd, s.x.rms.Eps = x, w, y, rstd, s.x.eps
		s.err = s.c.dev.RMSNormForward(s.c.stream, &s.x.rms)
	}
}

// normBack turns dy into dx in place.
func (s *lazy) normBack(dy, x, w, rstd, dw tensor.Tensor) {
	if dw.IsNil() {
		dw = s.x.noWeight
		if s.err == nil {
			s.err = s.c.dev.Fill(s.c.stream, dw, 0)
		}
	}
	if s.err == nil {
		g := &s.x.rmsGrad
		g.X, g.W, g.RStd, g.DY, g.DX, g.DW = x, w, rstd, dy, dy, dw
		s.err = s.c.dev.RMSNormBackward(s.c.stream, g)
	}
}

// rotate turns q and k by their positions, or their gradients back.
func (s *lazy) rotate(inverse bool) {
	if s.x.cos.IsNil() {
		return
	}
	for _, t := range [...]tensor.Tensor{s.x.q.Split(1, s.x.l.Heads), s.x.k.Split(1, s.x.l.KVHeads)} {
		if s.err == nil {
			r := &s.x.rope
			r.X, r.Y, r.Cos, r.Sin, r.Inverse = t, t, s.x.cos, s.x.sin, inverse
			s.err = s.c.dev.Rope(s.c.stream, r)
		}
	}
}
