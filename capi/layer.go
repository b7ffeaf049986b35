package main

import (
	"math"
	"unsafe"

	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// layerKind has the properties of a whole attention layer that its plan does not have.
type layerKind struct {
	hidden int64
	norm   bool // q and k have RMS norms
}

// variant returns a number for the tag of what the layer saves.
func (k layerKind) variant() int64 { return k.hidden<<1 | int64(b2i(k.norm)) }

// layerTensors are the tensors of a call of a whole attention layer. T = B*rows is the number of
// this rank's tokens. The context owns them.
type layerTensors struct {
	kind                layerKind
	tokens, rows, batch int64 // T, rows, B
	l                   sp.Layer
	eps                 float64

	// Of the caller.
	x, y, dy, dx       tensor.Tensor // [T, hidden]
	wq, wk, wv, wo     tensor.Tensor
	bq, bk, bv, bo     tensor.Tensor
	qNorm, kNorm       tensor.Tensor
	cos, sin           tensor.Tensor // [T, rotary/2]
	dwq, dwk, dwv, dwo tensor.Tensor
	dbq, dbk, dbv, dbo tensor.Tensor
	dqNorm, dkNorm     tensor.Tensor
	saved, workspace   tensor.Tensor

	// In saved memory, or in the workspace if there is none.
	mixed        tensor.Tensor // [T, Hq·Dv], the output of attention
	rawQ, rawK   tensor.Tensor // [T, H·D], q and k before their norms
	qRStd, kRStd tensor.Tensor // [T·H], of the norms

	// In the workspace.
	q, k, v  tensor.Tensor // [T, H·D], or their gradients
	dmixed   tensor.Tensor // [T, Hq·Dv]
	dx32     tensor.Tensor // [T, hidden] F32, if dx is narrower
	noWeight tensor.Tensor // [D] F32, for the gradient of a norm that the caller does not want

	gemm    device.Gemm
	rms     device.RMSNorm
	rmsGrad device.RMSNormGrad
	rope    device.Rope
}

// allocateSaved allocates what the forward pass saves, and returns the saved memory of attention.
func (x *layerTensors) allocateSaved(a *device.Allocator, attention int64) tensor.Tensor {
	l, t := x.l, x.tokens
	x.mixed = a.Take(l.DType, t, l.Heads*l.VDim)
	if x.kind.norm {
		x.rawQ, x.rawK = a.Take(l.DType, t, l.Heads*l.Dim), a.Take(l.DType, t, l.KVHeads*l.Dim)
		x.qRStd, x.kRStd = a.Take(tensor.F32, t*l.Heads), a.Take(tensor.F32, t*l.KVHeads)
	}
	return a.Take(tensor.U8, attention)
}

// allocateQKV allocates q, k and v, or their gradients.
func (x *layerTensors) allocateQKV(a *device.Allocator) {
	l, t := x.l, x.tokens
	x.q, x.k, x.v = a.Take(l.DType, t, l.Heads*l.Dim), a.Take(l.DType, t, l.KVHeads*l.Dim),
		a.Take(l.DType, t, l.KVHeads*l.VDim)
}

// allocateBackward allocates the other tensors of the backward pass.
func (x *layerTensors) allocateBackward(a *device.Allocator) {
	x.dmixed = a.Take(x.l.DType, x.tokens, x.l.Heads*x.l.VDim)
	if x.l.DType != tensor.F32 {
		x.dx32 = a.Take(tensor.F32, x.tokens, x.kind.hidden)
	}
	x.noWeight = a.Take(tensor.F32, x.l.Dim)
}

// reset clears all tensors and sets the shapes of a plan and a batch.
func (x *layerTensors) reset(p *plan, b *sp.Batch, kind layerKind) {
	*x = layerTensors{kind: kind, batch: b.Batch(), rows: b.Rows(), tokens: b.Batch() * b.Rows(), l: p.sp.Layer()}
}

// layerSizes returns the bytes of saved and workspace.
func layerSizes(p *plan, b *sp.Batch, kind layerKind) sp.Sizes {
	var x layerTensors
	x.reset(p, b, kind)
	attention := p.sizesOf(b)
	align := p.ctx.dev.Info().Align
	saved, forward, backward := device.Allocator{Align: align}, device.Allocator{Align: align},
		device.Allocator{Align: align}
	x.allocateSaved(&saved, attention.Saved)
	x.allocateQKV(&forward)
	size := sp.Sizes{Workspace: forward.Padded() + saved.Padded() + attention.Workspace}
	if !x.l.NoBackward {
		x.allocateQKV(&backward)
		x.allocateBackward(&backward)
		size.Saved = saved.Used
		size.Workspace = max(size.Workspace, backward.Padded()+attention.Workspace)
	}
	return size
}

const layerOp = "ulysses_attention_layer"

// readLayer reads the arguments of a layer except its tensors.
func (c *context) readLayer(op string, p *plan, b *sp.Batch, args unsafe.Pointer) (a cAttentionLayerArgs,
	x *layerTensors, err error) {
	if a, err = readStruct[cAttentionLayerArgs](op, "args", args); err != nil {
		return a, nil, err
	}
	x = &c.layer
	if a.hidden < 1 || a.hidden > 1<<20 {
		return a, nil, invalid("%s: hidden is %d; give 1 to 2^20 features", op, a.hidden)
	}
	if p.cross {
		return a, nil, invalid(
			"%s: the plan has ULYSSES_CROSS; a layer computes queries and keys from one x: plan without it", op)
	}
	if (a.q_norm == nil) != (a.k_norm == nil) || (a.cos == nil) != (a.sin == nil) {
		return a, nil, invalid("%s: one of q_norm and k_norm, or of cos and sin, is NULL; give both or neither", op)
	}
	if !(a.eps >= 0) || a.eps > 1 {
		return a, nil, invalid("%s: eps is %v; give 0 to 1, 0 is 1e-6", op, a.eps)
	}
	c.requireEqual("hidden", a.hidden)
	c.requireEqual("the bits of eps", int64(math.Float32bits(a.eps)))
	for _, x := range [...]struct {
		name string
		t    *cTensor
	}{{"q_norm given", a.q_norm}, {"cos given", a.cos}, {"bq given", a.bq}, {"bk given", a.bk}, {"bv given", a.bv},
		{"bo given", a.bo}} {
		c.requireEqualPresence(x.name, x.t)
	}
	x.reset(p, b, layerKind{hidden: a.hidden, norm: a.q_norm != nil})
	if x.eps = float64(a.eps); a.eps == 0 {
		x.eps = 1e-6
	}
	return a, x, nil
}

// layerArgs returns the lengths of a collective call, and what readLayer returns.
func (p *plan) layerArgs(op string, both *batch, args unsafe.Pointer) (b *sp.Batch, a cAttentionLayerArgs,
	x *layerTensors, err error) {
	if b, err = p.attentionBatch(op, both, true); err == nil {
		a, x, err = p.ctx.readLayer(op, p, b, args)
	}
	return b, a, x, err
}

// weights reads the weights, biases, norms and rotations, which both passes read. It checks that
// all are row-major and have the type of the plan (cos and sin: F32).
func (x *layerTensors) weights(r *reader, a *cAttentionLayerArgs) {
	l, h := x.l, x.kind.hidden
	x.matrix(r, &x.wq, "wq", a.wq, l.DType, false, l.Heads*l.Dim, h)
	x.matrix(r, &x.wk, "wk", a.wk, l.DType, false, l.KVHeads*l.Dim, h)
	x.matrix(r, &x.wv, "wv", a.wv, l.DType, false, l.KVHeads*l.VDim, h)
	x.matrix(r, &x.wo, "wo", a.wo, l.DType, false, h, l.Heads*l.VDim)
	x.matrix(r, &x.bq, "bq", a.bq, l.DType, true, l.Heads*l.Dim)
	x.matrix(r, &x.bk, "bk", a.bk, l.DType, true, l.KVHeads*l.Dim)
	x.matrix(r, &x.bv, "bv", a.bv, l.DType, true, l.KVHeads*l.VDim)
	x.matrix(r, &x.bo, "bo", a.bo, l.DType, true, h)
	x.matrix(r, &x.qNorm, "q_norm", a.q_norm, l.DType, true, l.Dim)
	x.matrix(r, &x.kNorm, "k_norm", a.k_norm, l.DType, true, l.Dim)
	if a.cos != nil && r.err == nil {
		half := int64(0)
		if a.cos.ndim == 2 && a.cos.shape != nil {
			half = element(a.cos.shape, 1)
		}
		if half < 1 || 2*half > l.Dim {
			r.err = invalid("%s: cos has the wrong shape; give F32[%d, rotary/2] with rotary from 2 to head_dim, %d",
				r.op, x.tokens, l.Dim)
			return
		}
		x.matrix(r, &x.cos, "cos", a.cos, tensor.F32, false, x.tokens, half)
		x.matrix(r, &x.sin, "sin", a.sin, tensor.F32, false, x.tokens, half)
	}
}

// matrix reads a row-major tensor of a type and a shape. An optional tensor may be NULL.
func (x *layerTensors) matrix(r *reader, dst *tensor.Tensor, name string, p *cTensor, dtype tensor.DType, optional bool,
	shape ...int64) {
	*dst = tensor.Tensor{}
	if optional && p == nil {
		return
	}
	r.get(dst, name, p, 0, false)
	r.dense(name, *dst, dtype, shape...)
}

// tokensOf reads a tensor [B, rows, hidden] as [T, hidden].
func (x *layerTensors) tokensOf(r *reader, dst *tensor.Tensor, name string, p *cTensor, out bool) {
	r.get(dst, name, p, 3, out)
	r.dense(name, *dst, x.l.DType, x.batch, x.rows, x.kind.hidden)
	if r.err == nil {
		*dst = dst.View(x.tokens, x.kind.hidden)
	}
}

func attentionLayerSizes(ph, bh uintptr, args, out unsafe.Pointer) error {
	const op = layerOp + "_sizes"
	p, b, err := enterAttentionPair(op, ph, bh)
	if err != nil {
		return err
	}
	defer p.ctx.leave()
	_, x, err := p.ctx.readLayer(op, p, b, args)
	if err != nil {
		return err
	}
	return p.writeSizes(op, layerSizes(p, b, x.kind), out)
}

func attentionLayerForward(ph, bh uintptr, args unsafe.Pointer) error {
	const op = layerOp + "_forward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.layerForward(op, b, args) })
}

func (p *plan) layerForward(op string, both *batch, args unsafe.Pointer) error {
	c := p.ctx
	b, a, x, err := p.layerArgs(op, both, args)
	if err != nil {
		return err
	}
	r := reader{c: c, op: op}
	x.tokensOf(&r, &x.x, "x", a.x, false)
	x.weights(&r, &a)
	x.tokensOf(&r, &x.y, "y", a.y, true)
	c.args = sp.Args{}
	r.options(p, b, a.sinks, a.alibi, a.block_mask, a.dropout_seed)
	if err := x.memory(&r, p, both, layerSizes(p, b, x.kind), &a, false); err != nil {
		return err
	}
	return c.writeTag(c.enqueue(op, a.stream, func() error { return c.runLayerForward(p, b, x) }))
}

// memory reads and checks saved and workspace, and ends the reading of a call.
func (x *layerTensors) memory(r *reader, p *plan, both *batch, size sp.Sizes, a *cAttentionLayerArgs,
	backward bool) error {
	r.saved(&x.saved, a.saved, a.saved_bytes, !backward)
	r.workspace(&x.workspace, a.workspace, a.workspace_bytes, size.Workspace)
	if err := r.finish(layerSaved, p, both, x.kind.variant(), backward); err != nil {
		return err
	}
	if err := checkSize(r.op, "workspace", x.workspace, size.Workspace); err != nil || x.saved.IsNil() {
		return err
	}
	return r.c.checkSavedSize(r.op, x.saved, size.Saved)
}

// runLayerForward computes the forward pass from tensors that were checked. Collective.
func (c *context) runLayerForward(p *plan, b *sp.Batch, x *layerTensors) error {
	if err := c.agree(nil); err != nil { // before anything is computed
		return err
	}
	align := c.dev.Info().Align
	workspace := device.Allocator{Mem: x.workspace, Align: align}
	saved := device.Allocator{Mem: x.saved, Align: align}
	x.allocateQKV(&workspace)
	attention := p.sp.Sizes(b)
	if x.saved.IsNil() {
		x.allocateSaved(&workspace, 0)
	} else {
		c.args.Saved = x.allocateSaved(&saved, attention.Saved)
	}
	rawQ, rawK := x.q, x.k
	if x.kind.norm {
		rawQ, rawK = x.rawQ, x.rawK
	}
	c.args.Q, c.args.K, c.args.V = x.batched(x.q, x.l.Heads), x.batched(x.k, x.l.KVHeads), x.batched(x.v, x.l.KVHeads)
	c.args.Out, c.args.Workspace = x.batched(x.mixed, x.l.Heads), workspace.Rest()
	if err := c.beginOptions(layerOp, p, b); err != nil {
		return err
	}
	if err := c.widenOptions(); err != nil {
		return err
	}
	ops := operations{c: c, x: x, overlap: p.overlap}
	if p.overlap {
		ops.err = p.sp.StartForward(b, &c.args, &c.overlap)
	}
	ops.project(x.q, rawQ, x.wq, x.bq, x.qNorm, x.qRStd, x.l.Heads, true)
	ops.step(sp.SendQ)
	ops.project(x.k, rawK, x.wk, x.bk, x.kNorm, x.kRStd, x.l.KVHeads, true)
	ops.step(sp.SendK)
	ops.project(x.v, x.v, x.wv, x.bv, tensor.Tensor{}, tensor.Tensor{}, x.l.KVHeads, false)
	ops.step(sp.SendV)
	ops.step(sp.AttendForward)
	if !p.overlap && ops.err == nil {
		ops.err = p.sp.Forward(c.stream, b, &c.args)
	}
	ops.gemm(x.y, x.mixed, x.wo.Permute(1, 0), x.bo, false)
	return ops.result()
}

// batched returns a view of [T, H·D] as [B, rows, H, D].
func (x *layerTensors) batched(t tensor.Tensor, heads int64) tensor.Tensor {
	return t.View(x.batch, x.rows, heads, t.Shape[1]/heads)
}
