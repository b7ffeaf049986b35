package model

import (
	"fmt"

	"ulysses/sp"
	"ulysses/tensor"
)

// latentEps is the eps of the norms of compressed vectors, which no field of a config.json changes.
const latentEps = 1e-6

// latentAttention is multi-head latent attention (see Latent), sequence-parallel by its plan: q, k
// and v of all heads are computed from compressed vectors, and attention runs as in other families.
//
//	queries  x -> compressed [T, R] -> norm -> q [T, H, rotated|others]
//	keys     x -> compressed [T, C|rotated] -> norm of C -> kv [T, H, others|v]
//
// k has, in each head, a copy of the rotated features and its own others.
type latentAttention struct {
	attentionCore
	rotated   int64        // features of a head of q and k with RoPE, the first ones
	queries   *compression // nil: q is computed from x
	keys      compression
	toQ, toKV linear // to the heads of q; to kv
}

func newLatentAttention(cfg *Config, layer int64) *latentAttention {
	a := &latentAttention{attentionCore: newAttentionCore(cfg, layer), rotated: cfg.QKRopeHeadDim}
	name := func(suffix string) string { return fmt.Sprintf("model.layers.%d.self_attn.%s", layer, suffix) }
	matrix := func(suffix, rows, columns string, out, in int64) linear {
		w := newParam(name(suffix+".weight"), cfg.DType, normal, []string{rows, columns}, out, in)
		return newLinear([]*Param{w}, nil)
	}
	withBias := func(l linear, suffix string) linear {
		if cfg.AttentionBias {
			l.b = []*Param{newParam(name(suffix+".bias"), cfg.DType, zeros, l.w[0].axes[:1], l.out)}
		}
		return l
	}
	compress := func(projection, norm, rows, rank string, out, normed int64) compression {
		in := withBias(matrix(projection, rows, "hidden_size", out, cfg.HiddenSize), projection)
		return compression{in: in, norm: newNorm(cfg, name(norm+".weight"), rank, normed)}
	}
	const queryRows = "num_attention_heads · (qk_nope_head_dim + qk_rope_head_dim)"
	if r := cfg.QLoraRank; r > 0 {
		queries := compress("q_a_proj", "q_a_layernorm", "q_lora_rank", "q_lora_rank", r, r)
		a.queries, a.toQ = &queries, matrix("q_b_proj", queryRows, "q_lora_rank", a.hq*a.d, r)
	} else {
		a.toQ = matrix("q_proj", queryRows, "hidden_size", a.hq*a.d, cfg.HiddenSize)
	}
	a.keys = compress("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_lora_rank + qk_rope_head_dim", "kv_lora_rank",
		cfg.KVLoraRank+a.rotated, cfg.KVLoraRank)
	a.toKV = matrix("kv_b_proj", "num_attention_heads · (qk_nope_head_dim + v_head_dim)", "kv_lora_rank",
		a.hq*(cfg.QKNopeHeadDim+a.dv), cfg.KVLoraRank)
	a.out = withBias(matrix("o_proj", "hidden_size", "num_attention_heads · v_head_dim", cfg.HiddenSize, a.hq*a.dv),
		"o_proj")
	return a
}

func (a *latentAttention) Params() []*Param {
	var ps []*Param
	if a.queries != nil {
		ps = a.queries.params()
	}
	ps = append(append(ps, a.toQ.w...), a.keys.params()...)
	return append(append(append(ps, a.toKV.w...), a.out.w...), a.out.b...)
}

func (a *latentAttention) visitSaved(p *pass) {
	a.attentionCore.visitSaved(p)
	if a.queries != nil {
		a.queries.visitSaved(p)
	}
	a.keys.visitSaved(p)
}

// latentHeads are the heads of q, k and v of a pass, or their gradients, and kv [T, H, others|v],
// of which v is a view.
type latentHeads struct {
	heads
	kv tensor.Tensor
}

// allocate allocates memory for the heads.
func (a *latentAttention) allocate(p *pass) (t latentHeads) {
	t.q, t.k = p.temp(p.tokens, a.hq, a.d), p.temp(p.tokens, a.hq, a.d)
	t.kv = p.temp(p.tokens, a.hq, a.d-a.rotated+a.dv)
	t.v = t.kv.Slice(2, a.d-a.rotated, t.kv.Shape[2])
	return t
}

// split returns views of the features of k with RoPE and without it, and of the latter in kv.
func (a *latentAttention) split(t latentHeads) (rotated, others, inKV tensor.Tensor) {
	return t.k.Slice(2, 0, a.rotated), t.k.Slice(2, a.rotated, a.d), t.kv.Slice(2, 0, a.d-a.rotated)
}

