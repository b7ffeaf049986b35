package sp

import (
	"slices"

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
	// unpacks them. Q and K are not changed. QCos and QSin are the table of q and dq, if k and dk
	// have another one; nil = Cos and Sin.
	Cos, Sin, QCos, QSin tensor.Tensor

	// QNorm and KNorm are optional and need Cos and Sin. With them, Forward and Restore normalize
	// the heads of q and k (RMSNorm) while they pack them, before the rotation. DQ and DK of
	// Backward are then the gradients of the normalized heads.
	QNorm, KNorm HeadNorm

	// Options of the layer, in the memory of the device, equal on all ranks.
	Sinks  tensor.Tensor // [Hq] F32, with Layer.Sinks
	Slopes tensor.Tensor // [Hq] F32, with Layer.ALiBi
	// U8 [Hq or 1, ⌈Seq/BlockRows⌉, ⌈KVSeq/BlockColumns⌉], dense, with Layer.BlockRows
	BlockMask tensor.Tensor
	// Seed chooses the dropout, together with head, query and key. Use another one in each layer
	// and step. Forward and Backward of a call need the same.
	Seed int64
	// HeadAt is the number of the first head for the dropout, if several plans share the heads of
	// a layer. NoDropout is for a call without dropout, such as an evaluation.
	HeadAt    int64
	NoDropout bool

	// Saved is U8, Sizes.Saved bytes, aligned to Info.Align; nil = Backward is not called
	Saved tensor.Tensor
	// SavedLSE is U8 and optional. With it, the LSE is saved there, and SeparateSizes has the bytes
	// of both.
	SavedLSE tensor.Tensor
	// Workspace is U8, Sizes.Workspace bytes, aligned to Info.Align. Its content has no meaning
	// between calls.
	Workspace tensor.Tensor
}

// queryTable returns the table of angles of q.
func (a *Args) queryTable() (cos, sin tensor.Tensor) {
	if a.QCos.IsNil() && a.QSin.IsNil() {
		return a.Cos, a.Sin
	}
	return a.QCos, a.QSin
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
	// Gradients of Sinks and Slopes, optional: this rank's terms, so the gradient is the sum over
	// all ranks
	DSinks  tensor.Tensor // [Hq] F32
	DSlopes tensor.Tensor // [Hq] F32
}

// Sizes has the bytes of Args.Saved and Args.Workspace.
type Sizes struct{ Saved, Workspace int64 }

// local has the tensors of a rank's attention: all tokens of its group, of its heads, in the
// device's preferred layout. A single rank also copies into this layout: CPU kernels gain more from
// it (6-13 %) than the copy costs (1-4 %), and the backward pass needs a copy in any case.
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
	x.lse = p.alloc(lse, tensor.F32, p.query[p.rank].n(), b.spec.Batch, x.q.Shape[2], 1)
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
	sch := p.placed(b)
	nq, nk := rows(sch.queries.attention[sch.group]), rows(sch.keys.attention[sch.group])
	d.q = p.alloc(c, l.DType, hq, n, nq, l.Dim)
	d.k = p.alloc(c, l.DType, hkv, n, nk, l.Dim)
	d.v = p.alloc(c, l.DType, hkv, n, nk, l.VDim)
	d.out = p.alloc(c, l.DType, hq, n, nq, l.VDim)
	return d
}

// Sizes returns the bytes that calls with this batch need. Not collective.
func (p *Plan) Sizes(b *Batch) Sizes { return p.sizes(b, b.queries.cu) }

// MaxSizes returns the bytes that calls need with any batch of at most these extents and any
// documents. It is for memory that is planned before the batches are known, and for buffers that
// serve batches of different lengths. Not collective.
func (p *Plan) MaxSizes(batch, seq, kvSeq int64) (most Sizes, err error) {
	err = p.eachMax(batch, seq, kvSeq, func(b *Batch) {
		s := p.sizes(b, nil)
		most = Sizes{max(most.Saved, s.Saved), max(most.Workspace, s.Workspace)}
	})
	return most, err
}

