package model

import (
	"fmt"

	"ulysses/sp"
	"ulysses/tensor"
)

// Mixer is a sublayer that mixes tokens: attention or linear attention.
//
// Both halves work in place. Forward overwrites x [T, hidden] with its output, and saves what
// Backward needs in the tensors that visitSaved has allocated. Backward gets the same x again, and
// overwrites it with the gradient of x, computed from dy [T, hidden]. It does not change dy. It
// adds to the gradients of the parameters and reports them complete.
type Mixer interface {
	Params() []*Param
	visitSaved(p *pass)
	Forward(p *pass, x tensor.Tensor)
	// Output is Forward from saved activations of the category attention.
	Output(p *pass, x tensor.Tensor)
	Backward(p *pass, x, dy tensor.Tensor)
}

// softmaxAttention is grouped-query attention (Ainslie et al. 2023) with rotary positions,
// sequence-parallel by its plan. In gpt-oss, each query head has a sink, a trained logit that takes
// part in every softmax (OpenAI 2025, arXiv:2508.10925). In Qwen3.5, q's projection also computes a
// gate for each feature, and the output is multiplied by its sigmoid (Qiu et al. 2025,
// arXiv:2505.06708).
type softmaxAttention struct {
	attentionCore
	dq           int64 // columns of a head in q's projection: D, or 2D with a gate [q|gate]
	eps          float64
	q, qkv       linear        // q has the first parameters of qkv
	qNorm, kNorm *Param        // [D], or of all heads [Hq·D], [Hkv·D]; nil in some families
	whole        bool          // the norms of q and k are over all heads
	sinks        *Param        // [Hq]; only gpt-oss has them
	raw          tensor.Tensor // [T, Hq·dq + Hkv·D], q with its gates and k, before their norms
	qRStd, kRStd tensor.Tensor // [T·Hq], [T·Hkv], or of all heads [T] F32
	qStats       sp.HeadNorm   // of the current pass: the norms of q and k, and their statistics
	kStats       sp.HeadNorm
}

func newAttention(cfg *Config, layer int64) *softmaxAttention {
	a := &softmaxAttention{attentionCore: newAttentionCore(cfg, layer), dq: cfg.HeadDim, eps: cfg.RMSNormEps}
	name := func(suffix string) string { return fmt.Sprintf("model.layers.%d.self_attn.%s", layer, suffix) }
	heads := func(kind string) []string { return []string{"num_" + kind + "_heads · head_dim", "hidden_size"} }
	qAxes := heads("attention")
	if cfg.OutputGate() {
		a.dq, qAxes[0] = 2*a.d, "num_attention_heads · 2 head_dim"
	}
	q := newParam(name("q_proj.weight"), cfg.DType, normal, qAxes, a.hq*a.dq, cfg.HiddenSize)
	k := newParam(name("k_proj.weight"), cfg.DType, normal, heads("key_value"), a.hkv*a.d, cfg.HiddenSize)
	v := newParam(name("v_proj.weight"), cfg.DType, normal, heads("key_value"), a.hkv*a.d, cfg.HiddenSize)
	o := newParam(name("o_proj.weight"), cfg.DType, normal, []string{"hidden_size", "num_attention_heads · head_dim"},
		cfg.HiddenSize, a.hq*a.d)
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
		a.qNorm, a.kNorm = newNorm(cfg, name("q_norm.weight"), "head_dim", a.d),
			newNorm(cfg, name("k_norm.weight"), "head_dim", a.d)
	}
	if a.whole = cfg.family.wholeNorm; a.whole {
		a.qNorm, a.kNorm = newNorm(cfg, name("q_norm.weight"), q.axes[0], a.hq*a.d),
			newNorm(cfg, name("k_norm.weight"), k.axes[0], a.hkv*a.d)
	}
	if cfg.Sinks() {
		a.sinks = newParam(name("sinks"), cfg.DType, normal, []string{"num_attention_heads"}, a.hq)
	}
	a.q, a.qkv, a.out = newLinear([]*Param{q}, in[:min(1, len(in))]), newLinear([]*Param{q, k, v}, in),
		newLinear([]*Param{o}, out)
	return a
}

func (a *softmaxAttention) Params() []*Param {
	ps := append(append([]*Param(nil), a.qkv.w...), a.qkv.b...)
	if a.qNorm != nil {
		ps = append(ps, a.qNorm, a.kNorm)
	}
	ps = append(append(ps, a.out.w...), a.out.b...)
	if a.sinks != nil {
		ps = append(ps, a.sinks)
	}
	return ps
}

