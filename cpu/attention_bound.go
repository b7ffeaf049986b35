package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import "ulysses/device"

// attentionBound returns the largest workspace, in bytes, that any division of these tokens into
// documents needs. Each document adds at most one block to the blocks of one long document. The
// number of visible pairs, which sets the number of splits, is largest for one document, and at
// most the width of the window for each query. If Shift is not nil, the bound is for any shifts.
func (d *Device) attentionBound(a *device.Attention, backward bool) int64 {
	dim, dv, kvHeads := a.Q.Shape[2], a.V.Shape[2], a.K.Shape[1]
	tq, tk := a.Q.Shape[0], a.K.Shape[0]
	left, right := a.Window.Sides(a.Causal)
	l := attentionLayout{blocks: blocksOf(tq, tk) + tq + tk} // as many documents as tokens
	d.planTables(a, &l, backward)
	bytes := l.partialOffset
	if !backward {
		return bytes
	}
	pairs := float64(tq) * float64(tk)
	if a.Causal && tq <= tk && a.Shift == nil {
		pairs = causalPairs(tq, tk)
	}
	if left+right < tk {
		pairs = min(pairs, float64(tq)*float64(left+right+1))
	}
	partial := int64(0)
	for splits := int64(1); splits <= splitsFor(pairs, dim, dv); splits++ {
		rows, sums := (splits-1)*tk, splits-1
		if l.largestGroup > 1 && isBF16(a.Q.DType) == 0 && splits > 1 { // tails as well
			rows, sums = splits*tk, 2*sums
		}
		if left+right < tk { // adjacent splits share at most the keys of a window
			rows = min(rows, tk+sums*(left+right))
		}
		if isBF16(a.Q.DType) != 0 { // dk and dv of all keys as well
			rows += tk
		}
		floats := rows * (dim + dv)
		partial = max(partial, padded(waveOf(kvHeads, int64(d.workers), splits)*floats*4))
	}
	return bytes + partial
}

// blocksOf returns the number of query blocks of one document.
func blocksOf(tq, tk int64) int64 {
	if tq == 0 {
		return min(tk, 1)
	}
	return ceilDiv(tq, blockRows(tq))
}

// causalPairs returns the number of visible pairs of one causal document with tq <= tk. There may
// be 2^80, so the result is a float64, exact up to 2^53.
func causalPairs(tq, tk int64) float64 {
	return float64(tq)*float64(tk-tq) + float64(tq)*float64(tq+1)/2
}
