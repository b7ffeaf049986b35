package gdn

import (
	"ulysses/device"
	"ulysses/tensor"
)

// scanStates is an exclusive prefix scan (Hillis & Steele 1986). Before the round of step 2^t, a
// position has the map of the 2^t − 1 positions that send to it, its prefix; the round adds the map
// of the 2^t positions behind them. The map of a range in which the document starts is e alone, and
// longer prefixes do not change it. The prefixes' e is built in into.
func (c *chain) scanStates() error {
	l, n := &c.layer, int64(len(c.layout.segments))
	memory := device.Allocator{Mem: c.scratch, Align: 1}
	// M of the prefixes before and after a round
	prefix := memory.Take(tensor.F32, n, l.ValueHeads, l.KeyDim, l.KeyDim)
	longer := memory.Take(tensor.F32, n, l.ValueHeads, l.KeyDim, l.KeyDim)
	if c.into.IsNil() { // a rank without tokens
		c.into = tensor.Of(nil, tensor.F32, 0, l.ValueHeads, l.KeyDim, l.ValueDim)
	}
	wire := memory.Rest()
	for step := int64(1); step <= c.layout.maxSources; step *= 2 {
		if err := c.packRound(wire, step, prefix); err != nil {
			return err
		}
		at, err := c.allToAll(wire)
		if err != nil {
			return err
		}
		for i := range c.layout.segments {
			x := &c.layout.segments[i]
			sources, _ := x.peers(c.backward)
			if sources < step {
				continue
			}
			withM := sources >= 2*step
			e, m := c.block(wire, at, withM)
			at += c.blockElements(withM)
			if err := c.extendPrefix(x, step, prefix, longer, e, m); err != nil {
				return err
			}
		}
		prefix, longer = longer, prefix
	}
	return nil
}

// packRound packs, for the position that is step positions ahead, the map of each segment's prefix
// and the segment itself.
func (c *chain) packRound(wire tensor.Tensor, step int64, prefix tensor.Tensor) error {
	clear(c.send)
	clear(c.recv)
	at := int64(0)
	for i := range c.layout.segments {
		x := &c.layout.segments[i]
		sources, targets := x.peers(c.backward)
		if sources >= step {
			c.recv[c.layout.rankAhead(-step, c.backward)] += c.blockElements(sources >= 2*step)
		}
		if targets < step {
			continue
		}
		withM := x.interior() && sources >= step
		c.send[c.layout.rankAhead(step, c.backward)] += c.blockElements(withM)
		if err := c.packPrefix(wire, at, x, step, prefix, withM); err != nil {
			return err
		}
		at += c.blockElements(withM)
	}
	return nil
}

// packPrefix packs the map of a segment's prefix and the segment itself at an element of wire.
func (c *chain) packPrefix(wire tensor.Tensor, at int64, x *segment, step int64, prefix tensor.Tensor,
	withM bool) error {
	if !x.interior() || step == 1 { // the prefix does not matter, or is empty
		return c.pack(wire, at, x, x.interior())
	}
	toE, toM := c.block(wire, at, withM)
	e, m := c.own.Select(0, x.sequence), c.transition.Select(0, x.sequence)
	if err := c.apply(m, c.into.Select(0, x.sequence), e, toE); err != nil || !withM {
		return err
	}
	return c.compose(m, prefix.Select(0, x.sequence), toM)
}

// extendPrefix composes a segment's prefix with the map e, m of the positions behind it. m is nil
// if the document starts there.
func (c *chain) extendPrefix(x *segment, step int64, prefix, longer, e, m tensor.Tensor) error {
	into := c.into.Select(0, x.sequence)
	if step == 1 { // the prefix is empty
		if err := c.dev.Copy(c.stream, into, e); err != nil || m.IsNil() {
			return err
		}
		return c.dev.Copy(c.stream, longer.Select(0, x.sequence), m)
	}
	own := prefix.Select(0, x.sequence)
	if err := c.apply(own, e, into, into); err != nil || m.IsNil() {
		return err
	}
	return c.compose(own, m, longer.Select(0, x.sequence))
}

// compose computes the M of two maps of which the second applies first: forward x → M1·(M2·x),
// backward x → M1ᵀ·(M2ᵀ·x) = (M2·M1)ᵀ·x.
func (c *chain) compose(m1, m2, to tensor.Tensor) error {
	if c.backward {
		m1, m2 = m2, m1
	}
	return c.multiply(c.stream, m1, m2, tensor.Tensor{}, to, false)
}
