package sp

import (
	"ulysses/comm"
	"ulysses/tensor"
)

// Reserve makes the communicator allocate, before the first step, the buffers for batches of at
// most these extents (comm.Reserve). Not collective.
func (p *Plan) Reserve(batch, seq, kvSeq int64) error {
	var most, one int64
	if err := p.eachMax(batch, seq, kvSeq, func(b *Batch) {
		most, one = max(most, p.mostWire(b)), max(one, p.tensorWireBytes(b))
	}); err != nil {
		return err
	}
	return p.reserve(most, one)
}

// ReserveFor is Reserve for one batch.
func (p *Plan) ReserveFor(b *Batch) error { return p.reserve(p.mostWire(b), p.tensorWireBytes(b)) }

// reserve reserves buffers for all-to-alls of so many bytes; one is for an all-to-all of one
// tensor. A ring has two all-to-alls in progress: the keys of the next step, and the gradients of
// the last. Overlap has three, of one tensor each.
func (p *Plan) reserve(most, one int64) error {
	n := 1
	if p.ring > 1 {
		n = 2
	}
	err := comm.Reserve(p.comm, n, most)
	if p.layer.Overlapped && err == nil {
		err = comm.Reserve(p.comm, 3, one)
	}
	return err
}

// mostWire returns the bytes, sent and received, of the largest all-to-all.
func (p *Plan) mostWire(b *Batch) int64 {
	return max(p.wireBytes(b, false), p.wireBytes(b, true), p.ringWireBytes(b))
}

// wireRows returns the rows of a query and of a key head in a sequence that this rank sends and
// receives between the layouts of tokens and of attention.
func (p *Plan) wireRows(b *Batch) (q, k int64) {
	me, sch := p.rank, p.placed(b)
	for j := range p.size {
		if j != me {
			q += p.query[j].n()*sch.queries.seqRows[j] + p.query[me].n()*sch.queries.headsRows[j]
			k += p.key[j].n()*sch.keys.seqRows[j] + p.key[me].n()*sch.keys.headsRows[j]
		}
	}
	return q, k
}

// tensorWireBytes returns the bytes, sent and received, of the largest all-to-all of Overlap.
func (p *Plan) tensorWireBytes(b *Batch) int64 {
	q, k := p.wireRows(b)
	return max(q, k) * max(p.layer.Dim, p.layer.VDim) * p.layer.DType.Size() * b.spec.Batch
}

// wireBytes returns the bytes, sent and received, of the largest all-to-all of a pass between the
// layouts of tokens and of attention.
func (p *Plan) wireBytes(b *Batch, backward bool) int64 {
	l := p.layer
	q, k := p.wireRows(b)
	in, out, lse := q*l.Dim+k*(l.Dim+l.VDim), q*l.VDim, q // elements of a sequence
	if backward {
		lse = 0
	}
	size := l.DType.Size()
	if p.lseWithOut() {
		out += lse
	}
	return max(in*size, out*size, lse*tensor.F32.Size()) * b.spec.Batch
}
