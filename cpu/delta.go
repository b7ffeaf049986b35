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

// GatedDeltaForward is the gated delta rule in chunks, exact: a chunk is widened to f32, and
// rounded when its results leave. A head's result depends on that head's tensors alone, and a
// document's not on where it lies.
func (d *Device) GatedDeltaForward(_ device.Stream, a *device.GatedDelta) error {
	defer runtime.KeepAlive(a)
	c := check{op: "GatedDeltaForward"}
	typ, bf16 := c.compute("k", a.K)
	c.typed("q", a.Q, typ, a.K.Shape[0], a.K.Shape[1], a.K.Shape[2])
	c.typed("out", a.Out, typ, a.V.Shape[0], a.V.Shape[1], a.V.Shape[2])
	checkDelta(&c, typ, a)
	if c.err != nil {
		return c.err
	}
	heads, dk, dv := a.V.Shape[1], C.int64_t(a.K.Shape[2]), C.int64_t(a.V.Shape[2])
	l := d.layDelta(a, int64(C.delta_forward_floats(dk, dv, bf16)), false, nil)
	checkMemory(&c, "workspace", a.Workspace, l.bytes)
	if !a.Saved.IsNil() {
		checkMemory(&c, "saved", a.Saved, heads*l.savedFloats*4)
	}
	if c.err != nil {
		return c.err
	}
	d.layDelta(a, l.scratchFloats, false, a.Workspace.Data)
	passStates(a.Cu, a.StateIn, a.StateOut)
	d.deltaArgs(a, &l, bf16)
	return d.run(C.K_delta_forward, heads*l.runs)
}

// GatedDeltaBackward is the derivative.
func (d *Device) GatedDeltaBackward(_ device.Stream, g *device.GatedDeltaGrad) error {
	defer runtime.KeepAlive(g)
	a := &g.GatedDelta
	c := check{op: "GatedDeltaBackward"}
	tokens, keyHeads, heads := a.K.Shape[0], a.K.Shape[1], a.V.Shape[1]
	of := keyHeads
	if g.PerHead {
		of = heads
	}
	typ, bf16 := c.compute("k", a.K)
	c.typed("q", a.Q, typ, tokens, keyHeads, a.K.Shape[2])
	c.typed("dout", g.DOut, typ, tokens, heads, a.V.Shape[2])
	c.typed("dq", g.DQ, typ, tokens, of, a.K.Shape[2])
	c.typed("dk", g.DK, typ, tokens, of, a.K.Shape[2])
	c.typed("dv", g.DV, typ, tokens, heads, a.V.Shape[2])
	c.shape("dg", g.DG, tensor.F32, tokens, heads)
	c.shape("dbeta", g.DBeta, tensor.F32, tokens, heads)
	checkDelta(&c, typ, a)
	if !g.DStateOut.IsNil() {
		checkStates(&c, "dstate_out", g.DStateOut, a)
	}
	if !g.DStateIn.IsNil() {
		checkStates(&c, "dstate_in", g.DStateIn, a)
		if c.err == nil && (a.StateIn.IsNil() || g.DStateIn.Shape[0] != a.StateIn.Shape[0]) {
			c.fail("dstate_in %v for state_in %v: their shapes must agree", g.DStateIn, a.StateIn)
		}
	}
	if c.err != nil {
		return c.err
	}
	dk, dv := C.int64_t(a.K.Shape[2]), C.int64_t(a.V.Shape[2])
	l := d.layDelta(a, int64(C.delta_backward_floats(dk, dv)), !g.PerHead, nil)
	checkMemory(&c, "workspace", a.Workspace, l.bytes)
	checkMemory(&c, "saved", a.Saved, heads*l.savedFloats*4)
	if c.err != nil {
		return c.err
	}
	d.layDelta(a, l.scratchFloats, !g.PerHead, a.Workspace.Data)
	passStatesBack(a.Cu, g.DStateOut, g.DStateIn)
	p := d.deltaArgs(a, &l, bf16)
	p.dout, p.dq, p.dk, p.dv = g.DOut.Data, g.DQ.Data, g.DK.Data, g.DV.Data
	p.dg, p.dbeta = floatPointer(g.DG), floatPointer(g.DBeta)
	p.dout_t, p.dout_h = strides(g.DOut)
	p.dq_t, p.dq_h = strides(g.DQ)
	p.dk_t, p.dk_h = strides(g.DK)
	p.dv_t, p.dv_h = strides(g.DV)
	p.dg_t, p.dg_h = strides(g.DG)
	p.dbeta_t, p.dbeta_h = strides(g.DBeta)
	p.dstate_out, p.dstate_in = floatPointer(g.DStateOut), floatPointer(g.DStateIn)
	if p.from_out = C.int64_t(documentsOf(a.Cu)); !g.DStateOut.IsNil() {
		p.from_out -= C.int64_t(g.DStateOut.Shape[0])
	}
	switch {
	case g.PerHead:
		p.per_head = 1
	case l.apart:
		p.apart, p.waiting = 1, unsafe.Add(a.Workspace.Data, l.atWaiting)
		defer d.forget() // both runs share the arguments
		if err := d.runKeeping(C.K_delta_backward, heads*l.runs); err != nil {
			return err
		}
		return d.runKeeping(C.K_delta_add_heads, keyHeads*ceilDiv(tokens, C.DELTA_ROWS))
	default:
		return d.run(C.K_delta_backward, keyHeads*l.runs)
	}
	return d.run(C.K_delta_backward, heads*l.runs)
}

