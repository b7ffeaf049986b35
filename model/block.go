package model

import (
	"fmt"

	"ulysses/tensor"
)

// residual is x + inner(norm(x)).
type residual struct {
	name  string // attention | linear attention | mlp
	norm  *Param
	inner sublayer
	eps   float64
}

// sublayer is what Mixer and the MLP have in common.
type sublayer interface {
	Forward(p *pass, x tensor.Tensor)
	Backward(p *pass, x, dy tensor.Tensor)
}

// forward writes the output to y [T, hidden], which may be x.
func (r *residual) forward(p *pass, y, x tensor.Tensor) { r.apply(p, y, x, r.inner.Forward) }

func (r *residual) apply(p *pass, y, x tensor.Tensor, inner func(*pass, tensor.Tensor)) {
	r.normed(p, x)
	inner(p, p.act)
	p.inspect(r.name, " output", p.act)
	p.phase("norm")
	p.Add(y, x, p.act)
	p.end()
	p.inspect("residual after ", r.name, y)
}

// normed is the norm's output, in p.act.
func (r *residual) normed(p *pass, x tensor.Tensor) {
	p.phase("norm")
	p.Norm(p.act, x, r.norm, p.rstd, r.eps)
	p.end()
}

// backward turns the gradient d [T, hidden] of the output into that of the input x, in place. The
// norm's output is computed again.
func (r *residual) backward(p *pass, x, d tensor.Tensor) {
	r.normed(p, x)
	r.inner.Backward(p, p.act, d)
	p.phase("norm")
	p.NormBack(d, p.act, x, r.norm, p.rstd, true)
	p.end()
	p.inspect("gradient before ", r.name, d)
}

// block is a decoder layer: tokens mix, then each token thinks.
type block struct {
	mixer, mlp residual
	tokens     Mixer         // mixer's
	wide       *mlp          // mlp's
	mid        tensor.Tensor // [T, hidden], the residual stream before the MLP
}

func newBlock(cfg *Config, layer int64) *block {
	norm := func(part string) *Param {
		return newNorm(cfg, fmt.Sprintf("model.layers.%d.%s.weight", layer, part), "hidden_size", cfg.HiddenSize)
	}
	var mixer Mixer
	name := "attention"
	if cfg.Linear(layer) {
		name = "linear attention"
		mixer = newLinearAttention(cfg, layer)
	} else {
		mixer = newAttention(cfg, layer)
	}
	wide := newMLP(cfg, layer)
	return &block{tokens: mixer, wide: wide,
		mixer: residual{name: name, norm: norm("input_layernorm"), inner: mixer, eps: cfg.RMSNormEps},
		mlp:   residual{name: "mlp", norm: norm("post_attention_layernorm"), inner: wide, eps: cfg.RMSNormEps},
	}
}

func (b *block) params() []*Param {
	ps := append([]*Param{b.mixer.norm}, b.tokens.Params()...)
	return append(append(ps, b.mlp.norm), b.wide.Params()...)
}

// visitSaved visits the tensors that may be saved between the forward and the backward half.
func (b *block) visitSaved(p *pass) {
	p.visit(&b.mid, mlpSaved, p.rows, b.wide.down.out)
	b.tokens.visitSaved(p)
	b.wide.visitSaved(p)
}

// forward writes the layer's output to y [T, hidden], which may be x.
func (b *block) forward(p *pass, y, x tensor.Tensor) {
	mid := y
	if !b.mid.IsNil() {
		mid = b.mid
	}
	b.mixer.forward(p, mid, x)
	b.mlp.forward(p, y, mid)
}

// again is forward in the backward half, from what there is of attention.
func (b *block) again(p *pass, y, x tensor.Tensor) {
	mark := p.mark()
	if p.policy[attention] == Recompute {
		b.mixer.forward(p, y, x)
	} else {
		b.mixer.apply(p, y, x, b.tokens.Output)
	}
	b.mlp.forward(p, y, y)
	p.reset(mark)
}

// backward turns the gradient d [T, hidden] of the output into that of the input x, in place, and
// computes again what was not kept.
func (b *block) backward(p *pass, x, d tensor.Tensor) {
	mark := p.mark()
	mid, lost := b.mid, p.policy[attention] == Recompute
	if mid.IsNil() {
		mid = p.temp(p.rows, b.wide.down.out)
		if lost {
			b.mix(p, mid, x)
		} else {
			b.mixer.apply(p, mid, x, b.tokens.Output)
		}
		lost = false
	}
	b.mlp.backward(p, mid, d)
	if lost { // the sum is of no use, and p.act takes it
		b.mix(p, p.act, x)
	}
	b.mixer.backward(p, x, d)
	p.reset(mark)
}

// mix computes the mixer's half again with what its backward needs; q, k and v only where they are
// there in whole for all heads anyway.
func (b *block) mix(p *pass, y, x tensor.Tensor) {
	inQKV := allocate
	if p.plans.groups > 1 {
		inQKV = free
	}
	p.setActions(allocate, inQKV, leave)
	b.tokens.visitSaved(p)
	b.mixer.forward(p, y, x)
}