func (a *softmaxAttention) gated() bool { return a.dq > a.d }

// splitQK returns views [T, H, D] of q, its gate and k in x, whose first columns are q's and k's.
func (a *softmaxAttention) splitQK(x tensor.Tensor) (q, gate, k tensor.Tensor) {
	n := a.hq * a.dq
	q, k = x.Slice(1, 0, n).Split(1, a.hq), x.Slice(1, n, n+a.hkv*a.d).Split(1, a.hkv)
	return q.Slice(2, 0, a.d), q.Slice(2, a.d, a.dq), k
}

// heads returns views of q, k and v in the projection [T, Hq·dq + 2Hkv·D].
func (a *softmaxAttention) heads(x tensor.Tensor) heads {
	q, _, k := a.splitQK(x)
	return heads{q, k, x.Slice(1, a.qkv.out-a.hkv*a.d, a.qkv.out).Split(1, a.hkv)}
}

// rawColumns returns the number of columns of a.raw.
func (a *softmaxAttention) rawColumns() int64 { return a.hq*a.dq + a.hkv*a.d }

func (a *softmaxAttention) visitSaved(p *pass) {
	a.attentionCore.visitSaved(p)
	if a.qNorm != nil {
		p.visit(&a.raw, qkv, p.tokens, a.rawColumns())
		p.visitF32(&a.qRStd, qkv, p.tokens*a.norms(a.hq))
		p.visitF32(&a.kRStd, qkv, p.tokens*a.norms(a.hkv))
	}
}

// norms returns the number of norms of a token for the heads of q or k.
func (a *softmaxAttention) norms(heads int64) int64 {
	if a.whole {
		return 1
	}
	return heads
}

// normed returns views [T, norms, features] of q and k in x, as their norms read them: the heads,
// or all heads as one.
func (a *softmaxAttention) normed(x tensor.Tensor) (q, k tensor.Tensor) {
	if a.whole {
		n := a.hq * a.d
		return x.Slice(1, 0, n).Split(1, 1), x.Slice(1, n, a.rawColumns()).Split(1, 1)
	}
	q, _, k = a.splitQK(x)
	return q, k
}

// normQ and normK replace q and k in all by their norms over all heads, if the model has such. raw
// has q and k, or is nil.
func (a *softmaxAttention) normQ(p *pass, all, raw tensor.Tensor) {
	if a.whole {
		q, _ := a.normed(all)
		from, _ := a.normed(either(raw, all))
		a.norm(p, q, from, a.qNorm, a.qStats)
	}
}

func (a *softmaxAttention) normK(p *pass, all, raw tensor.Tensor) {
	if a.whole {
		_, k := a.normed(all)
		_, from := a.normed(either(raw, all))
		a.norm(p, k, from, a.kNorm, a.kStats)
	}
}

func (a *softmaxAttention) norm(p *pass, y, x tensor.Tensor, w *Param, n sp.HeadNorm) {
	p.phase("norm")
	p.Norm(y, x, w, n.RStd.Flatten(0, 1), a.eps)
	p.end()
}

// either returns a tensor, or another one if it is nil.
func either(t, other tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		return other
	}
	return t
}

// project computes all [T, Hq·dq + 2Hkv·D] from x, and copies q, with the gates, and k to raw
// unless it is nil. The norms of the heads of q and k are computed later, by the plan.
func (a *softmaxAttention) project(p *pass, all, raw, x tensor.Tensor) {
	p.phase("projection")
	a.qkv.forward(p, all, x)
	p.end()
	if !raw.IsNil() {
		p.phase("norm")
		p.Copy(raw, all.Slice(1, 0, a.rawColumns()))
		p.end()
	}
	a.normQ(p, all, raw)
	a.normK(p, all, raw)
}

// setNorms sets the plan's arguments for the norms of q and k, with memory for their statistics
// unless it is saved.
func (a *softmaxAttention) setNorms(p *pass) {
	if a.qNorm == nil {
		return
	}
	q, k := a.qRStd, a.kRStd
	if q.IsNil() {
		q, k = p.tempF32(p.tokens*a.norms(a.hq)), p.tempF32(p.tokens*a.norms(a.hkv))
	}
	norm := func(w *Param, rstd tensor.Tensor, heads int64) sp.HeadNorm {
		return sp.HeadNorm{W: w.Value, RStd: rstd.View(p.tokens, heads), Eps: a.eps, Centre: w.centre}
	}
	a.qStats, a.kStats = norm(a.qNorm, q, a.norms(a.hq)), norm(a.kNorm, k, a.norms(a.hkv))
	if !a.whole {
		a.qNorms, a.kNorms = a.qStats, a.kStats
	}
}

