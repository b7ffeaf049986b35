package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import (
	"math"
	"runtime"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// maxAttentionRows is the largest number of queries, and of keys, of a call. The number of their
// pairs, 2^62, and each sum on the way to it are an int64, and a call's table of blocks is small.
const maxAttentionRows = int64(1) << 31

// AttentionWorkspace returns the workspace in bytes of AttentionForward or AttentionBackward for
// these shapes and documents. With CuQ nil, or more rows than a call can have, it returns the
// largest for any documents. The workspace holds scratch for each worker and, for the backward
// pass, partial sums of key gradients: in F32 if a key head is split, in BF16 always. None of these
// grows with queries times keys.
func (d *Device) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	if a.CuQ == nil || max(a.Q.Shape[0], a.K.Shape[0]) > maxAttentionRows {
		return d.attentionBound(a, backward)
	}
	return d.planAttention(a, backward, nil).bytes
}

// AttentionForward is FlashAttention-2 (Dao 2023): exact attention in blocks, with sums in F32. The
// result of a head depends on the tensors of that head alone.
func (d *Device) AttentionForward(_ device.Stream, a *device.Attention) error {
	defer runtime.KeepAlive(a)
	c := check{op: "AttentionForward"}
	l := d.checkAttention(&c, a, false)
	if c.err != nil {
		return c.err
	}
	heads := a.Q.Shape[1]
	if heads == 0 || l.blocks == 0 {
		return nil
	}
	d.planAttention(a, false, a.Workspace.Data)
	d.attentionArgs(a, &l)
	return d.run(C.K_attention_forward, heads*ceilDiv(l.blocks, l.group))
}

// AttentionBackward writes dq, dk and dv. The blocks of a key head are split by shapes alone. The
// partial sums of the splits are added in order, as are the gradients of the key head's query
// heads.
func (d *Device) AttentionBackward(_ device.Stream, g *device.AttentionGrad) error {
	defer runtime.KeepAlive(g)
	a := &g.Attention
	c := check{op: "AttentionBackward"}
	t, _ := c.compute("q", a.Q)
	grad := t
	if g.DQ.DType == tensor.F32 {
		grad = tensor.F32
	}
	c.typed("dout", g.DOut, t, a.Out.Shape[0], a.Out.Shape[1], a.Out.Shape[2])
	c.typed("dq", g.DQ, grad, a.Q.Shape[0], a.Q.Shape[1], a.Q.Shape[2])
	c.typed("dk", g.DK, grad, a.K.Shape[0], a.K.Shape[1], a.K.Shape[2])
	c.typed("dv", g.DV, grad, a.V.Shape[0], a.V.Shape[1], a.V.Shape[2])
	c.perHead("dsinks", g.DSinks, a)
	c.perHead("dslopes", g.DSlopes, a)
	if !g.DSinks.IsNil() && a.Sinks.IsNil() || !g.DSlopes.IsNil() && a.Slopes.IsNil() {
		c.fail("DSinks needs Sinks, and DSlopes needs Slopes; give these, or no gradient of them")
	}
	l := d.checkAttention(&c, a, true)
	if c.err != nil {
		return c.err
	}
	kvHeads, keys := a.K.Shape[1], a.K.Shape[0]
	d.planAttention(a, true, a.Workspace.Data)
	p := d.attentionArgs(a, &l)
	defer d.forget() // runs below share the arguments
	p.grad_bf16 = isBF16(grad)
	p.dout, p.dq, p.dk, p.dv = g.DOut.Data, g.DQ.Data, g.DK.Data, g.DV.Data
	p.dsinks, p.dslopes = floatsOf(g.DSinks), floatsOf(g.DSlopes)
	p.dout_t, p.dout_h = strides(g.DOut)
	p.dq_t, p.dq_h = strides(g.DQ)
	p.dk_t, p.dk_h = strides(g.DK)
	p.dv_t, p.dv_h = strides(g.DV)
	most := max(1, l.largestGroup)
	// Query heads of a run: all, or in F32 with partial sums one, because the splits of a head are
	// added before the next head.
	step := most
	if l.blocks == 0 {
		kvHeads = 0 // no documents: only the sums below are written
	}
	if l.partialFloats > 0 && isBF16(a.Q.DType) == 0 {
		step = 1
	}
	for kv := int64(0); kv < kvHeads; kv += l.wave {
		n := min(l.wave, kvHeads-kv)
		p.kv0 = C.int64_t(kv)
		for j := int64(0); j < most; j += step {
			p.j0, p.j1 = C.int64_t(j), C.int64_t(j+step)
			if err := d.runKeeping(C.K_attention_backward, n*l.splits); err != nil {
				return err
			}
			if l.partialFloats == 0 {
				continue
			}
			if err := d.runKeeping(C.K_attention_reduce, n*ceilDiv(keys, C.ATT_CHUNK)); err != nil {
				return err
			}
		}
	}
	if p.dsinks == nil && p.dslopes == nil {
		return nil
	}
	return d.runKeeping(C.K_attention_heads, a.Q.Shape[1])
}