// eachMax calls f with the batches of these extents that need the most memory. With a ring, these
// are one for each placement of the rows.
func (p *Plan) eachMax(batch, seq, kvSeq int64, f func(b *Batch)) error {
	e := extents{batch, seq, kvSeq}
	if p.largest == nil || p.largestOf != e {
		largest, err := p.batchesOf(e)
		if err != nil {
			return err
		}
		p.largest, p.largestOf = largest, e
	}
	for _, b := range p.largest {
		f(b)
	}
	return nil
}

// extents are the most sequences, queries and keys of a batch.
type extents struct{ batch, seq, kvSeq int64 }

func (p *Plan) batchesOf(e extents) ([]*Batch, error) {
	spec := BatchSpec{Batch: e.batch, Seq: e.seq, KVSeq: e.kvSeq, Ring: p.ring}
	b, err := newBatch(p.rank, p.size, spec)
	if err != nil || p.ring == 1 {
		return []*Batch{b}, err
	}
	spec.Zigzag = true
	zigzag, err := newBatch(p.rank, p.size, spec)
	if err != nil {
		return nil, err
	}
	var largest []*Batch
	for _, b := range []*Batch{b, zigzag} {
		for _, placement := range []int{inOrder, inZigzag} {
			x := *b // the schedule is kept by the address of the batch
			x.unknownDocuments, x.placement = true, placement
			largest = append(largest, &x)
		}
	}
	return largest, nil
}

// sizes computes Sizes for documents that start at cuQ among the queries; nil means any documents.
func (p *Plan) sizes(b *Batch, cuQ []int64) Sizes {
	saved, ws := device.Allocator{Align: p.align}, device.Allocator{Align: p.align}
	x := p.allocForward(b, &saved, nil)
	// Forward without Saved has these tensors in the workspace.
	scratch := max(p.wireBytes(b, false), p.passBytes(b, &x, cuQ, false))
	size := Sizes{Workspace: device.Padded(p.dev, saved.Used) + scratch}
	if !p.layer.NoBackward {
		p.allocQKVOut(b, &ws)
		scratch = max(p.wireBytes(b, true), p.passBytes(b, &x, cuQ, true))
		// also on a rank without heads, because a nil Saved means that there is no backward
		size.Saved = max(saved.Used, p.align)
		size.Workspace = max(size.Workspace, device.Padded(p.dev, ws.Used)+scratch)
	}
	return size
}

// passBytes returns the scratch of the attention of a pass.
func (p *Plan) passBytes(b *Batch, x *local, cuQ []int64, backward bool) int64 {
	if p.ring > 1 {
		c := device.Allocator{Align: p.align}
		p.ringBuffers(b, x, &c, backward)
		return c.Used
	}
	p.describe(b, x, nil)
	if p.attention.CuQ = cuQ; cuQ == nil {
		p.attention.CuK = nil
	}
	return p.dev.AttentionWorkspace(&p.attention, backward)
}

// lseWithOut reports whether one all-to-all moves both the LSE and the output. An all-to-all has
// one type.
func (p *Plan) lseWithOut() bool { return p.layer.DType == tensor.F32 }

// describe sets the arguments of the device's operation for all keys of this rank's heads.
func (p *Plan) describe(b *Batch, x *local, a *Args) {
	p.attention = p.options(b, a)
	c := &p.attention
	c.Q, c.K, c.V, c.Out, c.LSE = tokens(x.q), tokens(x.k), tokens(x.v), tokens(x.out), tokens(x.lse).Select(2, 0)
	c.CuQ, c.CuK = b.queries.cu, b.keys.cu
	switch {
	case !p.layer.Sinks:
	case a == nil:
		c.Sinks = p.sketch(tensor.F32, x.q.Shape[0])
	default:
		c.Sinks = p.ofHeads(a.Sinks)
	}
}