// projectQueries computes q from x. With again, the compressed vectors are saved.
func (a *latentAttention) projectQueries(p *pass, t latentHeads, x tensor.Tensor, again bool) {
	mark := p.mark()
	if a.queries != nil {
		x = a.queries.normed(p, a.queries.compressed(p, x, again))
	}
	p.phase("projection")
	a.toQ.forward(p, t.q.Flatten(1, 2), x)
	p.end()
	p.reset(mark)
}

// projectKeys is projectQueries for k and v.
func (a *latentAttention) projectKeys(p *pass, t latentHeads, x tensor.Tensor, again bool) {
	mark := p.mark()
	keys := a.keys.compressed(p, x, again)
	normed := a.keys.normed(p, keys)
	p.phase("projection")
	a.toKV.forward(p, t.kv.Flatten(1, 2), normed)
	p.end()
	rotated, others, inKV := a.split(t)
	p.phase("norm")
	p.Copy(rotated, repeated(a.keys.rest(keys), a.hq))
	p.Copy(others, inKV)
	p.end()
	p.reset(mark)
}

func (a *latentAttention) Forward(p *pass, x tensor.Tensor) {
	mark := p.mark()
	mixed := p.or(a.mixed, p.tokens, a.hq*a.dv)
	t, saved := a.allocate(p), a.begin(p)
	if a.overlaps(p) {
		a.startForward(p, t.heads, mixed, saved)
		a.projectQueries(p, t, x, false)
		a.do(p, sp.SendQ)
		a.projectKeys(p, t, x, false)
		a.do(p, sp.SendK)
		a.do(p, sp.SendV)
		a.do(p, sp.AttendForward)
	} else {
		a.projectQueries(p, t, x, false)
		a.projectKeys(p, t, x, false)
		a.attend(p, t.heads, mixed, saved)
	}
	a.project(p, x, mixed)
	p.reset(mark)
}

// project computes the projection y of attention's output.
func (a *latentAttention) project(p *pass, y, mixed tensor.Tensor) {
	p.phase("projection")
	a.out.forward(p, y, mixed)
	p.end()
}

// Output needs no more than attention's output.
func (a *latentAttention) Output(p *pass, x tensor.Tensor) { a.project(p, x, a.mixed) }

// Backward computes the heads again from the compressed vectors, unless they are saved.
func (a *latentAttention) Backward(p *pass, x, dy tensor.Tensor) {
	mark := p.mark()
	restore, overlaps := a.saved.IsNil(), a.overlaps(p)
	t, saved := a.allocate(p), a.begin(p)
	dmixed := p.temp(p.tokens, a.hq*a.dv)
	if restore {
		a.projectQueries(p, t, x, true)
		a.projectKeys(p, t, x, true)
	}
	if overlaps {
		a.backwardOverlapped(p, t, dmixed, saved, dy, restore)
	} else {
		p.phase("projection")
		a.out.backwardWeights(p, dy, a.mixed)
		a.out.backwardInput(p, dmixed, dy)
		p.end()
		a.attendBackward(p, t.heads, dmixed, saved, restore)
	}
	dkeys := a.backwardKeys(p, t, x)
	if overlaps {
		a.do(p, sp.WaitDQ)
	}
	from, dqueries := a.backwardQueries(p, t, x)
	p.phase("projection")
	a.keys.in.backwardInput(p, x, dkeys)
	from.inputGrad(p, x, dqueries, true)
	p.end()
	p.reset(mark)
}

// backwardOverlapped is the backward half up to the gradients of k and v. The gradients of q arrive
// while backwardKeys runs.
func (a *latentAttention) backwardOverlapped(p *pass, t latentHeads, dmixed, saved, dy tensor.Tensor, restore bool) {
	p.phase("attention")
	a.setBackward(p, 0, t.heads, saved, restore)
	p.end()
	p.phase("projection")
	a.out.backwardInput(p, dmixed, dy)
	p.end()
	a.startBackward(p, dmixed)
	p.phase("projection")
	a.out.backwardWeights(p, dy, a.mixed)
	p.end()
	a.do(p, sp.AttendBackward)
	a.do(p, sp.WaitDV)
	a.do(p, sp.WaitDK)
}

// backwardKeys returns the gradient of the compressed keys from the gradients of the heads. It adds
// to the gradients of all weights between x and the heads.
func (a *latentAttention) backwardKeys(p *pass, t latentHeads, x tensor.Tensor) tensor.Tensor {
	d := p.temp(p.tokens, a.keys.in.out)
	mark := p.mark()
	drotated, dothers, inKV := a.split(t)
	p.phase("norm")
	p.Copy(inKV, dothers)
	a.addHeads(p, drotated)
	p.Copy(a.keys.rest(d), drotated.Select(1, 0))
	p.end()
	a.keys.backward(p, &a.toKV, d, t.kv.Flatten(1, 2), x)
	p.reset(mark)
	return d
}

