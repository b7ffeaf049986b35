package sp

import (
	"slices"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// Args are the tensors of one layer's attention. They have the layer's type, except for the LSE,
// which is F32. Forward reads Q, K, V and writes Out, LSE and Saved; Backward reads only Saved. The
// last axis is dense; other strides are arbitrary. The caller owns all memory.
type Args struct {
	Q   tensor.Tensor // [B, rows, Hq, D]
	K   tensor.Tensor // [B, kvrows, Hkv, D]
	V   tensor.Tensor // [B, kvrows, Hkv, Dv]
	Out tensor.Tensor // [B, rows, Hq, Dv]
	LSE tensor.Tensor // [B, rows, Hq], optional: it sends LSEBytesSent

	// Cos and Sin [B·rows, R/2] F32, of a RopeTable, are optional. With them, Forward rotates q and
	// k while it packs them, and Backward applies the inverse rotation to dq and dk while it
	// unpacks them. Q and K are not changed.
	Cos, Sin tensor.Tensor

	// QNorm and KNorm are optional and need Cos and Sin. With them, Forward and Restore normalize
	// the heads of q and k (RMSNorm) while they pack them, before the rotation. DQ and DK of
	// Backward are then the gradients of the normalized heads.
	QNorm, KNorm HeadNorm

	// Saved is U8, Sizes.Saved bytes, aligned to Info.Align; nil = Backward is not called
	Saved tensor.Tensor
	// SavedLSE is U8 and optional. With it, the LSE is saved there, and SeparateSizes has the bytes
	// of both.
	SavedLSE tensor.Tensor
	// Workspace is U8, Sizes.Workspace bytes, aligned to Info.Align. Its content has no meaning
	// between calls.
	Workspace tensor.Tensor
}

// HeadNorm is the RMSNorm of heads (device.RMSNorm). A nil W means no norm.
type HeadNorm struct {
	W           tensor.Tensor // [D]
	RStd        tensor.Tensor // [B·rows, heads] F32, written, for the backward pass of the norm
	Eps, Centre float64
}

// Grads are the gradients. DOut is read, the others are written. The last axis is dense; other
// strides are arbitrary.
type Grads struct {
	DOut tensor.Tensor // [B, rows, Hq, Dv]
	DQ   tensor.Tensor // [B, rows, Hq, D]
	DK   tensor.Tensor // [B, kvrows, Hkv, D]
	DV   tensor.Tensor // [B, kvrows, Hkv, Dv]
}

// Sizes has the bytes of Args.Saved and Args.Workspace.
type Sizes struct{ Saved, Workspace int64 }

// local has the tensors of a rank's attention: all tokens of its heads, in the device's preferred
// layout. A single rank copies into this layout too: CPU kernels gain more from it (6-13 %) than
// the copy costs (1-4 %), and the backward pass needs a copy in any case.
type local struct {
	q, k, v, out tensor.Tensor // [hq, B, S, D], [hkv, B, Sk, D], [hkv, B, Sk, Dv], [hq, B, S, Dv]
	lse          tensor.Tensor // [hq, B, S, 1]
}

// alloc allocates a tensor [h, B, n, D]. In memory, heads precede tokens, or tokens precede heads
// if the device prefers that.
func (p *Plan) alloc(c *device.Allocator, dtype tensor.DType, heads, batch, rows, dim int64) tensor.Tensor {
	if p.tokenMajor {
		return c.Take(dtype, batch, rows, heads, dim).Permute(2, 0, 1, 3)
	}
	return c.Take(dtype, heads, batch, rows, dim)
}

// allocForward allocates the tensors that the forward pass saves for the backward pass: q, k, v and
// out from c, and the LSE from lse if it is not nil, else from c.
func (p *Plan) allocForward(b *Batch, c, lse *device.Allocator) local {
	x := p.allocQKVOut(b, c)
	if lse == nil {
		lse = c
	}
	x.lse = p.alloc(lse, tensor.F32, p.query[p.rank].n(), b.spec.Batch, b.queries.n, 1)
	return x
}

// savedBuffers returns allocators over Saved and SavedLSE. lse is nil if there is no SavedLSE.
func (p *Plan) savedBuffers(a *Args) (keep device.Allocator, lse *device.Allocator) {
	if !a.SavedLSE.IsNil() {
		p.lse = device.Allocator{Mem: a.SavedLSE, Align: p.align}
		lse = &p.lse
	}
	return device.Allocator{Mem: a.Saved, Align: p.align}, lse
}

// allocQKVOut allocates q, k, v and out, or their gradients.
func (p *Plan) allocQKVOut(b *Batch, c *device.Allocator) (d local) {
	l, hq, hkv, n := p.layer, p.query[p.rank].n(), p.key[p.rank].n(), b.spec.Batch
	d.q = p.alloc(c, l.DType, hq, n, b.queries.n, l.Dim)
	d.k = p.alloc(c, l.DType, hkv, n, b.keys.n, l.Dim)
	d.v = p.alloc(c, l.DType, hkv, n, b.keys.n, l.VDim)
	d.out = p.alloc(c, l.DType, hq, n, b.queries.n, l.VDim)
	return d
}

// Sizes returns the bytes that calls with this batch need. Not collective.
func (p *Plan) Sizes(b *Batch) Sizes { return p.sizes(b, b.queries.cu) }

// MaxSizes returns the bytes that calls need with any batch of at most these extents and any
// documents. It is for memory that is planned before the batches are known, and for buffers that
// serve batches of different lengths. Not collective.
func (p *Plan) MaxSizes(batch, seq, kvSeq int64) (Sizes, error) {
	b, err := newBatch(p.rank, p.size, BatchSpec{Batch: batch, Seq: seq, KVSeq: kvSeq})
	if err != nil {
		return Sizes{}, err
	}
	return p.sizes(b, nil), nil
}

// sizes computes Sizes for documents that start at cuQ among the queries; nil means any documents.
func (p *Plan) sizes(b *Batch, cuQ []int64) Sizes {
	saved, ws := device.Allocator{Align: p.align}, device.Allocator{Align: p.align}
	x := p.allocForward(b, &saved, nil)
	p.describe(b, &x)
	if p.attention.CuQ = cuQ; cuQ == nil {
		p.attention.CuK = nil
	}
	// Forward without Saved has these tensors in the workspace.
	scratch := max(p.wireBytes(b, false), p.dev.AttentionWorkspace(&p.attention, false))
	size := Sizes{Workspace: device.Padded(p.dev, saved.Used) + scratch}
	if !p.layer.NoBackward {
		p.allocQKVOut(b, &ws)
		scratch = max(p.wireBytes(b, true), p.dev.AttentionWorkspace(&p.attention, true))
		// also on a rank without heads, because a nil Saved means that there is no backward
		size.Saved = max(saved.Used, p.align)
		size.Workspace = max(size.Workspace, device.Padded(p.dev, ws.Used)+scratch)
	}
	return size
}

// Reserve makes the communicator allocate, before the first step, the buffers for batches of at
// most these extents (comm.Reserve). Not collective.
func (p *Plan) Reserve(batch, seq, kvSeq int64) error {
	b, err := newBatch(p.rank, p.size, BatchSpec{Batch: batch, Seq: seq, KVSeq: kvSeq})
	if err != nil {
		return err
	}
	return p.ReserveFor(b)
}

// ReserveFor is Reserve for one batch.
func (p *Plan) ReserveFor(b *Batch) error {
	return comm.Reserve(p.comm, 1, max(p.wireBytes(b, false), p.wireBytes(b, true)))
}

// wireBytes returns the bytes, sent and received, of the largest all-to-all of a pass.
func (p *Plan) wireBytes(b *Batch, backward bool) int64 {
	l, me, n, m := p.layer, p.rank, b.queries.rows, b.keys.rows
	var in, out, lse int64 // elements of a sequence, sent and received
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
	if p.lseWithOut() {
		out += lse
	}
	return max(in*size, out*size, lse*tensor.F32.Size()) * b.spec.Batch
}

// lseWithOut reports whether one all-to-all moves both the LSE and the output. An all-to-all has
// one type.
func (p *Plan) lseWithOut() bool { return p.layer.DType == tensor.F32 }

// describe sets the arguments of the device's operation.
func (p *Plan) describe(b *Batch, x *local) {
	p.attention = device.Attention{
		Q: tokens(x.q), K: tokens(x.k), V: tokens(x.v), Out: tokens(x.out), LSE: tokens(x.lse).Select(2, 0),
		CuQ: b.queries.cu, CuK: b.keys.cu, KVHead: p.kvHead, Causal: p.layer.Causal, Window: p.layer.Window, Scale: p.layer.Scale,
		Deterministic: p.layer.Deterministic,
	}
}

// tokens views [h, B, S, D] as the [T, h, D] of the device's operations.
func tokens(x tensor.Tensor) tensor.Tensor { return x.Flatten(1, 2).Permute(1, 0, 2) }

// Forward computes Out, and LSE if given, of the batch. It allocates nothing. Collective over the
// plan's communicator.
func (p *Plan) Forward(s device.Stream, b *Batch, a *Args) error {
	if err := p.Admit.Result(p.checkForward(b, a)); err != nil {
		return err
	}
	ws := device.Allocator{Mem: bytesOf(a.Workspace), Align: p.align}
	keep, lse := p.savedBuffers(a)
	to := &keep
	if a.Saved.IsNil() {
		to = &ws
	}
	x := p.allocForward(b, to, lse)
	scratch := ws.Rest()
	qkv := p.qkvTensors(b, a, &x)
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
	out := [2]reshardTensor{{seq: a.Out, heads: x.out, split: p.query, rows: b.queries.rows}}
	if a.LSE.IsNil() {
		return p.headsToSeq(s, scratch, out[:1])
	}
	out[1] = reshardTensor{seq: addUnitAxis(a.LSE), heads: x.lse, split: p.query, rows: b.queries.rows}
	if p.lseWithOut() {
		return p.headsToSeq(s, scratch, out[:])
	}
	if err := p.headsToSeq(s, scratch, out[:1]); err != nil {
		return err
	}
	return p.headsToSeq(s, scratch, out[1:])
}

// qkvTensors returns q, k and v for seqToHeads.
func (p *Plan) qkvTensors(b *Batch, a *Args, x *local) [3]reshardTensor {
	return [...]reshardTensor{
		{seq: a.Q, heads: x.q, split: p.query, rows: b.queries.rows, cos: a.Cos, sin: a.Sin, norm: a.QNorm},
		{seq: a.K, heads: x.k, split: p.key, rows: b.keys.rows, cos: a.Cos, sin: a.Sin, norm: a.KNorm},
		{seq: a.V, heads: x.v, split: p.key, rows: b.keys.rows},
	}
}

// Backward computes DQ, DK and DV from DOut and Saved as Forward left it. It allocates nothing.
// Collective over the plan's communicator.
func (p *Plan) Backward(s device.Stream, b *Batch, a *Args, g *Grads) error {
	if err := p.Admit.Result(p.checkBackward(b, a, g)); err != nil {
		return err
	}
	keep, lse := p.savedBuffers(a)
	ws := device.Allocator{Mem: bytesOf(a.Workspace), Align: p.align}
	x, d := p.allocForward(b, &keep, lse), p.allocQKVOut(b, &ws)
	scratch := ws.Rest()
	dout := [...]reshardTensor{{seq: g.DOut, heads: d.out, split: p.query, rows: b.queries.rows}}
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
	qkv := [...]reshardTensor{
		{seq: g.DQ, heads: d.q, split: p.query, rows: b.queries.rows, cos: a.Cos, sin: a.Sin},
		{seq: g.DK, heads: d.k, split: p.key, rows: b.keys.rows, first: p.shared(), cos: a.Cos, sin: a.Sin},
		{seq: g.DV, heads: d.v, split: p.key, rows: b.keys.rows, first: p.shared()},
	}
	return p.headsToSeq(s, scratch, qkv[:])
}

// shared returns owned if a key head is on several ranks, else nil.
func (p *Plan) shared() []span {
	if slices.Equal(p.owned, p.key) {
		return nil
	}
	return p.owned
}

// addUnitAxis views [B, n, H] as [B, n, H, 1].
func addUnitAxis(t tensor.Tensor) tensor.Tensor {
	t.Shape[3], t.Stride[3], t.NDim = 1, 1, 4
	return t
}