// options returns the arguments of the device's operation that are the same for all keys. a is nil
// when sizes are computed, which do not depend on tensors.
func (p *Plan) options(b *Batch, a *Args) device.Attention {
	l, h := &p.layer, p.query[p.rank]
	c := device.Attention{
		KVHead: p.kvHead, Causal: l.Causal, Window: l.Window, Scale: l.Scale, Softcap: l.Softcap, Dropout: l.Dropout,
		HeadAt: h.lo, QuerySeq: b.queries.n, KeySeq: b.keys.n, BlockRows: l.BlockRows, BlockColumns: l.BlockColumns,
		Deterministic: l.Deterministic,
	}
	if a == nil { // the sizes depend on which tensors there are
		if l.ALiBi {
			c.Slopes = p.sketch(tensor.F32, h.n())
		}
		if l.BlockRows > 0 {
			c.BlockMask = p.sketch(tensor.U8, 1, ceil(b.queries.n, l.BlockRows), ceil(b.keys.n, l.BlockColumns))
		}
		return c
	}
	c.Seed, c.HeadAt = a.Seed, a.HeadAt+h.lo
	if a.NoDropout {
		c.Dropout = 0
	}
	if l.ALiBi {
		c.Slopes = p.ofHeads(a.Slopes)
	}
	if c.BlockMask = a.BlockMask; l.BlockRows > 0 && a.BlockMask.Shape[0] > 1 {
		c.BlockMask = p.ofHeads(a.BlockMask)
	}
	return c
}

// sketch returns a tensor without memory, for sizes.
func (p *Plan) sketch(d tensor.DType, shape ...int64) tensor.Tensor {
	t := tensor.Of(nil, d, shape...)
	t.Where = p.dev.Info().Place
	return t
}

// ceil returns ⌈n/d⌉.
func ceil(n, d int64) int64 { return (n + d - 1) / d }

// tokens views [h, B, S, D] as the [T, h, D] of the device's operations.
func tokens(x tensor.Tensor) tensor.Tensor { return x.Flatten(1, 2).Permute(1, 0, 2) }

// Forward computes Out, and LSE if given, of the batch. It allocates nothing. Collective over the
// plan's communicator.
func (p *Plan) Forward(s device.Stream, b *Batch, a *Args) error {
	if err := p.Admit.Result(p.checkForward(b, a)); err != nil {
		return err
	}
	x, scratch := p.forwardMemory(b, a)
	qkv := p.qkvTensors(b, a, &x)
	if err := p.seqToHeads(s, scratch, qkv[:]); err != nil {
		return err
	}
	return p.attendAndReturn(s, b, a, &x, scratch)
}

// forwardMemory returns the tensors of a Forward, in Saved or in the workspace, and the rest of the
// workspace.
func (p *Plan) forwardMemory(b *Batch, a *Args) (x local, scratch tensor.Tensor) {
	ws := device.Allocator{Mem: bytesOf(a.Workspace), Align: p.align}
	keep, lse := p.savedBuffers(a)
	to := &keep
	if a.Saved.IsNil() {
		to = &ws
	}
	x = p.allocForward(b, to, lse)
	return x, ws.Rest()
}

// attendAndReturn computes attention from q, k and v of x, and returns its results to their tokens.
func (p *Plan) attendAndReturn(s device.Stream, b *Batch, a *Args, x *local, scratch tensor.Tensor) error {
	if err := p.attend(s, b, a, x, scratch); err != nil {
		return err
	}
	rows := p.placed(b).queries.exchange
	out := [2]reshardTensor{{seq: a.Out, heads: x.out, split: p.query, rows: rows}}
	if a.LSE.IsNil() {
		return p.headsToSeq(s, scratch, out[:1])
	}
	out[1] = reshardTensor{seq: addUnitAxis(a.LSE), heads: x.lse, split: p.query, rows: rows}
	if p.lseWithOut() {
		return p.headsToSeq(s, scratch, out[:])
	}
	if err := p.headsToSeq(s, scratch, out[:1]); err != nil {
		return err
	}
	return p.headsToSeq(s, scratch, out[1:])
}

// attend computes out and lse of x from its q, k and v.
func (p *Plan) attend(s device.Stream, b *Batch, a *Args, x *local, scratch tensor.Tensor) error {
	if p.ring > 1 {
		return p.ringForward(s, b, a, x, scratch)
	}
	if x.q.Numel() == 0 {
		return nil
	}
	p.describe(b, x, a)
	p.attention.Workspace = scratch
	return p.dev.AttentionForward(s, &p.attention)
}

