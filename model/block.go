package model

import (
	"fmt"

	"ulysses/tensor"
)

// residual is a sublayer with its norm and residual connection: x + inner(norm(x)).
type residual struct {
	name  string // attention | linear attention | mlp
	norm  *Param
	inner sublayer
	eps   float64
}

// sublayer is a Mixer or an MLP. See Mixer.
type sublayer interface {
	Forward(p *pass, x tensor.Tensor)
	Backward(p *pass, x, dy tensor.Tensor)
}

// forward writes the output to y [T, hidden], which may be x.
func (r *residual) forward(p *pass, y, x tensor.Tensor) { r.apply(p, y, x, r.inner.Forward) }

// apply computes y = x + inner(norm(x)).
func (r *residual) apply(p *pass, y, x tensor.Tensor, inner func(*pass, tensor.Tensor)) {
	r.applyNorm(p, x)
	inner(p, p.act)
	p.inspect(r.name, " output", p.act)
	p.phase("norm")
	p.Add(y, x, p.act)
	p.end()
	p.inspect("residual after ", r.name, y)
}

// applyNorm computes the norm's output in p.act.
func (r *residual) applyNorm(p *pass, x tensor.Tensor) {
	p.phase("norm")
	p.Norm(p.act, x, r.norm, p.rstd, r.eps)
	p.end()
}

// backward overwrites d [T, hidden], the gradient of the output, with the gradient of the input x.
// It recomputes the norm's output.
func (r *residual) backward(p *pass, x, d tensor.Tensor) {
	r.applyNorm(p, x)
	r.inner.Backward(p, p.act, d)
	p.phase("norm")
	p.NormBack(d, p.act, x, r.norm, p.rstd, true)
	p.end()
	p.inspect("gradient before ", r.name, d)
}

// block is a decoder layer: a mixer and an MLP, each with a residual connection.
type block struct {
	mixerResidual, mlpResidual residual
	mixer                      Mixer
	mlp                        *mlp
	mid                        tensor.Tensor // [T, hidden], the residual stream before the MLP
}

func newBlock(cfg *Config, layer int64) *block {
	norm := func(kind string) *Param {
		return newNorm(cfg, fmt.Sprintf("model.layers.%d.%s.weight", layer, kind), "hidden_size", cfg.HiddenSize)
	}
	var mixer Mixer
	name := "attention"
	if cfg.Linear(layer) {
		name = "linear attention"
		mixer = newLinearAttention(cfg, layer)
	} else {
		mixer = newAttention(cfg, layer)
	}
	mlp := newMLP(cfg, layer)
	return &block{mixer: mixer, mlp: mlp,
		mixerResidual: residual{name: name, norm: norm("input_layernorm"), inner: mixer, eps: cfg.RMSNormEps},
		mlpResidual:   residual{name: "mlp", norm: norm("post_attention_layernorm"), inner: mlp, eps: cfg.RMSNormEps},
	}
}

func (b *block) params() []*Param {
	ps := append([]*Param{b.mixerResidual.norm}, b.mixer.Params()...)
	return append(append(ps, b.mlpResidual.norm), b.mlp.Params()...)
}

// visitSaved visits the tensors that may be saved between the forward and the backward half.
func (b *block) visitSaved(p *pass) {
	p.visit(&b.mid, mlpSaved, p.tokens, b.mlp.down.out)
	b.mixer.visitSaved(p)
	b.mlp.visitSaved(p)
}

// forward writes the layer's output to y [T, hidden], which may be x.
func (b *block) forward(p *pass, y, x tensor.Tensor) {
	mid := y
	if !b.mid.IsNil() {
		mid = b.mid
	}
	b.mixerResidual.forward(p, mid, x)
	b.mlpResidual.forward(p, y, mid)
}

// forwardAgain is forward in the backward half. It uses saved activations of attention, if there
// are any.
func (b *block) forwardAgain(p *pass, y, x tensor.Tensor) {
	mark := p.mark()
	if p.policy[attention] == Recompute {
		b.mixerResidual.forward(p, y, x)
	} else {
		b.mixerResidual.apply(p, y, x, b.mixer.Output)
	}
	b.mlpResidual.forward(p, y, y)
	p.reset(mark)
}

// backward overwrites d [T, hidden], the gradient of the output, with the gradient of the input x.
// It recomputes what is not saved.
func (b *block) backward(p *pass, x, d tensor.Tensor) {
	mark := p.mark()
	mid, recompute := b.mid, p.policy[attention] == Recompute
	if mid.IsNil() {
		mid = p.temp(p.tokens, b.mlp.down.out)
		if recompute {
			b.recomputeMixer(p, mid, x)
		} else {
			b.mixerResidual.apply(p, mid, x, b.mixer.Output)
		}
		recompute = false
	}
	b.mlpResidual.backward(p, mid, d)
	if recompute { // the output is not used; p.act is memory for it
		b.recomputeMixer(p, p.act, x)
	}
	b.mixerResidual.backward(p, x, d)
	p.reset(mark)
}

// recomputeMixer runs the mixer's forward half again, and saves what its backward half reads: q, k
// and v only if all heads are in one group.
func (b *block) recomputeMixer(p *pass, y, x tensor.Tensor) {
	inQKV := allocate
	if p.plans.groups > 1 {
		inQKV = free
	}
	p.setActions(allocate, inQKV, leave)
	b.mixer.visitSaved(p)
	b.mixerResidual.forward(p, y, x)
}
