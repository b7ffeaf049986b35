package main

import "ulysses/sp"

// sizesOf returns the bytes of saved and workspace of a plan's calls with a batch.
func (p *plan) sizesOf(b *sp.Batch) sp.Sizes {
	switch {
	case p.gdn == nil:
		return p.withOptions(p.sp.Sizes(b))
	case p.states:
		return sp.Sizes(p.gdn.Sizes(b))
	}
	return sp.Sizes(p.gdn.SizesWithout(b))
}

// withOptions returns the sizes of attention with the workspace of the plan's options.
func (p *plan) withOptions(s sp.Sizes) sp.Sizes {
	s.Workspace += p.optionBytes()
	return s
}

// maxSizes returns the bytes that are sufficient for every batch of one evenly sharded sequence of
// at most p.maxTokens tokens.
func (p *plan) maxSizes() (sp.Sizes, error) {
	if p.gdn == nil {
		size, err := p.sp.MaxSizes(1, p.maxTokens, p.maxTokens)
		return p.withOptions(size), err
	}
	size, err := p.gdn.MaxSizes(1, p.maxTokens, p.states)
	return sp.Sizes(size), err
}

// unreserved returns the bytes of workspace of a call that plans and batches have not reserved: all
// with ULYSSES_OWN_WORKSPACES, otherwise 0.
func (p *plan) unreserved(b *sp.Batch) int64 {
	if !p.ctx.ownWorkspaces {
		return 0
	}
	return p.sizesOf(b).Workspace
}

// reserveAll reserves the memory of the plan's calls with max_tokens tokens and with each batch of
// the context.
func (p *plan) reserveAll() error {
	if p.maxTokens > 0 {
		s, err := p.maxSizes()
		if err != nil {
			return err
		}
		if err := p.ctx.reserve(s.Workspace); err != nil {
			return err
		}
		if err := p.reserveComm(1, p.maxTokens, p.maxTokens); err != nil {
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

// reserveComm reserves the memory of the communicator for batches of these lengths.
func (p *plan) reserveComm(batch, seq, kvSeq int64) error {
	if p.gdn != nil {
		return p.gdn.Reserve(batch, seq)
	}
	return p.sp.Reserve(batch, seq, kvSeq)
}

// reserveFor reserves the memory of the plan's calls with a batch. A batch that does not fit the
// plan is no error here: the call with both refuses it.
func (p *plan) reserveFor(b *batch) error {
	x, err := p.batchOf("libulysses", b)
	if err != nil {
		return nil
	}
	if p.sp != nil {
		if err := p.sp.CheckRows(x); err != nil {
			return err
		}
	}
	if err := p.ctx.reserve(p.sizesOf(x).Workspace); err != nil {
		return err
	}
	if p.gdn != nil {
		return p.gdn.Reserve(x.Batch(), x.Seq())
	}
	return p.sp.ReserveFor(x)
}
