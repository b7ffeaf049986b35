package ref

import "slices"

// GatedDelta has the shapes of linear attention by the gated delta rule over packed documents, see
// device.GatedDelta.
type GatedDelta struct {
	Hk, Hv, Dk, Dv int64
	Cu             []int64 // [documents+1] boundaries of the documents in tokens
	KeyHead        []int64 // [Hv]; nil = h/(Hv/Hk)
	L2Norm         bool
	Scale          float64
	// the first In documents begin with a given state; the states after the last Out are returned
	In, Out int64
	// Keep, if not nil, rounds the operands and the results of products, as a plain implementation
	// does that keeps them in a type of lower precision between its operations. Sums and states,
	// and the results of DG and DBeta, are not rounded.
	Keep func(float64) float64
}

// kept returns x as the call keeps it between operations, and keptAll every element of x.
func kept[T Float](a *GatedDelta, x T) T {
	if a.Keep == nil {
		return x
	}
	return T(a.Keep(float64(x)))
}

func keptAll[T Float](a *GatedDelta, x []T) []T {
	if a.Keep == nil {
		return x
	}
	y := make([]T, len(x))
	for i, v := range x {
		y[i] = kept(a, v)
	}
	return y
}

// T returns the number of tokens.
func (a *GatedDelta) T() int64 { return a.Cu[len(a.Cu)-1] }

// Documents returns the number of documents.
func (a *GatedDelta) Documents() int64 { return int64(len(a.Cu) - 1) }

// Key returns the key head of value head h.
func (a *GatedDelta) Key(h int64) int64 {
	if a.KeyHead != nil {
		return a.KeyHead[h]
	}
	return h / (a.Hv / a.Hk)
}

// KeySum returns the sum [T, Hk, Dk] of x [T, Hv, Dk] over the value heads of each key head, in
// index order.
func KeySum[T Float](a *GatedDelta, x []T) []T {
	y := make([]T, a.T()*a.Hk*a.Dk)
	for t := range a.T() {
		for h := range a.Hv {
			for c := range a.Dk {
				y[(t*a.Hk+a.Key(h))*a.Dk+c] += x[(t*a.Hv+h)*a.Dk+c]
			}
		}
	}
	return y
}

// row returns the d elements of token t and head h in x [T, heads, d].
func row[T any](x []T, t, heads, h, d int64) []T { return x[(t*heads+h)*d:][:d] }

// unit returns x/sqrt(Σx² + 1e-6) and the factor 1/sqrt(Σx² + 1e-6); without L2Norm x and 1.
func unit[T Float](a *GatedDelta, x []T) (y []T, by T) {
	if !a.L2Norm {
		return x, 1
	}
	y, by = make([]T, len(x)), 1/sqrt(SumSquares(x)+T(1e-6))
	for i, v := range x {
		y[i] = kept(a, v*by)
	}
	return y, by
}

// unitGrad returns the gradient of x for a gradient of y = unit(x).
func unitGrad[T Float](a *GatedDelta, y []T, by T, dy []T) []T {
	if !a.L2Norm {
		return dy
	}
	dx, along := make([]T, len(y)), T(0)
	for i, v := range y {
		along += v * dy[i]
	}
	for i, v := range y {
		dx[i] = by * (dy[i] - v*along)
	}
	return dx
}

// GatedDeltaGrad has gradients in the shapes of the inputs, except dq and dk, which have a head for
// each value head: [T, Hv, Dk].
type GatedDeltaGrad[T Float] struct{ DQ, DK, DV, DG, DBeta, DState []T }

// deltaStep updates the state s [Dk, N] for one token with v [N]: s ← e^g·s; u = beta·(v - sᵀk); s
// ← s + k·uᵀ.
func deltaStep[T Float](a *GatedDelta, s, k, v []T, g, beta T) {
	n, decay, u := len(v), exp(g), slices.Clone(v)
	for i := range s {
		s[i] *= decay
	}
	for i, x := range k {
		for j, y := range keptAll(a, s[i*n:][:n]) {
			u[j] -= x * y
		}
	}
	u = keptAll(a, u)
	for i, x := range k {
		for j := range u {
			s[i*n+j] += x * kept(a, beta*u[j])
		}
	}
}