// qkvTensors returns q, k and v for seqToHeads.
func (p *Plan) qkvTensors(b *Batch, a *Args, x *local) [3]reshardTensor {
	sch := p.placed(b)
	q, k := sch.queries.exchange, sch.keys.exchange
	cos, sin := a.queryTable()
	return [...]reshardTensor{
		{seq: a.Q, heads: x.q, split: p.query, rows: q, cos: cos, sin: sin, norm: a.QNorm},
		{seq: a.K, heads: x.k, split: p.key, rows: k, cos: a.Cos, sin: a.Sin, norm: a.KNorm},
		{seq: a.V, heads: x.v, split: p.key, rows: k},
	}
}

// Backward computes DQ, DK and DV from DOut and Saved as Forward left it. It allocates nothing.
// Collective over the plan's communicator.
func (p *Plan) Backward(s device.Stream, b *Batch, a *Args, g *Grads) error {
	if err := p.Admit.Result(p.checkBackward(b, a, g)); err != nil {
		return err
	}
	x, d, scratch := p.backwardMemory(b, a)
	dout := [...]reshardTensor{p.doutTensor(b, g, &d)}
	if err := p.seqToHeads(s, scratch, dout[:]); err != nil {
		return err
	}
	if err := p.backAttend(s, b, a, g, &x, &d, scratch); err != nil {
		return err
	}
	qkv := p.gradTensors(b, a, g, &d)
	return p.headsToSeq(s, scratch, qkv[:])
}

// backwardMemory returns the tensors that Forward has saved, their gradients, and the rest of the
// workspace.
func (p *Plan) backwardMemory(b *Batch, a *Args) (x, d local, scratch tensor.Tensor) {
	keep, lse := p.savedBuffers(a)
	ws := device.Allocator{Mem: bytesOf(a.Workspace), Align: p.align}
	x, d = p.allocForward(b, &keep, lse), p.allocQKVOut(b, &ws)
	return x, d, ws.Rest()
}

// doutTensor returns dout for seqToHeads.
func (p *Plan) doutTensor(b *Batch, g *Grads, d *local) reshardTensor {
	return reshardTensor{seq: g.DOut, heads: d.out, split: p.query, rows: p.placed(b).queries.exchange}
}

// gradTensors returns dq, dk and dv for headsToSeq.
func (p *Plan) gradTensors(b *Batch, a *Args, g *Grads, d *local) [3]reshardTensor {
	sch := p.placed(b)
	q, k := sch.queries.exchange, sch.keys.exchange
	cos, sin := a.queryTable()
	return [...]reshardTensor{
		{seq: g.DQ, heads: d.q, split: p.query, rows: q, cos: cos, sin: sin},
		{seq: g.DK, heads: d.k, split: p.key, rows: k, first: p.shared(), cos: a.Cos, sin: a.Sin},
		{seq: g.DV, heads: d.v, split: p.key, rows: k, first: p.shared()},
	}
}

// backAttend computes q, k and v of d, the gradients of q, k and v of x, from out of d.
func (p *Plan) backAttend(s device.Stream, b *Batch, a *Args, g *Grads, x, d *local, scratch tensor.Tensor) error {
	for _, t := range [...]tensor.Tensor{g.DSinks, g.DSlopes} { // zero for the heads of other ranks
		if !t.IsNil() {
			if err := p.dev.Fill(s, t, 0); err != nil {
				return err
			}
		}
	}
	if p.ring > 1 {
		return p.ringBackward(s, b, a, g, x, d, scratch)
	}
	if x.q.Numel() == 0 {
		return nil
	}
	p.describe(b, x, a)
	p.attention.Workspace = scratch
	p.gradient = device.AttentionGrad{Attention: p.attention, DOut: tokens(d.out), DQ: tokens(d.q), DK: tokens(d.k),
		DV: tokens(d.v), DSinks: p.ofHeads(g.DSinks), DSlopes: p.ofHeads(g.DSlopes)}
	return p.dev.AttentionBackward(s, &p.gradient)
}

// ofHeads returns the elements of this rank's query heads in a tensor [Hq], or nothing if it is
// absent.
func (p *Plan) ofHeads(t tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		return t
	}
	return t.Slice(0, p.query[p.rank].lo, p.query[p.rank].hi)
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
