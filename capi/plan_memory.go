package main

import "ulysses/sp"

// sizesOf is the bytes of a plan's calls with a batch, maxSizes with all batches of as many tokens
// as it was planned for.
func (p *plan) sizesOf(b *sp.Batch) sp.Sizes {
	switch {
	case p.gdn == nil:
		return p.sp.Sizes(b)
	case p.states:
		return sp.Sizes(p.gdn.Sizes(b))
	}
	return sp.Sizes(p.gdn.SizesWithout(b))
}

func (p *plan) maxSizes() (sp.Sizes, error) {
	if p.gdn == nil {
		return p.sp.MaxSizes(1, p.max, p.max)
	}
	size, err := p.gdn.MaxSizes(1, p.max, p.states)
	return sp.Sizes(size), err
}

// reserveAll makes the own workspace large enough for the plan with all batches, and with as many
// tokens as it was planned for.
func (p *plan) reserveAll() error {
	if p.max > 0 {
		s, err := p.maxSizes()
		if err != nil {
			return err
		}
		if err := p.ctx.reserve(s.Workspace); err != nil {
			return err
		}
		if err := p.reserveComm(1, p.max, p.max); err != nil {
			return err
		}
	}
	for b := range p.ctx.batches {
		if err := p.reserveFor(b); err != nil {
			return err
		}
	}
	return nil
}

// reserveComm has the communicator make what it needs beside tensors.
func (p *plan) reserveComm(batch, seq, kvSeq int64) error {
	if p.gdn != nil {
		return p.gdn.Reserve(batch, seq)
	}
	return p.sp.Reserve(batch, seq, kvSeq)
}

// reserveFor is for one batch; a pair that does not fit together is found out in the call.
func (p *plan) reserveFor(b *batch) error {
	x, err := p.batchOf("libulysses", b)
	if err != nil {
		return nil
	}
	if err := p.ctx.reserve(p.sizesOf(x).Workspace); err != nil {
		return err
	}
	if p.gdn != nil {
		return p.gdn.Reserve(x.Batch(), x.Seq())
	}
	return p.sp.ReserveFor(x)
}
