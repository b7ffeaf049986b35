package model

import (
	"ulysses/sp"
	"ulysses/tensor"
)

// Backward recomputes q, k and v unless they are saved, one group of heads at a time. Their
// gradients overwrite them.
func (a *softmaxAttention) Backward(p *pass, x, dy tensor.Tensor) {
	mark := p.mark()
	dmixed := p.temp(p.tokens, a.hq*a.d)
	all := p.temp(p.tokens, a.qkv.out) // q, k and v, then their gradients
	saved, raw, recompute := a.begin(p), a.raw, a.saved.IsNil()
	a.setNorms(p)
	a.setSinks(p, true)
	if recompute {
		if a.qNorm != nil {
			raw = p.temp(p.tokens, a.rawColumns())
		}
		a.project(p, all, raw, x)
	}
	_, dgate, _ := a.splitQK(all)

	if a.overlaps(p) {
		a.backwardOverlapped(p, all, dmixed, dgate, raw, saved, x, dy, recompute)
	} else {
		a.backwardOut(p, dmixed, dgate, raw, dy)
		a.attendBackward(p, a.heads(all), dmixed, saved, recompute)
		a.backwardKNorm(p, all, raw)
		a.backwardQNorm(p, all, raw)
		p.phase("projection")
		a.qkv.backwardWeights(p, all, x)
		p.end()
	}
	a.addSinks(p)
	p.phase("projection")
	a.qkv.backwardInput(p, x, all)
	p.end()
	p.reset(mark)
}

// backwardQNorm and backwardKNorm replace the gradients of normalized heads in all with the
// gradients of the heads in raw.
func (a *softmaxAttention) backwardQNorm(p *pass, all, raw tensor.Tensor) {
	if a.qNorm != nil {
		q, _ := a.normed(all)
		rawQ, _ := a.normed(raw)
		a.backwardNorm(p, q, rawQ, a.qNorm, a.qStats)
	}
}

func (a *softmaxAttention) backwardKNorm(p *pass, all, raw tensor.Tensor) {
	if a.kNorm != nil {
		_, k := a.normed(all)
		_, rawK := a.normed(raw)
		a.backwardNorm(p, k, rawK, a.kNorm, a.kStats)
	}
}

func (a *softmaxAttention) backwardNorm(p *pass, dy, x tensor.Tensor, w *Param, n sp.HeadNorm) {
	p.phase("norm")
	p.NormBack(dy, dy, x, w, n.RStd.Flatten(0, 1), false)
	p.end()
}

// backwardOverlapped is the backward half up to the gradients of q, k and v and of all weights. It
// computes gradients of weights while all-to-alls run. With a gate, the input of the output's
// projection is in the memory of dmixed, so its weights come first.
func (a *softmaxAttention) backwardOverlapped(p *pass, all, dmixed, dgate, raw, saved, x, dy tensor.Tensor,
	recompute bool) {
	p.phase("attention")
	a.setBackward(p, 0, a.heads(all), saved, recompute)
	p.end()
	if a.gated() {
		a.backwardOut(p, dmixed, dgate, raw, dy)
	} else {
		p.phase("projection")
		a.out.backwardInput(p, dmixed, dy)
		p.end()
	}
	a.startBackward(p, dmixed)
	if !a.gated() {
		p.phase("projection")
		a.out.backwardWeights(p, dy, a.mixed)
		p.end()
	}
	weights := func(i int) {
		one, lo, hi := a.qkv.part(i)
		p.phase("projection")
		one.backwardWeights(p, all.Slice(1, lo, hi), x)
		p.end()
	}
	a.do(p, sp.AttendBackward)
	a.do(p, sp.WaitDV)
	weights(2)
	a.do(p, sp.WaitDK)
	a.backwardKNorm(p, all, raw)
	weights(1)
	a.do(p, sp.WaitDQ)
	a.backwardQNorm(p, all, raw)
	weights(0)
}

// backwardOut computes the gradient dmixed of attention's output from dy, through the output's
// projection and its gate, whose output is recomputed.
func (a *softmaxAttention) backwardOut(p *pass, dmixed, dgate, raw, dy tensor.Tensor) {
	y, gate := a.mixed, tensor.Tensor{}
	heads, dheads := a.mixed.Split(1, a.hq), dmixed.Split(1, a.hq) // [T, Hq, D]
	if a.gated() {
		y = dmixed
		_, gate, _ = a.splitQK(raw)
		a.gate(p, dmixed, a.mixed, gate)
	}
	p.phase("projection")
	a.out.backwardWeights(p, dy, y)
	a.out.backwardInput(p, dmixed, dy)
	p.end()
	if a.gated() {
		p.phase("norm")
		p.SigmoidGateBack(dheads, dgate, heads, gate)
		p.end()
	}
}
