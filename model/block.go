package model

import (
	"fmt"

	"ulysses/tensor"
)

// residual is x + inner(norm(x)).
type residual struct {
	name  string // attention | linear attention | mlp
	norm  *Param
	inner Mixer
	eps   float64
	in    tensor.Tensor // [T, hidden], x
}

// forward returns the output: a tensor of its own in a pass with a backward half, else x, overwritten.
func (r *residual) forward(p *pass, x tensor.Tensor) tensor.Tensor {
	r.in = x
	y := x
	if p.backward {
		y = p.keep(blockInput, x.Shape[0], x.Shape[1])
	}
	p.phase("norm")
	p.Norm(p.act, x, r.norm, p.rstd, r.eps)
	p.end()
	r.inner.Forward(p, p.act)
	p.inspect(r.name, " output", p.act)
	p.phase("norm")
	p.Add(y, x, p.act)
	p.end()
	p.inspect("residual after ", r.name, y)
	return y
}

// backward turns the gradient d [T, hidden] of the output into that of the input, in place. The norm's output is computed again.
func (r *residual) backward(p *pass, d tensor.Tensor) {
	p.phase("norm")
	p.Norm(p.act, r.in, r.norm, p.rstd, r.eps)
	p.end()
	r.inner.Backward(p, p.act, d)
	p.phase("norm")
	p.NormBack(d, p.act, r.in, r.norm, p.rstd, true)
	p.end()
	p.inspect("gradient before ", r.name, d)
}

// block is a decoder layer: tokens mix, then each token thinks.
type block struct {
	mixer, mlp residual
}

func newBlock(cfg *Config, plans *plans, layer int64) *block {
	norm := func(part string) *Param {
		return newNorm(cfg, fmt.Sprintf("model.layers.%d.%s.weight", layer, part), "hidden_size", cfg.HiddenSize)
	}
	var mixer Mixer
	name := "attention"
	if cfg.Linear(layer) {
		name = "linear attention"
		mixer = newLinearAttention(cfg, plans.linear, layer)
	} else {
		mixer = newAttention(cfg, plans.full, layer)
	}
	return &block{
		mixer: residual{name: name, norm: norm("input_layernorm"), inner: mixer, eps: cfg.RMSNormEps},
		mlp:   residual{name: "mlp", norm: norm("post_attention_layernorm"), inner: newMLP(cfg, layer), eps: cfg.RMSNormEps},
	}
}

func (b *block) params() []*Param {
	ps := append([]*Param{b.mixer.norm}, b.mixer.inner.Params()...)
	return append(append(ps, b.mlp.norm), b.mlp.inner.Params()...)
}

func (b *block) forward(p *pass, x tensor.Tensor) tensor.Tensor {
	return b.mlp.forward(p, b.mixer.forward(p, x))
}

func (b *block) backward(p *pass, d tensor.Tensor) {
	b.mlp.backward(p, d)
	b.mixer.backward(p, d)
}
