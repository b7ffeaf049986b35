package ref

import "math"

// Attention is the geometry of softmax(scale·q·kᵀ)·v over packed documents, see device.Attention.
type Attention struct {
	Hq, Hkv, D, Dv int64
	CuQ, CuK       []int64 // [documents+1] token bounds of queries and of keys
	KVHead         []int64 // [Hq]; nil = h/(Hq/Hkv)
	Causal         bool    // bottom-right aligned in each document
	Scale          float64
}

// Tq is the number of queries.
func (a *Attention) Tq() int64 { return a.CuQ[len(a.CuQ)-1] }

// Tk is the number of keys.
func (a *Attention) Tk() int64 { return a.CuK[len(a.CuK)-1] }

// Head is the key head of query head h.
func (a *Attention) Head(h int64) int64 {
	if a.KVHead != nil {
		return a.KVHead[h]
	}
	return h / (a.Hq / a.Hkv)
}

// Document is the one that query i belongs to.
func (a *Attention) Document(i int64) int {
	d := 0
	for a.CuQ[d+1] <= i {
		d++
	}
	return d
}

// Visible is the range [lo, hi) of keys that query i sees; empty when hi <= lo.
func (a *Attention) Visible(i int64) (lo, hi int64) {
	d := a.Document(i)
	lo, hi = a.CuK[d], a.CuK[d+1]
	if a.Causal { // the last query of a document sees its last key
		hi -= a.CuQ[d+1] - 1 - i
	}
	return lo, max(lo, hi)
}

// weights is row i of head h of the softmax, over the keys [lo, hi), and the logarithm of its denominator.
func weights[T Float](a *Attention, q, k []T, i, h int64) (lo, hi int64, p []T, lse T) {
	lo, hi = a.Visible(i)
	if lo == hi {
		return lo, hi, nil, T(math.Inf(-1))
	}
	p = make([]T, hi-lo)
	top := T(math.Inf(-1))
	qi := q[(i*a.Hq+h)*a.D:][:a.D]
	for j := lo; j < hi; j++ {
		kj := k[(j*a.Hkv+a.Head(h))*a.D:][:a.D]
		var s T
		for c, x := range qi {
			s += x * kj[c]
		}
		p[j-lo] = s * T(a.Scale)
		top = max(top, p[j-lo])
	}
	var sum T
	for j := range p {
		p[j] = exp(p[j] - top)
		sum += p[j]
	}
	for j := range p {
		p[j] /= sum
	}
	return lo, hi, p, top + log(sum)
}

// AttentionForward returns out [Tq, Hq, Dv] and lse [Tq, Hq] for q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv].
// A query that sees no key has out 0 and lse -inf.
func AttentionForward[T Float](a *Attention, q, k, v []T) (out, lse []T) {
	out, lse = make([]T, a.Tq()*a.Hq*a.Dv), make([]T, a.Tq()*a.Hq)
	for i := range a.Tq() {
		for h := range a.Hq {
			lo, hi, p, l := weights(a, q, k, i, h)
			lse[i*a.Hq+h] = l
			o := out[(i*a.Hq+h)*a.Dv:][:a.Dv]
			for j := lo; j < hi; j++ {
				vj := v[(j*a.Hkv+a.Head(h))*a.Dv:]
				for c := range o {
					o[c] += p[j-lo] * vj[c]
				}
			}
		}
	}
	return out, lse
}

// AttentionBackward returns the gradients for dout [Tq, Hq, Dv], in the shapes of q, k and v. With P the softmax and dP = dout·vᵀ:
//
//	dS = P·(dP - Σ_j P·dP),  dq = scale·dS·k,  dk = scale·dSᵀ·q,  dv = Pᵀ·dout
func AttentionBackward[T Float](a *Attention, q, k, v, dout []T) (dq, dk, dv []T) {
	dq, dk, dv = make([]T, len(q)), make([]T, len(k)), make([]T, len(v))
	for h := range a.Hq {
		for i := range a.Tq() {
			lo, hi, p, _ := weights(a, q, k, i, h)
			do := dout[(i*a.Hq+h)*a.Dv:][:a.Dv]
			dp, delta := make([]T, hi-lo), T(0)
			for j := lo; j < hi; j++ {
				vj := v[(j*a.Hkv+a.Head(h))*a.Dv:]
				for c, x := range do {
					dp[j-lo] += x * vj[c]
				}
				delta += p[j-lo] * dp[j-lo]
			}
			qi, dqi := q[(i*a.Hq+h)*a.D:][:a.D], dq[(i*a.Hq+h)*a.D:][:a.D]
			for j := lo; j < hi; j++ {
				at := j*a.Hkv + a.Head(h)
				kj, dkj, dvj := k[at*a.D:], dk[at*a.D:], dv[at*a.Dv:]
				ds := p[j-lo] * (dp[j-lo] - delta) * T(a.Scale)
				for c := range qi {
					dqi[c] += ds * kj[c]
					dkj[c] += ds * qi[c]
				}
				for c, x := range do {
					dvj[c] += p[j-lo] * x
				}
			}
		}
	}
	return dq, dk, dv
}
