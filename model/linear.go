package model

import "ulysses/tensor"

// linear is y = x·Wᵀ + b. W [out, in] and b [out] may be several parameters that follow each other
// in the memory of their group: q, k and v are one matrix product.
type linear struct {
	w, b    []*Param // b is empty without biases
	in, out int64
}

func newLinear(weights, biases []*Param) linear {
	l := linear{w: weights, b: biases, in: weights[0].Shape[1]}
	for _, w := range weights {
		l.out += w.Shape[0]
		w.matrix = true
	}
	return l
}

// matrix returns a view [out, in] of all weights, or of their gradients, given the first.
func (l *linear) matrix(first tensor.Tensor) tensor.Tensor { return span(first, l.out, l.in) }

// bias returns a view [out] of all biases, or nil.
func (l *linear) bias() tensor.Tensor {
	if len(l.b) == 0 {
		return tensor.Tensor{}
	}
	return span(l.b[0].Value, l.out)
}

// span returns a tensor of a shape that begins where first begins.
func span(first tensor.Tensor, shape ...int64) tensor.Tensor {
	t := tensor.Of(first.Data, first.DType, shape...)
	t.Where = first.Where
	return t
}

// forward computes y [T, out] from x [T, in].
func (l *linear) forward(p *pass, y, x tensor.Tensor) {
	for i := 0; i < len(l.w); {
		run, j, lo, hi := l.run(i)
		p.Gemm(y.Slice(1, lo, hi), x, run.matrix(run.w[0].Value).Permute(1, 0), run.bias())
		i = j
	}
	l.adapters(y, func(a adapter, y tensor.Tensor) { a.forward(p, y, x) })
}

// part returns one of several projections, and its columns [lo, hi) of y. Its results are bitwise
// equal to these columns of all projections in one product.
func (l *linear) part(i int) (one linear, lo, hi int64) { return l.slice(i, i+1) }

// slice returns projections [i, j), and their columns [lo, hi) of y.
func (l *linear) slice(i, j int) (some linear, lo, hi int64) {
	for _, w := range l.w[:i] {
		lo += w.Shape[0]
	}
	hi = lo
	for _, w := range l.w[i:j] {
		hi += w.Shape[0]
	}
	some = linear{w: l.w[i:j], in: l.in, out: hi - lo}
	if len(l.b) > 0 {
		some.b = l.b[i:j]
	}
	return some, lo, hi
}

// run returns the projections [i, j) that are one matrix, with their columns [lo, hi) of y: as many
// from i on as are all trained, or all frozen, and whose biases are as well.
func (l *linear) run(i int) (some linear, j int, lo, hi int64) {
	for j = i + 1; j < len(l.w) && l.w[j].Frozen == l.w[i].Frozen &&
		(len(l.b) == 0 || l.b[j].Frozen == l.b[i].Frozen); j++ {
	}
	some, lo, hi = l.slice(i, j)
	return some, j, lo, hi
}

// backwardWeights adds to the gradients of W and b, from dy [T, out] and the forward pass's x
// [T, in]. They are complete then.
func (l *linear) backwardWeights(p *pass, dy, x tensor.Tensor) {
	l.addWeights(p, dy, x)
	l.gradReady(p)
}

// addWeights is backwardWeights for some of the tokens. After all tokens, the caller reports the
// gradients by gradReady. Products for frozen weights are left out.
func (l *linear) addWeights(p *pass, dy, x tensor.Tensor) {
	for i := 0; i < len(l.w); {
		run, j, lo, hi := l.run(i)
		d := dy.Slice(1, lo, hi)
		if !run.w[0].Frozen {
			p.GemmAdd(run.matrix(run.w[0].Grad), d.Permute(1, 0), x)
		}
		if len(run.b) > 0 && !run.b[0].Frozen {
			p.ColumnSum(span(run.b[0].Grad, run.out), d)
		}
		i = j
	}
	l.adapters(dy, func(a adapter, dy tensor.Tensor) { a.addWeights(p, dy, x) })
}

// gradReady reports gradients. The gradients of the adapter of a fused matrix are complete with its
// first part: a caller that takes the projections one by one ends with the first.
func (l *linear) gradReady(p *pass) {
	p.gradReady(l.w...)
	p.gradReady(l.b...)
	for _, w := range l.w {
		if w.adapter != nil && w.adapter.at == 0 {
			p.gradReady(w.adapter.a, w.adapter.b)
		}
	}
}

// backwardInput computes dx [T, in] from dy [T, out].
func (l *linear) backwardInput(p *pass, dx, dy tensor.Tensor) { l.inputGrad(p, dx, dy, false) }

// inputGrad is backwardInput, and with add it adds to dx.
func (l *linear) inputGrad(p *pass, dx, dy tensor.Tensor, add bool) {
	for i := 0; i < len(l.w); {
		run, j, lo, hi := l.run(i)
		if d, w := dy.Slice(1, lo, hi), run.matrix(run.w[0].Value); i == 0 && !add {
			p.Gemm(dx, d, w, tensor.Tensor{})
		} else {
			p.GemmAdd(dx, d, w)
		}
		i = j
	}
	l.adapters(dy, func(a adapter, dy tensor.Tensor) { a.backwardInput(p, dx, dy) })
}
