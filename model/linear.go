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
	p.Gemm(y, x, l.matrix(l.w[0].Value).Permute(1, 0), l.bias())
}

// part returns one of several projections, and its columns [lo, hi) of y. Its results are bitwise
// equal to these columns of all projections in one product.
func (l *linear) part(i int) (one linear, lo, hi int64) {
	for _, w := range l.w[:i] {
		lo += w.Shape[0]
	}
	one = linear{w: l.w[i : i+1], in: l.in, out: l.w[i].Shape[0]}
	if len(l.b) > 0 {
		one.b = l.b[i : i+1]
	}
	return one, lo, lo + one.out
}

// backwardWeights adds to the gradients of W and b, from dy [T, out] and the forward pass's x
// [T, in]. They are complete then.
func (l *linear) backwardWeights(p *pass, dy, x tensor.Tensor) {
	l.addWeights(p, dy, x)
	l.gradReady(p)
}

// addWeights is backwardWeights for some of the tokens. After all tokens, the caller reports the
// gradients by gradReady.
func (l *linear) addWeights(p *pass, dy, x tensor.Tensor) {
	p.GemmAdd(l.matrix(l.w[0].Grad), dy.Permute(1, 0), x)
	if len(l.b) > 0 {
		p.ColumnSum(span(l.b[0].Grad, l.out), dy)
	}
}

func (l *linear) gradReady(p *pass) {
	p.gradReady(l.w...)
	p.gradReady(l.b...)
}

// backwardInput computes dx [T, in] from dy [T, out].
func (l *linear) backwardInput(p *pass, dx, dy tensor.Tensor) {
	p.Gemm(dx, dy, l.matrix(l.w[0].Value), tensor.Tensor{})
}
