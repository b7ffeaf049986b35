package ref

import (
	"math"
	"slices"
)

// Attention has the shapes and masks of softmax(bias + cap(scale·q·kᵀ))·v over packed documents,
// see device.Attention.
type Attention struct {
	Hq, Hkv, D, Dv int64
	// [documents+1] boundaries of the documents in tokens, of queries and of keys
	CuQ, CuK []int64
	Shift    []int64 // [documents]; nil = the last query of a document is aligned with its last key
	KVHead   []int64 // [Hq]; nil = h/(Hq/Hkv)
	Causal   bool    // no keys after the aligned one
	Window   *Window // nil = unbounded
	Scale    float64
	Softcap  float64   // 0 = off
	Sinks    []float64 // [Hq]; nil = none
	Slopes   []float64 // [Hq]; nil = none

	// [Hq or 1, ⌈QuerySeq/BlockRows⌉, ⌈KeySeq/BlockColumns⌉]; nil = none
	Mask                                                      []uint8
	QueryAt, KeyAt, QuerySeq, KeySeq, BlockRows, BlockColumns int64

	Dropout      float64
	Seed, HeadAt int64

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

// Window limits a query to the keys from Left before to Right after the aligned key. A negative
// side is unlimited.
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

// Aligned returns the key row that is aligned with query i. It may be outside the document.
func (a *Attention) Aligned(i int64) int64 {
	d := a.Document(i)
	if a.Shift != nil {
		return i + a.Shift[d]
	}
	return a.CuK[d+1] - (a.CuQ[d+1] - i)
}

// Visible returns the range [lo, hi) of keys that query i sees without the block mask. It is empty
// if hi <= lo.
func (a *Attention) Visible(i int64) (lo, hi int64) {
	d, at := a.Document(i), a.Aligned(i)
	lo, hi = a.CuK[d], a.CuK[d+1]
	first, end := lo, hi
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

// Hides reports whether the block mask of head h hides key j from query i.
func (a *Attention) Hides(h, i, j int64) bool {
	if a.Mask == nil {
		return false
	}
	rows, columns := ceil(a.QuerySeq, a.BlockRows), ceil(a.KeySeq, a.BlockColumns)
	if int64(len(a.Mask)) == rows*columns {
		h = 0
	}
	row, column := (a.QueryAt+i)%a.QuerySeq/a.BlockRows, (a.KeyAt+j)%a.KeySeq/a.BlockColumns
	return a.Mask[(h*rows+row)*columns+column] == 0
}

func ceil(n, by int64) int64 { return (n + by - 1) / by }

// line is a line of the matrix of scores: query i of head h and the keys that it sees.
type line[T Float] struct {
	keys []int64
	s    []T // capped and biased scores
	cap  []T // their derivative by the scores before the cap
	drop []T // what dropout multiplies the softmax weight by
	dist []T // distance of the key from the aligned one
}

func lineOf[T Float](a *Attention, q, k []T, i, h int64) (l line[T]) {
	lo, hi := a.Visible(i)
	qi := q[(i*a.Hq+h)*a.D:][:a.D]
	for j := lo; j < hi; j++ {
		if a.Hides(h, i, j) {
			continue
		}
		kj := k[(j*a.Hkv+a.Head(h))*a.D:]
		s, slope, drop, dist := T(0), T(1), T(1), T(j-a.Aligned(i))
		for c, x := range qi {
			s += x * kj[c]
		}
		s = keep(a, s*T(a.Scale))
		if a.Softcap != 0 {
			t := T(math.Tanh(float64(s / T(a.Softcap))))
			s, slope = keep(a, T(a.Softcap)*t), 1-t*t
		}
		if a.Slopes != nil {
			s = keep(a, s+T(a.Slopes[h])*dist)
		}
		if a.Dropout != 0 {
			drop = 0
			if Keeps(a.Dropout, a.Seed, a.HeadAt+h, a.QueryAt+i, a.KeyAt+j) {
				drop = T(1 / (1 - a.Dropout))
			}
		}
		l.keys, l.s, l.cap = append(l.keys, j), append(l.s, s), append(l.cap, slope)
		l.drop, l.dist = append(l.drop, drop), append(l.dist, dist)
	}
	return l
}

// AttentionForward returns out [Tq, Hq, Dv] and lse [Tq, Hq], the logarithm of the softmax's
// denominator, for q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]. A query that sees no key has out
// 0 and lse -inf, or its sink.
func AttentionForward[T Float](a *Attention, q, k, v []T) (out, lse []T) {
	out, lse = make([]T, a.Tq()*a.Hq*a.Dv), make([]T, a.Tq()*a.Hq)
	for row := range lse {
		if lse[row] = T(math.Inf(-1)); a.Sinks != nil {
			lse[row] = T(a.Sinks[int64(row)%a.Hq])
		}
	}
	AttentionCarry(a, q, k, v, out, lse)
	return out, lse
}

// AttentionCarry adds keys to a softmax that has begun: out and lse are the result over other keys,
// and become the result over those and the keys of this call.
func AttentionCarry[T Float](a *Attention, q, k, v, out, lse []T) {
	for i := range a.Tq() {
		for h := range a.Hq {
			l, row := lineOf(a, q, k, i, h), i*a.Hq+h
			if len(l.keys) == 0 {
				continue
			}
			top := max(slices.Max(l.s), lse[row])
			was := exp(lse[row] - top)
			sum := was
			for j := range l.s {
				l.s[j] = exp(l.s[j] - top)
				sum += l.s[j]
			}
			lse[row] = top + log(sum)
			o := out[row*a.Dv:][:a.Dv]
			for c := range o {
				o[c] *= was / sum
			}
			for n, j := range l.keys {
				vj, p := v[(j*a.Hkv+a.Head(h))*a.Dv:], keep(a, l.s[n]/sum*l.drop[n])
				for c := range o {
					o[c] += p * vj[c]
				}
			}
		}
	}
}

// AttentionBackward returns the gradients for dout [Tq, Hq, Dv], in the shapes of q, k and v, from
// forward's out and lse.
func AttentionBackward[T Float](a *Attention, q, k, v, out, lse, dout []T) (dq, dk, dv []T) {
	g := AttentionGradients(a, q, k, v, out, lse, dout)
	return g.DQ, g.DK, g.DV
}

// AttentionGrads are the gradients of q, k, v, and [Hq] of sinks and slopes, nil without these.
// SinkTerms and SlopeTerms [Hq] are the sums of the magnitudes of their terms.
type AttentionGrads[T Float] struct{ DQ, DK, DV, DSinks, DSlopes, SinkTerms, SlopeTerms []T }

// AttentionGradients returns all gradients for dout [Tq, Hq, Dv], from forward's out and lse. With
// P = exp(S - lse) the softmax of the scores S, M what dropout multiplies it by, and dP =
// dout·vᵀ·M (Dao 2023):
//
//	dS = P·(dP - Σ dout·out),  dv = (P·M)ᵀ·dout,  dslope = Σ dS·distance
//	dsink = -Σ exp(sink - lse)·(dout·out)
//
// With dX = dS·cap' the gradient of scores before the cap, dq = scale·dX·k and dk = scale·dXᵀ·q.
func AttentionGradients[T Float](a *Attention, q, k, v, out, lse, dout []T) (g AttentionGrads[T]) {
	g = AttentionGrads[T]{DQ: make([]T, len(q)), DK: make([]T, len(k)), DV: make([]T, len(v))}
	if a.Sinks != nil {
		g.DSinks, g.SinkTerms = make([]T, a.Hq), make([]T, a.Hq)
	}
	if a.Slopes != nil {
		g.DSlopes, g.SlopeTerms = make([]T, a.Hq), make([]T, a.Hq)
	}
	for h := range a.Hq {
		for i := range a.Tq() {
			l, row := lineOf(a, q, k, i, h), i*a.Hq+h
			do, delta := dout[row*a.Dv:][:a.Dv], T(0)
			for c, x := range do {
				delta += x * out[row*a.Dv+int64(c)]
			}
			if a.Sinks != nil && !math.IsInf(float64(lse[row]), -1) {
				term := exp(T(a.Sinks[h])-lse[row]) * delta
				g.DSinks[h], g.SinkTerms[h] = g.DSinks[h]-term, g.SinkTerms[h]+max(term, -term)
			}
			qi, dqi := q[row*a.D:][:a.D], g.DQ[row*a.D:][:a.D]
			for n, j := range l.keys {
				at := j*a.Hkv + a.Head(h)
				kj, vj, dkj, dvj := k[at*a.D:], v[at*a.Dv:], g.DK[at*a.D:], g.DV[at*a.Dv:]
				p, dp := exp(l.s[n]-lse[row]), T(0)
				dropped := keep(a, p*l.drop[n])
				for c, x := range do {
					dp += x * vj[c]
					dvj[c] += dropped * x
				}
				ds := keep(a, keep(a, p)*(keep(a, dp*l.drop[n])-delta))
				if a.Slopes != nil {
					term := ds * l.dist[n]
					g.DSlopes[h], g.SlopeTerms[h] = g.DSlopes[h]+term, g.SlopeTerms[h]+max(term, -term)
				}
				ds *= l.cap[n] * T(a.Scale)
				for c := range qi {
					dqi[c] += ds * kj[c]
					dkj[c] += ds * qi[c]
				}
			}
		}
	}
	return g
}
