package ref

import (
	"math"
	"slices"
)

// Ignored is the target of a position without loss.
const Ignored = -100

// CrossEntropy returns nll [T] = logsumexp(logits) - logits[target] for each line of logits [T,
// vocab], and the gradient of scale·Σnll, (softmax - onehot)·scale. Lines whose target is Ignored
// have nll 0 and gradient 0.
func CrossEntropy[T Float](vocab int64, logits []T, targets []int64, scale float64) (nll, dlogits []T) {
	nll, dlogits = make([]T, len(targets)), make([]T, len(logits))
	for t, target := range targets {
		if target == Ignored {
			continue
		}
		at := int64(t) * vocab
		row := logits[at : at+vocab]
		top := slices.Max(row)
		var sum T
		for _, x := range row {
			sum += exp(x - top)
		}
		nll[t] = log(sum) - (row[target] - top)
		for i, x := range row {
			dlogits[at+int64(i)] = exp(x-top) / sum * T(scale)
		}
		dlogits[at+target] = (exp(row[target]-top)/sum - 1) * T(scale)
	}
	return nll, dlogits
}

// CappedCrossEntropy is CrossEntropy of the logits softcap·tanh(logits/softcap), with the gradient
// of the logits before the cap.
func CappedCrossEntropy[T Float](vocab int64, logits []T, targets []int64, scale, softcap float64) (nll, dlogits []T) {
	capped := make([]T, len(logits))
	for i, x := range logits {
		capped[i] = T(softcap) * T(math.Tanh(float64(x/T(softcap))))
	}
	nll, dlogits = CrossEntropy(vocab, capped, targets, scale)
	for i, y := range capped {
		if dlogits[i] != 0 { // a NaN in an ignored row does not matter
			dlogits[i] *= 1 - y/T(softcap)*(y/T(softcap))
		}
	}
	return nll, dlogits
}
