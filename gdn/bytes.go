package gdn

import (
	"fmt"

	"ulysses/sp"
	"ulysses/tensor"
)

// BytesSent is what this rank sends to others in one Forward and one Backward of the core. With
// Heads, n being a rank's rows and hv, hk its value heads and the key heads under them,
//
//	forward   B·Σ_{j≠r} [ n_r·(hk_j·2Dk + hv_j·(Dv + gates)) + n_j·hv_r·Dv ]
//	backward  B·Σ_{j≠r} [ n_r·hv_j·Dv + n_j·(hk_r·2Dk + hv_r·(Dv + gates)) ]
//
// elements, the gates being two of F32; where a key head's value heads lie on several ranks, dq and
// dk travel with each of these, hv_r·2Dk. With State it is for each batch row and each rank behind
// this one that holds rows of its last document (backward: before it, of its first) Hv·Dk·Dv F32,
// and Hv·Dk·Dk more where the document fills this rank's rows and comes from and goes on to others;
// over many ranks a prefix scan sends fewer.
func (p *Plan) BytesSent(b *sp.Batch) (forward, backward int64) {
	c := p.cutOf(b)
	return p.sent(c, p.rank, call{}), p.sent(c, p.rank, call{backward: true})
}

// LayerBytesSent is the same for LayerForward and LayerBackward: with Heads the gates are two
// elements of the layer's type, and dq and dk always those of key heads; with State B·(ConvWidth −
// 1) rows of q|k|v to the ranks behind come on top, fewer at the start of a document, and their
// gradients on the way back.
func (p *Plan) LayerBytesSent(b *sp.Batch) (forward, backward int64) {
	c := p.cutOf(b)
	return p.sent(c, p.rank, call{layer: true}), p.sent(c, p.rank, call{layer: true, backward: true})
}

// RecomputeBytesSent is what this rank sends in one Recompute or LayerRecompute: nothing with
// State.
func (p *Plan) RecomputeBytesSent(b *sp.Batch) int64 {
	if p.layer.Strategy == State {
		return 0
	}
	_, sent := p.exchanged(b, p.rank, 0, p.layer.ValueDim)
	return sent * p.layer.DType.Size()
}

// StateBytesSent is what this rank sends on top in a Forward that is asked for StateOut, and in a
// Backward that is asked for DStateIn.
func (p *Plan) StateBytesSent(b *sp.Batch) (forward, backward int64) {
	c := p.cutOf(b)
	e, _ := p.elements()
	bytes := (p.size - 1) * e * tensor.F32.Size()
	if p.layer.Strategy == Heads {
		lo, hi, _, _ := p.Heads()
		bytes = bytes / p.layer.ValueHeads * (hi - lo)
	}
	if p.size == 1 || p.layer.Strategy == State && c.n == 0 {
		return 0, 0
	}
	return c.ends * bytes, c.starts * bytes
}

// sent is the bytes that a rank sends in one call.
func (p *Plan) sent(c *cut, rank int64, kind call) int64 {
	l := p.layer
	if l.Strategy == State {
		bytes := p.chainSent(&c.line, c.line.placeOf(rank), p.scan, kind.backward) * tensor.F32.Size()
		if kind.layer && l.ConvWidth > 1 {
			send, recv := c.batch.HaloElements(int(rank), l.ConvWidth-1, l.channels())
			if kind.backward {
				send = recv
			}
			bytes += send * l.DType.Size()
		}
		return bytes
	}
	key, value := p.enters(kind)
	in, _ := p.exchanged(c.batch, rank, key, value)
	key, value = p.leaves(kind)
	_, out := p.exchanged(c.batch, rank, key, value)
	return (in + out) * l.DType.Size()
}

// choose settles the strategy, and the form in which states travel, by the bytes of all ranks
// together for a document over all of them.
func (p *Plan) choose() error {
	l := &p.layer
	asked := l.Strategy
	tokens := l.Tokens
	if tokens == 0 {
		tokens = p.size // a row for each: states do not depend on it
	}
	b, err := sp.SketchBatch(int(p.rank), int(p.size), sp.BatchSpec{Batch: 1, Seq: tokens})
	if err != nil {
		return err
	}
	c := cut{batch: b}
	c.line.fill(b)
	var gather, scan int64
	for at := range int64(len(c.line.ranks)) {
		gather += p.chainSent(&c.line, at, false, false)
		scan += p.chainSent(&c.line, at, true, false)
	}
	p.scan = gather >= 2*scan && scan > 0
	total := func(s Strategy) (sum int64) {
		l.Strategy = s
		for rank := range p.size {
			for _, kind := range []call{{}, {backward: true}} {
				kind.layer = l.ConvWidth > 0
				sum += p.sent(&c, rank, kind)
			}
		}
		return sum
	}
	heads, state := total(Heads), total(State)
	l.Strategy = asked
	if asked == Auto {
		l.Strategy = Heads
		if l.Tokens > 0 && state < heads {
			l.Strategy = State
		}
	}
	p.why = p.describePlan(asked, heads, state)
	return nil
}

// describePlan is the plan in one line.
func (p *Plan) describePlan(asked Strategy, heads, state int64) string {
	l := p.layer
	s := fmt.Sprintf("gated delta rule over %d ranks by %v", p.size, l.Strategy)
	if l.Strategy == Heads {
		s += ", value heads " + p.counts(func(lo, hi, _, _ int64) int64 { return hi - lo }) +
			", key heads " + p.counts(func(_, _, lo, hi int64) int64 { return hi - lo })
	} else if p.scan {
		s += " (prefix scan)"
	}
	if p.size == 1 {
		return s + ", sends nothing"
	}
	switch {
	case l.Tokens == 0 && l.Strategy == Heads:
		s += fmt.Sprintf(", sends %d bytes a token forward and backward, all ranks together", heads/p.size)
	case l.Tokens == 0:
		s += fmt.Sprintf(", sends %d bytes a document over all ranks forward and backward, all ranks together", state)
	default:
		s += fmt.Sprintf(", %d tokens forward and backward send %d bytes by heads and %d by state, all ranks together", l.Tokens, heads, state)
	}
	switch {
	case asked != Auto:
		return s + "; as asked for"
	case l.Tokens == 0:
		return s + "; auto, the tokens of a batch not being known"
	}
	return s + "; auto, which is the lesser"
}

// counts lists how many heads each rank has, runs shortened: "2×3 1".
func (p *Plan) counts(n func(lo, hi, keyLo, keyHi int64) int64) (s string) {
	for r := int64(0); r < p.size; {
		k, first := n(headsOf(p.layer, p.size, r)), r
		for r < p.size && n(headsOf(p.layer, p.size, r)) == k {
			r++
		}
		if first > 0 {
			s += " "
		}
		if s += fmt.Sprint(k); r-first > 1 {
			s += fmt.Sprintf("×%d", r-first)
		}
	}
	return s
}
