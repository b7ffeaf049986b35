package gdn

import (
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// exchange is the tensors of one all-to-all between tokens and heads, in both layouts.
type exchange struct {
	r      sp.Reshard
	seq    [5]tensor.Tensor // [B, rows, H, ·]
	heads  [5]tensor.Tensor // [B, S, h, ·]
	shared [5]bool          // heads are those of keys
	n      int
}

// add is a tensor of the exchange; gates without a last axis and of another type travel as words of
// the layer's.
func (e *exchange) add(dtype tensor.DType, seq, heads tensor.Tensor, keys bool) {
	e.seq[e.n], e.heads[e.n], e.shared[e.n] = words(seq, dtype), words(heads, dtype), keys
	e.n++
}

// words views [B, n, H] as [B, n, H, 1], and an F32 among BF16 as two of those; [B, n, H, D] stays.
func words(t tensor.Tensor, dtype tensor.DType) tensor.Tensor {
	if t.NDim == 4 {
		return t
	}
	t.NDim, t.Shape[3], t.Stride[3] = 4, 1, 1
	if ratio := t.DType.Size() / dtype.Size(); ratio > 1 {
		for i := range 3 {
			t.Stride[i] *= ratio
		}
		t.DType, t.Shape[3] = dtype, ratio
	}
	return t
}

// run exchanges what was added, and forgets it.
func (e *exchange) run(p *Plan, s device.Stream, b *sp.Batch, wire tensor.Tensor, toHeads, sum bool) error {
	e.r = sp.Reshard{Seq: e.seq[:e.n], Heads: e.heads[:e.n], Shared: e.shared[:e.n], SumCopies: sum, Workspace: wire}
	e.n = 0
	if toHeads {
		return p.ulysses.SeqToHeads(s, b, &e.r)
	}
	return p.ulysses.HeadsToSeq(s, b, &e.r)
}

// Elements of the layer's type that one token has on the wire, by key and by value head: what
// enters the heads' side, and what leaves it.

func (p *Plan) enters(kind call) (key, value int64) {
	l := p.layer
	if kind.backward {
		return 0, l.ValueDim // dout
	}
	return 2 * l.KeyDim, l.ValueDim + p.gateWords(kind)
}

func (p *Plan) leaves(kind call) (key, value int64) {
	l := p.layer
	switch {
	case !kind.backward:
		return 0, l.ValueDim
	case p.keysCut && !kind.layer:
		return 0, 2*l.KeyDim + l.ValueDim + p.gateWords(kind) // each value head's own dq and dk
	}
	return 2 * l.KeyDim, l.ValueDim + p.gateWords(kind)
}

// gateWords is the words of two gates of a head: a and b of the layer's type, or g and beta in F32.
func (p *Plan) gateWords(kind call) int64 {
	if kind.layer {
		return 2
	}
	return 2 * tensor.F32.Size() / p.layer.DType.Size()
}

// exchanged is the elements that a rank sends and receives in one exchange to heads; the way back
// is the mirror image.
func (p *Plan) exchanged(b *sp.Batch, rank, key, value int64) (send, recv int64) {
	width := func(r int64) int64 {
		lo, hi, keyLo, keyHi := headsOf(p.layer, p.size, r)
		return (keyHi-keyLo)*key + (hi-lo)*value
	}
	rows := func(r int64) int64 {
		lo, hi := b.RankRows(int(r))
		return (hi - lo) * b.Batch()
	}
	for r := range p.size {
		if r != rank {
			send += rows(rank) * width(r)
			recv += rows(r) * width(rank)
		}
	}
	return send, recv
}

// wire is the bytes of the larger exchange of a call.
func (p *Plan) wire(c *cut, kind call) int64 {
	key, value := p.enters(kind)
	inSend, inRecv := p.exchanged(c.batch, p.rank, key, value)
	key, value = p.leaves(kind)
	outRecv, outSend := p.exchanged(c.batch, p.rank, key, value)
	return max(inSend+inRecv, outSend+outRecv) * p.layer.DType.Size()
}
