package model

import (
	"fmt"

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

// expand computes the heads from x and from the compressed vectors.
func (a *latentAttention) expand(p *pass, t latentHeads, x, queries, keys tensor.Tensor) {
	mark := p.mark()
	if a.queries != nil {
		x = a.queries.normed(p, queries)
	}
	normed := a.keys.normed(p, keys)
	p.phase("projection")
	a.toQ.forward(p, t.q.Flatten(1, 2), x)
	a.toKV.forward(p, t.kv.Flatten(1, 2), normed)
	p.end()
	rotated, others, inKV := a.split(t)
	p.phase("norm")
	p.Copy(rotated, repeated(a.keys.rest(keys), a.hq))
	p.Copy(others, inKV)
	p.end()
	p.reset(mark)
}

// compress computes the compressed vectors of x. That of queries is nil if they are not compressed.
func (a *latentAttention) compress(p *pass, x tensor.Tensor) (queries, keys tensor.Tensor) {
	if a.queries != nil {
		queries = a.queries.forward(p, x)
	}
	return queries, a.keys.forward(p, x)
}

func (a *latentAttention) Forward(p *pass, x tensor.Tensor) {
	mark := p.mark()
	mixed := p.or(a.mixed, p.tokens, a.hq*a.dv)
	t, saved := a.allocate(p), a.begin(p)
	queries, keys := a.compress(p, x)
	a.expand(p, t, x, queries, keys)
	a.attend(p, t.heads, mixed, saved)
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
	restore := a.saved.IsNil()
	t, saved := a.allocate(p), a.begin(p)
	dmixed := p.temp(p.tokens, a.hq*a.dv)
	if restore {
		var queries tensor.Tensor
		if a.queries != nil {
			queries = a.queries.raw
		}
		a.expand(p, t, x, queries, a.keys.raw)
	}
	p.phase("projection")
	a.out.backwardWeights(p, dy, a.mixed)
	a.out.backwardInput(p, dmixed, dy)
	p.end()
	a.attendBackward(p, t.heads, dmixed, saved, restore)
	dkeys := a.backwardKeys(p, t, x)
	from, dqueries := a.backwardQueries(p, t, x)
	p.phase("projection")
	a.keys.in.backwardInput(p, x, dkeys)
	from.inputGrad(p, x, dqueries, true)
	p.end()
	p.reset(mark)
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

// addHeads adds the heads of x [T, H, ·] to the first one. It adds halves of the heads, so that in
// BF16 a sum is rounded only log2(H) times.
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
	queries, keys := a.compress(p, x)
	a.expand(p, t, x, queries, keys)
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

// forward returns the compressed vectors [T, n|rest] of x, in saved memory if there is any.
func (c *compression) forward(p *pass, x tensor.Tensor) tensor.Tensor {
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
