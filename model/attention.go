package model

import (
	"fmt"

	"ulysses/sp"
	"ulysses/tensor"
)

// Mixer is a sublayer that mixes tokens, the one polymorphic layer of a model.
//
// Both halves work in place, for memory is lifetimes: Forward overwrites x [T, hidden] with its output and keeps what Backward needs
// (when the pass has a backward half); Backward gets the same x once more and overwrites it with the gradient of x, from dy
// [T, hidden], which it leaves alone. Gradients of parameters are added to and announced.
type Mixer interface {
	Params() []*Param
	Forward(p *pass, x tensor.Tensor)
	Backward(p *pass, x, dy tensor.Tensor)
}

// softmaxAttention is grouped-query attention (Ainslie et al. 2023) with rotary positions, sequence-parallel by its plan.
type softmaxAttention struct {
	plan         *sp.Plan
	hq, hkv, d   int64
	eps          float64
	qkv, out     linear
	qNorm, kNorm *Param        // [D], nil but for Qwen3
	raw          tensor.Tensor // [T, (Hq+Hkv)·D], q and k before their norms
	qRStd, kRStd tensor.Tensor // [T·Hq], [T·Hkv] F32
	mixed        tensor.Tensor // [T, Hq·D], attention's output
	args         sp.Args
	grads        sp.Grads
}

func newAttention(cfg *Config, plan *sp.Plan, layer int64) *softmaxAttention {
	a := &softmaxAttention{plan: plan, hq: cfg.NumAttentionHeads, hkv: cfg.NumKeyValueHeads, d: cfg.HeadDim, eps: cfg.RMSNormEps}
	name := func(part string) string { return fmt.Sprintf("model.layers.%d.self_attn.%s", layer, part) }
	heads := func(kind string) []string { return []string{"num_" + kind + "_heads · head_dim", "hidden_size"} }
	q := newParam(name("q_proj.weight"), cfg.DType, normal, heads("attention"), a.hq*a.d, cfg.HiddenSize)
	k := newParam(name("k_proj.weight"), cfg.DType, normal, heads("key_value"), a.hkv*a.d, cfg.HiddenSize)
	v := newParam(name("v_proj.weight"), cfg.DType, normal, heads("key_value"), a.hkv*a.d, cfg.HiddenSize)
	o := newParam(name("o_proj.weight"), cfg.DType, normal, []string{"hidden_size", "num_attention_heads · head_dim"}, cfg.HiddenSize, a.hq*a.d)
	var in, out []*Param
	if cfg.QKVBias() {
		in = []*Param{
			newParam(name("q_proj.bias"), cfg.DType, zeros, q.axes[:1], a.hq*a.d),
			newParam(name("k_proj.bias"), cfg.DType, zeros, k.axes[:1], a.hkv*a.d),
			newParam(name("v_proj.bias"), cfg.DType, zeros, v.axes[:1], a.hkv*a.d),
		}
	}
	if cfg.OutBias() {
		out = []*Param{newParam(name("o_proj.bias"), cfg.DType, zeros, o.axes[:1], cfg.HiddenSize)}
	}
	if cfg.QKNorm() {
		a.qNorm = newParam(name("q_norm.weight"), cfg.DType, ones, []string{"head_dim"}, a.d)
		a.kNorm = newParam(name("k_norm.weight"), cfg.DType, ones, []string{"head_dim"}, a.d)
	}
	a.qkv, a.out = newLinear([]*Param{q, k, v}, in), newLinear([]*Param{o}, out)
	return a
}

func (a *softmaxAttention) Params() []*Param {
	ps := append(append([]*Param(nil), a.qkv.w...), a.qkv.b...)
	if a.qNorm != nil {
		ps = append(ps, a.qNorm, a.kNorm)
	}
	return append(append(ps, a.out.w...), a.out.b...)
}

