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

// begin cuts up the memory of a call that has passed its checks: keep is the Carver of Saved,
// behind what the frame took of it.
func (p *Plan) begin(b *sp.Batch, kind call, saved, workspace tensor.Tensor) (c *cut, f *frame, keep device.Allocator, scratch tensor.Tensor) {
	c, f = p.cutOf(b), &p.frame
	p.work = device.Allocator{Mem: p.bytesOf(workspace), Align: p.align}
	p.kept = device.Allocator{Mem: p.bytesOf(saved), Align: p.align}
	to := &p.kept
	if !kind.keep {
		to = &p.work
	}
	p.lay(f, c, kind, to, &p.work)
	return c, f, p.kept, p.work.Rest()
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
	p.states = states{in: a.StateIn, out: a.StateOut}
	x := &p.states
	kind := call{keep: !a.Saved.IsNil(), states: x.any()}
	if err := p.Admit.Result(p.checkForward("gdn.Forward", b, a, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	p.args = *a
	if err := p.method.enter(s, c, f, &p.args, kind, scratch); err != nil {
		return err
	}
	if err := p.method.pass(s, c, f, scratch, x); err != nil {
		return err
	}
	return p.output(s, c, f, &keep, scratch, a.Out, kind, x)
}

// Recompute writes Out again from Saved and StateIn; it reads nothing else. It is collective with
// Heads; with State it sends nothing.
func (p *Plan) Recompute(s device.Stream, b *sp.Batch, a *Args) error {
	p.states = states{in: a.StateIn}
	x := &p.states
	kind := call{keep: true, states: x.any()}
	if err := p.Admit.Result(p.checkRecompute("gdn.Recompute", b, a, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	return p.output(s, c, f, &keep, scratch, a.Out, kind, x)
}

// output runs the rule on the frame's q, k, v, gates and states and brings its output to out, and
// the documents' states to x.out.
func (p *Plan) output(s device.Stream, c *cut, f *frame, keep *device.Allocator, scratch, out tensor.Tensor, kind call, x *states) error {
	if err := p.method.beginOutput(s, f, out, x); err != nil {
		return err
	}
	p.written = 0
	for i := range c.pieces {
		piece := &c.pieces[i]
		saved := tensor.Tensor{}
		if kind.keep {
			saved = keep.Take(tensor.U8, p.deltaSizes(f, piece).Saved)
		}
		p.arguments(f, piece)
		d := &p.delta
		d.Saved, d.Workspace, d.Out = saved, scratch, of(f.out, piece)
		var err error
		if d.StateIn, err = p.method.stateBefore(s, f, piece, x.in); err != nil {
			return err
		}
		if !x.out.IsNil() {
			d.StateOut = p.method.stateBehind(f, piece, x.out, &p.written)
		}
		if err := p.dev.GatedDeltaForward(s, d); err != nil {
			return err
		}
	}
	if err := p.method.endOutput(s, c, f, scratch, out); err != nil {
		return err
	}
	if x.out.IsNil() {
		return nil
	}
	return p.gatherDocs(s, c, f.docs.out, f.docs.gathered, x.out, false)
}

// arguments fills the arguments of the device's operation, but for states, Saved and Workspace.
func (p *Plan) arguments(f *frame, x *piece) {
	l := &p.layer
	p.delta = device.GatedDelta{Q: of(f.q, x), K: of(f.k, x), V: of(f.v, x), Out: of(f.v, x), G: of(f.g, x), Beta: of(f.beta, x),
		Cu: x.cu, KeyHead: p.keyHead, L2Norm: l.L2Norm, Scale: l.Scale, Chunk: l.Chunk}
}

// Backward computes the gradients from DOut, DStateOut and what Forward left in Saved. Collective.
// It allocates nothing.
func (p *Plan) Backward(s device.Stream, b *sp.Batch, a *Args, g *Grads) error {
	p.states = states{in: a.StateIn, dout: g.DStateOut, din: g.DStateIn}
	x := &p.states
	kind := call{keep: true, backward: true, states: x.any()}
	if err := p.Admit.Result(p.checkBackward("gdn.Backward", b, a, g, kind)); err != nil {
		return err
	}
	c, f, keep, scratch := p.begin(b, kind, a.Saved, a.Workspace)
	p.grads = *g
	if err := p.method.enterGrads(s, c, f, &p.grads, scratch); err != nil {
		return err
	}
	if err := p.gradient(s, c, f, &keep, scratch, p.method.perHead(), x); err != nil {
		return err
	}
	if err := p.method.leaveGrads(s, c, f, &p.grads, scratch); err != nil {
		return err
	}
	if x.din.IsNil() {
		return nil
	}
	return p.gatherDocs(s, c, f.docs.din, f.docs.gathered, x.din, true)
}

// gradient runs the rule's derivative on the frame.
func (p *Plan) gradient(s device.Stream, c *cut, f *frame, keep *device.Allocator, scratch tensor.Tensor, perHead bool, x *states) error {
	if err := p.method.passGrad(s, c, f, scratch, x); err != nil {
		return err
	}
	saved := keep.Padded()
	for i := range c.pieces {
		saved = p.savedBehind(saved, f, &c.pieces[i])
	}
	p.written = c.starts + 1                  // states are written from the end on, see gradBefore
	for i := len(c.pieces) - 1; i >= 0; i-- { // the last first
		piece := &c.pieces[i]
		n := p.deltaSizes(f, piece).Saved
		saved -= device.Padded(p.dev, n)
		p.arguments(f, piece)
		p.delta.Saved, p.delta.Workspace = keep.Mem.At(saved, tensor.U8, n), scratch
		var err error
		if p.delta.StateIn, err = p.method.stateBefore(s, f, piece, x.in); err != nil {
			return err
		}
		d := &p.deltaGrad
		*d = device.GatedDeltaGrad{GatedDelta: p.delta, DOut: of(f.dout, piece), DQ: of(f.dq, piece), DK: of(f.dk, piece), DV: of(f.dv, piece),
			DG: of(f.dg, piece), DBeta: of(f.dbeta, piece), PerHead: perHead}
		if d.DStateOut, err = p.method.gradBehind(s, f, piece, x.dout); err != nil {
			return err
		}
		if !x.din.IsNil() {
			d.DStateIn = p.method.gradBefore(f, piece, x.din, &p.written)
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

// gatherDocs brings the states of all documents to all ranks: those of documents that end, or with
// starts begin, at each rank, or each rank's heads of all documents. Collective.
func (p *Plan) gatherDocs(s device.Stream, c *cut, local, gathered, to tensor.Tensor, starts bool) error {
	if p.size == 1 {
		return nil // written in their place
	}
	rows := p.docRows
	clear(rows)
	local = p.method.docElements(c, rows, local.Flatten(0, 3), starts)
	if err := p.comm.AllGather(s, gathered, local.Slice(0, 0, rows[p.rank]), rows); err != nil {
		return err
	}
	return p.method.scatterDocs(s, c, gathered, to, starts)
}

// statesAt views states of documents in flat memory, from an element on.
func (p *Plan) statesAt(flat tensor.Tensor, at, docs, heads int64) tensor.Tensor {
	flat = flat.Slice(0, at, flat.Shape[0])
	t := tensor.Of(flat.Data, tensor.F32, docs, heads, p.layer.KeyDim, p.layer.ValueDim)
	t.Where = flat.Where
	return t
}