// setSinks converts the sinks to F32, and in a backward half allocates memory for their gradient.
func (a *softmaxAttention) setSinks(p *pass, backward bool) {
	if a.sinks == nil {
		return
	}
	a.logits, a.dsinks = p.tempF32(a.hq), tensor.Tensor{}
	p.Copy(a.logits, a.sinks.Value)
	if backward {
		a.dsinks = p.tempF32(a.hq)
	}
}

// addSinks adds to the gradient of the sinks, which is complete then. Each rank adds the terms of
// its own queries, so the sum over ranks has each term once.
func (a *softmaxAttention) addSinks(p *pass) {
	if a.sinks != nil && !a.sinks.Frozen {
		p.Add(a.sinks.Grad, a.sinks.Grad, a.dsinks)
		p.gradReady(a.sinks)
	}
}

func (a *softmaxAttention) Forward(p *pass, x tensor.Tensor) {
	mark := p.mark()
	mixed := p.or(a.mixed, p.tokens, a.hq*a.d)
	a.setNorms(p)
	a.setSinks(p, false)
	all := p.temp(p.tokens, a.qkv.out) // [T, Hq·dq + 2Hkv·D]
	saved := a.begin(p)
	if a.overlaps(p) {
		a.forwardOverlapped(p, all, x, mixed, saved)
	} else {
		a.project(p, all, a.raw, x)
		a.attend(p, a.heads(all), mixed, saved)
	}
	y := mixed
	if a.gated() {
		_, gate, _ := a.splitQK(all)
		if !a.raw.IsNil() {
			_, gate, _ = a.splitQK(a.raw)
		}
		switch { // if the output is saved, it is saved without the gate
		case a.mixed.IsNil():
		case !a.raw.IsNil():
			y = all.Slice(1, 0, a.hq*a.d) // q's columns are not used any more
		default:
			y = p.temp(p.tokens, a.hq*a.d)
		}
		a.gate(p, y, mixed, gate)
	}
	p.phase("projection")
	a.out.forward(p, x, y)
	p.end()
	p.reset(mark)
}

// forwardOverlapped is project and attend, with each of q, k and v sent while the next one is
// projected.
func (a *softmaxAttention) forwardOverlapped(p *pass, all, x, mixed, saved tensor.Tensor) {
	a.startForward(p, a.heads(all), mixed, saved)
	for i, step := range [...]sp.Step{sp.SendQ, sp.SendK, sp.SendV} {
		one, lo, hi := a.qkv.part(i)
		p.phase("projection")
		one.forward(p, all.Slice(1, lo, hi), x)
		p.end()
		if raw := min(hi, a.rawColumns()); !a.raw.IsNil() && lo < raw {
			p.phase("norm")
			p.Copy(a.raw.Slice(1, lo, raw), all.Slice(1, lo, raw))
			p.end()
		}
		switch step {
		case sp.SendQ:
			a.normQ(p, all, a.raw)
		case sp.SendK:
			a.normK(p, all, a.raw)
		}
		a.do(p, step)
	}
	a.do(p, sp.AttendForward)
}

func (a *softmaxAttention) gate(p *pass, y, mixed, gate tensor.Tensor) {
	p.phase("norm")
	p.SigmoidGate(y.Split(1, a.hq), mixed.Split(1, a.hq), gate)
	p.end()
}

// Output computes the gate and the output's projection. It projects the gate's input again, unless
// it is saved.
func (a *softmaxAttention) Output(p *pass, x tensor.Tensor) {
	mark, y := p.mark(), a.mixed
	if a.gated() {
		raw := a.raw
		if raw.IsNil() {
			raw = p.temp(p.tokens, a.q.out)
			p.phase("projection")
			a.q.forward(p, raw, x)
			p.end()
		}
		y = p.temp(p.tokens, a.hq*a.d)
		a.gate(p, y, a.mixed, raw.Slice(1, 0, a.hq*a.dq).Split(1, a.hq).Slice(2, a.d, a.dq))
	}
	p.phase("projection")
	a.out.forward(p, x, y)
	p.end()
	p.reset(mark)
}