// deltaStepGrad is the derivative of deltaStep. s is the state before the token. d is the gradient
// of the state after the token, and becomes the gradient of s.
func deltaStepGrad[T Float](a *GatedDelta, s, d, k, v []T, g, beta T) (dk, dv []T, dg, dbeta T) {
	n, decay, e := len(v), exp(g), slices.Clone(v)
	decayed := make([]T, len(s))
	for i := range s {
		decayed[i] = decay * s[i]
	}
	keptS, keptD := keptAll(a, decayed), keptAll(a, d)
	dk, dv = make([]T, len(k)), make([]T, n)
	for i, x := range k {
		for j := range e {
			e[j] -= x * keptS[i*n+j]
			dv[j] += x * keptD[i*n+j]
		}
	}
	e, dv = keptAll(a, e), keptAll(a, dv)
	for j := range e {
		dbeta += dv[j] * e[j]
		dv[j] = kept(a, beta*dv[j])
	}
	for i, x := range k {
		for j := range e {
			dk[i] += keptD[i*n+j]*kept(a, beta*e[j]) - keptS[i*n+j]*dv[j]
			d[i*n+j] -= x * dv[j]
			dg += kept(a, d[i*n+j]) * keptS[i*n+j]
			d[i*n+j] *= decay
		}
	}
	return dk, dv, dg, dbeta
}

// given returns a copy of the state of head h of a document in states [In, Hv, Dk, Dv], or zero if
// the document has none.
func given[T Float](a *GatedDelta, states []T, document, h int64) []T {
	if s := make([]T, a.Dk*a.Dv); document >= a.In {
		return s
	}
	return slices.Clone(row(states, document, a.Hv, h, a.Dk*a.Dv))
}

// GatedDeltaForward computes the recurrence token by token, from q, k [T, Hk, Dk], v [T, Hv, Dv],
// g, beta [T, Hv], in [In, Hv, Dk, Dv]. It returns out [T, Hv, Dv] and last [Out, Hv, Dk, Dv].
func GatedDeltaForward[T Float](a *GatedDelta, q, k, v, g, beta, in []T) (out, last []T) {
	out, last = make([]T, len(v)), make([]T, a.Out*a.Hv*a.Dk*a.Dv)
	for h := range a.Hv {
		for document := range a.Documents() {
			s := given(a, in, document, h)
			for t := a.Cu[document]; t < a.Cu[document+1]; t++ {
				key, _ := unit(a, row(k, t, a.Hk, a.Key(h), a.Dk))
				query, _ := unit(a, row(q, t, a.Hk, a.Key(h), a.Dk))
				deltaStep(a, s, key, row(v, t, a.Hv, h, a.Dv), g[t*a.Hv+h], beta[t*a.Hv+h])
				o := row(out, t, a.Hv, h, a.Dv)
				for i, x := range query {
					for j := range o {
						o[j] += T(a.Scale) * x * kept(a, s[int64(i)*a.Dv+int64(j)])
					}
				}
			}
			if at := document - (a.Documents() - a.Out); at >= 0 {
				copy(row(last, at, a.Hv, h, a.Dk*a.Dv), s)
			}
		}
	}
	return out, last
}

// GatedDeltaBackward returns the gradients for dout [T, Hv, Dv] and dlast [Out, Hv, Dk, Dv], by the
// recurrence in the opposite order. A nil dlast is zero.
func GatedDeltaBackward[T Float](a *GatedDelta, q, k, v, g, beta, in, dout, dlast []T) GatedDeltaGrad[T] {
	y := GatedDeltaGrad[T]{make([]T, a.T()*a.Hv*a.Dk), make([]T, a.T()*a.Hv*a.Dk), make([]T, len(v)), make([]T, len(g)),
		make([]T, len(g)), make([]T, a.In*a.Hv*a.Dk*a.Dv)}
	for h := range a.Hv {
		for document := range a.Documents() {
			lo, hi := a.Cu[document], a.Cu[document+1]
			states := [][]T{given(a, in, document, h)} // states[i] is the state before token lo + i
			for t := lo; t < hi; t++ {
				s := slices.Clone(states[t-lo])
				key, _ := unit(a, row(k, t, a.Hk, a.Key(h), a.Dk))
				deltaStep(a, s, key, row(v, t, a.Hv, h, a.Dv), g[t*a.Hv+h], beta[t*a.Hv+h])
				states = append(states, s)
			}
			d := make([]T, a.Dk*a.Dv)
			if at := document - (a.Documents() - a.Out); at >= 0 && dlast != nil {
				copy(d, row(dlast, at, a.Hv, h, a.Dk*a.Dv))
			}
			for t := hi - 1; t >= lo; t-- {
				at, do := t*a.Hv+h, row(dout, t, a.Hv, h, a.Dv)
				key, keyBy := unit(a, row(k, t, a.Hk, a.Key(h), a.Dk))
				query, queryBy := unit(a, row(q, t, a.Hk, a.Key(h), a.Dk))
				dq := make([]T, a.Dk)
				for i, x := range query {
					for j, o := range do {
						dq[i] += T(a.Scale) * kept(a, states[t-lo+1][int64(i)*a.Dv+int64(j)]) * o
						d[int64(i)*a.Dv+int64(j)] += T(a.Scale) * x * o
					}
				}
				dk, dv, dg, dbeta := deltaStepGrad(a, states[t-lo], d, key, row(v, t, a.Hv, h, a.Dv), g[at], beta[at])
				copy(row(y.DQ, t, a.Hv, h, a.Dk), unitGrad(a, query, queryBy, keptAll(a, dq)))
				copy(row(y.DK, t, a.Hv, h, a.Dk), unitGrad(a, key, keyBy, keptAll(a, dk)))
				copy(row(y.DV, t, a.Hv, h, a.Dv), dv)
				y.DG[at], y.DBeta[at] = dg, dbeta
			}
			if document < a.In {
				copy(row(y.DState, document, a.Hv, h, a.Dk*a.Dv), d)
			}
		}
	}
	return y
}

