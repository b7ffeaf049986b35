package ref

import (
	"math"
	"slices"
)

// Attention has the shapes and masks of softmax(scale·q·kᵀ)·v over packed documents, see
// device.Attention.
type Attention struct {
	Hq, Hkv, D, Dv int64
	// [documents+1] boundaries of the documents in tokens, of queries and of keys
	CuQ, CuK []int64
	KVHead   []int64 // [Hq]; nil = h/(Hq/Hkv)
	Causal   bool    // bottom-right aligned in each document
	Window   *Window // nil = unbounded
	Scale    float64
	// Keep rounds scores, probabilities and their gradients, as a plain implementation in a narrow
	// type does; nil = no rounding.
	Keep func(float64) float64
}

func keep[T Float](a *Attention, x T) T {
	if a.Keep == nil {
		return x
	}
	return T(a.Keep(float64(x)))
}

// Window limits query i to the keys i+sk-sq-Left <= j <= i+sk-sq+Right, in a document of sq queries
// and sk keys. A negative side is unlimited.
type Window struct{ Left, Right int64 }

// Tq returns the number of queries.
func (a *Attention) Tq() int64 { return a.CuQ[len(a.CuQ)-1] }

// Tk returns the number of keys.
func (a *Attention) Tk() int64 { return a.CuK[len(a.CuK)-1] }

// Head returns the key head of query head h.
func (a *Attention) Head(h int64) int64 {
	if a.KVHead != nil {
		return a.KVHead[h]
	}
	return h / (a.Hq / a.Hkv)
}

// Document returns the document of query i.
func (a *Attention) Document(i int64) int {
	d := 0
	for a.CuQ[d+1] <= i {
		d++
	}
	return d
}

// Visible returns the range [lo, hi) of keys that query i sees. It is empty if hi <= lo.
func (a *Attention) Visible(i int64) (lo, hi int64) {
	d := a.Document(i)
	lo, hi = a.CuK[d], a.CuK[d+1]
	// the last query of a document is aligned with its last key
	first, end, at := lo, hi, hi-(a.CuQ[d+1]-i)
	if a.Causal {
		hi = min(hi, at+1)
	}
	if w := a.Window; w != nil && w.Left >= 0 && w.Left < at-first {
		lo = max(lo, at-w.Left)
	}
	if w := a.Window; w != nil && w.Right >= 0 && w.Right < end-at {
		hi = min(hi, at+w.Right+1)
	}
	return lo, max(lo, hi)
}

// scores returns line i of scale·q·kᵀ for head h, over the keys [lo, hi) that query i sees.
func scores[T Float](a *Attention, q, k []T, i, h int64) (lo, hi int64, s []T) {
	lo, hi = a.Visible(i)
	s = make([]T, hi-lo)
	qi := q[(i*a.Hq+h)*a.D:][:a.D]
	for j := range s {
		kj := k[((lo+int64(j))*a.Hkv+a.Head(h))*a.D:]
		for c, x := range qi {
			s[j] += x * kj[c]
		}
		s[j] = keep(a, s[j]*T(a.Scale))
	}
	return lo, hi, s
}

// AttentionForward returns out [Tq, Hq, Dv] and lse [Tq, Hq], the logarithm of the softmax's
// denominator, for q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]. A query that sees no key has out
// 0 and lse -inf.
func AttentionForward[T Float](a *Attention, q, k, v []T) (out, lse []T) {
	out, lse = make([]T, a.Tq()*a.Hq*a.Dv), make([]T, a.Tq()*a.Hq)
	for i := range a.Tq() {
		for h := range a.Hq {
			lo, hi, s := scores(a, q, k, i, h)
			if lo == hi {
				lse[i*a.Hq+h] = T(math.Inf(-1))
				continue
			}
			top, sum := slices.Max(s), T(0)
			for j := range s {
				s[j] = exp(s[j] - top)
				sum += s[j]
			}
			lse[i*a.Hq+h] = top + log(sum)
			o := out[(i*a.Hq+h)*a.Dv:][:a.Dv]
			for j := lo; j < hi; j++ {
				vj, p := v[(j*a.Hkv+a.Head(h))*a.Dv:], keep(a, s[j-lo]/sum)
				for c := range o {
					o[c] += p * vj[c]
				}
			}
		}
	}
	return out, lse
}

// AttentionBackward returns the gradients for dout [Tq, Hq, Dv], in the shapes of q, k and v, from
// forward's out and lse. With P = exp(S - lse) the softmax of the scores S, and dP =
// dout·vᵀ (Dao 2023):
//
//	dS = P·(dP - Σ dout·out),  dq = scale·dS·k,  dk = scale·dSᵀ·q,  dv = Pᵀ·dout
func AttentionBackward[T Float](a *Attention, q, k, v, out, lse, dout []T) (dq, dk, dv []T) {
	dq, dk, dv = make([]T, len(q)), make([]T, len(k)), make([]T, len(v))
	for h := range a.Hq {
		for i := range a.Tq() {
			lo, hi, s := scores(a, q, k, i, h)
			row := i*a.Hq + h
			do, delta := dout[row*a.Dv:][:a.Dv], T(0)
			for c, x := range do {
				delta += x * out[row*a.Dv+int64(c)]
			}
			qi, dqi := q[row*a.D:][:a.D], dq[row*a.D:][:a.D]
			for j := lo; j < hi; j++ {
				at := j*a.Hkv + a.Head(h)
				kj, vj, dkj, dvj := k[at*a.D:], v[at*a.Dv:], dk[at*a.D:], dv[at*a.Dv:]
				p, dp := keep(a, exp(s[j-lo]-lse[row])), T(0)
				for c, x := range do {
					dp += x * vj[c]
					dvj[c] += p * x
				}
				ds := keep(a, p*(keep(a, dp)-delta)) * T(a.Scale)
				for c := range qi {
					dqi[c] += ds * kj[c]
					dkj[c] += ds * qi[c]
				}
			}
		}
	}
	return dq, dk, dv
}