// checkDelta looks at what both passes share.
func checkDelta(c *check, typ tensor.DType, a *device.GatedDelta) {
	tokens, heads := a.V.Shape[0], a.V.Shape[1]
	checkDeltaHeads(c, typ, a.K, a.G, a.Beta, a.KeyHead, heads)
	c.typed("v", a.V, typ, a.K.Shape[0], whatever, whatever)
	if a.V.Shape[2] < 1 {
		c.fail("v %v: head sizes must be at least 1", a.V)
	}
	checkDocuments(c, "Cu", a.Cu, tokens)
	if !a.StateIn.IsNil() {
		checkStates(c, "state_in", a.StateIn, a)
	}
	if !a.StateOut.IsNil() {
		checkStates(c, "state_out", a.StateOut, a)
	}
}

// checkDeltaHeads looks at keys, decays and betas, and how value heads go with key heads.
func checkDeltaHeads(c *check, typ tensor.DType, k, g, beta tensor.Tensor, keyHead []int64, heads int64) {
	keyHeads := k.Shape[1]
	c.typed("k", k, typ, whatever, whatever, whatever)
	c.shape("g", g, tensor.F32, k.Shape[0], heads)
	c.shape("beta", beta, tensor.F32, k.Shape[0], heads)
	if k.Shape[2] < 1 {
		c.fail("k %v: head sizes must be at least 1", k)
	}
	switch {
	case keyHead == nil && heads > 0 && (keyHeads == 0 || heads%keyHeads != 0):
		c.fail("%d value heads for %d key heads: give KeyHead where they do not divide", heads, keyHeads)
	case keyHead != nil && int64(len(keyHead)) != heads:
		c.fail("KeyHead has %d entries for %d value heads", len(keyHead), heads)
	}
	for i, h := range keyHead {
		if h < 0 || h >= keyHeads || i > 0 && h < keyHead[i-1] {
			c.fail("KeyHead[%d] = %d: it must not decrease and stay below %d", i, h, keyHeads)
			break
		}
	}
}

// checkStates wants states of at most as many documents as there are.
func checkStates(c *check, name string, s tensor.Tensor, a *device.GatedDelta) {
	c.dense(name, s, tensor.F32, whatever, a.V.Shape[1], a.K.Shape[2], a.V.Shape[2])
	if c.err == nil && s.Shape[0] > documentsOf(a.Cu) {
		c.fail("%s %v: there are %d documents", name, s, documentsOf(a.Cu))
	}
}

func documentsOf(cu []int64) int64 { return max(0, int64(len(cu))-1) }

