package gdn

import (
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// states are those of documents in a call; each may be absent.
type states struct{ in, out, dout, din tensor.Tensor }

func (x *states) any() bool {
	return !x.in.IsNil() || !x.out.IsNil() || !x.dout.IsNil() || !x.din.IsNil()
}

// begin cuts up the memory of a call that has passed its checks: keep is the allocator of Saved,
// behind what the frame took of it.
func (p *Plan) begin(b *sp.Batch, kind call, saved, workspace tensor.Tensor) (c *cut, f *frame, keep device.Allocator, scratch tensor.Tensor) {
	c, f = p.cutOf(b), &p.frame
	ws := device.Allocator{Mem: p.bytesOf(workspace), Align: p.align}
	keep = device.Allocator{Mem: p.bytesOf(saved), Align: p.align}
	to := &keep
	if !kind.keep {
		to = &ws
	}
	p.lay(f, c, kind, to, &ws)
	return c, f, keep, ws.Rest()
}

// bytesOf makes absent memory an empty block of the device's, so that a rank without rows meets the
// others in the same exchanges.
func (p *Plan) bytesOf(t tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		t = tensor.Of(nil, tensor.U8, 0)
		t.Where = p.dev.Info().Place
	}
	return t
}

// Forward computes Out, and StateOut if given, of the batch. Collective. It allocates nothing.
func (p *Plan) Forward(s device.Stream, b *sp.Batch, a *Args) error {
	x := states{in: a.StateIn, out: a.StateOut}
	kind := call{keep: !a.Saved.IsNil(), states: x.any()}
	if err := p.admit(p.checkForward("gdn.Forward", b, a, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	if p.layer.Strategy == Heads {
		e, t := &p.exchange, p.layer.DType
		e.add(t, a.Q, f.q, true)
		e.add(t, a.K, f.k, true)
		e.add(t, a.V, f.v, false)
		e.add(t, a.G, f.g, false)
		e.add(t, a.Beta, f.beta, false)
		if err := e.run(p, s, b, scratch, true, false); err != nil {
			return err
		}
	} else {
		if !kind.keep {
			f.q, f.k, f.v, f.g, f.beta = a.Q, a.K, a.V, a.G, a.Beta
		}
		for _, t := range [...][2]tensor.Tensor{{f.q, a.Q}, {f.k, a.K}, {f.v, a.V}, {f.g, a.G}, {f.beta, a.Beta}} {
			if err := p.keepCopy(s, t[0], t[1], kind); err != nil {
				return err
			}
		}
	}
	if err := p.sumUp(s, c, f, scratch, &x); err != nil {
		return err
	}
	return p.output(s, c, f, &keep, scratch, a.Out, kind, &x)
}

// keepCopy fills what is kept of a caller's tensor.
func (p *Plan) keepCopy(s device.Stream, to, from tensor.Tensor, kind call) error {
	if !kind.keep || to.Numel() == 0 {
		return nil
	}
	return p.dev.Copy(s, to, from)
}

// Recompute writes Out again from Saved and StateIn; it reads nothing else. It is collective with
// Heads; with State it sends nothing.
func (p *Plan) Recompute(s device.Stream, b *sp.Batch, a *Args) error {
	x := states{in: a.StateIn}
	kind := call{keep: true, states: x.any()}
	if err := p.admit(p.checkRecompute("gdn.Recompute", b, a, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	return p.output(s, c, f, &keep, scratch, a.Out, kind, &x)
}

// output runs the rule on the frame's q, k, v, gates and states and brings its output to out, and
// the documents' states to x.out.
func (p *Plan) output(s device.Stream, c *cut, f *frame, keep *device.Allocator, scratch, out tensor.Tensor, kind call, x *states) error {
	if p.layer.Strategy == State {
		f.out = out
	}
	if err := p.docStates(s, c, f, x); err != nil {
		return err
	}
	at := int64(0) // documents whose states are in f.stateOut
	for i := range c.pieces {
		piece := &c.pieces[i]
		saved := tensor.Tensor{}
		if kind.keep {
			saved = keep.Take(tensor.U8, p.deltaSizes(f, piece).Saved)
		}
		p.describe(f, piece)
		d := &p.delta
		d.Saved, d.Workspace, d.Out = saved, scratch, of(f.out, piece)
		if err := p.stateBefore(s, f, piece, x.in); err != nil {
			return err
		}
		if !x.out.IsNil() {
			d.StateOut = p.statesBehind(f, piece, x.out, &at)
		}
		if err := p.dev.GatedDeltaForward(s, d); err != nil {
			return err
		}
	}
	if p.layer.Strategy == Heads {
		e := &p.exchange
		e.add(p.layer.DType, out, f.out, false)
		if err := e.run(p, s, c.batch, scratch, false, false); err != nil {
			return err
		}
	}
	if x.out.IsNil() {
		return nil
	}
	return p.gatherDocs(s, c, f.stateOut, f.gathered, x.out, false)
}

// describe fills the arguments of the device's operation, but for states, Saved and Workspace.
func (p *Plan) describe(f *frame, x *piece) {
	l := &p.layer
	p.delta = device.GatedDelta{Q: of(f.q, x), K: of(f.k, x), V: of(f.v, x), Out: of(f.v, x), G: of(f.g, x), Beta: of(f.beta, x),
		Cu: x.cu, KeyHead: p.keyHead, L2Norm: l.L2Norm, Scale: l.Scale, Chunk: l.Chunk}
}

// Backward computes the gradients from DOut, DStateOut and what Forward left in Saved. Collective.
// It allocates nothing.
func (p *Plan) Backward(s device.Stream, b *sp.Batch, a *Args, g *Grads) error {
	x := states{in: a.StateIn, dout: g.DStateOut, din: g.DStateIn}
	kind := call{keep: true, backward: true, states: x.any()}
	if err := p.admit(p.checkBackward("gdn.Backward", b, a, g, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	e, t := &p.exchange, p.layer.DType
	if p.layer.Strategy == State {
		f.dout, f.dq, f.dk, f.dv, f.dg, f.dbeta = g.DOut, g.DQ, g.DK, g.DV, g.DG, g.DBeta
	} else {
		e.add(t, g.DOut, f.dout, false)
		if err := e.run(p, s, b, scratch, true, false); err != nil {
			return err
		}
	}
	if err := p.gradient(s, c, f, &keep, scratch, p.keysCut, &x); err != nil {
		return err
	}
	if p.layer.Strategy == Heads {
		dq, dk := g.DQ, g.DK
		if p.keysCut {
			dq, dk = f.allDQ, f.allDK
		}
		e.add(t, dq, f.dq, !p.keysCut)
		e.add(t, dk, f.dk, !p.keysCut)
		e.add(t, g.DV, f.dv, false)
		e.add(t, g.DG, f.dg, false)
		e.add(t, g.DBeta, f.dbeta, false)
		if err := e.run(p, s, b, scratch, false, false); err != nil {
			return err
		}
		if p.keysCut && b.Rows() > 0 {
			if err := p.sumHeads(s, f, g.DQ, f.allDQ); err != nil {
				return err
			}
			if err := p.sumHeads(s, f, g.DK, f.allDK); err != nil {
				return err
			}
		}
	}
	if x.din.IsNil() {
		return nil
	}
	return p.gatherDocs(s, c, f.dstateIn, f.gathered, x.din, true)
}

// gradient runs the rule's derivative on the frame.
func (p *Plan) gradient(s device.Stream, c *cut, f *frame, keep *device.Allocator, scratch tensor.Tensor, perHead bool, x *states) error {
	if err := p.sumUpGradient(s, c, f, scratch, x); err != nil {
		return err
	}
	if err := p.docStates(s, c, f, x); err != nil {
		return err
	}
	saved := keep.Padded()
	for i := range c.pieces {
		saved = p.savedBehind(saved, f, &c.pieces[i])
	}
	at := c.starts + 1                        // the way states are written, see statesAhead
	for i := len(c.pieces) - 1; i >= 0; i-- { // the last first
		piece := &c.pieces[i]
		n := p.deltaSizes(f, piece).Saved
		saved -= device.Padded(p.dev, n)
		p.describe(f, piece)
		p.delta.Saved, p.delta.Workspace = keep.Mem.At(saved, tensor.U8, n), scratch
		if err := p.stateBefore(s, f, piece, x.in); err != nil {
			return err
		}
		d := &p.deltaGrad
		*d = device.GatedDeltaGrad{GatedDelta: p.delta, DOut: of(f.dout, piece), DQ: of(f.dq, piece), DK: of(f.dk, piece), DV: of(f.dv, piece),
			DG: of(f.dg, piece), DBeta: of(f.dbeta, piece), PerHead: perHead}
		var err error
		if d.DStateOut, err = p.gradientBehind(s, f, piece, x.dout); err != nil {
			return err
		}
		if !x.din.IsNil() {
			d.DStateIn = p.statesAhead(f, piece, x.din, &at)
		}
		if err := p.dev.GatedDeltaBackward(s, d); err != nil {
			return err
		}
	}
	return nil
}

// savedBehind is the offset in Saved behind a piece that begins at one.
func (p *Plan) savedBehind(at int64, f *frame, x *piece) int64 {
	return at + device.Padded(p.dev, p.deltaSizes(f, x).Saved)
}

// sumHeads writes into dst [B, rows, Hk, Dk] the sum of each value head's own gradient all [B,
// rows, Hv, Dk], in index order and, as the device does, in F32.
func (p *Plan) sumHeads(s device.Stream, f *frame, dst, all tensor.Tensor) error {
	l := p.layer
	each := all.Split(2, l.KeyHeads) // [B, rows, Hk, group, Dk]
	sum := dst
	if l.DType != tensor.F32 {
		sum = f.sum
	}
	if err := p.dev.Copy(s, sum, each.Select(3, 0)); err != nil {
		return err
	}
	for i := int64(1); i < l.ValueHeads/l.KeyHeads; i++ {
		term := each.Select(3, i)
		if l.DType != tensor.F32 {
			if err := p.dev.Copy(s, f.term, term); err != nil {
				return err
			}
			term = f.term
		}
		if err := p.dev.Add(s, sum, sum, term); err != nil {
			return err
		}
	}
	if l.DType == tensor.F32 {
		return nil
	}
	return p.dev.Copy(s, dst, sum)
}
