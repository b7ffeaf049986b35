package model

import (
	"math"

	"ulysses/device"
	"ulysses/internal/splitmix"
	"ulysses/sp"
	"ulysses/tensor"
)

// heads are q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv] of a pass, or their gradients. In each,
// the last axis is dense.
type heads struct{ q, k, v tensor.Tensor }

// attentionCore is the common part of the mixers with softmax attention: attention itself, by the
// plan, for one group of heads after the other, and the projection of its output. A mixer computes
// q, k and v before it.
type attentionCore struct {
	layer      int64
	hq, hkv    int64
	d, dv      int64 // features of a head of q and k, and of v
	mask       mask
	window     *device.Window
	noRope     bool
	scale      float64 // of the scores
	softcap    float64 // of the scores; 0 = none
	out        linear
	mixed      tensor.Tensor // [T, Hq·Dv], attention's output
	saved, lse tensor.Tensor // U8, what the plan saves, of all groups of heads
	qNorms     sp.HeadNorm   // of the current pass: of each head, computed by the plan
	kNorms     sp.HeadNorm
	logits     tensor.Tensor // [Hq] F32, the sinks; nil = none
	dsinks     tensor.Tensor // [Hq] F32, this rank's terms of their gradient; nil in a forward half
	args       sp.Args
	grads      sp.Grads
	overlap    sp.Overlap
}

func newAttentionCore(cfg *Config, layer int64) attentionCore {
	c := attentionCore{layer: layer, hq: cfg.NumAttentionHeads, hkv: cfg.NumKeyValueHeads, d: cfg.HeadDim,
		dv: cfg.ValueDim(), mask: cfg.maskOf(layer), window: cfg.window(cfg.maskOf(layer)), scale: cfg.ScoreScale,
		softcap: cfg.ScoreSoftcap, noRope: cfg.NoRope != nil && cfg.NoRope[layer]}
	if c.scale == 0 {
		c.scale = 1 / math.Sqrt(float64(c.d))
	}
	return c
}

func (c *attentionCore) visitSaved(p *pass) {
	p.visit(&c.mixed, attention, p.tokens, c.hq*c.dv)
	p.visitBytes(&c.lse, attention, p.plans.groups*p.sizes.full.lse)
	p.visitBytes(&c.saved, qkv, p.plans.groups*p.sizes.full.saved)
}

// begin allocates the workspace of the plan's calls, and returns memory for what they save: memory
// of the layer, if there is any. A forward half that saves nothing needs none.
func (c *attentionCore) begin(p *pass) (saved tensor.Tensor) {
	c.args.Workspace = p.alloc(tensor.U8, p.sizes.full.workspace)
	if c.saved.IsNil() && !c.lse.IsNil() { // only the LSE is saved
		return p.alloc(tensor.U8, p.sizes.full.saved)
	}
	return c.saved
}

// ofGroup returns the elements of group g of the heads in a tensor [Hq], or nil if it is nil.
func (c *attentionCore) ofGroup(p *pass, g int64, t tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		return t
	}
	h := c.hq / p.plans.groups
	return t.Slice(0, g*h, (g+1)*h)
}

// setGroup sets the plan's arguments for group g of the heads in t, and in mixed. saved is memory
// for all groups, or for one.
func (c *attentionCore) setGroup(p *pass, g int64, t heads, mixed, saved tensor.Tensor) {
	n, size := p.plans.groups, p.sizes.full
	ofGroup := func(t tensor.Tensor) tensor.Tensor { // of [T, H, D], or of [T, H]
		h := t.Shape[1] / n
		return t.Slice(1, g*h, (g+1)*h)
	}
	batched := func(t tensor.Tensor) tensor.Tensor { return withBatch(ofGroup(t)) }
	c.args.QNorm, c.args.KNorm = c.qNorms, c.kNorms
	for _, norm := range [...]*sp.HeadNorm{&c.args.QNorm, &c.args.KNorm} {
		if !norm.RStd.IsNil() {
			norm.RStd = ofGroup(norm.RStd)
		}
	}
	c.args.Q, c.args.K, c.args.V, c.args.Out = batched(t.q), batched(t.k), batched(t.v), batched(mixed.Split(1, c.hq))
	var table angles
	if !c.noRope {
		table = p.tables[c.mask]
	}
	c.args.Cos, c.args.Sin, c.args.QCos, c.args.QSin = table.cos, table.sin, table.qCos, table.qSin
	c.args.Sinks = c.ofGroup(p, g, c.logits)
	if !p.dry {
		c.args.Seed = int64(splitmix.Mix(splitmix.Mix(splitmix.Mix(uint64(p.batch.Seed))+uint64(p.batch.Number)) +
			uint64(c.layer)))
		c.args.HeadAt, c.args.NoDropout = g*c.hq/n, !p.backward
	}
	c.args.Saved, c.args.SavedLSE = saved, tensor.Tensor{}
	if !c.lse.IsNil() {
		c.args.SavedLSE = c.lse.Slice(0, g*size.lse, (g+1)*size.lse)
	}
	if saved.Numel() > size.saved {
		c.args.Saved = saved.Slice(0, g*size.saved, (g+1)*size.saved)
	}
}

// attend computes mixed from the heads.
func (c *attentionCore) attend(p *pass, t heads, mixed, saved tensor.Tensor) {
	p.phase("attention")
	for g := range p.plans.groups {
		c.setGroup(p, g, t, mixed, saved)
		if !p.skip() {
			p.err = p.plans.softmax[c.mask].Forward(p.ctx.Stream, p.batch.SP, &c.args)
		}
	}
	p.end()
}

