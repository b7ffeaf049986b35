package model

import "ulysses/tensor"

// linear is y = x·Wᵀ + b. W [out, in] and b [out] may be several parameters that lie back to back
// in their group: q, k, v are one product.
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

// matrix and bias view several parameters, or their gradients, as one.
// [out, in]
func (l *linear) matrix(first tensor.Tensor) tensor.Tensor { return span(first, l.out, l.in) }

func (l *linear) bias() tensor.Tensor { // [out], or nil
	if len(l.b) == 0 {
		return tensor.Tensor{}
	}
	return span(l.b[0].Value, l.out)
}

func span(first tensor.Tensor, shape ...int64) tensor.Tensor {
	t := tensor.Of(first.Data, first.DType, shape...)
	t.Where = first.Where
	return t
}

// forward writes y [T, out] from x [T, in].
func (l *linear) forward(p *pass, y, x tensor.Tensor) {
	p.Gemm(y, x, l.matrix(l.w[0].Value).Permute(1, 0), l.bias())
}

// backwardWeights adds the gradients of W and b, which are complete then, from dy [T, out] and the
// x [T, in] that forward saw.
func (l *linear) backwardWeights(p *pass, dy, x tensor.Tensor) {
	l.addWeights(p, dy, x)
	l.ready(p)
}

// addWeights is backwardWeights of some of the rows; when all are there, ready announces the
// gradients.
func (l *linear) addWeights(p *pass, dy, x tensor.Tensor) {
	p.GemmAdd(l.matrix(l.w[0].Grad), dy.Permute(1, 0), x)
	if len(l.b) > 0 {
		p.ColumnSum(span(l.b[0].Grad, l.out), dy)
	}
}

func (l *linear) ready(p *pass) {
	p.ready(l.w...)
	p.ready(l.b...)
}

// backwardInput writes dx [T, in] from dy [T, out].
func (l *linear) backwardInput(p *pass, dx, dy tensor.Tensor) {
	p.Gemm(dx, dy, l.matrix(l.w[0].Value), tensor.Tensor{})
}
