package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import "ulysses/device"

// attentionBound is the largest workspace that any documents of these lengths need. A document adds
// at most one block to those of one long document; visible pairs, which decide the number of parts,
// are most for one document, and no more than a window's for each query.
func (d *Device) attentionBound(a *device.Attention, backward bool) int64 {
	dim, dv, kvHeads := a.Q.Shape[2], a.V.Shape[2], a.K.Shape[1]
	tq, tk := a.Q.Shape[0], a.K.Shape[0]
	left, right := sides(a)
	l := attentionLayout{blocks: blocksOf(tq, tk) + tq + tk} // as many documents as tokens
	d.layTables(a, &l, backward)
	bytes := l.atPartial
	if !backward {
		return bytes
	}
	pairs := float64(tq) * float64(tk)
	if a.Causal && tq <= tk {
		pairs = causalPairs(tq, tk)
	}
	if left+right < tk {
		pairs = min(pairs, float64(tq)*float64(left+right+1))
	}
	partial := int64(0)
	for parts := int64(1); parts <= partsFor(pairs, dim, dv); parts++ {
		rows, sums := (parts-1)*tk, parts-1
		if l.most > 1 && isBF16(a.Q.DType) == 0 && parts > 1 { // and tails
			rows, sums = parts*tk, 2*sums
		}
		if left+right < tk { // neighbours have no more in common than a window
			rows = min(rows, tk+sums*(left+right))
		}
		if isBF16(a.Q.DType) != 0 { // and all of dk and dv
			rows += tk
		}
		floats := rows * (dim + dv)
		partial = max(partial, padded(waveOf(kvHeads, int64(d.workers), parts)*floats*4))
	}
	return bytes + partial
}

// blocksOf is the number of blocks of one document.
func blocksOf(tq, tk int64) int64 {
	if tq == 0 {
		return min(tk, 1)
	}
	return ceilDiv(tq, blockRows(tq))
}

// causalPairs is what the causal mask leaves of one document with no fewer keys than queries, exact
// where a float is: there may be 2^80.
func causalPairs(tq, tk int64) float64 {
	return float64(tq)*float64(tk-tq) + float64(tq)*float64(tq+1)/2
}
