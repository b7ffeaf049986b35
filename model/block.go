package model

import (
	"cmp"
	"fmt"

	"ulysses/tensor"
)

// residual is a sublayer with its norms and residual connection: x + after(inner(norm(x))). Gemma
// has both norms, OLMo only the second, other families only the first.
type residual struct {
	name        string // attention | linear attention | mlp
	norm, after *Param // one may be nil
	inner       sublayer
	eps         float64
	scale       float64       // of the sublayer's output; 1 with after
	category    category      // of what after saves
	out         tensor.Tensor // [T, hidden], the sublayer's output; only with after
	outRStd     tensor.Tensor // [T] F32, its statistics
}

// sublayer is a Mixer or an MLP. See Mixer.
type sublayer interface {
	Forward(p *pass, x tensor.Tensor)
	Backward(p *pass, x, dy tensor.Tensor)
}

// memory returns the memory in which the sublayer runs: that of its saved output, if there is one.
func (r *residual) memory(p *pass) tensor.Tensor {
	if !r.out.IsNil() {
		return r.out
	}
	return p.act
}

// forward writes the output to y [T, hidden], which may be x. See connect for next.
func (r *residual) forward(p *pass, y, x tensor.Tensor, next *residual) {
	r.apply(p, y, x, r.inner.Forward, next)
}

// apply computes y = x + after(inner(norm(x))).
func (r *residual) apply(p *pass, y, x tensor.Tensor, inner func(*pass, tensor.Tensor), next *residual) {
	r.applyNorm(p, r.memory(p), x)
	r.applyNormed(p, y, x, inner, next)
}

// applyNormed is apply after the residual before this one has computed norm(x) (connect).
func (r *residual) applyNormed(p *pass, y, x tensor.Tensor, inner func(*pass, tensor.Tensor), next *residual) {
	out := r.memory(p)
	inner(p, out)
	p.inspect(r.name, " output", out)
	r.connect(p, y, x, out, next)
}

// again computes y from the saved output of the sublayer, if there is one, otherwise by apply.
func (r *residual) again(p *pass, y, x tensor.Tensor, inner func(*pass, tensor.Tensor), next *residual) {
	if r.out.IsNil() {
		r.apply(p, y, x, inner, next)
	} else {
		r.connect(p, y, x, r.out, next)
	}
}

// connect computes y = x + after(scale·out). Unless next is nil, it also computes the norm of y for
// the sublayer of next, and next.applyNormed follows. It may overwrite out if there is no norm
// after.
func (r *residual) connect(p *pass, y, x, out tensor.Tensor, next *residual) {
	p.phase("norm")
	if r.after != nil {
		rstd := p.rstd
		if !r.outRStd.IsNil() {
			rstd = r.outRStd
		}
		p.Norm(p.act, out, r.after, rstd, r.eps)
		out = p.act
	} else {
		p.Scale(out, r.scale)
	}
	if next != nil {
		next.addNorm(p, y, x, out)
	} else {
		p.Add(y, x, out)
	}
	p.end()
	p.inspect("residual after ", r.name, y)
}

// addNorm computes sum = a + b and, in the memory of the sublayer, the norm of sum: in one pass, if
// there is a norm.
func (r *residual) addNorm(p *pass, sum, a, b tensor.Tensor) {
	if r.norm != nil {
		p.AddNorm(sum, r.memory(p), a, b, r.norm, p.rstd, r.eps)
	} else {
		p.Add(sum, a, b)
		p.Copy(r.memory(p), sum)
	}
}

// applyNorm computes the norm's output y.
func (r *residual) applyNorm(p *pass, y, x tensor.Tensor) {
	p.phase("norm")
	if r.norm != nil {
		p.Norm(y, x, r.norm, p.rstd, r.eps)
	} else {
		p.Copy(y, x)
	}
	p.end()
}

// visitSaved visits what the norm after the sublayer saves.
func (r *residual) visitSaved(p *pass, hidden int64) {
	if r.after != nil {
		p.visit(&r.out, r.category, p.tokens, hidden)
		p.visitF32(&r.outRStd, r.category, p.tokens)
	}
}

// backward overwrites d [T, hidden], the gradient of the output, with the gradient of the input x.
// It recomputes the norm's output.
func (r *residual) backward(p *pass, x, d tensor.Tensor) {
	mark, dy := p.mark(), d
	switch {
	case r.after != nil:
		dy = p.temp(d.Shape[:d.NDim]...)
		r.backwardAfter(p, dy, x, d)
	case r.scale != 1:
		dy = p.temp(d.Shape[:d.NDim]...)
		p.Copy(dy, d)
		p.Scale(dy, r.scale)
	}
	r.applyNorm(p, p.act, x)
	r.inner.Backward(p, p.act, dy)
	p.phase("norm")
	if r.norm != nil {
		p.NormBack(d, p.act, x, r.norm, p.rstd, true)
	} else {
		p.Add(d, d, p.act)
	}
	p.end()
	p.reset(mark)
	p.inspect("gradient before ", r.name, d)
}

