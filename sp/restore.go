package sp

import "ulysses/device"

// A layer that has no room for its q, k and v until the backward pass keeps two things of
// attention: Out, where Forward wrote it, and the LSE (Args.SavedLSE). Restore makes the rest of
// what Backward needs from these and from q, k and v computed again: exchanges, but no attention,
// the one part of a layer whose work grows with the square of the sequence.

// Apart is the bytes of Args.Saved and Args.SavedLSE where both are given.
func (p *Plan) Apart(b *Batch) (saved, lse int64) {
	keep, apart := device.Allocator{Align: p.align}, device.Allocator{Align: p.align}
	p.inputs(b, &keep, &apart)
	return max(keep.Used, p.align), max(apart.Used, p.align)
}

// MaxApart is Apart for any batch of at most these extents.
func (p *Plan) MaxApart(batch, seq, kvSeq int64) (saved, lse int64, err error) {
	b, err := newBatch(p.rank, p.size, BatchSpec{Batch: batch, Seq: seq, KVSeq: kvSeq})
	if err != nil {
		return 0, 0, err
	}
	saved, lse = p.Apart(b)
	return saved, lse, nil
}

// Restore fills Saved from Q, K, V and Out, all as Forward had them or left them, bit for bit as it
// was. SavedLSE must be as Forward left it. Collective. It allocates nothing.
func (p *Plan) Restore(s device.Stream, b *Batch, a *Args) error {
	if err := p.Admit.Result(p.checkRestore(b, a)); err != nil {
		return err
	}
	ws := device.Allocator{Mem: bytesOf(a.Workspace), Align: p.align}
	keep, lse := p.keepers(a)
	x := p.inputs(b, &keep, lse)
	scratch := ws.Rest()
	qkv := p.enter(b, a, &x)
	if err := p.seqToHeads(s, scratch, qkv[:]); err != nil {
		return err
	}
	// By itself: together they would need a larger wire than any exchange of Forward or Backward.
	out := [...]part{{seq: a.Out, heads: x.out, split: p.query, rows: b.queries.rows}}
	return p.seqToHeads(s, scratch, out[:])
}

// RestoreBytesSent is what this rank sends to others in one Restore: B·Σ_{j≠r} [ n_r·hq_j·(D+Dv) +
// m_r·kv_j·(D+Dv) ] elements, in the terms of BytesSent.
func (p *Plan) RestoreBytesSent(b *Batch) (bytes int64) {
	l, me := p.layer, p.rank
	for j := range p.size {
		if j != me {
			bytes += (b.queries.rows[me].n()*p.query[j].n() + b.keys.rows[me].n()*p.key[j].n()) * (l.Dim + l.VDim)
		}
	}
	return bytes * b.spec.Batch * l.DType.Size()
}
