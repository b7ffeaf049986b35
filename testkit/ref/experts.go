package ref

import (
	"math"
	"slices"
)

// Routing is the choice of K experts for each of T tokens, device.Route.
type Routing[T Float] struct {
	Probs   []T     // [T, E]
	Experts []int64 // [T, K]
	Rows    []int64 // [T, K]
	Weights []T     // [T·K], by row
	Offsets []int64 // [E+1]
}

// Route chooses the k experts with the largest logits; of equal logits, the lower expert first. It
// sorts the choices by expert, then by token. With a bias [E] it chooses by probability + bias.
func Route[T Float](experts, k int64, logits, bias []T, normalize bool) (r Routing[T]) {
	tokens := int64(len(logits)) / max(1, experts)
	var weights []T // by choice
	for t := range tokens {
		x := logits[t*experts : (t+1)*experts]
		p := Softmax(x)
		least := T(0) // of the divisor
		if bias != nil {
			x, least = slices.Clone(p), 1e-12
			for e := range x {
				x[e] += bias[e]
			}
		}
		order := make([]int64, experts)
		for e := range order {
			order[e] = int64(e)
		}
		slices.SortStableFunc(order, func(a, b int64) int {
			switch {
			case x[a] > x[b]:
				return -1
			case x[a] < x[b]:
				return 1
			}
			return 0
		})
		sum := T(0)
		for _, e := range order[:k] {
			sum += p[e]
		}
		for _, e := range order[:k] {
			w := p[e]
			if normalize {
				w /= max(sum, least)
			}
			weights = append(weights, w)
		}
		r.Probs, r.Experts = append(r.Probs, p...), append(r.Experts, order[:k]...)
	}
	r.Rows, r.Weights, r.Offsets = make([]int64, tokens*k), make([]T, tokens*k), []int64{0}
	row := int64(0)
	for e := range experts {
		for i, chosen := range r.Experts {
			if chosen == e {
				r.Rows[i], r.Weights[row] = row, weights[i]
				row++
			}
		}
		r.Offsets = append(r.Offsets, row)
	}
	return r
}

// Softmax returns the softmax of x.
func Softmax[T Float](x []T) []T {
	y, top, sum := make([]T, len(x)), T(math.Inf(-1)), T(0)
	for _, v := range x {
		top = max(top, v)
	}
	for i, v := range x {
		y[i] = exp(v - top)
		sum += y[i]
	}
	for i := range y {
		y[i] /= sum
	}
	return y
}

// RouteGrad returns the gradient of the logits from the gradient of the weights [T·K]. It is the
// Jacobian of the softmax, over the chosen logits if the weights are normalized and otherwise over
// all, times the gradient. scaled [T, E] is a gradient of the probabilities, or empty.
func RouteGrad[T Float](r *Routing[T], experts, k int64, dweights, scaled []T, normalize bool) []T {
	d := make([]T, len(r.Probs))
	for t := range int64(len(r.Experts)) / k {
		p, dp := r.Probs[t*experts:(t+1)*experts], make([]T, experts)
		for j := t * k; j < (t+1)*k; j++ {
			dp[r.Experts[j]] = dweights[r.Rows[j]]
		}
		if normalize {
			q := make([]T, experts) // the softmax over the chosen logits
			for j := t * k; j < (t+1)*k; j++ {
				q[r.Experts[j]] = r.Weights[r.Rows[j]]
			}
			addSoftmaxGrad(d[t*experts:], q, dp)
		} else {
			addSoftmaxGrad(d[t*experts:], p, dp)
		}
		if len(scaled) > 0 {
			addSoftmaxGrad(d[t*experts:], p, scaled[t*experts:(t+1)*experts])
		}
	}
	return d
}

func addSoftmaxGrad[T Float](d, p, dp []T) {
	sum := T(0)
	for i := range p {
		sum += p[i] * dp[i]
	}
	for i := range p {
		d[i] += p[i] * (dp[i] - sum)
	}
}

// CombineRows returns y[t] = Σ weights[r]·x[r] + ownWeights[t]·own[t] over the k rows r of token t;
// nil weights are 1, and a nil own is 0.
func CombineRows[T Float](n, k int64, x []T, rows []int64, weights, own, ownWeights []T) []T {
	y := make([]T, int64(len(rows))/k*n)
	for i, r := range rows {
		w := T(1)
		if weights != nil {
			w = weights[r]
		}
		for c := range n {
			y[int64(i)/k*n+c] += w * x[r*n+c]
		}
	}
	for i := range own {
		w := T(1)
		if ownWeights != nil {
			w = ownWeights[int64(i)/n]
		}
		y[i] += w * own[i]
	}
	return y
}
