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
	}{{&x.dwq, "dwq", g.dwq, &x.wq}, {&x.dwk, "dwk", g.dwk, &x.wk}, {&x.dwv, "dwv", g.dwv, &x.wv},
		{&x.dwo, "dwo", g.dwo, &x.wo},
		{&x.dbq, "dbq", g.dbq, &x.bq}, {&x.dbk, "dbk", g.dbk, &x.bk}, {&x.dbv, "dbv", g.dbv, &x.bv},
		{&x.dbo, "dbo", g.dbo, &x.bo},
		{&x.dqNorm, "dq_norm", g.dq_norm, &x.qNorm}, {&x.dkNorm, "dk_norm", g.dk_norm, &x.kNorm}} {
		*w.dst = tensor.Tensor{}
		if w.p == nil || r.err != nil {
			continue
		}
		if w.weight.IsNil() {
			r.err = invalid("%s: %s is given and its weight is NULL; set it to NULL", r.op, w.name)
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

	ops := operations{c: c, x: x, overlap: p.overlap}
	ops.gemm(x.dmixed, x.dy, x.wo, tensor.Tensor{}, false)
	if ops.err != nil {
		return ops.err
	}
	c.grads = sp.Grads{DOut: x.batched(x.dmixed, x.l.Heads), DQ: x.batched(x.q, x.l.Heads),
		DK: x.batched(x.k, x.l.KVHeads), DV: x.batched(x.v, x.l.KVHeads)}
	if err := c.beginOptions(layerOp, p, b); err != nil {
		return err
	}
	if err := c.widenOptions(); err != nil {
		return err
	}
	if p.overlap {
		ops.err = p.sp.StartBackward(c.stream, b, &c.args, &c.grads, &c.overlap)
	} else {
		ops.err = p.sp.Backward(c.stream, b, &c.args, &c.grads)
	}
	ops.weightGrad(x.dwo, x.dbo, x.dy, x.mixed)
	ops.step(sp.AttendBackward)
	if ops.err == nil {
		ops.err = c.endOptions()
	}
	dx := x.dx
	if !x.dx32.IsNil() { // dx is the sum of three products, which is computed in F32
		dx = x.dx32
	}
	ops.step(sp.WaitDV)
	ops.weightGrad(x.dwv, x.dbv, x.v, x.x)
	ops.gemm(dx, x.v, x.wv, tensor.Tensor{}, false)
	ops.step(sp.WaitDK)
	ops.headsBackward(x.k, x.rawK, x.kNorm, x.kRStd, x.dkNorm, x.l.KVHeads)
	ops.weightGrad(x.dwk, x.dbk, x.k, x.x)
	ops.gemm(dx, x.k, x.wk, tensor.Tensor{}, true)
	ops.step(sp.WaitDQ)
	ops.headsBackward(x.q, x.rawQ, x.qNorm, x.qRStd, x.dqNorm, x.l.Heads)
	ops.weightGrad(x.dwq, x.dbq, x.q, x.x)
	ops.gemm(dx, x.q, x.wq, tensor.Tensor{}, true)
	if ops.err == nil && !x.dx32.IsNil() {
		ops.err = c.dev.Copy(c.stream, x.dx, x.dx32)
	}
	return ops.result()
}

// operations enqueues operations of a layer on the context's stream. After the first error it
// enqueues nothing more and keeps the error.
type operations struct {
	c       *context
	x       *layerTensors
	overlap bool // the pass is overlapped
	err     error
}

// step runs a step of the pass, if it is overlapped.
func (s *operations) step(step sp.Step) {
	if s.overlap && s.err == nil {
		s.err = s.c.overlap.Do(s.c.stream, step)
	}
}

// result returns the first error. After an error, the context forgets the overlapped pass.
func (s *operations) result() error {
	if s.err != nil {
		s.c.overlap = sp.Overlap{}
	}
	return s.err
}

// project computes the heads y of a projection from x: raw = x·wᵀ + bias, which is normalized if
// the layer has norms, and rotated. Values are neither.
func (s *operations) project(y, raw, w, bias, norm, rstd tensor.Tensor, heads int64, rotated bool) {
	s.gemm(raw, s.x.x, w.Permute(1, 0), bias, false)
	if !norm.IsNil() {
		s.norm(y.Split(1, heads), raw.Split(1, heads), norm, rstd)
	}
	if rotated {
		s.rotate(y.Split(1, heads), false)
	}
}

// headsBackward replaces the gradient of projected queries or keys by the gradient of raw.
func (s *operations) headsBackward(dy, raw, norm, rstd, dnorm tensor.Tensor, heads int64) {
	s.rotate(dy.Split(1, heads), true)
	if !norm.IsNil() {
		s.normBackward(dy.Split(1, heads), raw.Split(1, heads), norm, rstd, dnorm)
	}
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

// rotate applies the rotary embedding to heads, or its inverse to their gradients.
func (s *operations) rotate(heads tensor.Tensor, inverse bool) {
	if s.x.cos.IsNil() || s.err != nil {
		return
	}
	r := &s.x.rope
	r.X, r.Y, r.Cos, r.Sin, r.Inverse = heads, heads, s.x.cos, s.x.sin, inverse
	s.err = s.c.dev.Rope(s.c.stream, r)
}