// split views [T, (Hq+2Hkv)·D] as q and k together, q, k and v: [T, H, D].
func (a *softmaxAttention) split(x tensor.Tensor) (qk, q, k, v tensor.Tensor) {
	n, m := a.hq*a.d, a.hkv*a.d
	return x.Slice(1, 0, n+m).Split(1, a.hq+a.hkv), x.Slice(1, 0, n).Split(1, a.hq),
		x.Slice(1, n, n+m).Split(1, a.hkv), x.Slice(1, n+m, n+2*m).Split(1, a.hkv)
}

func (a *softmaxAttention) Forward(p *pass, x tensor.Tensor) {
	if p.backward {
		a.mixed = p.keep(attention, p.rows, a.hq*a.d)
		a.args.Saved = p.keepAs(attention, tensor.U8, p.sizes.Saved)
		if a.qNorm != nil {
			a.raw = p.keep(qkv, p.rows, (a.hq+a.hkv)*a.d)
			a.qRStd, a.kRStd = p.keepStat(qkv, p.rows*a.hq), p.keepStat(qkv, p.rows*a.hkv)
		}
	}
	mark := p.mark()
	if !p.backward {
		a.mixed, a.args.Saved = p.temp(p.rows, a.hq*a.d), tensor.Tensor{}
		if a.qNorm != nil {
			a.qRStd, a.kRStd = p.stat(p.rows*a.hq), p.stat(p.rows*a.hkv)
		}
	}
	all := p.temp(p.rows, a.qkv.out) // [T, (Hq+2Hkv)·D]
	a.args.Workspace = p.take(tensor.U8, p.sizes.Workspace)
	qk, q, k, v := a.split(all)

	p.phase("projection")
	a.qkv.forward(p, all, x)
	p.end()
	if a.qNorm != nil {
		p.phase("norm")
		if p.backward {
			p.Copy(a.raw.Split(1, a.hq+a.hkv), qk)
		}
		p.Norm(q, q, a.qNorm, a.qRStd, a.eps)
		p.Norm(k, k, a.kNorm, a.kRStd, a.eps)
		p.end()
	}
	p.phase("attention")
	a.args.Q, a.args.K, a.args.V, a.args.Out = one(q), one(k), one(v), one(a.mixed.Split(1, a.hq))
	a.args.Cos, a.args.Sin = p.cos, p.sin
	if !p.skip() {
		p.err = a.plan.Forward(p.c.Stream, p.batch.SP, &a.args)
	}
	p.end()
	p.phase("projection")
	a.out.forward(p, x, a.mixed)
	p.end()
	p.reset(mark)
}

func (a *softmaxAttention) Backward(p *pass, x, dy tensor.Tensor) {
	mark := p.mark()
	dmixed := p.temp(p.rows, a.hq*a.d)
	all := p.temp(p.rows, a.qkv.out) // gradients of q, k and v
	a.args.Workspace = p.take(tensor.U8, p.sizes.Workspace)
	_, q, k, v := a.split(all)

	p.phase("projection")
	a.out.backwardWeights(p, dy, a.mixed)
	a.out.backwardInput(p, dmixed, dy)
	p.end()
	p.phase("attention")
	a.grads = sp.Grads{DOut: one(dmixed.Split(1, a.hq)), DQ: one(q), DK: one(k), DV: one(v)}
	if !p.skip() {
		p.err = a.plan.Backward(p.c.Stream, p.batch.SP, &a.args, &a.grads)
	}
	p.end()
	if a.qNorm != nil {
		p.phase("norm")
		raw := a.raw.Split(1, a.hq+a.hkv) // [T, Hq+Hkv, D]
		p.NormBack(q, q, raw.Slice(1, 0, a.hq), a.qNorm, a.qRStd, false)
		p.NormBack(k, k, raw.Slice(1, a.hq, a.hq+a.hkv), a.kNorm, a.kRStd, false)
		p.end()
	}
	p.phase("projection")
	a.qkv.backwardWeights(p, all, x)
	a.qkv.backwardInput(p, x, all)
	p.end()
	p.reset(mark)
}

// one puts a batch axis of 1 before [T, H, D].
func one(t tensor.Tensor) tensor.Tensor { return t.Split(0, 1) }
