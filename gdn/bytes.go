package gdn

import (
	"ulysses/sp"
	"ulysses/tensor"
)

// BytesSent returns the bytes that this rank r sends to others in one Forward and one Backward of
// the core. With Heads these are
//
//	forward   B·Σ_{j≠r} [ n_r·(hk_j·2Dk + hv_j·(Dv + gates)) + n_j·hv_r·Dv ]
//	backward  B·Σ_{j≠r} [ n_r·hv_j·Dv + n_j·(hk_r·2Dk + hv_r·(Dv + gates)) ]
//
// elements, where n_j is the number of tokens of a sequence on rank j, hv_j of its value heads and
// hk_j of the key heads that these use, and gates is the size of two F32. Where the value heads of
// a key head are on several ranks, dq and dk of each value head are sent: hv_r·2Dk.
//
// With State this rank sends Hv·Dk·Dv F32 for each sequence and each following rank that has tokens
// of the sequence's last document on this rank; backward, for each preceding rank that has tokens
// of the first document. It also sends Hv·Dk·Dk F32 if one document begins before this rank's
// tokens and ends after them. Over many ranks, a prefix scan sends fewer bytes.
func (p *Plan) BytesSent(b *sp.Batch) (forward, backward int64) {
	return p.bytesSent(b, callKind{}), p.bytesSent(b, callKind{backward: true})
}

// LayerBytesSent is BytesSent for LayerForward and LayerBackward. With Heads the gates are two
// elements of the layer's type, and only dq and dk of key heads are sent. With State, B·(ConvWidth
// − 1) tokens of q|k|v also go to the following ranks, fewer at the start of a document, and their
// gradients go back.
func (p *Plan) LayerBytesSent(b *sp.Batch) (forward, backward int64) {
	return p.bytesSent(b, callKind{layer: true}), p.bytesSent(b, callKind{layer: true, backward: true})
}

// RecomputeBytesSent returns the bytes that this rank sends in one Recompute or LayerRecompute: 0
// with State.
func (p *Plan) RecomputeBytesSent(b *sp.Batch) int64 {
	return p.bytesSent(b, callKind{recompute: true})
}

func (p *Plan) bytesSent(b *sp.Batch, kind callKind) int64 {
	return p.method.bytesSent(p.layoutOf(b), p.rank, kind)
}

// StateBytesSent returns the bytes that this rank sends in addition in a Forward with StateOut, and
// in a Backward with DStateIn.
func (p *Plan) StateBytesSent(b *sp.Batch) (forward, backward int64) {
	l := p.layoutOf(b)
	document := p.method.heads(p.rank).values() * p.layer.KeyDim * p.layer.ValueDim * tensor.F32.Size()
	return (p.size - 1) * l.ends * document, (p.size - 1) * l.starts * document
}
