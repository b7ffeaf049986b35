package main

import (
	"unsafe"

	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// layerKind is what a whole layer has beyond its plan.
type layerKind struct {
	hidden int64
	norm   bool
}

// id stands for the kind in the tag of what a layer saves.
func (k layerKind) id() int64 { return k.hidden<<1 | int64(b2i(k.norm)) }

// layerPlaces is where a layer's values lie; T is tokens of this rank.
type layerPlaces struct {
	kind                layerKind
	tokens, rows, batch int64
	l                   sp.Layer
	x, y, dy, dx        tensor.Tensor // [T, hidden]
	wq, wk, wv, wo      tensor.Tensor
	bq, bk, bv, bo      tensor.Tensor
	qNorm, kNorm        tensor.Tensor
	cos, sin            tensor.Tensor // [T, rotary/2]
	// [T, H·D] before their norms; without norms q and k themselves
	rawQ, rawK         tensor.Tensor
	q, k, v            tensor.Tensor // [T, H·D], or their gradients
	qRStd, kRStd       tensor.Tensor // [T·H]
	mixed, dmixed      tensor.Tensor // [T, Hq·Dv]
	wide               tensor.Tensor // [T, hidden] F32, where dx is narrower
	noWeight           tensor.Tensor // [D] F32: takes the gradient of a norm that nobody wants
	saved, workspace   tensor.Tensor
	dwq, dwk, dwv, dwo tensor.Tensor
	dbq, dbk, dbv, dbo tensor.Tensor
	dqNorm, dkNorm     tensor.Tensor
	eps                float64
	gemm               device.Gemm
	rms                device.RMSNorm
	rmsGrad            device.RMSNormGrad
	rope               device.Rope
}

// keep carves what forward leaves for backward; the attention's own comes last.
func (x *layerPlaces) keep(c *device.Allocator, attention int64) tensor.Tensor {
	l, t := x.l, x.tokens
	x.mixed = c.Take(l.DType, t, l.Heads*l.VDim)
	if x.kind.norm {
		x.rawQ, x.rawK = c.Take(l.DType, t, l.Heads*l.Dim), c.Take(l.DType, t, l.KVHeads*l.Dim)
		x.qRStd, x.kRStd = c.Take(tensor.F32, t*l.Heads), c.Take(tensor.F32, t*l.KVHeads)
	}
	return c.Take(tensor.U8, attention)
}

// project carves q, k and v, or their gradients.
func (x *layerPlaces) project(c *device.Allocator) {
	l, t := x.l, x.tokens
	x.q, x.k, x.v = c.Take(l.DType, t, l.Heads*l.Dim), c.Take(l.DType, t, l.KVHeads*l.Dim), c.Take(l.DType, t, l.KVHeads*l.VDim)
}

// back carves what backward needs beside q, k and v.
func (x *layerPlaces) back(c *device.Allocator) {
	x.dmixed = c.Take(x.l.DType, x.tokens, x.l.Heads*x.l.VDim)
	if x.l.DType != tensor.F32 {
		x.wide = c.Take(tensor.F32, x.tokens, x.kind.hidden)
	}
	x.noWeight = c.Take(tensor.F32, x.l.Dim)
}

// start settles a layer's shapes for a plan and a batch.
func (x *layerPlaces) start(p *plan, b *sp.Batch, kind layerKind) {
	*x = layerPlaces{kind: kind, batch: b.Batch(), rows: b.Rows(), tokens: b.Batch() * b.Rows(), l: p.sp.Layer()}
}

// layerSizes is the bytes of saved and workspace.
func layerSizes(p *plan, b *sp.Batch, kind layerKind) sp.Sizes {
	var x layerPlaces
	x.start(p, b, kind)
	attention := p.sp.Sizes(b)
	align := p.ctx.dev.Info().Align
	saved, forward, backward := device.Allocator{Align: align}, device.Allocator{Align: align}, device.Allocator{Align: align}
	x.keep(&saved, attention.Saved)
	x.project(&forward)
	size := sp.Sizes{Workspace: forward.Padded() + saved.Padded() + attention.Workspace}
	if !x.l.NoBackward {
		x.project(&backward)
		x.back(&backward)
		size.Saved = saved.Used
		size.Workspace = max(size.Workspace, backward.Padded()+attention.Workspace)
	}
	return size
}

const layerOp = "ulysses_attention_layer"

// readLayer checks what forward and backward have in common.
func (c *context) readLayer(op string, p *plan, b *sp.Batch, args unsafe.Pointer) (a cAttentionLayerArgs, x *layerPlaces, err error) {
	if a, err = read[cAttentionLayerArgs](op, "args", args); err != nil {
		return a, nil, err
	}
	x = &c.layer
	if a.hidden < 1 || a.hidden > 1<<20 {
		return a, nil, invalid("%s: hidden is %d: 1 to 2^20 features", op, a.hidden)
	}
	if p.cross {
		return a, nil, invalid("%s: the plan is ULYSSES_CROSS: a layer has queries and keys of one x", op)
	}
	if (a.q_norm == nil) != (a.k_norm == nil) || (a.cos == nil) != (a.sin == nil) {
		return a, nil, invalid("%s: q_norm and k_norm, cos and sin: give both of a pair, or neither", op)
	}
	if !(a.eps >= 0) || a.eps > 1 {
		return a, nil, invalid("%s: eps is %v: 0 (1e-6) to 1", op, a.eps)
	}
	c.must("hidden", a.hidden)
	x.start(p, b, layerKind{hidden: a.hidden, norm: a.q_norm != nil})
	if x.eps = float64(a.eps); a.eps == 0 {
		x.eps = 1e-6
	}
	return a, x, nil
}

// weights reads the tensors that both passes read. With dense reports that all are dense and of the
// plan's type.
func (x *layerPlaces) weights(r *tensors, a *cAttentionLayerArgs) {
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
			half = at(a.cos.shape, 1)
		}
		if half < 1 || 2*half > l.Dim {
			r.err = invalid("%s: cos must be F32[%d, rotary/2] with rotary from 2 to head_dim %d", r.op, x.tokens, l.Dim)
			return
		}
		x.matrix(r, &x.cos, "cos", a.cos, tensor.F32, false, x.tokens, half)
		x.matrix(r, &x.sin, "sin", a.sin, tensor.F32, false, x.tokens, half)
	}
}

