package gdn

import (
	"ulysses/device"
	"ulysses/tensor"
)

// scanStates is the second form (Hillis & Steele 1986, exclusive): before the round of step 2^t a
// place knows the map of the 2^t − 1 places it receives from, its prefix; it gets that of the 2^t
// places beyond them. Maps that begin where a document starts are e alone, and longer prefixes do
// not change them.
func (p *stateMethod) scanStates(s device.Stream, c *cut, scratch, own, transition, into tensor.Tensor, backward bool) error {
	l, n := p.layer, int64(len(c.pieces))
	memory := device.Allocator{Mem: scratch, Align: 1}
	take := func(last int64) tensor.Tensor { return memory.Take(tensor.F32, n, l.ValueHeads, l.KeyDim, last) }
	// M of the prefixes, before and behind a round
	prefix := [2]tensor.Tensor{take(l.KeyDim), take(l.KeyDim)}
	if into.IsNil() { // a rank without rows
		into = tensor.Of(nil, tensor.F32, 0, l.ValueHeads, l.KeyDim, l.ValueDim)
	}
	wire := memory.Rest()
	for step := int64(1); step <= c.depth; step *= 2 {
		if err := p.packRound(s, c, wire, step, own, transition, into, prefix[0], backward); err != nil {
			return err
		}
		at, err := p.swap(s, wire)
		if err != nil {
			return err
		}
		for i := range c.pieces {
			piece := &c.pieces[i]
			from, _ := piece.along(backward)
			if from < step {
				continue
			}
			open := from >= 2*step
			e, m := p.wireBlock(wire, at, open)
			at += p.block(open)
			if err := p.lengthen(s, into.Select(0, int64(i)), prefix[0].Select(0, int64(i)), prefix[1].Select(0, int64(i)), e, m, open, step == 1, backward); err != nil {
				return err
			}
		}
		prefix[0], prefix[1] = prefix[1], prefix[0]
	}
	return nil
}

// packRound writes the map of each place's prefix and of the place itself for the one that is a
// step ahead.
func (p *stateMethod) packRound(s device.Stream, c *cut, wire tensor.Tensor, step int64, own, transition, prefixE, prefixM tensor.Tensor, backward bool) error {
	x, at := &p.chain, int64(0)
	clear(x.send)
	clear(x.recv)
	for i := range c.pieces {
		piece := &c.pieces[i]
		from, to := piece.along(backward)
		if from >= step {
			x.recv[c.rankAhead(-step, backward)] += p.block(from >= 2*step)
		}
		if to < step {
			continue
		}
		row := int64(i)
		e, m, open := own.Select(0, row), transition.Select(0, row), piece.passes() && from >= step
		x.send[c.rankAhead(step, backward)] += p.block(open)
		toE, toM := p.wireBlock(wire, at, open)
		at += p.block(open)
		var err error
		switch {
		case !piece.passes():
			err = p.dev.Copy(s, toE, e)
		case step == 1: // no prefix yet
			if err = p.dev.Copy(s, toE, e); err == nil {
				err = p.dev.Copy(s, toM, m)
			}
		default:
			if err = p.apply(s, m, prefixE.Select(0, row), e, toE, backward); err == nil && open {
				err = p.compose(s, m, prefixM.Select(0, row), toM, backward)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// lengthen puts what came before a prefix; first says that there is none yet.
func (p *stateMethod) lengthen(s device.Stream, prefixE, prefixM, longerM, e, m tensor.Tensor, open, first, backward bool) error {
	if first {
		if err := p.dev.Copy(s, prefixE, e); err != nil || !open {
			return err
		}
		return p.dev.Copy(s, longerM, m)
	}
	if err := p.apply(s, prefixM, e, prefixE, prefixE, backward); err != nil || !open {
		return err
	}
	return p.compose(s, prefixM, m, longerM, backward)
}

// compose is the M of two maps, first the second: forward x → M1·(M2·x), backward x → M1ᵀ·(M2ᵀ·x) =
// (M2·M1)ᵀ·x.
func (p *stateMethod) compose(s device.Stream, m1, m2, to tensor.Tensor, backward bool) error {
	if backward {
		m1, m2 = m2, m1
	}
	return p.apply(s, m1, m2, tensor.Tensor{}, to, false)
}

// rankAhead is the rank so many places ahead in the direction in which states travel.
func (c *cut) rankAhead(places int64, backward bool) int64 {
	if backward {
		places = -places
	}
	return c.line.ranks[c.at+places]
}
