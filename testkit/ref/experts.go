package ref

import (
	"cmp"
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

// Router describes how experts are chosen, see device.Route.
type Router struct {
	Normalize, Sigmoid bool
	Groups, Kept       int64
	Scale              float64
}

// Route chooses the k experts with the largest logits; of equal logits, the lower expert first. It
// sorts the choices by expert, then by token. With a bias [E] it chooses by probability + bias.
func Route[T Float](experts, k int64, logits, bias []T, o Router) (r Routing[T]) {
	tokens := int64(len(logits)) / max(1, experts)
	var weights []T // by choice
	for t := range tokens {
		x := logits[t*experts : (t+1)*experts]
		p := Softmax(x)
		if o.Sigmoid {
			p = sigmoids(x)
		}
		if o.Sigmoid || bias != nil {
			x = slices.Clone(p)
			for e := range bias {
				x[e] += bias[e]
			}
		}
		order := falling(x)
		if o.Groups > 1 {
			order = inGroups(order, keptGroups(x, o))
		}
		sum := T(0)
		for _, e := range order[:k] {
			sum += p[e]
		}
		switch {
		case o.Sigmoid:
			sum += 1e-20
		case bias != nil:
			sum = max(sum, 1e-12)
		}
		for _, e := range order[:k] {
			w := p[e]
			if o.Normalize {
				w /= sum
			}
			weights = append(weights, w*T(cmp.Or(o.Scale, 1)))
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

// falling returns the indices of x in the order of falling values; of equal ones, the lower first.
func falling[T Float](x []T) []int64 {
	order := make([]int64, len(x))
	for i := range order {
		order[i] = int64(i)
	}
	slices.SortStableFunc(order, func(a, b int64) int { return cmp.Compare(x[b], x[a]) })
	return order
}

// keptGroups returns for each expert whether its group is one of the kept ones: with Sigmoid, the
// groups with the largest sums of their two largest x, otherwise with the largest x.
func keptGroups[T Float](x []T, o Router) []bool {
	size, sums := int64(len(x))/o.Groups, make([]T, o.Groups)
	for g := range sums {
		group := x[int64(g)*size : int64(g+1)*size]
		order := falling(group)
		if sums[g] = group[order[0]]; o.Sigmoid {
			sums[g] += group[order[1]]
		}
	}
	kept := make([]bool, len(x))
	for _, g := range falling(sums)[:o.Kept] {
		for e := range size {
			kept[g*size+e] = true
		}
	}
	return kept
}

func inGroups(order []int64, kept []bool) []int64 {
	return slices.DeleteFunc(order, func(e int64) bool { return !kept[e] })
}

func sigmoids[T Float](x []T) []T {
	y := make([]T, len(x))
	for i := range x {
		y[i] = 1 / (1 + exp(-x[i]))
	}
	return y
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
// all, times the gradient and Scale. scaled [T, E] is a gradient of the probabilities, or empty.
func RouteGrad[T Float](r *Routing[T], experts, k int64, dweights, scaled []T, o Router) []T {
	d := make([]T, len(r.Probs))
	for t := range int64(len(r.Experts)) / k {
		p, dp := r.Probs[t*experts:(t+1)*experts], make([]T, experts)
		for j := t * k; j < (t+1)*k; j++ {
			dp[r.Experts[j]] = dweights[r.Rows[j]]
		}
		if o.Sigmoid {
			addSigmoidGrad(d[t*experts:], p, dp, r.Experts[t*k:(t+1)*k], o)
		} else {
			q, c := p, T(cmp.Or(o.Scale, 1))
			if o.Normalize {
				q = make([]T, experts) // the softmax over the chosen logits
				for j := t * k; j < (t+1)*k; j++ {
					q[r.Experts[j]] = r.Weights[r.Rows[j]] / c
				}
			}
			for e := range dp {
				dp[e] *= c
			}
			addSoftmaxGrad(d[t*experts:], q, dp)
		}
		if len(scaled) > 0 {
			addSoftmaxGrad(d[t*experts:], p, scaled[t*experts:(t+1)*experts])
		}
	}
	return d
}

// addSigmoidGrad is the chain rule for w_j = c·s_j, or c·s_j / (Σ s_i + 1e-20) over the chosen, and
// s = sigmoid(z), in the order in which Route computes them.
func addSigmoidGrad[T Float](d, s, dw []T, chosen []int64, o Router) {
	c, sum, mean := T(cmp.Or(o.Scale, 1)), T(1), T(0)
	if o.Normalize {
		sum = 1e-20
		for _, e := range chosen {
			sum += s[e]
		}
		for _, e := range chosen {
			mean += dw[e] * s[e] / sum
		}
	}
	for _, e := range chosen {
		d[e] += c / sum * (dw[e] - mean) * s[e] * (1 - s[e])
	}
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