// backwardAfter computes the gradient dy of the sublayer's output from d, through the norm after
// it. Unless the output is saved, it runs the sublayer's forward half again.
func (r *residual) backwardAfter(p *pass, dy, x, d tensor.Tensor) {
	mark, out, rstd := p.mark(), r.out, r.outRStd
	if out.IsNil() {
		out, rstd = p.temp(d.Shape[:d.NDim]...), p.tempF32(p.tokens)
		r.applyNorm(p, out, x)
		r.inner.Forward(p, out)
		p.phase("norm")
		p.Norm(p.act, out, r.after, rstd, r.eps)
		p.end()
	}
	p.phase("norm")
	p.NormBack(dy, d, out, r.after, rstd, false)
	p.end()
	p.reset(mark)
}

// block is a decoder layer: a mixer and an MLP, each with a residual connection.
type block struct {
	mixerResidual, mlpResidual residual
	mixer                      Mixer
	mlp                        feedForward
	hidden                     int64
	mid                        tensor.Tensor // [T, hidden], the residual stream before the MLP
}

// feedForward is a layer's MLP: dense, or experts.
type feedForward interface {
	sublayer
	Params() []*Param
	// visitSaved visits the tensors that may be saved between the halves.
	visitSaved(p *pass)
}

func newFeedForward(cfg *Config, layer int64) feedForward {
	if cfg.Sparse(layer) {
		return newExperts(cfg, layer)
	}
	return newMLP(cfg, layer)
}

func newBlock(cfg *Config, layer int64) *block {
	norm := func(kind string) *Param {
		if kind == "" {
			return nil
		}
		return newNorm(cfg, fmt.Sprintf("model.layers.%d.%s.weight", layer, kind), "hidden_size", cfg.HiddenSize)
	}
	var mixer Mixer
	name := "attention"
	switch {
	case cfg.Linear(layer):
		name = "linear attention"
		mixer = newLinearAttention(cfg, layer)
	case cfg.IsLatent():
		mixer = newLatentAttention(cfg, layer)
	default:
		mixer = newAttention(cfg, layer)
	}
	mlp, names, scale := newFeedForward(cfg, layer), cfg.family.norms, cmp.Or(cfg.ResidualScale, 1)
	return &block{mixer: mixer, mlp: mlp, hidden: cfg.HiddenSize,
		mixerResidual: residual{name: name, norm: norm(names.mixer), after: norm(names.mixerOut), inner: mixer,
			eps: cfg.RMSNormEps, scale: scale, category: attention},
		mlpResidual: residual{name: "mlp", norm: norm(names.mlp), after: norm(names.mlpOut), inner: mlp,
			eps: cfg.RMSNormEps, scale: scale, category: mlpSaved},
	}
}

func (b *block) params() []*Param {
	return append(b.mixerResidual.params(b.mixer.Params()), b.mlpResidual.params(b.mlp.Params())...)
}

// params returns the parameters of the norms and, between them, of the sublayer.
func (r *residual) params(inner []*Param) []*Param {
	var ps []*Param
	if r.norm != nil {
		ps = append(ps, r.norm)
	}
	ps = append(ps, inner...)
	if r.after != nil {
		ps = append(ps, r.after)
	}
	return ps
}

// visitSaved visits the tensors that may be saved between the forward and the backward half.
func (b *block) visitSaved(p *pass) {
	p.visit(&b.mid, mlpSaved, p.tokens, b.hidden)
	b.visitMixer(p)
	b.mlp.visitSaved(p)
	b.mlpResidual.visitSaved(p, b.hidden)
}

func (b *block) visitMixer(p *pass) {
	b.mixer.visitSaved(p)
	b.mixerResidual.visitSaved(p, b.hidden)
}

// forward writes the layer's output to y [T, hidden], which may be x.
func (b *block) forward(p *pass, y, x tensor.Tensor) {
	mid := y
	if !b.mid.IsNil() {
		mid = b.mid
	}
	b.mixerResidual.forward(p, mid, x, &b.mlpResidual)
	b.mlpResidual.applyNormed(p, y, mid, b.mlp.Forward, nil)
}

// forwardAgain is forward in the backward half. It uses saved activations of attention and saved
// outputs, if there are any.
func (b *block) forwardAgain(p *pass, y, x tensor.Tensor) {
	mark := p.mark()
	next := &b.mlpResidual
	if !next.out.IsNil() {
		next = nil // its saved output needs no norm
	}
	if p.policy[attention] == Recompute {
		b.mixerResidual.forward(p, y, x, next)
	} else {
		b.mixerResidual.again(p, y, x, b.mixer.Output, next)
	}
	if next != nil {
		next.applyNormed(p, y, y, b.mlp.Forward, nil)
	} else {
		b.mlpResidual.connect(p, y, y, b.mlpResidual.out, nil)
	}
	p.reset(mark)
}

// backward overwrites d [T, hidden], the gradient of the output, with the gradient of the input x.
// It recomputes what is not saved.
func (b *block) backward(p *pass, x, d tensor.Tensor) {
	mark := p.mark()
	mid, recompute := b.mid, p.policy[attention] == Recompute
	if mid.IsNil() {
		mid = p.temp(p.tokens, b.hidden)
		if recompute {
			b.recomputeMixer(p, mid, x)
		} else {
			b.mixerResidual.again(p, mid, x, b.mixer.Output, nil)
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
	b.visitMixer(p)
	b.mixerResidual.forward(p, y, x, nil)
}
