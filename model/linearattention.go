package model

import (
	"fmt"

	"ulysses/gdn"
	"ulysses/tensor"
)

// linearMixer is linear attention by the gated delta rule as Qwen3.5 has it (Yang, Kautz &
// Hatamizadeh 2024), sequence-parallel by its plan. One projection computes q|k|v, b and a, the
// inputs of the plan, and z, which gates the output after its norm.
type linearMixer struct {
	hk, hv, dk, dv             int64
	channels                   int64 // C = 2·Hk·Dk + Hv·Dv
	eps                        float64
	in, gate, out              linear // gate has the last parameter of in
	conv, aLog, dtBias, weight *Param // [C, 1, W], [Hv], [Hv]; the norm's [Dv]

	mixed tensor.Tensor // [T, Hv·Dv], the rule's output
	z     tensor.Tensor // [T, Hv·Dv]
	rstd  tensor.Tensor // [T·Hv] F32
	saved tensor.Tensor // U8
	args  gdn.LayerArgs
	grads gdn.LayerGrads
}

func newLinearAttention(cfg *Config, layer int64) *linearMixer {
	m := &linearMixer{hk: cfg.LinearNumKeyHeads, hv: cfg.LinearNumValueHeads, dk: cfg.LinearKeyHeadDim,
		dv: cfg.LinearValueHeadDim, channels: cfg.convChannels(), eps: cfg.RMSNormEps}
	const heads, values = "linear_num_value_heads", "linear_num_value_heads · linear_value_head_dim"
	const channels = "2 linear_num_key_heads · linear_key_head_dim + " + values
	param := func(suffix string, start fill, axes []string, shape ...int64) *Param {
		return newParam(fmt.Sprintf("model.layers.%d.linear_attn.%s", layer, suffix), cfg.DType, start, axes, shape...)
	}
	matrix := func(suffix, lines string, n int64) *Param {
		return param(suffix, normal, []string{lines, "hidden_size"}, n, cfg.HiddenSize)
	}
	m.in = newLinear([]*Param{matrix("in_proj_qkv.weight", channels, m.channels),
		matrix("in_proj_b.weight", heads, m.hv), matrix("in_proj_a.weight", heads, m.hv),
		matrix("in_proj_z.weight", values, m.hv*m.dv)}, nil)
	m.gate = newLinear(m.in.w[3:], nil)
	m.conv = param("conv1d.weight", normal, []string{channels, "1", "linear_conv_kernel_dim"}, m.channels, 1,
		cfg.LinearConvKernelDim)
	m.aLog, m.dtBias = param("A_log", decays, []string{heads}, m.hv), param("dt_bias", ones, []string{heads}, m.hv)
	// this weight is stored as it is, not as its distance from 1
	m.weight = param("norm.weight", ones, []string{"linear_value_head_dim"}, m.dv)
	m.out = newLinear([]*Param{param("out_proj.weight", normal, []string{"hidden_size", values}, cfg.HiddenSize,
		m.hv*m.dv)}, nil)
	return m
}

func (m *linearMixer) Params() []*Param {
	ps := append([]*Param(nil), m.in.w...)
	return append(append(ps, m.conv, m.aLog, m.dtBias, m.weight), m.out.w...)
}

// split returns views of the projection, or of its gradient: q|k|v [T, C], b, a [T, Hv] and z
// [T, Hv·Dv].
func (m *linearMixer) split(x tensor.Tensor) (qkv, b, a, z tensor.Tensor) {
	n := m.channels
	return x.Slice(1, 0, n), x.Slice(1, n, n+m.hv), x.Slice(1, n+m.hv, n+2*m.hv), x.Slice(1, n+2*m.hv, m.in.out)
}

// matrix returns a view [C, W] of the convolution's weight, or of its gradient.
func (m *linearMixer) matrix(w tensor.Tensor) tensor.Tensor { return span(w, m.channels, w.Shape[2]) }

// heads returns a view [T, Hv, Dv] of [T, Hv·Dv].
func (m *linearMixer) heads(x tensor.Tensor) tensor.Tensor { return x.Split(1, m.hv) }

// setWeights sets the plan's arguments to the weights, whose memory differs between uses of the
// layer.
func (m *linearMixer) setWeights() {
	m.args.Conv, m.args.ALog, m.args.DtBias = m.matrix(m.conv.Value), m.aLog.Value, m.dtBias.Value
}

