package sp

import "ulysses/device"

// A layer without enough memory for its q, k and v until the backward pass saves only two results
// of attention: Out, where Forward wrote it, and the LSE (Args.SavedLSE). Restore computes the rest
// of Saved from these and from recomputed q, k and v. It needs all-to-alls but no attention, whose
// work grows with the square of the sequence length.

// SeparateSizes returns the bytes of Args.Saved and Args.SavedLSE if both are given. Not
// collective.
func (p *Plan) SeparateSizes(b *Batch) (saved, lse int64) {
	keep, apart := device.Allocator{Align: p.align}, device.Allocator{Align: p.align}
	p.allocForward(b, &keep, &apart)
	return max(keep.Used, p.align), max(apart.Used, p.align)
}

// MaxSeparateSizes is SeparateSizes for any batch of at most these extents.
func (p *Plan) MaxSeparateSizes(batch, seq, kvSeq int64) (saved, lse int64, err error) {
	err = p.eachMax(batch, seq, kvSeq, func(b *Batch) {
		s, l := p.SeparateSizes(b)
		saved, lse = max(saved, s), max(lse, l)
	})
	return saved, lse, err
}

// Restore fills Saved from Q, K, V, Out and SavedLSE. They must have the values of Forward; Saved
// is then bitwise equal to the one of Forward. It allocates nothing. Collective over the plan's
// communicator.
func (p *Plan) Restore(s device.Stream, b *Batch, a *Args) error {
	if err := p.Admit.Result(p.checkRestore(b, a)); err != nil {
		return err
	}
	ws := device.Allocator{Mem: bytesOf(a.Workspace), Align: p.align}
	keep, lse := p.savedBuffers(a)
	x := p.allocForward(b, &keep, lse)
	scratch := ws.Rest()
	qkv := p.qkvTensors(b, a, &x)
	if err := p.seqToHeads(s, scratch, qkv[:]); err != nil {
		return err
	}
	// A second all-to-all: together they would need a larger workspace than Forward and Backward.
	out := [...]reshardTensor{{seq: a.Out, heads: x.out, split: p.query, rows: p.placed(b).queries.exchange}}
	return p.seqToHeads(s, scratch, out[:])
}

// RestoreBytesSent returns the bytes that this rank sends to other ranks in one Restore:
// B·Σ_{j≠r} [ n_rj·hq_j·(D+Dv) + m_rj·kv_j·(D+Dv) ] elements, in the terms of BytesSent.
func (p *Plan) RestoreBytesSent(b *Batch) (bytes int64) {
	l, sch := p.layer, p.placed(b)
	for j := range p.size {
		if j != p.rank {
			bytes += (sch.queries.seqRows[j]*p.query[j].n() + sch.keys.seqRows[j]*p.key[j].n()) * (l.Dim + l.VDim)
		}
	}
	return bytes * b.spec.Batch * l.DType.Size()
}
