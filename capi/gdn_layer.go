package main

import (
	"math"
	"unsafe"

	"ulysses/device"
	"ulysses/gdn"
	"ulysses/sp"
	"ulysses/tensor"
)

const gdnLayerOp = "ulysses_gdn_layer"

// checkIsGDNLayer returns an error for a plan that does not serve whole layers of the gated delta
// rule.
func (p *plan) checkIsGDNLayer(op string) error {
	err := p.checkIsGDN(op)
	if err == nil && p.gdn.Layer().ConvWidth == 0 {
		err = invalid("%s: conv_width of the plan is 0, so it has no layer; set conv_width of ulysses_gdn_desc", op)
	}
	return err
}

// spareGrads allocates gradients of the weights of a layer (conv, a_log, dt_bias, norm), for those
// that the caller does not want.
func (p *plan) spareGrads(a *device.Allocator) (x [4]tensor.Tensor) {
	l := p.gdn.Layer()
	x[0] = a.Take(tensor.F32, l.Channels(), l.ConvWidth)
	x[1], x[2] = a.Take(tensor.F32, l.ValueHeads), a.Take(tensor.F32, l.ValueHeads)
	if l.GatedNorm {
		x[3] = a.Take(tensor.F32, l.ValueDim)
	}
	return x
}

// gdnLayerBytes returns the bytes of saved and workspace. The workspace of a backward pass begins
// with spareGrads.
func (p *plan) gdnLayerBytes(b *sp.Batch) sp.Sizes {
	size, spare := sp.Sizes(p.gdn.LayerSizes(b)), device.Allocator{Align: p.ctx.dev.Info().Align}
	if !p.gdn.Layer().NoBackward {
		p.spareGrads(&spare)
	}
	size.Workspace += spare.Padded()
	return size
}

func gdnLayerSizes(ph, bh uintptr, out unsafe.Pointer) error {
	const op = gdnLayerOp + "_sizes"
	p, b, err := enterPair(op, ph, bh)
	if err != nil {
		return err
	}
	defer p.ctx.leave()
	if err := p.checkIsGDNLayer(op); err != nil {
		return err
	}
	return p.writeSizes(op, p.gdnLayerBytes(b), out)
}

// gdnLayerArgs returns the lengths and the arguments of a call of a whole layer.
func (p *plan) gdnLayerArgs(op string, both *batch, args unsafe.Pointer) (b *sp.Batch, a cGDNLayerArgs, err error) {
	if err = p.checkIsGDNLayer(op); err != nil {
		return b, a, err
	}
	if b, err = p.batchOf(op, both); err != nil {
		return b, a, err
	}
	if a, err = readStruct[cGDNLayerArgs](op, "args", args); err != nil {
		return b, a, err
	}
	switch {
	case !(a.eps >= 0) || a.eps > 1:
		err = invalid("%s: eps is %v; give 0 to 1, 0 is 1e-6", op, a.eps)
	case a.eps != 0 && !p.gdn.Layer().GatedNorm:
		err = invalid("%s: eps is %v and the plan has no ULYSSES_GATED_NORM; plan with the flag, or leave it 0",
			op, a.eps)
	}
	p.ctx.requireEqual("the bits of eps", int64(math.Float32bits(a.eps)))
	return b, a, err
}

// gdnLayerCommon reads what both passes read: the weights, the gate of the norm and the memory. It
// ends the reading of a call.
func (r *reader) gdnLayerCommon(p *plan, both *batch, b *sp.Batch, a *cGDNLayerArgs, backward bool) error {
	x, normed, size := &r.c.gdnLayer, p.gdn.Layer().GatedNorm, p.gdnLayerBytes(b)
	r.get(&x.Conv, "conv", a.conv, 0, false)
	r.get(&x.ALog, "a_log", a.a_log, 0, false)
	r.get(&x.DtBias, "dt_bias", a.dt_bias, 0, false)
	r.option(&x.Z, "z", "ULYSSES_GATED_NORM", a.z, 4, normed)
	r.option(&x.Norm, "norm", "ULYSSES_GATED_NORM", a.norm, 0, normed)
	if x.Eps = float64(a.eps); a.eps == 0 {
		x.Eps = 1e-6
	}
	r.c.requireEqual("the type of a_log", int64(x.ALog.DType))
	r.c.requireEqual("the type of dt_bias", int64(x.DtBias.DType))
	r.saved(&x.Saved, a.saved, a.saved_bytes, !backward)
	r.workspace(&x.Workspace, a.workspace, a.workspace_bytes, size.Workspace)
	if err := r.finish(gdnLayerSaved, p, both, 0, backward); err != nil {
		return err
	}
	if err := checkSize(r.op, "workspace", x.Workspace, size.Workspace); err != nil || x.Saved.IsNil() {
		return err
	}
	return r.c.checkSavedSize(r.op, x.Saved, size.Saved)
}