// checkMemory wants dense bytes, aligned.
func checkMemory(c *check, name string, m tensor.Tensor, bytes int64) {
	c.shape(name, m, tensor.U8, whatever)
	if c.err == nil && (m.Numel() < bytes || !m.Contiguous()) {
		c.fail("%s %v: GatedDeltaSizes asks for %d bytes", name, m, bytes)
	}
	if c.err == nil && uintptr(m.Data)%align != 0 {
		c.fail("%s at %p: it must be aligned to %d bytes", name, m.Data, align)
	}
}

// deltaArgs fills the argument block with what both passes share.
func (d *Device) deltaArgs(a *device.GatedDelta, l *deltaLayout, bf16 C.int64_t) *C.delta_args {
	w := a.Workspace.Data
	documents := documentsOf(a.Cu)
	p := (*C.delta_args)(d.args)
	*p = C.delta_args{
		q: a.Q.Data, k: a.K.Data, v: a.V.Data, g: floatPointer(a.G), beta: floatPointer(a.Beta), out: a.Out.Data, bf16: bf16,
		heads: C.int64_t(a.V.Shape[1]), key_heads: C.int64_t(a.K.Shape[1]), d_k: C.int64_t(a.K.Shape[2]), d_v: C.int64_t(a.V.Shape[2]),
		tokens: C.int64_t(a.V.Shape[0]), scale: C.float(a.Scale),
		state_in: floatPointer(a.StateIn), state_out: floatPointer(a.StateOut), from_out: C.int64_t(documents),
		saved: floatPointer(a.Saved), saved_floats: C.int64_t(l.savedFloats),
	}
	if !a.StateIn.IsNil() {
		p.with_in = C.int64_t(a.StateIn.Shape[0])
	}
	if !a.StateOut.IsNil() {
		p.from_out -= C.int64_t(a.StateOut.Shape[0])
	}
	p.q_t, p.q_h = strides(a.Q)
	p.k_t, p.k_h = strides(a.K)
	p.v_t, p.v_h = strides(a.V)
	p.g_t, p.g_h = strides(a.G)
	p.beta_t, p.beta_h = strides(a.Beta)
	p.out_t, p.out_h = strides(a.Out)
	pointDelta(p, l, w, a.L2Norm)
	return p
}

// pointDelta points the arguments at the tables and the scratch of a workspace.
func pointDelta(p *C.delta_args, l *deltaLayout, w unsafe.Pointer, l2norm bool) {
	p.chunk, p.n_runs = C.int64_t(l.chunk), C.int64_t(l.runs)
	p.documents, p.runs = (*C.delta_document)(w), (*C.int64_t)(unsafe.Add(w, l.atRuns))
	p.key_head, p.first = (*C.int64_t)(unsafe.Add(w, l.atKeyHead)), (*C.int64_t)(unsafe.Add(w, l.atFirst))
	p.scratch, p.scratch_floats = (*C.float)(unsafe.Add(w, l.atScratch)), C.int64_t(l.scratchFloats)
	if l2norm {
		p.l2norm = 1
	}
}

// passStates gives the state behind an empty document, which is that before it.
func passStates(cu []int64, in, out tensor.Tensor) {
	if !out.IsNil() {
		passEmpty(cu, out, documentsOf(cu)-out.Shape[0], in, 0)
	}
}

// passStatesBack is the way back.
func passStatesBack(cu []int64, dout, din tensor.Tensor) {
	if din.IsNil() {
		return
	}
	at := int64(0)
	if !dout.IsNil() {
		at = documentsOf(cu) - dout.Shape[0]
	}
	passEmpty(cu, din, 0, dout, at)
}

// passEmpty writes the states `to`, of the documents from toAt on, where a document is empty: from
// those of `from`, else zero.
func passEmpty(cu []int64, to tensor.Tensor, toAt int64, from tensor.Tensor, fromAt int64) {
	n := to.Shape[1] * to.Shape[2] * to.Shape[3]
	for i := range to.Shape[0] {
		if doc := toAt + i; cu[doc] == cu[doc+1] && n > 0 {
			x := to.Float32s()[i*n : (i+1)*n]
			if j := doc - fromAt; !from.IsNil() && j >= 0 && j < from.Shape[0] {
				copy(x, from.Float32s()[j*n:(j+1)*n])
			} else {
				clear(x)
			}
		}
	}
}
