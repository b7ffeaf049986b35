package gdn

import (
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// LayerForward is Forward with the convolution and the gates before it, and with Layer.GatedNorm
// the gated norm after it. Collective.
func (p *Plan) LayerForward(s device.Stream, b *sp.Batch, a *LayerArgs) error {
	kind := callKind{layer: true, keep: !a.Saved.IsNil()}
	if err := p.Admit.Result(p.checkLayerForward("gdn.LayerForward", b, a, kind)); err != nil {
		return err
	}
	return p.layerOutput(s, b, a, kind)
}

// LayerRecompute computes Out again from Saved, Z and the weights, and reads nothing else. With
// Heads it is collective; with State it sends nothing.
func (p *Plan) LayerRecompute(s device.Stream, b *sp.Batch, a *LayerArgs) error {
	kind := callKind{layer: true, keep: true, recompute: true}
	if err := p.Admit.Result(p.checkLayerRecompute("gdn.LayerRecompute", b, a, kind)); err != nil {
		return err
	}
	return p.layerOutput(s, b, a, kind)
}

func (p *Plan) layerOutput(s device.Stream, b *sp.Batch, a *LayerArgs, kind callKind) error {
	c := p.begin(s, b, kind, a.Saved, a.Workspace)
	c.layerArgs, c.states = *a, documentStates{}
	if p.hasNorm(kind) && c.keep { // otherwise the norm works in place
		c.layerArgs.Out = c.buffers.mixed
	}
	if err := p.method.enter(c); err != nil {
		return err
	}
	if err := p.computeInputs(c); err != nil {
		return err
	}
	if err := p.computeOutput(c); err != nil || !p.hasNorm(kind) {
		return err
	}
	return p.normalize(c, a.Out)
}

// LayerBackward computes the gradients from DOut, Z, the weights and the Saved of LayerForward.
// Collective.
func (p *Plan) LayerBackward(s device.Stream, b *sp.Batch, a *LayerArgs, g *LayerGrads) error {
	kind := callKind{layer: true, backward: true, keep: true}
	if err := p.Admit.Result(p.checkLayerBackward("gdn.LayerBackward", b, a, g, kind)); err != nil {
		return err
	}
	c := p.begin(s, b, kind, a.Saved, a.Workspace)
	c.layerArgs, c.layerGrads, c.states = *a, *g, documentStates{}
	if p.hasNorm(kind) {
		if err := p.normalizeGrad(c); err != nil {
			return err
		}
		c.layerGrads.DOut = c.buffers.dmixed
	}
	if err := p.method.enter(c); err != nil {
		return err
	}
	if err := p.computeInputs(c); err != nil {
		return err
	}
	// Where the value heads of a key head are on several ranks, each rank has the sum of dq and dk
	// over its own value heads. The gradients of the convolution are linear in dq and dk, so the
	// sum over the ranks is the gradient of the inputs and weights.
	if err := p.computeGrads(c); err != nil {
		return err
	}
	if err := p.computeInputGrads(c); err != nil {
		return err
	}
	return p.method.leave(c)
}

// computeInputs computes q, k, v and the gates from the inputs of a layer.
func (p *Plan) computeInputs(c *call) error {
	f, a, h := &c.buffers, &c.layerArgs, p.method.heads(p.rank)
	for i := range c.layout.segments {
		x := &c.layout.segments[i]
		for _, r := range p.channels {
			p.setConvArgs(c, x, r)
			if err := p.dev.Conv1dForward(c.stream, &p.conv.Conv1d); err != nil {
				return err
			}
		}
		p.gates = device.DeltaGates{A: x.view(f.a), B: x.view(f.b), ALog: a.ALog.Slice(0, h.lo, h.hi),
			DtBias: a.DtBias.Slice(0, h.lo, h.hi), G: x.view(f.g), Beta: x.view(f.beta)}
		if err := p.dev.DeltaGatesForward(c.stream, &p.gates); err != nil {
			return err
		}
	}
	return nil
}

// setConvArgs sets the arguments of the convolution of some channels of a segment.
func (p *Plan) setConvArgs(c *call, x *segment, r channelRange) {
	f := &c.buffers
	p.conv.Conv1d = device.Conv1d{X: x.view(f.x).Slice(1, r.lo, r.hi), Y: x.view(f.y).Slice(1, r.lo, r.hi),
		W: c.layerArgs.Conv.Slice(0, r.row, r.row+r.hi-r.lo), Cu: x.cu}
	if x.before > 0 && p.layer.ConvWidth > 1 {
		p.conv.Before = f.halo.Select(0, x.sequence).Slice(1, r.lo, r.hi)
	}
}

// computeInputGrads computes, from dy, dg and dbeta, the gradients dx, da and db of a layer's
// inputs and the gradients of its weights. dx may be dy.
func (p *Plan) computeInputGrads(c *call) error {
	f, a, g, h := &c.buffers, &c.layerArgs, &c.layerGrads, p.method.heads(p.rank)
	for i := range c.layout.segments {
		x := &c.layout.segments[i]
		for _, r := range p.channels {
			p.setConvArgs(c, x, r)
			d := &p.conv
			d.DY, d.DX = x.view(f.dy).Slice(1, r.lo, r.hi), x.view(f.dx).Slice(1, r.lo, r.hi)
			d.DW, d.DBefore = g.DConv.Slice(0, r.row, r.row+r.hi-r.lo), tensor.Tensor{}
			if !d.Before.IsNil() {
				d.DBefore = f.dhalo.Select(0, x.sequence).Slice(1, r.lo, r.hi)
			}
			if err := p.dev.Conv1dBackward(c.stream, d); err != nil {
				return err
			}
		}
		p.gatesGrad = device.DeltaGatesGrad{A: x.view(f.a), B: x.view(f.b), ALog: a.ALog.Slice(0, h.lo, h.hi),
			DtBias: a.DtBias.Slice(0, h.lo, h.hi), DG: x.view(f.dg), DBeta: x.view(f.dbeta), DA: x.view(f.da),
			DB: x.view(f.db), DALog: g.DALog.Slice(0, h.lo, h.hi), DDtBias: g.DDtBias.Slice(0, h.lo, h.hi)}
		if err := p.dev.DeltaGatesBackward(c.stream, &p.gatesGrad); err != nil {
			return err
		}
	}
	return nil
}
