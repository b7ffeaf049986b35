package gdn

import (
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// LayerForward is Forward with the convolution and the gates before it. Collective. It allocates
// nothing.
func (p *Plan) LayerForward(s device.Stream, b *sp.Batch, a *LayerArgs) error {
	kind := call{layer: true, keep: !a.Saved.IsNil()}
	if err := p.Admit.Result(p.checkLayerForward("gdn.LayerForward", b, a, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	p.states = states{}
	p.layerArgs = *a
	if err := p.method.enterLayer(s, c, f, &p.layerArgs, kind, scratch); err != nil {
		return err
	}
	if err := p.prepare(s, c, f, a); err != nil {
		return err
	}
	if err := p.method.pass(s, c, f, scratch, &p.states); err != nil {
		return err
	}
	return p.output(s, c, f, &keep, scratch, a.Out, kind, &p.states)
}

// LayerRecompute writes Out again from Saved and the weights; it reads nothing else. It is
// collective with Heads; with State it sends nothing.
func (p *Plan) LayerRecompute(s device.Stream, b *sp.Batch, a *LayerArgs) error {
	kind := call{layer: true, keep: true}
	if err := p.Admit.Result(p.checkLayerRecompute("gdn.LayerRecompute", b, a, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	p.states = states{}
	if err := p.prepare(s, c, f, a); err != nil {
		return err
	}
	return p.output(s, c, f, &keep, scratch, a.Out, kind, &p.states)
}

// channels are a run of this rank's features of q|k|v, from lo to hi, and the row of the weights at
// which they start.
type channels struct{ lo, hi, row int64 }

// channelsOf lists them: those of this rank's q heads, k heads and v heads, in one where they lie
// together.
func (p *Plan) channelsOf() []channels {
	l := p.layer
	lo, hi, keyLo, keyHi := p.Heads()
	keys, values := (keyHi-keyLo)*l.KeyDim, (hi-lo)*l.ValueDim
	if all := l.channels(); 2*keys+values == all {
		return []channels{{0, all, 0}}
	}
	return []channels{
		{0, keys, keyLo * l.KeyDim},
		{keys, 2 * keys, (l.KeyHeads + keyLo) * l.KeyDim},
		{2 * keys, 2*keys + values, 2*l.KeyHeads*l.KeyDim + lo*l.ValueDim},
	}
}

// prepare computes q, k, v and the gates of the frame from what came in.
func (p *Plan) prepare(s device.Stream, c *cut, f *frame, a *LayerArgs) error {
	lo, hi, _, _ := p.Heads()
	for i := range c.pieces {
		x := &c.pieces[i]
		for _, part := range p.channels {
			p.describeConv(f, x, part, a)
			if err := p.dev.Conv1dForward(s, &p.conv.Conv1d); err != nil {
				return err
			}
		}
		p.gates = device.DeltaGates{A: of(f.a, x), B: of(f.b, x), ALog: a.ALog.Slice(0, lo, hi), DtBias: a.DtBias.Slice(0, lo, hi),
			G: of(f.g, x), Beta: of(f.beta, x)}
		if err := p.dev.DeltaGatesForward(s, &p.gates); err != nil {
			return err
		}
	}
	return nil
}

// describeConv fills the arguments of the convolution of some channels of a piece.
func (p *Plan) describeConv(f *frame, x *piece, part channels, a *LayerArgs) {
	n := part.hi - part.lo
	p.conv.Conv1d = device.Conv1d{X: of(f.x, x).Slice(1, part.lo, part.hi), Y: of(f.y, x).Slice(1, part.lo, part.hi),
		W: a.Conv.Slice(0, part.row, part.row+n), Cu: x.cu}
	if x.up > 0 && p.layer.ConvWidth > 1 {
		p.conv.Before = f.chain.before.Select(0, x.row).Slice(1, part.lo, part.hi)
	}
}

// LayerBackward computes the gradients from DOut, the weights and what LayerForward left in Saved.
// Collective. It allocates nothing.
func (p *Plan) LayerBackward(s device.Stream, b *sp.Batch, a *LayerArgs, g *LayerGrads) error {
	kind := call{layer: true, backward: true, keep: true}
	if err := p.Admit.Result(p.checkLayerBackward("gdn.LayerBackward", b, a, g, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	p.states = states{}
	p.layerGrads = *g
	if err := p.method.enterLayerGrads(s, c, f, &p.layerGrads, scratch); err != nil {
		return err
	}
	if err := p.prepare(s, c, f, a); err != nil {
		return err
	}
	// Of a key head whose value heads lie on several ranks each has its part of dq and dk. What is
	// before them is linear in these: the parts' gradients, of inputs and of weights, add up.
	if err := p.gradient(s, c, f, &keep, scratch, false, &p.states); err != nil {
		return err
	}
	if err := p.prepareGradient(s, c, f, a, g); err != nil {
		return err
	}
	return p.method.leaveLayerGrads(s, c, f, &p.layerGrads, scratch)
}

// prepareGradient is the derivative of prepare: from dy, dg and dbeta to dx, which may be dy, da
// and db, and the weights' gradients.
func (p *Plan) prepareGradient(s device.Stream, c *cut, f *frame, a *LayerArgs, g *LayerGrads) error {
	lo, hi, _, _ := p.Heads()
	for i := range c.pieces {
		x := &c.pieces[i]
		for _, part := range p.channels {
			p.describeConv(f, x, part, a)
			d := &p.conv
			d.DY, d.DX = of(f.dy, x).Slice(1, part.lo, part.hi), of(f.dx, x).Slice(1, part.lo, part.hi)
			d.DW, d.DBefore = g.DConv.Slice(0, part.row, part.row+part.hi-part.lo), tensor.Tensor{}
			if !d.Before.IsNil() {
				d.DBefore = f.chain.dbefore.Select(0, x.row).Slice(1, part.lo, part.hi)
			}
			if err := p.dev.Conv1dBackward(s, d); err != nil {
				return err
			}
		}
		p.gatesGrad = device.DeltaGatesGrad{A: of(f.a, x), B: of(f.b, x), ALog: a.ALog.Slice(0, lo, hi), DtBias: a.DtBias.Slice(0, lo, hi),
			DG: of(f.dg, x), DBeta: of(f.dbeta, x), DA: of(f.da, x), DB: of(f.db, x), DALog: g.DALog.Slice(0, lo, hi), DDtBias: g.DDtBias.Slice(0, lo, hi)}
		if err := p.dev.DeltaGatesBackward(s, &p.gatesGrad); err != nil {
			return err
		}
	}
	return nil
}
