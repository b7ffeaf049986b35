package gdn

import (
	"ulysses/device"
	"ulysses/tensor"
)

// sumUp has each rank whose last document goes on send what its stretch of it does to a state, and
// fills f.state where one comes in. Collective with State; with Heads there is nothing to do.
func (p *Plan) sumUp(s device.Stream, c *cut, f *frame, scratch tensor.Tensor, x *states) error {
	if p.layer.Strategy != State || p.size == 1 {
		return nil
	}
	for i := range c.pieces {
		piece := &c.pieces[i]
		if piece.down == 0 {
			continue
		}
		last := piece.docs - 1
		e, m := f.own.Select(0, piece.row), f.transition.Select(0, piece.row)
		starts := !piece.passes() && !x.in.IsNil()
		wanted := m
		if !piece.passes() && !starts {
			wanted = tensor.Tensor{}
		}
		if err := p.stretchState(s, f, piece, last, e, wanted, scratch); err != nil {
			return err
		}
		if starts {
			if err := p.apply(s, m, x.in.Select(0, piece.doc+last), e, e, false); err != nil {
				return err
			}
		}
	}
	return p.pass(s, c, scratch, f.own, f.transition, f.state, false)
}

// stretchState is what a piece's tokens of one of its documents do to a state.
func (p *Plan) stretchState(s device.Stream, f *frame, x *piece, doc int64, e, m, scratch tensor.Tensor) error {
	l := &p.layer
	lo, hi := x.cu[doc], x.cu[doc+1]
	p.deltaState = device.DeltaState{K: of(f.k, x).Slice(0, lo, hi), V: of(f.v, x).Slice(0, lo, hi), G: of(f.g, x).Slice(0, lo, hi),
		Beta: of(f.beta, x).Slice(0, lo, hi), KeyHead: p.keyHead, L2Norm: l.L2Norm, Chunk: l.Chunk, State: e, Transition: m, Workspace: scratch}
	return p.dev.DeltaState(s, &p.deltaState)
}

// sumUpGradient is sumUp the other way: each rank whose first document began before it sends what
// its stretch does to a gradient, and f.incoming is filled where one comes in.
func (p *Plan) sumUpGradient(s device.Stream, c *cut, f *frame, scratch tensor.Tensor, x *states) error {
	if p.layer.Strategy != State || p.size == 1 {
		return nil
	}
	l := &p.layer
	for i := range c.pieces {
		piece := &c.pieces[i]
		if piece.up == 0 {
			continue
		}
		e, hi := f.own.Select(0, piece.row), piece.cu[1]
		p.deltaStateGrad = device.DeltaStateGrad{Q: of(f.q, piece).Slice(0, 0, hi), K: of(f.k, piece).Slice(0, 0, hi), G: of(f.g, piece).Slice(0, 0, hi),
			Beta: of(f.beta, piece).Slice(0, 0, hi), DOut: of(f.dout, piece).Slice(0, 0, hi), KeyHead: p.keyHead, L2Norm: l.L2Norm,
			Scale: l.Scale, Chunk: l.Chunk, DState: e, Workspace: scratch}
		if err := p.dev.DeltaStateGrad(s, &p.deltaStateGrad); err != nil {
			return err
		}
		if piece.passes() || x.dout.IsNil() {
			continue
		}
		// The document ends here, with a gradient of its own: that passes the stretch too.
		if err := p.stretchState(s, f, piece, 0, f.spareState, f.spareTransition, scratch); err != nil {
			return err
		}
		if err := p.apply(s, f.spareTransition, x.dout.Select(0, piece.doc), e, e, true); err != nil {
			return err
		}
	}
	return p.pass(s, c, scratch, f.own, f.transition, f.incoming, true)
}

// docStates cuts the caller's states down to this rank's heads.
func (p *Plan) docStates(s device.Stream, c *cut, f *frame, x *states) error {
	lo, hi, _, _ := p.Heads()
	if p.layer.Strategy != Heads || p.size == 1 || lo == hi {
		return nil
	}
	if !x.in.IsNil() {
		if err := p.dev.Copy(s, f.stateIn, x.in.Slice(1, lo, hi)); err != nil {
			return err
		}
	}
	if x.dout.IsNil() {
		return nil
	}
	return p.dev.Copy(s, f.dstateOut, x.dout.Slice(1, lo, hi))
}

// stateBefore sets the states before a piece's documents: the caller's, but for a document that
// began on another rank.
func (p *Plan) stateBefore(s device.Stream, f *frame, x *piece, in tensor.Tensor) error {
	to := &p.delta.StateIn
	switch {
	case x.row < 0 && (in.IsNil() || p.size == 1):
		*to = in
		return nil
	case x.row < 0:
		*to = f.stateIn
		return nil
	case x.up == 0 && in.IsNil():
		return nil
	case x.up == 0:
		*to = in.Slice(0, x.doc, x.doc+x.docs)
		return nil
	case in.IsNil() || x.docs == 1:
		*to = f.state.Slice(0, x.row, x.row+1)
		return nil
	}
	*to = f.stateIn.Slice(0, 0, x.docs)
	if err := p.dev.Copy(s, to.Select(0, 0), f.state.Select(0, x.row)); err != nil {
		return err
	}
	return p.dev.Copy(s, to.Slice(0, 1, x.docs), in.Slice(0, x.doc+1, x.doc+x.docs))
}

