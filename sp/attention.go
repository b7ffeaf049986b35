package sp

import (
	"slices"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// Args are the tensors of one layer's attention, of the layer's type but for the LSE, which is F32.
// Forward reads Q, K, V and writes Out, LSE and Saved; Backward reads Saved, and looks at no other.
// Strides are free but for a dense last axis.
type Args struct {
	Q   tensor.Tensor // [B, rows, Hq, D]
	K   tensor.Tensor // [B, kvrows, Hkv, D]
	V   tensor.Tensor // [B, kvrows, Hkv, Dv]
	Out tensor.Tensor // [B, rows, Hq, Dv]
	LSE tensor.Tensor // [B, rows, Hq], optional: it costs LSEBytesSent

	// Cos and Sin [B·rows, R/2] F32, of a RopeTable, optional: Forward rotates q and k while it
	// packs them, Backward turns dq and dk back while it unpacks them. Q and K stay as they are.
	Cos, Sin tensor.Tensor

	// QNorm and KNorm, optional, with Cos and Sin alone: Forward and Restore normalize the heads of
	// q and k (RMSNorm) while they pack them, before they turn them. Backward's DQ and DK are then
	// the gradients of what was normalized.
	QNorm, KNorm HeadNorm

	// U8, Sizes.Saved bytes, aligned to Info.Align; nil = there will be no Backward
	Saved tensor.Tensor
	// U8, optional: where the LSE is saved instead; both have the bytes that Apart says then
	SavedLSE tensor.Tensor
	// U8, Sizes.Workspace bytes, aligned to Info.Align; its contents are of no use between calls
	Workspace tensor.Tensor
}

// HeadNorm is RMSNorm of heads: device.RMSNorm. There is none where W is nil.
type HeadNorm struct {
	W           tensor.Tensor // [D]
	RStd        tensor.Tensor // [B·rows, heads] F32, written: for its backward pass
	Eps, Centre float64
}

// Grads are the gradients: DOut is read, the others are written. Strides are free but for a dense
// last axis.
type Grads struct {
	DOut tensor.Tensor // [B, rows, Hq, Dv]
	DQ   tensor.Tensor // [B, rows, Hq, D]
	DK   tensor.Tensor // [B, kvrows, Hkv, D]
	DV   tensor.Tensor // [B, kvrows, Hkv, Dv]
}

// Sizes are bytes of Args.Saved and Args.Workspace.
type Sizes struct{ Saved, Workspace int64 }

// local is what a rank's attention works on: all rows of its heads, in memory as the device's
// kernels like it. One rank copies into it too: kernels on the CPU gain more from the layout than
// the copy costs (6-13 % against 1-4 %), and the backward pass needs a copy of its own anyway.
type local struct {
	q, k, v, out tensor.Tensor // [hq, B, S, D], [hkv, B, Sk, D], [hkv, B, Sk, Dv], [hq, B, S, Dv]
	lse          tensor.Tensor // [hq, B, S, 1]
}

// take carves [h, B, n, D]: heads before tokens in memory, or the other way round where the device
// likes that.
func (p *Plan) take(c *device.Allocator, dtype tensor.DType, heads, batch, rows, dim int64) tensor.Tensor {
	if p.tokenMajor {
		return c.Take(dtype, batch, rows, heads, dim).Permute(2, 0, 1, 3)
	}
	return c.Take(dtype, heads, batch, rows, dim)
}

// inputs allocates what the forward pass leaves for the backward pass, the LSE from an allocator of
// its own if it has one.
func (p *Plan) inputs(b *Batch, c, lse *device.Allocator) local {
	x := p.qkvOut(b, c)
	if lse == nil {
		lse = c
	}
	x.lse = p.take(lse, tensor.F32, p.query[p.rank].n(), b.spec.Batch, b.queries.n, 1)
	return x
}

// keepers are the allocators of what a call saves.
func (p *Plan) keepers(a *Args) (keep device.Allocator, lse *device.Allocator) {
	if !a.SavedLSE.IsNil() {
		p.lse = device.Allocator{Mem: a.SavedLSE, Align: p.align}
		lse = &p.lse
	}
	return device.Allocator{Mem: a.Saved, Align: p.align}, lse
}

// qkvOut carves q, k, v and out, or their gradients.
func (p *Plan) qkvOut(b *Batch, c *device.Allocator) (d local) {
	l, hq, hkv, n := p.layer, p.query[p.rank].n(), p.key[p.rank].n(), b.spec.Batch
	d.q = p.take(c, l.DType, hq, n, b.queries.n, l.Dim)
	d.k = p.take(c, l.DType, hkv, n, b.keys.n, l.Dim)
	d.v = p.take(c, l.DType, hkv, n, b.keys.n, l.VDim)
	d.out = p.take(c, l.DType, hq, n, b.queries.n, l.VDim)
	return d
}

// Sizes is the bytes that calls with this batch need.
func (p *Plan) Sizes(b *Batch) Sizes { return p.sizes(b, b.queries.cu) }

// MaxSizes is the bytes that calls need with any batch of at most these extents, whatever its
// documents: for memory that is planned before the batches are known, and for buffers that serve
// batches of different lengths one after another.
func (p *Plan) MaxSizes(batch, seq, kvSeq int64) (Sizes, error) {
	b, err := newBatch(p.rank, p.size, BatchSpec{Batch: batch, Seq: seq, KVSeq: kvSeq})
	if err != nil {
		return Sizes{}, err
	}
	return p.sizes(b, nil), nil
}

// sizes is for documents that start at cuQ among the queries; nil = any.
func (p *Plan) sizes(b *Batch, cuQ []int64) Sizes {
	saved, ws := device.Allocator{Align: p.align}, device.Allocator{Align: p.align}
	x := p.inputs(b, &saved, nil)
	p.describe(b, &x)
	if p.attention.CuQ = cuQ; cuQ == nil {
		p.attention.CuK = nil
	}
	// A forward pass without Saved keeps its inputs in the workspace.
	scratch := max(p.wire(b, false), p.dev.AttentionWorkspace(&p.attention, false))
	size := Sizes{Workspace: device.Padded(p.dev, saved.Used) + scratch}
	if !p.layer.NoBackward {
		p.qkvOut(b, &ws)
		scratch = max(p.wire(b, true), p.dev.AttentionWorkspace(&p.attention, true))
		// of a rank without heads too: no memory means no backward, on all ranks alike
		size.Saved = max(saved.Used, p.align)
		size.Workspace = max(size.Workspace, device.Padded(p.dev, ws.Used)+scratch)
	}
	return size
}

// Reserve has the communicator make, before the first step, what it needs beside tensors for
// batches of at most these extents.
func (p *Plan) Reserve(batch, seq, kvSeq int64) error {
	b, err := newBatch(p.rank, p.size, BatchSpec{Batch: batch, Seq: seq, KVSeq: kvSeq})
	if err != nil {
		return err
	}
	return p.ReserveFor(b)
}

// ReserveFor is Reserve for one batch.
func (p *Plan) ReserveFor(b *Batch) error {
	return comm.Reserve(p.comm, 1, max(p.wire(b, false), p.wire(b, true)))
}

// wire is the bytes of the larger exchange of a pass.
func (p *Plan) wire(b *Batch, backward bool) int64 {
	l, me, n, m := p.layer, p.rank, b.queries.rows, b.keys.rows
	var in, out, lse int64 // both ways, elements a batch row
	for j := range p.size {
		if j == me {
			continue
		}
		q := p.query[j].n()*n[me].n() + p.query[me].n()*n[j].n()
		k := p.key[j].n()*m[me].n() + p.key[me].n()*m[j].n()
		in += q*l.Dim + k*(l.Dim+l.VDim)
		out += q * l.VDim
		lse += q
	}
	if backward {
		lse = 0
	}
	size := l.DType.Size()
	if p.together() {
		out += lse
	}
	return max(in*size, out*size, lse*tensor.F32.Size()) * b.spec.Batch
}

// together reports that the LSE travels with the output: an exchange has one type.
func (p *Plan) together() bool { return p.layer.DType == tensor.F32 }

// describe fills the arguments of the device's operation.
func (p *Plan) describe(b *Batch, x *local) {
	p.attention = device.Attention{
		Q: tokens(x.q), K: tokens(x.k), V: tokens(x.v), Out: tokens(x.out), LSE: tokens(x.lse).Select(2, 0),
		CuQ: b.queries.cu, CuK: b.keys.cu, KVHead: p.kvHead, Causal: p.layer.Causal, Window: p.layer.Window, Scale: p.layer.Scale,
		Deterministic: p.layer.Deterministic,
	}
}

// tokens views [h, B, S, D] as the [T, h, D] of the device's operations.
func tokens(x tensor.Tensor) tensor.Tensor { return x.Flatten(1, 2).Permute(1, 0, 2) }

// Forward computes Out, and LSE if given, of the batch. Collective. It allocates nothing.
func (p *Plan) Forward(s device.Stream, b *Batch, a *Args) error {
	if err := p.Admit.Result(p.checkForward(b, a)); err != nil {
		return err
	}
	ws := device.Allocator{Mem: bytesOf(a.Workspace), Align: p.align}
	keep, lse := p.keepers(a)
	to := &keep
	if a.Saved.IsNil() {
		to = &ws
	}
	x := p.inputs(b, to, lse)
	scratch := ws.Rest()
	qkv := p.enter(b, a, &x)
	if err := p.seqToHeads(s, scratch, qkv[:]); err != nil {
		return err
	}
	if x.q.Numel() > 0 {
		p.describe(b, &x)
		p.attention.Workspace = scratch
		if err := p.dev.AttentionForward(s, &p.attention); err != nil {
			return err
		}
	}
	out := [2]part{{seq: a.Out, heads: x.out, split: p.query, rows: b.queries.rows}}
	if a.LSE.IsNil() {
		return p.headsToSeq(s, scratch, out[:1])
	}
	out[1] = part{seq: column(a.LSE), heads: x.lse, split: p.query, rows: b.queries.rows}
	if p.together() {
		return p.headsToSeq(s, scratch, out[:])
	}
	if err := p.headsToSeq(s, scratch, out[:1]); err != nil {
		return err
	}
	return p.headsToSeq(s, scratch, out[1:])
}

// enter is q, k and v on their way from rows to heads.
func (p *Plan) enter(b *Batch, a *Args, x *local) [3]part {
	return [...]part{
		{seq: a.Q, heads: x.q, split: p.query, rows: b.queries.rows, cos: a.Cos, sin: a.Sin, norm: a.QNorm},
		{seq: a.K, heads: x.k, split: p.key, rows: b.keys.rows, cos: a.Cos, sin: a.Sin, norm: a.KNorm},
		{seq: a.V, heads: x.v, split: p.key, rows: b.keys.rows},
	}
}

// Backward computes DQ, DK and DV from DOut and what Forward left in Saved. Collective. It
// allocates nothing.
func (p *Plan) Backward(s device.Stream, b *Batch, a *Args, g *Grads) error {
	if err := p.Admit.Result(p.checkBackward(b, a, g)); err != nil {
		return err
	}
	keep, lse := p.keepers(a)
	ws := device.Allocator{Mem: bytesOf(a.Workspace), Align: p.align}
	x, d := p.inputs(b, &keep, lse), p.qkvOut(b, &ws)
	scratch := ws.Rest()
	dout := [...]part{{seq: g.DOut, heads: d.out, split: p.query, rows: b.queries.rows}}
	if err := p.seqToHeads(s, scratch, dout[:]); err != nil {
		return err
	}
	if x.q.Numel() > 0 {
		p.describe(b, &x)
		p.attention.Workspace = scratch
		p.gradient = device.AttentionGrad{Attention: p.attention, DOut: tokens(d.out), DQ: tokens(d.q), DK: tokens(d.k), DV: tokens(d.v)}
		if err := p.dev.AttentionBackward(s, &p.gradient); err != nil {
			return err
		}
	}
	qkv := [...]part{
		{seq: g.DQ, heads: d.q, split: p.query, rows: b.queries.rows, cos: a.Cos, sin: a.Sin},
		{seq: g.DK, heads: d.k, split: p.key, rows: b.keys.rows, first: p.shared(), cos: a.Cos, sin: a.Sin},
		{seq: g.DV, heads: d.v, split: p.key, rows: b.keys.rows, first: p.shared()},
	}
	return p.headsToSeq(s, scratch, qkv[:])
}

// shared is owned where any head is on several ranks.
func (p *Plan) shared() []span {
	if slices.Equal(p.owned, p.key) {
		return nil
	}
	return p.owned
}

// column views [B, n, H] as [B, n, H, 1].
func column(t tensor.Tensor) tensor.Tensor {
	t.Shape[3], t.Stride[3], t.NDim = 1, 1, 4
	return t
}