func (m *linearMixer) visitSaved(p *pass) {
	p.visit(&m.mixed, attention, p.tokens, m.hv*m.dv)
	p.visitF32(&m.rstd, attention, p.tokens*m.hv)
	p.visitBytes(&m.saved, attention, p.sizes.linear.Saved)
	p.visit(&m.z, qkv, p.tokens, m.hv*m.dv)
}

func (m *linearMixer) Forward(p *pass, x tensor.Tensor) {
	mark := p.mark()
	mixed, rstd := p.or(m.mixed, p.tokens, m.hv*m.dv), m.rstd
	if rstd.IsNil() {
		rstd = p.tempF32(p.tokens * m.hv)
	}
	all := p.temp(p.tokens, m.in.out) // [T, C + 2Hv + Hv·Dv]
	m.args.Saved, m.args.Workspace = m.saved, p.alloc(tensor.U8, p.sizes.linear.Workspace)
	qkv, b, a, z := m.split(all)

	p.phase("projection")
	m.in.forward(p, all, x)
	if !m.z.IsNil() {
		p.Copy(m.z, z)
	}
	p.end()
	p.phase("linear-attention")
	m.args.QKV, m.args.B, m.args.A, m.args.Out = withBatch(qkv), withBatch(b), withBatch(a), withBatch(m.heads(mixed))
	m.setWeights()
	if !p.skip() {
		p.err = p.plans.linear.LayerForward(p.ctx.Stream, p.batch.SP, &m.args)
	}
	p.end()
	m.project(p, x, mixed, z, rstd, qkv.Slice(1, 0, m.hv*m.dv)) // qkv is not used any more
	p.reset(mark)
}

// project computes the gated norm of the rule's output, into y, and the output's projection, into
// out.
func (m *linearMixer) project(p *pass, out, mixed, z, rstd, y tensor.Tensor) {
	p.phase("norm")
	p.GatedNorm(m.heads(y), m.heads(mixed), m.heads(z), m.weight, rstd, m.eps)
	p.end()
	p.phase("projection")
	m.out.forward(p, out, y)
	p.end()
}

// Output projects the gate's input again, unless it is saved.
func (m *linearMixer) Output(p *pass, x tensor.Tensor) {
	mark := p.mark()
	z, y := m.gateInput(p, x), p.temp(p.tokens, m.hv*m.dv)
	m.project(p, x, m.mixed, z, m.rstd, y)
	p.reset(mark)
}

func (m *linearMixer) gateInput(p *pass, x tensor.Tensor) tensor.Tensor {
	z := p.or(m.z, p.tokens, m.hv*m.dv)
	if m.z.IsNil() {
		p.phase("projection")
		m.gate.forward(p, z, x)
		p.end()
	}
	return z
}

// Backward recomputes the norm's output, which is never saved.
func (m *linearMixer) Backward(p *pass, x, dy tensor.Tensor) {
	mark := p.mark()
	z := m.gateInput(p, x)
	// the norm's output, then its gradient, then that of the rule's output
	d := p.temp(p.tokens, m.hv*m.dv)
	all := p.temp(p.tokens, m.in.out) // the projection's gradient
	m.args.Saved, m.args.Workspace = m.saved, p.alloc(tensor.U8, p.sizes.linear.Workspace)
	dqkv, db, da, dz := m.split(all)

	p.phase("norm")
	p.GatedNorm(m.heads(d), m.heads(m.mixed), m.heads(z), m.weight, m.rstd, m.eps)
	p.end()
	p.phase("projection")
	m.out.backwardWeights(p, dy, d)
	m.out.backwardInput(p, d, dy)
	p.end()
	p.phase("norm")
	p.GatedNormBack(m.heads(d), m.heads(dz), m.heads(m.mixed), m.heads(z), m.weight, m.rstd)
	p.end()
	p.phase("linear-attention")
	m.setWeights()
	conv, aLog, dtBias := p.gradOf(m.conv), p.gradOf(m.aLog), p.gradOf(m.dtBias)
	if !p.skip() {
		m.grads = gdn.LayerGrads{DOut: withBatch(m.heads(d)), DQKV: withBatch(dqkv), DB: withBatch(db),
			DA: withBatch(da), DConv: m.matrix(conv), DALog: aLog, DDtBias: dtBias}
		p.err = p.plans.linear.LayerBackward(p.ctx.Stream, p.batch.SP, &m.args, &m.grads)
	}
	p.gradReady(m.conv, m.aLog, m.dtBias)
	p.end()
	p.phase("projection")
	m.in.backwardWeights(p, all, x)
	m.in.backwardInput(p, x, all)
	p.end()
	p.reset(mark)
}