// gradientBehind is the gradients of the states behind a piece's documents: the caller's, but for a
// document that goes on at another rank.
func (p *Plan) gradientBehind(s device.Stream, f *frame, x *piece, dout tensor.Tensor) (tensor.Tensor, error) {
	switch {
	case x.row < 0 && (dout.IsNil() || p.size == 1):
		return dout, nil
	case x.row < 0:
		return f.dstateOut, nil
	case x.down == 0 && dout.IsNil():
		return dout, nil
	case x.down == 0:
		return dout.Slice(0, x.doc, x.doc+x.docs), nil
	case dout.IsNil() || x.docs == 1:
		return f.incoming.Slice(0, x.row, x.row+1), nil
	}
	to, last := f.dstateOut.Slice(0, 0, x.docs), x.docs-1
	if err := p.dev.Copy(s, to.Slice(0, 0, last), dout.Slice(0, x.doc, x.doc+last)); err != nil {
		return to, err
	}
	return to, p.dev.Copy(s, to.Select(0, last), f.incoming.Select(0, x.row))
}

// statesBehind is where the states behind a piece's documents are written, at documents being there
// already. The last is not wanted where its document goes on: the next piece writes over it.
func (p *Plan) statesBehind(f *frame, x *piece, out tensor.Tensor, at *int64) tensor.Tensor {
	switch {
	case x.row < 0 && p.size == 1:
		return out
	case x.row < 0:
		return f.stateOut
	case p.size == 1:
		return out.Slice(0, x.doc, x.doc+x.docs)
	}
	to := f.stateOut.Slice(0, *at, *at+x.docs)
	if *at += x.docs; x.down > 0 {
		*at--
	}
	return to
}

// statesAhead is the mirror image for the gradients of the states before a piece's documents, which
// are written from the end on.
func (p *Plan) statesAhead(f *frame, x *piece, din tensor.Tensor, at *int64) tensor.Tensor {
	switch {
	case x.row < 0 && p.size == 1:
		return din
	case x.row < 0:
		return f.dstateIn
	case p.size == 1:
		return din.Slice(0, x.doc, x.doc+x.docs)
	}
	to := f.dstateIn.Slice(0, *at-x.docs, *at)
	if *at -= x.docs; x.up > 0 {
		*at++
	}
	return to
}

// gatherDocs brings the states of all documents to all ranks: those that end, or with starts begin,
// at each rank, or each rank's heads of all.
func (p *Plan) gatherDocs(s device.Stream, c *cut, local, gathered, to tensor.Tensor, starts bool) error {
	if p.size == 1 {
		return nil // written in their place
	}
	l, rows := p.layer, p.docRows
	each := l.KeyDim * l.ValueDim
	clear(rows)
	local = local.Flatten(0, 3)
	if l.Strategy == Heads {
		for r := range p.size {
			lo, hi, _, _ := headsOf(l, p.size, r)
			rows[r] = c.docs * (hi - lo) * each
		}
	} else {
		for at, r := range c.line.ranks {
			for i := range c.line.batch {
				_, n := c.line.within(i, int64(at), starts)
				rows[r] += n * l.ValueHeads * each
			}
		}
		if starts { // behind the one that is not wanted
			local = local.Slice(0, l.ValueHeads*each, local.Shape[0])
		}
	}
	if err := p.comm.AllGather(s, gathered, local.Slice(0, 0, rows[p.rank]), rows); err != nil {
		return err
	}
	at := int64(0)
	if l.Strategy == Heads {
		for r := range p.size {
			lo, hi, _, _ := headsOf(l, p.size, r)
			if hi == lo {
				continue
			}
			from := p.statesAt(gathered, at, c.docs, hi-lo)
			if err := p.dev.Copy(s, to.Slice(1, lo, hi), from); err != nil {
				return err
			}
			at += from.Numel()
		}
		return nil
	}
	for place := range c.line.ranks {
		for i := range c.line.batch {
			first, docs := c.line.within(i, int64(place), starts)
			if docs == 0 {
				continue
			}
			from := p.statesAt(gathered, at, docs, l.ValueHeads)
			if err := p.dev.Copy(s, to.Slice(0, first, first+docs), from); err != nil {
				return err
			}
			at += from.Numel()
		}
	}
	return nil
}

// statesAt views states of documents in flat memory, from an element on.
func (p *Plan) statesAt(flat tensor.Tensor, at, docs, heads int64) tensor.Tensor {
	flat = flat.Slice(0, at, flat.Shape[0])
	t := tensor.Of(flat.Data, tensor.F32, docs, heads, p.layer.KeyDim, p.layer.ValueDim)
	t.Where = flat.Where
	return t
}
