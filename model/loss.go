package model

import "ulysses/tensor"

// A tile of logits takes about lossTileBytes, but has enough rows to keep the products efficient and no more than are of use to them.
const (
	lossTileBytes = 64 << 20
	lossTileMin   = 128
	lossTileMax   = 1024
)

// head is the final norm and the projection to the vocabulary, with the loss. The logits exist a tile of rows at a time, in F32, and so
// do their gradients, in the compute type: where that is F32 they take the logits' place.
type head struct {
	norm   *Param
	matrix linear // [V, hidden]; the embedding's table when tied
	tied   bool
	eps    float64
	tile   int64 // rows, 0 = chosen
}

func (h *head) tileRows(rows int64) int64 {
	if h.tile > 0 {
		return min(h.tile, rows)
	}
	return min(rows, max(lossTileMin, min(lossTileMax, lossTileBytes/(4*h.matrix.out))))
}

// run sums the negative log likelihoods of x [T, hidden] into sum (F64, one element). In a pass with a backward half it returns the
// gradient of x, which takes the place of p.act; p.act takes that of x.
func (h *head) run(p *pass, x, sum tensor.Tensor) tensor.Tensor {
	p.phase("norm")
	p.Norm(p.act, x, h.norm, p.rstd, h.eps)
	p.end()
	p.phase("loss")
	mark, tile := p.mark(), h.tileRows(p.rows)
	nll := p.stat(p.rows) // the sum is over all rows at once, so that tiles leave no trace in it
	all := p.stat(tile, h.matrix.out)
	dall := all
	if p.backward && p.compute != tensor.F32 {
		dall = p.temp(tile, h.matrix.out)
	}
	for lo := int64(0); lo < p.rows; lo += tile {
		hi := min(lo+tile, p.rows)
		act, logits, dlogits := p.act.Slice(0, lo, hi), all.Slice(0, 0, hi-lo), dall.Slice(0, 0, hi-lo) // [tile, hidden], [tile, V] twice
		h.matrix.forward(p, logits, act)
		p.CrossEntropy(nll.Slice(0, lo, hi), logits, dlogits, p.batch.Targets.Slice(0, lo, hi))
		if p.backward {
			h.matrix.addWeights(p, dlogits, act)
			h.matrix.backwardInput(p, act, dlogits)
		}
	}
	p.Sum(sum, nll)
	p.reset(mark)
	p.end()
	if !p.backward {
		return x
	}
	if !h.tied { // else the embedding has more to add
		p.ready(h.matrix.w...)
	}
	p.phase("norm")
	p.NormBack(p.act, p.act, x, h.norm, p.rstd, false)
	p.end()
	d := p.act
	p.act = x
	return d
}
