package gdn

import (
	"fmt"

	"ulysses/sp"
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
	return p.method.sent(c, p.rank, call{}), p.method.sent(c, p.rank, call{backward: true})
}

// LayerBytesSent is the same for LayerForward and LayerBackward: with Heads the gates are two
// elements of the layer's type, and dq and dk always those of key heads; with State B·(ConvWidth −
// 1) rows of q|k|v to the ranks behind come on top, fewer at the start of a document, and their
// gradients on the way back.
func (p *Plan) LayerBytesSent(b *sp.Batch) (forward, backward int64) {
	c := p.cutOf(b)
	return p.method.sent(c, p.rank, call{layer: true}), p.method.sent(c, p.rank, call{layer: true, backward: true})
}

// RecomputeBytesSent is what this rank sends in one Recompute or LayerRecompute: nothing with
// State.
func (p *Plan) RecomputeBytesSent(b *sp.Batch) int64 {
	return p.method.recomputeSent(b)
}

// StateBytesSent is what this rank sends on top in a Forward that is asked for StateOut, and in a
// Backward that is asked for DStateIn.
func (p *Plan) StateBytesSent(b *sp.Batch) (forward, backward int64) {
	c := p.cutOf(b)
	bytes := p.method.docSent(c)
	return c.ends * bytes, c.starts * bytes
}

// describe returns the plan in one line: the strategy that was asked for, and the bytes that both
// send.
func (p *Plan) describe(asked Strategy, heads, state int64) string {
	l := p.layer
	s := fmt.Sprintf("gated delta rule over %d ranks by %v%s", p.size, l.Strategy, p.method.describe())
	if p.size == 1 {
		return s + ", sends nothing"
	}
	if l.Tokens == 0 {
		s += ", " + p.method.describeSent(map[Strategy]int64{Heads: heads, State: state}[l.Strategy]) + " forward and backward, all ranks together"
	} else {
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
