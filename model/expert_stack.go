package model

import "ulysses/tensor"

// stack is a linear layer of each expert: y = x·W[e]ᵀ + b[e] for the rows of expert e. The matrices
// of all experts follow each other in the memory of their group, as do the biases.
type stack struct {
	w, b        []*Param // in the order of the experts; b is empty without biases
	count       int64    // experts
	in, out     int64
	inputsFirst bool  // a matrix is [in, out]
	first, held int64 // the experts of this rank
}

// newStack returns the layers of all experts, given the matrices and biases of each. Matrices with
// biases are [in, out], as in files of gpt-oss, and others are [out, in].
func newStack(count, in, out int64, w, b []*Param) stack {
	return stack{w: w, b: b, count: count, in: in, out: out, inputsFirst: len(b) > 0, held: count}
}

// params returns the matrices and then the biases.
func (s *stack) params() []*Param { return append(append([]*Param(nil), s.w...), s.b...) }

// own returns the parameters of this rank's experts.
func (s *stack) own(all []*Param) []*Param {
	n := int64(len(all)) / s.count
	return all[n*s.first : n*(s.first+s.held)]
}

// matrices returns a view [E, out, in] of the matrices of this rank's experts.
func (s *stack) matrices() tensor.Tensor {
	if first := s.own(s.w)[0].Value; s.inputsFirst {
		return span(first, s.held, s.in, s.out).Permute(0, 2, 1)
	} else {
		return span(first, s.held, s.out, s.in)
	}
}

// biases returns a view [E, out] of the biases, or nil.
func (s *stack) biases() tensor.Tensor {
	if len(s.b) == 0 {
		return tensor.Tensor{}
	}
	return span(s.own(s.b)[0].Value, s.held, s.out)
}

// forward computes y [R, out] from x [R, in].
func (s *stack) forward(p *pass, y, x, offsets tensor.Tensor) {
	p.GroupedGemm(y, x, s.matrices().Permute(0, 2, 1), s.biases(), offsets)
}

// backwardInput computes dx [R, in] from dy [R, out].
func (s *stack) backwardInput(p *pass, dx, dy, offsets tensor.Tensor) {
	p.GroupedGemm(dx, dy, s.matrices(), tensor.Tensor{}, offsets)
}

// addWeights adds to the gradients of the matrices, from dy and x, and to the gradients of the
// biases the rows of dy times weights [R, 1].
func (s *stack) addWeights(p *pass, dy, x, weights, offsets tensor.Tensor) {
	if w := s.own(s.w)[0]; !w.Frozen {
		if s.inputsFirst {
			p.GroupedGemmWeights(span(w.Grad, s.held, s.in, s.out), x, dy, offsets)
		} else {
			p.GroupedGemmWeights(span(w.Grad, s.held, s.out, s.in), dy, x, offsets)
		}
	}
	if len(s.b) > 0 {
		if b := s.own(s.b)[0]; !b.Frozen {
			p.GroupedGemmWeights(span(b.Grad, s.held, 1, s.out), weights, dy, offsets)
		}
	}
}

// addBiasProducts adds dy·b[e] of each row to sums [R] F32. product [R, 1] and wide [R, 1] F32 are
// working memory.
func (s *stack) addBiasProducts(p *pass, sums, dy, product, wide, offsets tensor.Tensor) {
	if len(s.b) == 0 {
		return
	}
	p.GroupedGemm(product, dy, span(s.own(s.b)[0].Value, s.held, s.out, 1), tensor.Tensor{}, offsets)
	p.Copy(wide, product)
	p.Add(sums, sums, wide.View(sums.Shape[0]))
}

// trains reports whether the matrices are trained.
func (s *stack) trains() bool { return !s.w[0].Frozen }

func (s *stack) gradReady(p *pass) {
	p.gradReady(s.own(s.w)...)
	p.gradReady(s.own(s.b)...)
}