// attendBackward overwrites the heads with their gradients, from the gradient dmixed of attention's
// output. With restore, saved is memory for one group of heads, and each group is restored from the
// heads. Otherwise saved has what the plan saved, and the heads need not have values.
func (c *attentionCore) attendBackward(p *pass, t heads, dmixed, saved tensor.Tensor, restore bool) {
	p.phase("attention")
	for g := range p.plans.groups {
		c.setBackward(p, g, t, saved, restore)
		c.setGrads(p, g, dmixed)
		if !p.skip() {
			p.err = p.plans.softmax[c.mask].Backward(p.ctx.Stream, p.batch.SP, &c.args, &c.grads)
		}
	}
	p.end()
}

// setBackward sets the plan's arguments for group g of the heads in a backward half. With restore,
// it restores what the plan saved from the heads.
func (c *attentionCore) setBackward(p *pass, g int64, t heads, saved tensor.Tensor, restore bool) {
	c.setGroup(p, g, t, c.mixed, saved)
	if restore && !p.skip() {
		p.err = p.plans.softmax[c.mask].Restore(p.ctx.Stream, p.batch.SP, &c.args)
	}
}

// setGrads sets the plan's gradients for group g of the heads, which the gradients overwrite.
func (c *attentionCore) setGrads(p *pass, g int64, dmixed tensor.Tensor) {
	h := c.hq / p.plans.groups
	c.grads = sp.Grads{DOut: withBatch(dmixed.Split(1, c.hq).Slice(1, g*h, (g+1)*h)), DQ: c.args.Q, DK: c.args.K,
		DV: c.args.V, DSinks: c.ofGroup(p, g, c.dsinks)}
}

// overlaps reports whether projections overlap with all-to-alls. With several groups of heads, all
// are projected before the first is sent.
func (c *attentionCore) overlaps(p *pass) bool { return p.plans.overlap && p.plans.groups == 1 }

// startForward begins attend in steps, which do runs: q, k and v are sent when each is computed.
func (c *attentionCore) startForward(p *pass, t heads, mixed, saved tensor.Tensor) {
	c.setGroup(p, 0, t, mixed, saved)
	if !p.skip() {
		p.err = p.plans.softmax[c.mask].StartForward(p.batch.SP, &c.args, &c.overlap)
	}
}

// startBackward begins attendBackward in steps, after setBackward.
func (c *attentionCore) startBackward(p *pass, dmixed tensor.Tensor) {
	c.setGrads(p, 0, dmixed)
	p.phase("attention")
	if !p.skip() {
		p.err = p.plans.softmax[c.mask].StartBackward(p.ctx.Stream, p.batch.SP, &c.args, &c.grads, &c.overlap)
	}
	p.end()
}

// do runs a step of an overlapped call.
func (c *attentionCore) do(p *pass, step sp.Step) {
	p.phase("attention")
	if !p.skip() {
		p.err = c.overlap.Do(p.ctx.Stream, step)
	}
	p.end()
}

// withBatch returns a view [1, T, …] of [T, …].
func withBatch(t tensor.Tensor) tensor.Tensor { return t.Split(0, 1) }

func (c *attentionCore) newCache(d *Decoder) (kept cache, err error) {
	if kept.k, err = d.kept.Tensor(d.m.compute, d.limit, c.hkv, c.d); err == nil {
		kept.v, err = d.kept.Tensor(d.m.compute, d.limit, c.hkv, c.dv)
	}
	return kept, err
}

// attendCached adds the keys, after their rotation, and the values of the heads to the cache, in
// which `at` tokens precede them, and computes mixed [n, Hq·Dv] from the cache. The norms are of
// each head of q and k; nil = none. It overwrites q.
func (c *attentionCore) attendCached(p *pass, kept *cache, at int64, t heads, qNorm, kNorm *Param, eps float64,
	mixed tensor.Tensor) {
	n := mixed.Shape[0]
	table := &p.tables[c.mask]
	c.rotate(p, t.q, t.q, table.ofQueries(), qNorm, eps)
	c.rotate(p, kept.k.Slice(0, at, at+n), t.k, *table, kNorm, eps)
	p.Copy(kept.v.Slice(0, at, at+n), t.v)
	scores := device.Attention{Q: t.q, K: kept.k.Slice(0, 0, at+n), V: kept.v.Slice(0, 0, at+n),
		Out: mixed.Split(1, c.hq), LSE: p.tempF32(n, c.hq), Sinks: c.logits, CuQ: []int64{0, n},
		CuK: []int64{0, at + n}, Causal: true, Window: c.window, Scale: c.scale, Softcap: c.softcap}
	scores.Workspace = p.alloc(tensor.U8, p.dev.AttentionWorkspace(&scores, false))
	if !p.skip() {
		p.err = p.dev.AttentionForward(p.ctx.Stream, &scores)
	}
}

// rotate writes x [n, H, D], after its norm if there is one, rotated by a table of the pass.
func (c *attentionCore) rotate(p *pass, y, x tensor.Tensor, t angles, norm *Param, eps float64) {
	if c.noRope {
		if x.Data != y.Data {
			p.Copy(y, x)
		}
		return
	}
	mark := p.mark()
	r := device.Rope{X: x, Y: y, Cos: t.cos, Sin: t.sin}
	if norm != nil {
		r.W, r.Eps, r.Centre, r.RStd = norm.Value, eps, norm.centre, p.tempF32(x.Shape[0], x.Shape[1])
	}
	if !p.skip() {
		p.err = p.dev.Rope(p.ctx.Stream, &r)
	}
	p.reset(mark)
}
