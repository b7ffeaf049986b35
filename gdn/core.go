package gdn

import (
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// begin prepares a call that has passed its checks, and allocates its buffers.
func (p *Plan) begin(s device.Stream, b *sp.Batch, kind callKind, saved, workspace tensor.Tensor) *call {
	p.allocate(p.layoutOf(b), kind, p.orEmpty(saved), p.orEmpty(workspace))
	c := &p.call
	c.stream, c.scratch = s, c.workspace.Rest()
	return c
}

// orEmpty replaces an absent tensor by one of no bytes on the device, so that a rank without tokens
// can take part in collectives.
func (p *Plan) orEmpty(t tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		t = tensor.Of(nil, tensor.U8, 0)
		t.Where = p.dev.Info().Place
	}
	return t
}

// Forward computes Out, and StateOut if it is given. Collective.
func (p *Plan) Forward(s device.Stream, b *sp.Batch, a *Args) error {
	states := documentStates{in: a.StateIn, out: a.StateOut}
	kind := callKind{keep: !a.Saved.IsNil(), withStates: states.any()}
	if err := p.Admit.Result(p.checkForward("gdn.Forward", b, a, kind)); err != nil {
		return err
	}
	c := p.begin(s, b, kind, a.Saved, a.Workspace)
	c.args, c.states = *a, states
	if err := p.method.enter(c); err != nil {
		return err
	}
	return p.computeOutput(c)
}

// Recompute computes Out again from Saved and StateIn, and reads nothing else. With Heads it is
// collective; with State it sends nothing.
func (p *Plan) Recompute(s device.Stream, b *sp.Batch, a *Args) error {
	states := documentStates{in: a.StateIn}
	kind := callKind{keep: true, withStates: states.any(), recompute: true}
	if err := p.Admit.Result(p.checkRecompute("gdn.Recompute", b, a, kind)); err != nil {
		return err
	}
	c := p.begin(s, b, kind, a.Saved, a.Workspace)
	c.args, c.states = *a, states
	if err := p.method.enter(c); err != nil {
		return err
	}
	return p.computeOutput(c)
}

// Backward computes the gradients from DOut, DStateOut and the Saved of Forward. Collective.
func (p *Plan) Backward(s device.Stream, b *sp.Batch, a *Args, g *Grads) error {
	states := documentStates{in: a.StateIn, dout: g.DStateOut, din: g.DStateIn}
	kind := callKind{keep: true, backward: true, withStates: states.any()}
	if err := p.Admit.Result(p.checkBackward("gdn.Backward", b, a, g, kind)); err != nil {
		return err
	}
	c := p.begin(s, b, kind, a.Saved, a.Workspace)
	c.args, c.grads, c.states = *a, *g, states
	if err := p.method.enter(c); err != nil {
		return err
	}
	if err := p.computeGrads(c); err != nil {
		return err
	}
	if err := p.method.leave(c); err != nil {
		return err
	}
	if states.din.IsNil() {
		return nil
	}
	return p.method.gatherDocs(c, c.buffers.docs.din, states.din, true)
}

// computeOutput runs the rule on the call's q, k, v, gates and states, and brings the output and
// the states after documents to the caller.
func (p *Plan) computeOutput(c *call) error {
	if err := p.method.passStates(c); err != nil {
		return err
	}
	for i := range c.layout.segments {
		x := &c.layout.segments[i]
		saved := tensor.Tensor{}
		if c.keep {
			saved = c.saved.Take(tensor.U8, p.ruleSizes(x).Saved)
		}
		states, err := p.method.segmentStates(c, x)
		if err != nil {
			return err
		}
		p.setRuleArgs(x)
		d := &p.delta
		d.Saved, d.Workspace, d.Out = saved, c.scratch, x.view(c.buffers.out)
		d.StateIn, d.StateOut = states.in, states.out
		if err := p.dev.GatedDeltaForward(c.stream, d); err != nil {
			return err
		}
	}
	if err := p.method.leave(c); err != nil || c.states.out.IsNil() {
		return err
	}
	return p.method.gatherDocs(c, c.buffers.docs.out, c.states.out, false)
}

// computeGrads runs the derivative of the rule, from the last segment to the first.
func (p *Plan) computeGrads(c *call) error {
	if err := p.method.passStates(c); err != nil {
		return err
	}
	offset, segments := c.saved.Padded(), c.layout.segments // in Saved
	for i := range segments {
		offset += device.Padded(p.dev, p.ruleSizes(&segments[i]).Saved)
	}
	for i := len(segments) - 1; i >= 0; i-- {
		x, f := &segments[i], &c.buffers
		size := p.ruleSizes(x).Saved
		offset -= device.Padded(p.dev, size)
		states, err := p.method.segmentStates(c, x)
		if err != nil {
			return err
		}
		p.setRuleArgs(x)
		p.delta.Saved, p.delta.Workspace, p.delta.StateIn = c.saved.Mem.At(offset, tensor.U8, size), c.scratch,
			states.in
		p.deltaGrad = device.GatedDeltaGrad{GatedDelta: p.delta, DOut: x.view(f.dout), DStateOut: states.dout,
			DQ: x.view(f.dq), DK: x.view(f.dk), DV: x.view(f.dv), DG: x.view(f.dg), DBeta: x.view(f.dbeta),
			DStateIn: states.din, PerHead: f.perValueHead}
		if err := p.dev.GatedDeltaBackward(c.stream, &p.deltaGrad); err != nil {
			return err
		}
	}
	return nil
}
