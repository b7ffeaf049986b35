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

// softmaxAttention is grouped-query attention (Ainslie et al. 2023) with rotary positions, sequence-parallel by its plan. In Qwen3.5 a gate
// for each of its features comes out of q's projection, and the output is times the sigmoid of it (Qiu et al. 2025, arXiv:2505.06708).
type softmaxAttention struct {
	plan         *sp.Plan
	hq, hkv, d   int64
	dq           int64 // columns of a head of q's projection: D, with a gate [q|gate]: 2D
	eps          float64
	qkv, out     linear
	qNorm, kNorm *Param        // [D], nil but for Qwen3 and 3.5
	raw          tensor.Tensor // [T, Hq·dq + Hkv·D], q with its gates and k, before their norms
	qRStd, kRStd tensor.Tensor // [T·Hq], [T·Hkv] F32
	mixed        tensor.Tensor // [T, Hq·D], attention's output
	args         sp.Args
	grads        sp.Grads
}

func newAttention(cfg *Config, plan *sp.Plan, layer int64) *softmaxAttention {
	a := &softmaxAttention{plan: plan, hq: cfg.NumAttentionHeads, hkv: cfg.NumKeyValueHeads, d: cfg.HeadDim, dq: cfg.HeadDim, eps: cfg.RMSNormEps}
	name := func(part string) string { return fmt.Sprintf("model.layers.%d.self_attn.%s", layer, part) }
	heads := func(kind string) []string { return []string{"num_" + kind + "_heads · head_dim", "hidden_size"} }
	qAxes := heads("attention")
	if cfg.OutputGate() {
		a.dq, qAxes[0] = 2*a.d, "num_attention_heads · 2 head_dim"
	}
	q := newParam(name("q_proj.weight"), cfg.DType, normal, qAxes, a.hq*a.dq, cfg.HiddenSize)
	k := newParam(name("k_proj.weight"), cfg.DType, normal, heads("key_value"), a.hkv*a.d, cfg.HiddenSize)
	v := newParam(name("v_proj.weight"), cfg.DType, normal, heads("key_value"), a.hkv*a.d, cfg.HiddenSize)
	o := newParam(name("o_proj.weight"), cfg.DType, normal, []string{"hidden_size", "num_attention_heads · head_dim"}, cfg.HiddenSize, a.hq*a.d)
	var in, out []*Param
	if cfg.QKVBias() {
		in = []*Param{
			newParam(name("q_proj.bias"), cfg.DType, zeros, q.axes[:1], a.hq*a.dq),
			newParam(name("k_proj.bias"), cfg.DType, zeros, k.axes[:1], a.hkv*a.d),
			newParam(name("v_proj.bias"), cfg.DType, zeros, v.axes[:1], a.hkv*a.d),
		}
	}
	if cfg.OutBias() {
		out = []*Param{newParam(name("o_proj.bias"), cfg.DType, zeros, o.axes[:1], cfg.HiddenSize)}
	}
	if cfg.QKNorm() {
		a.qNorm, a.kNorm = newNorm(cfg, name("q_norm.weight"), "head_dim", a.d), newNorm(cfg, name("k_norm.weight"), "head_dim", a.d)
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

func (a *softmaxAttention) gated() bool { return a.dq > a.d }

// queriesKeys views what begins with the columns of q and k as q, its gate and k: [T, H, D].
func (a *softmaxAttention) queriesKeys(x tensor.Tensor) (q, gate, k tensor.Tensor) {
	n := a.hq * a.dq
	q, k = x.Slice(1, 0, n).Split(1, a.hq), x.Slice(1, n, n+a.hkv*a.d).Split(1, a.hkv)
	return q.Slice(2, 0, a.d), q.Slice(2, a.d, a.dq), k
}

// values is v [T, Hkv, D], the last columns of the projection.
func (a *softmaxAttention) values(x tensor.Tensor) tensor.Tensor {
	return x.Slice(1, a.qkv.out-a.hkv*a.d, a.qkv.out).Split(1, a.hkv)
}

// beforeNorms is the columns that a.raw keeps.
func (a *softmaxAttention) beforeNorms() int64 { return a.hq*a.dq + a.hkv*a.d }

func (a *softmaxAttention) Forward(p *pass, x tensor.Tensor) {
	if p.backward {
		a.mixed = p.keep(attention, p.rows, a.hq*a.d)
		a.args.Saved = p.keepAs(attention, tensor.U8, p.sizes.full.Saved)
		if a.qNorm != nil {
			a.raw = p.keep(qkv, p.rows, a.beforeNorms())
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
	all := p.temp(p.rows, a.qkv.out) // [T, Hq·dq + 2Hkv·D]
	a.args.Workspace = p.take(tensor.U8, p.sizes.full.Workspace)
	q, gate, k := a.queriesKeys(all)

	p.phase("projection")
	a.qkv.forward(p, all, x)
	p.end()
	if a.qNorm != nil {
		p.phase("norm")
		if p.backward {
			p.Copy(a.raw, all.Slice(1, 0, a.beforeNorms()))
		}
		p.Norm(q, q, a.qNorm, a.qRStd, a.eps)
		p.Norm(k, k, a.kNorm, a.kRStd, a.eps)
		p.end()
	}
	p.phase("attention")
	a.args.Q, a.args.K, a.args.V, a.args.Out = one(q), one(k), one(a.values(all)), one(a.mixed.Split(1, a.hq))
	a.args.Cos, a.args.Sin = p.cos, p.sin
	if !p.skip() {
		p.err = a.plan.Forward(p.c.Stream, p.batch.SP, &a.args)
	}
	p.end()
	y := a.mixed
	if a.gated() {
		if p.backward { // which wants the output as it was; q's columns are free, the gates are kept elsewhere
			y = all.Slice(1, 0, a.hq*a.d)
			_, gate, _ = a.queriesKeys(a.raw)
		}
		p.phase("norm")
		p.SigmoidGate(y.Split(1, a.hq), a.mixed.Split(1, a.hq), gate)
		p.end()
	}
	p.phase("projection")
	a.out.forward(p, x, y)
	p.end()
	p.reset(mark)
}

func (a *softmaxAttention) Backward(p *pass, x, dy tensor.Tensor) {
	mark := p.mark()
	dmixed := p.temp(p.rows, a.hq*a.d)
	all := p.temp(p.rows, a.qkv.out) // gradients of q, k and v
	a.args.Workspace = p.take(tensor.U8, p.sizes.full.Workspace)
	q, dgate, k := a.queriesKeys(all)

	a.backwardOut(p, dmixed, dgate, dy)
	p.phase("attention")
	a.grads = sp.Grads{DOut: one(dmixed.Split(1, a.hq)), DQ: one(q), DK: one(k), DV: one(a.values(all))}
	if !p.skip() {
		p.err = a.plan.Backward(p.c.Stream, p.batch.SP, &a.args, &a.grads)
	}
	p.end()
	if a.qNorm != nil {
		p.phase("norm")
		rawQ, _, rawK := a.queriesKeys(a.raw)
		p.NormBack(q, q, rawQ, a.qNorm, a.qRStd, false)
		p.NormBack(k, k, rawK, a.kNorm, a.kRStd, false)
		p.end()
	}
	p.phase("projection")
	a.qkv.backwardWeights(p, all, x)
	a.qkv.backwardInput(p, x, all)
	p.end()
	p.reset(mark)
}

// backwardOut is the way back through the output's projection and its gate, whose output is computed again.
func (a *softmaxAttention) backwardOut(p *pass, dmixed, dgate, dy tensor.Tensor) {
	y, gate := a.mixed, tensor.Tensor{}
	heads, dheads := a.mixed.Split(1, a.hq), dmixed.Split(1, a.hq) // [T, Hq, D]
	if a.gated() {
		y = dmixed
		_, gate, _ = a.queriesKeys(a.raw)
		p.phase("norm")
		p.SigmoidGate(dheads, heads, gate)
		p.end()
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

// one puts a batch axis of 1 before [T, H, D].
func one(t tensor.Tensor) tensor.Tensor { return t.Split(0, 1) }