// DeltaState returns the map of all tokens as one document: for a state S before the document, the
// state after it is transition·S + state. The recurrence gives state [Hv, Dk, Dv] from zero, and
// transition [Hv, Dk, Dk] from the identity with v = 0.
func DeltaState[T Float](a *GatedDelta, k, v, g, beta []T) (state, transition []T) {
	state, transition = make([]T, a.Hv*a.Dk*a.Dv), make([]T, a.Hv*a.Dk*a.Dk)
	for h := range a.Hv {
		s, m := row(state, 0, a.Hv, h, a.Dk*a.Dv), row(transition, 0, a.Hv, h, a.Dk*a.Dk)
		for i := range a.Dk {
			m[i*a.Dk+i] = 1
		}
		for t := range a.T() {
			key, _ := unit(a, row(k, t, a.Hk, a.Key(h), a.Dk))
			deltaStep(a, s, key, row(v, t, a.Hv, h, a.Dv), g[t*a.Hv+h], beta[t*a.Hv+h])
			deltaStep(a, m, key, make([]T, a.Dk), g[t*a.Hv+h], beta[t*a.Hv+h])
		}
	}
	return state, transition
}

// DeltaStateGrad returns dstate [Hv, Dk, Dv], the gradient of the state before the tokens if the
// gradient of the state after them is zero.
func DeltaStateGrad[T Float](a *GatedDelta, q, k, g, beta, dout []T) (dstate []T) {
	dstate = make([]T, a.Hv*a.Dk*a.Dv)
	for h := range a.Hv {
		d := row(dstate, 0, a.Hv, h, a.Dk*a.Dv)
		for t := a.T() - 1; t >= 0; t-- {
			key, _ := unit(a, row(k, t, a.Hk, a.Key(h), a.Dk))
			query, _ := unit(a, row(q, t, a.Hk, a.Key(h), a.Dk))
			for i, x := range query {
				for j, o := range row(dout, t, a.Hv, h, a.Dv) {
					d[int64(i)*a.Dv+int64(j)] += T(a.Scale) * x * o
				}
			}
			// This gradient does not depend on the state and on v.
			deltaStepGrad(a, make([]T, len(d)), d, key, make([]T, a.Dv), g[t*a.Hv+h], beta[t*a.Hv+h])
		}
	}
	return dstate
}

// DeltaFold returns m·x + e for each head, or mᵀ·x + e: m [H, K, K], x [H, K, N], e [H, K, N] or
// nil.
func DeltaFold[T Float](heads, k, n int64, m, x, e []T, transpose bool) []T {
	y := make([]T, len(x))
	for h := range heads {
		for i := range k {
			for j := range n {
				at := (h*k+i)*n + j
				for p := range k {
					f := m[(h*k+i)*k+p]
					if transpose {
						f = m[(h*k+p)*k+i]
					}
					y[at] += f * x[(h*k+p)*n+j]
				}
				if e != nil {
					y[at] += e[at]
				}
			}
		}
	}
	return y
}