// matrix reads a dense tensor of a shape. NULL is left out where it may be.
func (x *layerPlaces) matrix(r *tensors, dst *tensor.Tensor, name string, p *cTensor, dtype tensor.DType, optional bool, shape ...int64) {
	*dst = tensor.Tensor{}
	if optional && p == nil {
		return
	}
	r.get(dst, name, p, 0, false)
	r.dense(name, *dst, dtype, shape...)
}

// dense holds a tensor to a type, a shape and row-major order.
func (r *tensors) dense(name string, t tensor.Tensor, dtype tensor.DType, shape ...int64) {
	want := tensor.Tensor{DType: dtype, NDim: int8(len(shape))}
	copy(want.Shape[:], shape)
	if r.err == nil && (t.DType != dtype || t.NDim != want.NDim || t.Shape != want.Shape || !t.Contiguous()) {
		r.err = invalid("%s: %s is %v: it must be %v, dense", r.op, name, t, want)
	}
}

// tokensOf reads [B, rows, hidden] as [T, hidden].
func (x *layerPlaces) tokensOf(r *tensors, dst *tensor.Tensor, name string, p *cTensor, out bool) {
	r.get(dst, name, p, 3, out)
	r.dense(name, *dst, x.l.DType, x.batch, x.rows, x.kind.hidden)
	if r.err == nil {
		*dst = dst.View(x.tokens, x.kind.hidden)
	}
}