// checkAttention checks the arguments that both passes share, and returns the layout of the call.
func (d *Device) checkAttention(c *check, a *device.Attention, backward bool) (l attentionLayout) {
	tq, heads, dim := a.Q.Shape[0], a.Q.Shape[1], a.Q.Shape[2]
	tk, kvHeads, dv := a.K.Shape[0], a.K.Shape[1], a.V.Shape[2]
	t, _ := c.compute("q", a.Q)
	c.typed("q", a.Q, t, whatever, whatever, whatever)
	if max(tq, tk) > maxAttentionRows {
		c.fail("there are %d queries and %d keys; at most %d are possible in a call, so use more ranks in a ring", tq,
			tk, maxAttentionRows)
	}
	c.typed("k", a.K, t, whatever, whatever, dim)
	c.typed("v", a.V, t, tk, kvHeads, whatever)
	out := t
	if a.Carry || backward && a.Out.DType == tensor.F32 {
		out = tensor.F32
	}
	c.typed("out", a.Out, out, tq, heads, dv)
	c.shape("lse", a.LSE, tensor.F32, tq, heads)
	if dim < 1 || dv < 1 {
		c.fail("keys have %d features and values %d; both need at least 1", dim, dv)
	}
	checkDocuments(c, "CuQ", a.CuQ, tq)
	checkDocuments(c, "CuK", a.CuK, tk)
	if len(a.CuQ) != len(a.CuK) {
		c.fail("CuQ has %d documents, CuK has %d; the numbers must be equal", len(a.CuQ)-1, len(a.CuK)-1)
	}
	c.heads("KVHead", a.KVHead, heads, kvHeads)
	c.attentionOptions(a, backward)
	if c.err != nil {
		return l
	}
	l = d.planAttention(a, backward, nil)
	c.memory("workspace", a.Workspace, l.bytes, "AttentionWorkspace")
	return l
}

// attentionOptions checks the arguments that change or hide scores.
func (c *check) attentionOptions(a *device.Attention, backward bool) {
	c.perHead("sinks", a.Sinks, a)
	c.perHead("slopes", a.Slopes, a)
	if !a.Sinks.IsNil() && a.Carry && !backward {
		c.fail("Sinks and Carry are set; the softmax that is carried has the sinks, set one of the two")
	}
	if !(a.Softcap >= 0 && a.Softcap <= math.MaxFloat32/2) {
		c.fail("Softcap is %g; it must be positive and finite in F32, or 0 for scores without a cap", a.Softcap)
	}
	if !(a.Dropout >= 0 && a.Dropout < 1) {
		c.fail("Dropout is %g; it must be in [0, 1)", a.Dropout)
	}
	if n := len(a.CuQ) - 1; a.Shift != nil && len(a.Shift) != n {
		c.fail("Shift has %d entries for %d documents; give one for each document", len(a.Shift), n)
	}
	for i, shift := range a.Shift {
		if shift < -maxShift || shift > maxShift {
			c.fail("Shift[%d] is %d; it must be at most 2^50 in magnitude", i, shift)
			return
		}
	}
	if !a.BlockMask.IsNil() {
		c.blockMask(a)
	}
}

// maxShift bounds shifts, so that sums with rows and the sides of a window do not overflow.
const maxShift = 1 << 50

// perHead requires F32 for each query head, or no tensor.
func (c *check) perHead(name string, t tensor.Tensor, a *device.Attention) {
	if !t.IsNil() {
		c.rows(name, t, a.Q.Shape[1])
	}
}

// blockMask requires a block mask of the shape that the lengths of a sequence and of the blocks
// give, and documents that lie inside a sequence.
func (c *check) blockMask(a *device.Attention) {
	if a.QuerySeq < 1 || a.KeySeq < 1 || a.BlockRows < 1 || a.BlockColumns < 1 || a.QueryAt < 0 || a.KeyAt < 0 {
		c.fail("BlockMask with sequences of %d queries and %d keys, from %d and %d on, in blocks of %d by %d; "+
			"QuerySeq, KeySeq, BlockRows and BlockColumns must be at least 1, QueryAt and KeyAt at least 0",
			a.QuerySeq, a.KeySeq, a.QueryAt, a.KeyAt, a.BlockRows, a.BlockColumns)
		return
	}
	heads := a.Q.Shape[1]
	if a.BlockMask.NDim == 3 && a.BlockMask.Shape[0] == 1 {
		heads = 1
	}
	c.dense("BlockMask", a.BlockMask, tensor.U8, heads, ceilDiv(a.QuerySeq, a.BlockRows),
		ceilDiv(a.KeySeq, a.BlockColumns))
	for _, x := range []struct {
		name   string
		cu     []int64
		at, of int64
	}{{"CuQ", a.CuQ, a.QueryAt, a.QuerySeq}, {"CuK", a.CuK, a.KeyAt, a.KeySeq}} {
		for i := 1; i < len(x.cu) && c.err == nil; i++ {
			if n := x.cu[i] - x.cu[i-1]; n > 0 && (x.at+x.cu[i-1])%x.of+n > x.of {
				c.fail("%s: rows %d to %d of document %d cross the end of a sequence of %d tokens; with BlockMask, a document lies inside a sequence",
					x.name, x.at+x.cu[i-1], x.at+x.cu[i]-1, i-1, x.of)
			}
		}
	}
}

