package main

import (
	"unsafe"

	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

func attentionLayerBackward(ph, bh uintptr, args, grads unsafe.Pointer) error {
	const op = layerOp + "_backward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.layerBackward(op, b, args, grads) })
}

func (p *plan) layerBackward(op string, both *batch, args, grads unsafe.Pointer) error {
	c := p.ctx
	b, a, x, err := p.layerArgs(op, both, args)
	if err != nil {
		return err
	}
	g, err := readStruct[cAttentionLayerGrads](op, "grads", grads)
	if err != nil {
		return err
	}
	if g.reserved != 0 {
		return invalid("%s: grads.reserved is %d; leave it 0", op, g.reserved)
	}
	if x.l.NoBackward || a.saved == nil {
		return noSaved(op)
	}
	r := reader{c: c, op: op}
	x.tokensOf(&r, &x.x, "x", a.x, false)
	x.weights(&r, &a)
	x.tokensOf(&r, &x.dy, "dy", g.dy, false)
	x.tokensOf(&r, &x.dx, "dx", g.dx, true)
	x.weightGrads(&r, &g)
	c.args, c.grads = sp.Args{}, sp.Grads{}
	r.options(p, b, a.sinks, a.alibi, a.block_mask, a.dropout_seed)
	r.optionGrads(p, g.dsinks, g.dalibi, true)
	if err := x.memory(&r, p, both, layerSizes(p, b, x.kind), &a, true); err != nil {
		return err
	}
	return c.enqueue(op, a.stream, func() error { return c.runLayerBackward(p, b, x) })
}

// weightGrads reads the gradients of weights that the caller wants. Each is F32 and has the shape
// of its weight.
func (x *layerTensors) weightGrads(r *reader, g *cAttentionLayerGrads) {
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
			r.err = invalid("%s: %s is given and its weight is NULL; leave it NULL too", r.op, w.name)
			return
		}
		r.get(w.dst, w.name, w.p, 0, true)
		r.dense(w.name, *w.dst, tensor.F32, w.weight.Shape[:w.weight.NDim]...)
	}
}

// runLayerBackward computes the backward pass from tensors that were checked, in the reverse order
// of runLayerForward. Collective.
func (c *context) runLayerBackward(p *plan, b *sp.Batch, x *layerTensors) error {
	if err := c.agree(nil); err != nil { // before anything is added to gradients of weights
		return err
	}
	align := c.dev.Info().Align
	workspace := device.Allocator{Mem: x.workspace, Align: align}
	saved := device.Allocator{Mem: x.saved, Align: align}
	attention := p.sp.Sizes(b)
	c.args.Saved = x.allocateSaved(&saved, attention.Saved)
	x.allocateQKV(&workspace)
	x.allocateBackward(&workspace)
	c.args.Workspace = workspace.Rest()

	ops := operations{c: c, x: x}
	ops.weightGrad(x.dwo, x.dbo, x.dy, x.mixed)
	ops.gemm(x.dmixed, x.dy, x.wo, tensor.Tensor{}, false)
	if ops.err != nil {
		return ops.err
	}
	c.grads = sp.Grads{DOut: x.batched(x.dmixed, x.l.Heads), DQ: x.batched(x.q, x.l.Heads), DK: x.batched(x.k, x.l.KVHeads), DV: x.batched(x.v, x.l.KVHeads)}
	if err := c.beginOptions(layerOp, p, b); err != nil {
		return err
	}
	if err := c.widenOptions(); err != nil {
		return err
	}
	if err := p.sp.Backward(c.stream, b, &c.args, &c.grads); err != nil {
		return err
	}
	if err := c.endOptions(); err != nil {
		return err
	}
	ops.rotate(true)
	if x.kind.norm {
		ops.normBackward(x.q.Split(1, x.l.Heads), x.rawQ.Split(1, x.l.Heads), x.qNorm, x.qRStd, x.dqNorm)
		ops.normBackward(x.k.Split(1, x.l.KVHeads), x.rawK.Split(1, x.l.KVHeads), x.kNorm, x.kRStd, x.dkNorm)
	}
	ops.weightGrad(x.dwq, x.dbq, x.q, x.x)
	ops.weightGrad(x.dwk, x.dbk, x.k, x.x)
	ops.weightGrad(x.dwv, x.dbv, x.v, x.x)
	dx := x.dx
	if !x.dx32.IsNil() { // dx is the sum of three products, which is computed in F32
		dx = x.dx32
	}
	ops.gemm(dx, x.q, x.wq, tensor.Tensor{}, false)
	ops.gemm(dx, x.k, x.wk, tensor.Tensor{}, true)
	ops.gemm(dx, x.v, x.wv, tensor.Tensor{}, true)
	if ops.err == nil && !x.dx32.IsNil() {
		ops.err = c.dev.Copy(c.stream, x.dx, x.dx32)
	}
	return ops.err
}

// operations enqueues operations of a layer on the context's stream. After the first error it
// enqueues nothing more and keeps the error.
type operations struct {
	c   *context
	x   *layerTensors
	err error
}

// gemm computes c = a·b + bias, or c += a·b with add.
func (s *operations) gemm(c, a, b, bias tensor.Tensor, add bool) {
	if s.err == nil {
		s.x.gemm.A, s.x.gemm.B, s.x.gemm.C, s.x.gemm.Bias, s.x.gemm.Accumulate = a, b, c, bias, add
		s.err = s.c.dev.Gemm(s.c.stream, &s.x.gemm)
	}
}

// weightGrad adds the gradients of a weight and a bias: dw += dyᵀ·x, where x is the input of the
// product, and db += the sum of the rows of dy. A nil gradient is left out.
func (s *operations) weightGrad(dw, db, dy, x tensor.Tensor) {
	if !dw.IsNil() {
		s.gemm(dw, dy.Permute(1, 0), x, tensor.Tensor{}, true)
	}
	if !db.IsNil() && s.err == nil {
		s.err = s.c.dev.ColumnSum(s.c.stream, db, dy)
	}
}

func (s *operations) norm(y, x, w, rstd tensor.Tensor) {
	if s.err == nil {
		s.x.rms.X, s.x.rms.W, s.x.rms.Y, s.x.rms.RStd, s.x.rms.Eps = x, w, y, rstd, s.x.eps
		s.err = s.c.dev.RMSNormForward(s.c.stream, &s.x.rms)
	}
}

// normBackward replaces dy by dx. dw gets the gradient of the norm's weight; nil = not wanted.
func (s *operations) normBackward(dy, x, w, rstd, dw tensor.Tensor) {
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

// rotate applies the rotary embedding to q and k, or its inverse to their gradients.
func (s *operations) rotate(inverse bool) {
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