func attentionLayerSizes(ph, bh uintptr, args, out unsafe.Pointer) error {
	const op = layerOp + "_sizes"
	p, b, err := pair(op, ph, bh)
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
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.forwardLayer(op, b, args) })
}

func (p *plan) forwardLayer(op string, whole *batch, args unsafe.Pointer) error {
	c := p.ctx
	b, err := p.attentionOf(op, whole, true)
	if err != nil {
		return err
	}
	a, x, err := c.readLayer(op, p, b, args)
	if err != nil {
		return err
	}
	size := layerSizes(p, b, x.kind)
	r := tensors{c: c, op: op}
	x.tokensOf(&r, &x.x, "x", a.x, false)
	x.weights(&r, &a)
	x.tokensOf(&r, &x.y, "y", a.y, true)
	r.saved(&x.saved, a.saved, uint64(a.saved_bytes), true)
	r.workspace(&x.workspace, a.workspace, uint64(a.workspace_bytes), size.Workspace)
	if r.err == nil {
		r.err = c.overlaps(op)
	}
	if r.err != nil {
		return r.err
	}
	if err := sizeOf(op, "workspace", x.workspace, size.Workspace); err != nil {
		return err
	}
	if !x.saved.IsNil() {
		if err := c.savedSize(op, x.saved, size.Saved); err != nil {
			return err
		}
	}
	if err := c.join(op, a.stream); err != nil {
		return err
	}
	c.saves(savesLayer, p, whole, x.kind.id())
	return c.seal(c.part(c.layerForward(p, b, x)))
}

// layerForward runs on places that were checked.
func (c *context) layerForward(p *plan, b *sp.Batch, x *layerPlaces) error {
	if err := c.agree(nil); err != nil { // before anything is computed
		return err
	}
	align := c.dev.Info().Align
	ws := device.Allocator{Mem: x.workspace, Align: align}
	keep := device.Allocator{Mem: x.saved, Align: align}
	x.project(&ws)
	attention := p.sp.Sizes(b)
	c.args = sp.Args{}
	if x.saved.IsNil() {
		x.keep(&ws, 0)
	} else {
		c.args.Saved = x.keep(&keep, attention.Saved)
	}
	rawQ, rawK := x.q, x.k
	if x.kind.norm {
		rawQ, rawK = x.rawQ, x.rawK
	}
	steps := lazy{c: c, x: x}
	steps.gemm(rawQ, x.x, x.wq.Permute(1, 0), x.bq, false)
	steps.gemm(rawK, x.x, x.wk.Permute(1, 0), x.bk, false)
	steps.gemm(x.v, x.x, x.wv.Permute(1, 0), x.bv, false)
	if x.kind.norm {
		steps.norm(x.q.Split(1, x.l.Heads), rawQ.Split(1, x.l.Heads), x.qNorm, x.qRStd)
		steps.norm(x.k.Split(1, x.l.KVHeads), rawK.Split(1, x.l.KVHeads), x.kNorm, x.kRStd)
	}
	steps.rotate(false)
	if steps.err != nil {
		return steps.err
	}
	c.args.Q, c.args.K, c.args.V = x.batched(x.q, x.l.Heads), x.batched(x.k, x.l.KVHeads), x.batched(x.v, x.l.KVHeads)
	c.args.Out, c.args.Workspace = x.batched(x.mixed, x.l.Heads), ws.Rest()
	if err := p.sp.Forward(c.stream, b, &c.args); err != nil {
		return err
	}
	steps.gemm(x.y, x.mixed, x.wo.Permute(1, 0), x.bo, false)
	return steps.err
}

// batched views [T, H·D] as [B, rows, H, D].
func (x *layerPlaces) batched(t tensor.Tensor, heads int64) tensor.Tensor {
	return t.View(x.batch, x.rows, heads, t.Shape[1]/heads)
}