// checkDocuments requires boundaries that start with 0, do not decrease and end with the number of
// rows. Every row index is then inside its tensor.
func checkDocuments(c *check, name string, cu []int64, rows int64) {
	if len(cu) < 1 || cu[0] != 0 || cu[len(cu)-1] != rows {
		c.fail("%s has %d entries for %d rows; it must start with 0 and end with the number of rows", name,
			len(cu), rows)
		return
	}
	for i := 1; i < len(cu); i++ {
		if cu[i] < cu[i-1] {
			c.fail("%s[%d] is %d after %d; boundaries must not decrease", name, i, cu[i], cu[i-1])
			return
		}
	}
}

// attentionArgs writes the arguments that both passes share.
func (d *Device) attentionArgs(a *device.Attention, l *attentionLayout) *C.attention_args {
	w := a.Workspace.Data
	writeHeadTables(unsafe.Add(w, l.kvHeadOffset), unsafe.Add(w, l.firstOffset), a.KVHead, a.Q.Shape[1], a.K.Shape[1])
	p := (*C.attention_args)(d.args)
	*p = C.attention_args{
		bf16: isBF16(a.Q.DType), q: a.Q.Data, k: a.K.Data, v: a.V.Data, out: a.Out.Data, lse: floatsOf(a.LSE),
		heads: C.int64_t(a.Q.Shape[1]), d: C.int64_t(a.Q.Shape[2]), d_v: C.int64_t(a.V.Shape[2]),
		scale: C.float(a.Scale), blocks: (*C.attention_block)(w), n_blocks: C.int64_t(l.blocks),
		group: C.int64_t(l.group), kv_head: (*C.int64_t)(unsafe.Add(w, l.kvHeadOffset)),
		first: (*C.int64_t)(unsafe.Add(w, l.firstOffset)), splits: (*C.attention_split)(unsafe.Add(w, l.splitsOffset)),
		n_splits: C.int64_t(l.splits), keys: C.int64_t(a.K.Shape[0]),
		partial: (*C.float)(unsafe.Add(w, l.partialOffset)), partial_floats: C.int64_t(l.partialFloats),
		scratch: (*C.float)(unsafe.Add(w, l.scratchOffset)), scratch_floats: C.int64_t(l.scratchFloats),
		out_bf16: isBF16(a.Out.DType), sinks: floatsOf(a.Sinks), slopes: floatsOf(a.Slopes), cap: C.float(a.Softcap),
		seed: C.uint64_t(a.Seed), head_at: C.int64_t(a.HeadAt),
		query_at: C.int64_t(a.QueryAt),
		key_at:   C.int64_t(a.KeyAt),
		queries:  C.int64_t(a.Q.Shape[0]),
	}
	if a.Carry {
		p.carry = 1
	}
	if scored(a) {
		p.scored = 1
	}
	if a.Dropout > 0 {
		p.drop, p.kept = drops(a.Dropout)
	}
	if !a.BlockMask.IsNil() {
		m := &a.BlockMask
		p.mask, p.mask_columns, p.block_columns = (*C.uint8_t)(m.Data), C.int64_t(m.Shape[2]), C.int64_t(a.BlockColumns)
		if m.Shape[0] > 1 {
			p.mask_h = C.int64_t(m.Shape[1] * m.Shape[2])
		}
	}
	if l.slopesOffset > 0 {
		sums := unsafe.Add(w, l.slopesOffset)
		p.slope_sums = (*C.double)(sums)
		clear(unsafe.Slice((*float64)(sums), a.Q.Shape[1]*C.ATT_MAX_SPLITS))
	}
	left, right := a.Window.Sides(a.Causal)
	p.left, p.right = C.int64_t(left), C.int64_t(right)
	p.q_t, p.q_h = strides(a.Q)
	p.k_t, p.k_h = strides(a.K)
	p.v_t, p.v_h = strides(a.V)
	p.out_t, p.out_h = strides(a.Out)
	p.lse_t, p.lse_h = strides(a.LSE)
	return p
}

// strides returns the strides of a token and of a head of a tensor [T, H, ...].
func strides(t tensor.Tensor) (token, head C.int64_t) {
	return C.int64_t(t.Stride[0]), C.int64_t(t.Stride[1])
}
