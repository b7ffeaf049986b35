package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import (
	"runtime"

	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// AttentionWorkspace is the bytes that AttentionForward, or AttentionBackward, needs for a call of
// these shapes and documents: scratch for each worker, and for the backward pass sums of key
// gradients: in F32 where one key head is split, in BF16 always. None grows with queries times
// keys.
func (d *Device) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	if a.CuQ == nil {
		return d.attentionBound(a, backward)
	}
	return d.layAttention(a, backward, nil).bytes
}

// AttentionForward is flash attention: exact, in blocks, with sums in F32. Each head's result
// depends on that head's tensors alone.
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
	d.layAttention(a, false, a.Workspace.Data)
	d.attentionArgs(a, &l)
	return d.run(C.K_attention_forward, heads*ceilDiv(l.blocks, l.group))
}

// AttentionBackward is the derivative. A key head is split into parts by shapes alone; their sums
// are added in order, and so are its query heads'.
func (d *Device) AttentionBackward(_ device.Stream, g *device.AttentionGrad) error {
	defer runtime.KeepAlive(g)
	a := &g.Attention
	c := check{op: "AttentionBackward"}
	t, _ := c.compute("q", a.Q)
	c.typed("dout", g.DOut, t, a.Out.Shape[0], a.Out.Shape[1], a.Out.Shape[2])
	c.typed("dq", g.DQ, t, a.Q.Shape[0], a.Q.Shape[1], a.Q.Shape[2])
	c.typed("dk", g.DK, t, a.K.Shape[0], a.K.Shape[1], a.K.Shape[2])
	c.typed("dv", g.DV, t, a.V.Shape[0], a.V.Shape[1], a.V.Shape[2])
	l := d.checkAttention(&c, a, true)
	if c.err != nil {
		return c.err
	}
	kvHeads, keys := a.K.Shape[1], a.K.Shape[0]
	if kvHeads == 0 || l.blocks == 0 {
		return nil
	}
	d.layAttention(a, true, a.Workspace.Data)
	p := d.attentionArgs(a, &l)
	defer d.forget() // runs below share the arguments
	p.dout, p.dq, p.dk, p.dv = g.DOut.Data, g.DQ.Data, g.DK.Data, g.DV.Data
	p.dout_t, p.dout_h = strides(g.DOut)
	p.dq_t, p.dq_h = strides(g.DQ)
	p.dk_t, p.dk_h = strides(g.DK)
	p.dv_t, p.dv_h = strides(g.DV)
	most := max(1, l.most)
	// query heads at a time: in F32 where parts meet in partial sums, one, whose parts are added up
	// before the next one's
	step := most
	if l.partialFloats > 0 && isBF16(a.Q.DType) == 0 {
		step = 1
	}
	for kv := int64(0); kv < kvHeads; kv += l.wave {
		n := min(l.wave, kvHeads-kv)
		p.kv0 = C.int64_t(kv)
		for j := int64(0); j < most; j += step {
			p.j0, p.j1 = C.int64_t(j), C.int64_t(j+step)
			if err := d.runKeeping(C.K_attention_backward, n*l.parts); err != nil {
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
	return nil
}

// checkAttention looks at what both passes share and lays the call out.
func (d *Device) checkAttention(c *check, a *device.Attention, backward bool) (l attentionLayout) {
	tq, heads, dim := a.Q.Shape[0], a.Q.Shape[1], a.Q.Shape[2]
	tk, kvHeads, dv := a.K.Shape[0], a.K.Shape[1], a.V.Shape[2]
	t, _ := c.compute("q", a.Q)
	c.typed("q", a.Q, t, whatever, whatever, whatever)
	c.typed("k", a.K, t, whatever, whatever, dim)
	c.typed("v", a.V, t, tk, kvHeads, whatever)
	c.typed("out", a.Out, t, tq, heads, dv)
	c.shape("lse", a.LSE, tensor.F32, tq, heads)
	if dim < 1 || dv < 1 {
		c.fail("head sizes %d and %d: they must be at least 1", dim, dv)
	}
	checkDocuments(c, "CuQ", a.CuQ, tq)
	checkDocuments(c, "CuK", a.CuK, tk)
	if len(a.CuQ) != len(a.CuK) {
		c.fail("CuQ names %d documents, CuK %d: they must agree", len(a.CuQ)-1, len(a.CuK)-1)
	}
	switch {
	case a.KVHead == nil && heads > 0 && (kvHeads == 0 || heads%kvHeads != 0):
		c.fail("%d query heads for %d key heads: give KVHead where they do not divide", heads, kvHeads)
	case a.KVHead != nil && int64(len(a.KVHead)) != heads:
		c.fail("KVHead has %d entries for %d query heads", len(a.KVHead), heads)
	}
	for i, h := range a.KVHead {
		if h < 0 || h >= kvHeads || i > 0 && h < a.KVHead[i-1] {
			c.fail("KVHead[%d] = %d: it must not decrease and stay below %d", i, h, kvHeads)
			break
		}
	}
	if c.err != nil {
		return l
	}
	l = d.layAttention(a, backward, nil)
	c.shape("workspace", a.Workspace, tensor.U8, whatever)
	if c.err == nil && (a.Workspace.Numel() < l.bytes || !a.Workspace.Contiguous()) {
		c.fail("workspace %v: AttentionWorkspace asks for %d bytes", a.Workspace, l.bytes)
	}
	if c.err == nil && uintptr(a.Workspace.Data)%align != 0 {
		c.fail("workspace at %p: it must be aligned to %d bytes", a.Workspace.Data, align)
	}
	return l
}

// checkDocuments wants 0 ... rows without a decrease, which is what keeps every row index inside
// its tensor.
func checkDocuments(c *check, name string, cu []int64, rows int64) {
	if len(cu) < 1 || cu[0] != 0 || cu[len(cu)-1] != rows {
		c.fail("%s has %d entries for %d rows: it must go from 0 to the number of rows", name, len(cu), rows)
		return
	}
	for i := 1; i < len(cu); i++ {
		if cu[i] < cu[i-1] {
			c.fail("%s[%d] = %d is less than the %d before it", name, i, cu[i], cu[i-1])
			return
		}
	}
}

// attentionArgs fills the argument block with what both passes share.
func (d *Device) attentionArgs(a *device.Attention, l *attentionLayout) *C.attention_args {
	w := a.Workspace.Data
	layHeads(a, l, w)
	p := (*C.attention_args)(d.args)
	*p = C.attention_args{
		bf16: isBF16(a.Q.DType), q: a.Q.Data, k: a.K.Data, v: a.V.Data, out: a.Out.Data, lse: floatPointer(a.LSE),
		heads: C.int64_t(a.Q.Shape[1]), d: C.int64_t(a.Q.Shape[2]), d_v: C.int64_t(a.V.Shape[2]), scale: C.float(a.Scale),
		blocks: (*C.attention_block)(w), n_blocks: C.int64_t(l.blocks), group: C.int64_t(l.group),
		kv_head: (*C.int64_t)(unsafe.Add(w, l.atKVHead)), first: (*C.int64_t)(unsafe.Add(w, l.atFirst)),
		parts: (*C.attention_part)(unsafe.Add(w, l.atParts)), n_parts: C.int64_t(l.parts), keys: C.int64_t(a.K.Shape[0]),
		partial: (*C.float)(unsafe.Add(w, l.atPartial)), partial_floats: C.int64_t(l.partialFloats),
		scratch: (*C.float)(unsafe.Add(w, l.atScratch)), scratch_floats: C.int64_t(l.scratchFloats),
	}
	left, right := sides(a)
	p.left, p.right = C.int64_t(left), C.int64_t(right)
	p.q_t, p.q_h = strides(a.Q)
	p.k_t, p.k_h = strides(a.K)
	p.v_t, p.v_h = strides(a.V)
	p.out_t, p.out_h = strides(a.Out)
	p.lse_t, p.lse_h = strides(a.LSE)
	return p
}

func floatPointer(t tensor.Tensor) *C.float { return (*C.float)(t.Data) }

// strides are those of a token and of a head.
func strides(t tensor.Tensor) (token, head C.int64_t) {
	return C.int64_t(t.Stride[0]), C.int64_t(t.Stride[1])
}
