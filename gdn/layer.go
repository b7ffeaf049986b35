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
	if err := p.admit(p.checkLayerForward("gdn.LayerForward", b, a, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	l := &p.layer
	if l.Strategy == Heads {
		e := &p.exchange
		q, k, v := p.heads(a.QKV, l.KeyHeads, l.ValueHeads)
		lo, hi, keyLo, keyHi := p.Heads()
		toQ, toK, toV := p.heads(f.x, keyHi-keyLo, hi-lo)
		e.add(l.DType, q, toQ, true)
		e.add(l.DType, k, toK, true)
		e.add(l.DType, v, toV, false)
		e.add(l.DType, a.A, f.a, false)
		e.add(l.DType, a.B, f.b, false)
		if err := e.run(p, s, b, scratch, true, false); err != nil {
			return err
		}
	} else {
		if !kind.keep {
			f.x, f.a, f.b = a.QKV, a.A, a.B
		}
		for _, t := range [...][2]tensor.Tensor{{f.x, a.QKV}, {f.a, a.A}, {f.b, a.B}} {
			if err := p.keepCopy(s, t[0], t[1], kind); err != nil {
				return err
			}
		}
		if h := p.haloOf(f.x, f.before, scratch); h != nil {
			if err := h.Forward(p.dev, p.comm, s, b); err != nil {
				return err
			}
		}
	}
	if err := p.prepare(s, c, f, a); err != nil {
		return err
	}
	if err := p.sumUp(s, c, f, scratch, &states{}); err != nil {
		return err
	}
	return p.output(s, c, f, &keep, scratch, a.Out, kind, &states{})
}

// haloOf is the rows across the cut of a call with State; nil where the convolution does not look
// at any.
func (p *Plan) haloOf(x, rows, wire tensor.Tensor) *sp.Halo {
	if p.size == 1 || p.layer.ConvWidth < 2 {
		return nil
	}
	h := &p.halo
	h.N, h.X, h.Rows, h.Workspace = p.layer.ConvWidth-1, x, rows, wire
	return h
}

// LayerRecompute writes Out again from Saved and the weights; it reads nothing else. It is
// collective with Heads; with State it sends nothing.
func (p *Plan) LayerRecompute(s device.Stream, b *sp.Batch, a *LayerArgs) error {
	kind := call{layer: true, keep: true}
	if err := p.admit(p.checkLayerRecompute("gdn.LayerRecompute", b, a, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	if err := p.prepare(s, c, f, a); err != nil {
		return err
	}
	return p.output(s, c, f, &keep, scratch, a.Out, kind, &states{})
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
		p.conv.Before = f.before.Select(0, x.row).Slice(1, part.lo, part.hi)
	}
}

// LayerBackward computes the gradients from DOut, the weights and what LayerForward left in Saved.
// Collective. It allocates nothing.
func (p *Plan) LayerBackward(s device.Stream, b *sp.Batch, a *LayerArgs, g *LayerGrads) error {
	kind := call{layer: true, backward: true, keep: true}
	if err := p.admit(p.checkLayerBackward("gdn.LayerBackward", b, a, g, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	l, e := &p.layer, &p.exchange
	dx := f.dy // of the convolution
	if l.Strategy == State {
		f.dout, f.da, f.db, dx = g.DOut, g.DA, g.DB, g.DQKV
	} else {
		e.add(l.DType, g.DOut, f.dout, false)
		if err := e.run(p, s, b, scratch, true, false); err != nil {
			return err
		}
	}
	if err := p.prepare(s, c, f, a); err != nil {
		return err
	}
	// Of a key head whose value heads lie on several ranks each has its part of dq and dk. What is
	// before them is linear in these: the parts' gradients, of inputs and of weights, add up.
	if err := p.gradient(s, c, f, &keep, scratch, false, &states{}); err != nil {
		return err
	}
	if err := p.prepareGradient(s, c, f, a, g, dx); err != nil {
		return err
	}
	if l.Strategy == State {
		if h := p.haloOf(g.DQKV, f.dbefore, scratch); h != nil {
			return h.Backward(p.dev, p.comm, s, b)
		}
		return nil
	}
	q, k, v := p.heads(g.DQKV, l.KeyHeads, l.ValueHeads)
	e.add(l.DType, q, f.dq, true)
	e.add(l.DType, k, f.dk, true)
	e.add(l.DType, v, f.dv, false)
	e.add(l.DType, g.DA, f.da, false)
	e.add(l.DType, g.DB, f.db, false)
	return e.run(p, s, b, scratch, false, p.keysCut)
}

// prepareGradient is the derivative of prepare: from dy, dg and dbeta to dx, which may be dy, da
// and db, and the weights' gradients.
func (p *Plan) prepareGradient(s device.Stream, c *cut, f *frame, a *LayerArgs, g *LayerGrads, dx tensor.Tensor) error {
	lo, hi, _, _ := p.Heads()
	for i := range c.pieces {
		x := &c.pieces[i]
		for _, part := range p.channels {
			p.describeConv(f, x, part, a)
			d := &p.conv
			d.DY, d.DX = of(f.dy, x).Slice(1, part.lo, part.hi), of(dx, x).Slice(1, part.lo, part.hi)
			d.DW, d.DBefore = g.DConv.Slice(0, part.row, part.row+part.hi-part.lo), tensor.Tensor{}
			if !d.Before.IsNil() {
				d.DBefore = f.dbefore.Select(0, x.row).Slice(1, part.lo, part.hi)
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