// addHeads adds the heads of x [T, H, ·] to the first one. It adds halves of the heads: with 128
// heads in BF16, the largest error is 1.7 times as large as with sums in F32, and 6.5 times if one
// head is added after another.
func (a *latentAttention) addHeads(p *pass, x tensor.Tensor) {
	for n := x.Shape[1]; n > 1; n = (n + 1) / 2 {
		lower := x.Slice(1, 0, n/2)
		p.Add(lower, lower, x.Slice(1, n-n/2, n))
	}
}

// backwardQueries returns the projection of x on the way to the queries, and the gradient of its
// output. It adds to the gradients of all weights between x and the heads.
func (a *latentAttention) backwardQueries(p *pass, t latentHeads, x tensor.Tensor) (from *linear, d tensor.Tensor) {
	dq := t.q.Flatten(1, 2)
	if a.queries == nil {
		p.phase("projection")
		a.toQ.backwardWeights(p, dq, x)
		p.end()
		return &a.toQ, dq
	}
	d = p.temp(p.tokens, a.queries.in.out)
	a.queries.backward(p, &a.toQ, d, dq, x)
	return &a.queries.in, d
}

func (a *latentAttention) decode(p *pass, c *cache, at int64, x tensor.Tensor) {
	mark := p.mark()
	t, mixed := a.allocate(p), p.temp(p.tokens, a.hq*a.dv)
	a.projectQueries(p, t, x, false)
	a.projectKeys(p, t, x, false)
	a.attendCached(p, c, at, t.heads, nil, nil, 0, mixed)
	a.project(p, x, mixed)
	p.reset(mark)
}

// compression projects tokens to vectors with few features, of which the first ones get a norm.
type compression struct {
	in   linear
	norm *Param        // [n]
	raw  tensor.Tensor // [T, n|rest], the output of the projection
	rstd tensor.Tensor // [T] F32, of the norm
}

func (c *compression) params() []*Param {
	return append(append(append([]*Param(nil), c.in.w...), c.in.b...), c.norm)
}

func (c *compression) visitSaved(p *pass) {
	p.visit(&c.raw, attention, p.tokens, c.in.out)
	p.visitF32(&c.rstd, attention, p.tokens)
}

// first returns the features of x that have a norm, and rest the others.
func (c *compression) first(x tensor.Tensor) tensor.Tensor { return x.Slice(1, 0, c.norm.Shape[0]) }
func (c *compression) rest(x tensor.Tensor) tensor.Tensor {
	return x.Slice(1, c.norm.Shape[0], c.in.out)
}

// compressed returns the compressed vectors [T, n|rest] of x, in saved memory if there is any. With
// again, they are there.
func (c *compression) compressed(p *pass, x tensor.Tensor, again bool) tensor.Tensor {
	if again {
		return c.raw
	}
	raw := p.or(c.raw, p.tokens, c.in.out)
	p.phase("projection")
	c.in.forward(p, raw, x)
	p.end()
	return raw
}

// normed returns the norms [T, n] of compressed vectors.
func (c *compression) normed(p *pass, raw tensor.Tensor) tensor.Tensor {
	rstd := c.rstd
	if rstd.IsNil() {
		rstd = p.tempF32(p.tokens)
	}
	y := p.temp(p.tokens, c.norm.Shape[0])
	p.phase("norm")
	p.Norm(y, c.first(raw), c.norm, rstd, latentEps)
	p.end()
	return y
}

// backward computes the gradient of the first features of d [T, n|rest] from dy, the gradient of
// the output of a projection of the norms. The other features of d have their gradient. backward
// adds to the gradients of all weights between x and dy.
func (c *compression) backward(p *pass, projection *linear, d, dy, x tensor.Tensor) {
	mark := p.mark()
	y, first := c.normed(p, c.raw), c.first(d)
	p.phase("projection")
	projection.backwardWeights(p, dy, y)
	projection.backwardInput(p, first, dy)
	p.end()
	p.phase("norm")
	p.NormBack(first, first, c.first(c.raw), c.norm, c.rstd, false)
	p.end()
	p.phase("projection")
	c.in.backwardWeights(p, d, x)
	p.end()
	p.reset(mark)
}

// repeated returns a view [T, n, ·] of x [T, ·] that has each row n times.
func repeated(x tensor.Tensor, n int64) tensor.Tensor {
	y := x.Split(1, 1)
	y.Shape[1], y.Stride[1] = n, 0
	return y
}