func gdnLayerForward(ph, bh uintptr, args unsafe.Pointer) error {
	const op = gdnLayerOp + "_forward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.gdnLayerForward(op, b, args) })
}

func (p *plan) gdnLayerForward(op string, both *batch, args unsafe.Pointer) error {
	c := p.ctx
	b, a, err := p.gdnLayerArgs(op, both, args)
	if err != nil {
		return err
	}
	r, x := reader{c: c, op: op}, &c.gdnLayer
	r.get(&x.QKV, "qkv", a.qkv, 3, false)
	r.get(&x.A, "a", a.a, 3, false)
	r.get(&x.B, "b", a.b, 3, false)
	r.get(&x.Out, "out", a.out, 4, true)
	if err := r.gdnLayerCommon(p, both, b, &a, false); err != nil {
		return err
	}
	return c.writeTag(c.enqueue(op, a.stream, func() error { return p.gdn.LayerForward(c.stream, b, x) }))
}

func gdnLayerBackward(ph, bh uintptr, args, grads unsafe.Pointer) error {
	const op = gdnLayerOp + "_backward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.gdnLayerBackward(op, b, args, grads) })
}

func (p *plan) gdnLayerBackward(op string, both *batch, args, grads unsafe.Pointer) error {
	c := p.ctx
	b, a, err := p.gdnLayerArgs(op, both, args)
	if err != nil {
		return err
	}
	g, err := readStruct[cGDNLayerGrads](op, "grads", grads)
	if err != nil {
		return err
	}
	if g.reserved != 0 {
		return invalid("%s: grads.reserved is %d; leave it 0", op, g.reserved)
	}
	if p.gdn.Layer().NoBackward || a.saved == nil {
		return noSaved(op)
	}
	normed := p.gdn.Layer().GatedNorm
	if !normed && (g.dz != nil || g.dnorm != nil) {
		return invalid("%s: dz or dnorm is given and the plan has no ULYSSES_GATED_NORM; leave them NULL", op)
	}
	r, x := reader{c: c, op: op}, &c.gdnLayerGrads
	*x = gdn.LayerGrads{}
	r.get(&x.DOut, "dout", g.dout, 4, false)
	r.get(&x.DQKV, "dqkv", g.dqkv, 3, true)
	r.get(&x.DA, "da", g.da, 3, true)
	r.get(&x.DB, "db", g.db, 3, true)
	if normed {
		r.get(&x.DZ, "dz", g.dz, 4, true)
	}
	r.optional(&x.DConv, "dconv", g.dconv, 0, true)
	r.optional(&x.DALog, "da_log", g.da_log, 0, true)
	r.optional(&x.DDtBias, "ddt_bias", g.ddt_bias, 0, true)
	r.optional(&x.DNorm, "dnorm", g.dnorm, 0, true)
	if err := r.gdnLayerCommon(p, both, b, &a, true); err != nil {
		return err
	}
	return c.enqueue(op, a.stream, func() error {
		if err := c.useSpareGrads(p); err != nil {
			return err
		}
		return p.gdn.LayerBackward(c.stream, b, &c.gdnLayer, x)
	})
}

// useSpareGrads takes memory of the workspace for the gradients that the caller does not want.
func (c *context) useSpareGrads(p *plan) error {
	x, a := &c.gdnLayerGrads, device.Allocator{Mem: c.gdnLayer.Workspace, Align: c.dev.Info().Align}
	spare := p.spareGrads(&a)
	c.gdnLayer.Workspace = a.Rest()
	for i, g := range [...]*tensor.Tensor{&x.DConv, &x.DALog, &x.DDtBias, &x.DNorm} {
		if !g.IsNil() || spare[i].IsNil() {
			continue
		}
		*g = spare[i]
		if err := c.dev.Fill(c.stream, *g, 0); err != nil {
			return err
		}
	}
	return nil
}
