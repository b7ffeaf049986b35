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

// GatedDeltaForward computes the gated delta rule in chunks, exactly. BF16 inputs of a chunk are
// widened to F32, and its results are rounded once. The result of a head depends on the tensors of
// that head alone, and the result of a document does not depend on its position.
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
	l := d.planDelta(a, int64(C.delta_forward_floats(dk, dv, bf16)), false, nil)
	c.memory("workspace", a.Workspace, l.bytes, "GatedDeltaSizes")
	if !a.Saved.IsNil() {
		c.memory("saved", a.Saved, heads*l.savedFloats*4, "GatedDeltaSizes")
	}
	if c.err != nil {
		return c.err
	}
	d.planDelta(a, l.scratchFloats, false, a.Workspace.Data)
	copyEmptyStates(a.Cu, a.StateIn, a.StateOut)
	d.deltaArgs(a, &l, bf16)
	return d.run(C.K_delta_forward, heads*l.groups)
}

// GatedDeltaBackward writes the gradients of all inputs. It needs the Saved of the forward pass.
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
			c.fail("dstate_in is %v and state_in is %v; their shapes must be equal", g.DStateIn, a.StateIn)
		}
	}
	if c.err != nil {
		return c.err
	}
	dk, dv := C.int64_t(a.K.Shape[2]), C.int64_t(a.V.Shape[2])
	l := d.planDelta(a, int64(C.delta_backward_floats(dk, dv)), !g.PerHead, nil)
	c.memory("workspace", a.Workspace, l.bytes, "GatedDeltaSizes")
	c.memory("saved", a.Saved, heads*l.savedFloats*4, "GatedDeltaSizes")
	if c.err != nil {
		return c.err
	}
	d.planDelta(a, l.scratchFloats, !g.PerHead, a.Workspace.Data)
	copyEmptyStateGrads(a.Cu, g.DStateOut, g.DStateIn)
	p := d.deltaArgs(a, &l, bf16)
	gradArgs(p, g)
	switch {
	case g.PerHead:
		p.per_head = 1
	case l.byValueHead:
		p.by_value_head, p.extra = 1, unsafe.Add(a.Workspace.Data, l.extraOffset)
		defer d.forget() // both runs share the arguments
		if err := d.runKeeping(C.K_delta_backward, heads*l.groups); err != nil {
			return err
		}
		return d.runKeeping(C.K_delta_add_heads, keyHeads*ceilDiv(tokens, C.DELTA_ROWS))
	default:
		return d.run(C.K_delta_backward, keyHeads*l.groups)
	}
	return d.run(C.K_delta_backward, heads*l.groups)
}

// gradArgs writes the arguments of the backward pass alone.
func gradArgs(p *C.delta_args, g *device.GatedDeltaGrad) {
	p.dout, p.dq, p.dk, p.dv = g.DOut.Data, g.DQ.Data, g.DK.Data, g.DV.Data
	p.dg, p.dbeta = floatsOf(g.DG), floatsOf(g.DBeta)
	p.dout_t, p.dout_h = strides(g.DOut)
	p.dq_t, p.dq_h = strides(g.DQ)
	p.dk_t, p.dk_h = strides(g.DK)
	p.dv_t, p.dv_h = strides(g.DV)
	p.dg_t, p.dg_h = strides(g.DG)
	p.dbeta_t, p.dbeta_h = strides(g.DBeta)
	p.dstate_out, p.dstate_in = floatsOf(g.DStateOut), floatsOf(g.DStateIn)
	if p.from_out = C.int64_t(documentsOf(g.Cu)); !g.DStateOut.IsNil() {
		p.from_out -= C.int64_t(g.DStateOut.Shape[0])
	}
}

// checkDelta checks the arguments that both passes share.
func checkDelta(c *check, typ tensor.DType, a *device.GatedDelta) {
	tokens, heads := a.V.Shape[0], a.V.Shape[1]
	checkDeltaHeads(c, typ, a.K, a.G, a.Beta, a.KeyHead, heads)
	c.typed("v", a.V, typ, a.K.Shape[0], whatever, whatever)
	if a.V.Shape[2] < 1 {
		c.fail("v is %v; values need at least 1 feature", a.V)
	}
	checkDocuments(c, "Cu", a.Cu, tokens)
	if !a.StateIn.IsNil() {
		checkStates(c, "state_in", a.StateIn, a)
	}
	if !a.StateOut.IsNil() {
		checkStates(c, "state_out", a.StateOut, a)
	}
}

// checkDeltaHeads checks keys, decays and betas, and the key head of each value head.
func checkDeltaHeads(c *check, typ tensor.DType, k, g, beta tensor.Tensor, keyHead []int64, heads int64) {
	c.typed("k", k, typ, whatever, whatever, whatever)
	c.shape("g", g, tensor.F32, k.Shape[0], heads)
	c.shape("beta", beta, tensor.F32, k.Shape[0], heads)
	if k.Shape[2] < 1 {
		c.fail("k is %v; keys need at least 1 feature", k)
	}
	c.heads("KeyHead", keyHead, heads, k.Shape[1])
}

// checkStates requires states of at most all documents.
func checkStates(c *check, name string, s tensor.Tensor, a *device.GatedDelta) {
	c.dense(name, s, tensor.F32, whatever, a.V.Shape[1], a.K.Shape[2], a.V.Shape[2])
	if c.err == nil && s.Shape[0] > documentsOf(a.Cu) {
		c.fail("%s is %v; it must not have more states than there are documents, %d", name, s, documentsOf(a.Cu))
	}
}

// documentsOf returns the number of documents.
func documentsOf(cu []int64) int64 { return max(0, int64(len(cu))-1) }

// deltaArgs writes the arguments that both passes share.
func (d *Device) deltaArgs(a *device.GatedDelta, l *deltaLayout, bf16 C.int64_t) *C.delta_args {
	w := a.Workspace.Data
	documents := documentsOf(a.Cu)
	p := (*C.delta_args)(d.args)
	*p = C.delta_args{
		q: a.Q.Data, k: a.K.Data, v: a.V.Data, g: floatsOf(a.G), beta: floatsOf(a.Beta), out: a.Out.Data, bf16: bf16,
		heads: C.int64_t(a.V.Shape[1]), key_heads: C.int64_t(a.K.Shape[1]), d_k: C.int64_t(a.K.Shape[2]),
		d_v: C.int64_t(a.V.Shape[2]), tokens: C.int64_t(a.V.Shape[0]), scale: C.float(a.Scale),
		state_in: floatsOf(a.StateIn), state_out: floatsOf(a.StateOut), from_out: C.int64_t(documents),
		saved: floatsOf(a.Saved), saved_floats: C.int64_t(l.savedFloats),
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

// pointDelta sets the pointers to the tables and the scratch in the workspace w.
func pointDelta(p *C.delta_args, l *deltaLayout, w unsafe.Pointer, l2norm bool) {
	p.chunk, p.n_groups = C.int64_t(l.chunk), C.int64_t(l.groups)
	p.documents, p.groups = (*C.delta_document)(w), (*C.int64_t)(unsafe.Add(w, l.groupsOffset))
	p.key_head, p.first = (*C.int64_t)(unsafe.Add(w, l.keyHeadOffset)), (*C.int64_t)(unsafe.Add(w, l.firstOffset))
	p.scratch, p.scratch_floats = (*C.float)(unsafe.Add(w, l.scratchOffset)), C.int64_t(l.scratchFloats)
	if l2norm {
		p.l2norm = 1
	}
}

// copyEmptyStates copies the incoming state of each empty document to its outgoing state.
func copyEmptyStates(cu []int64, in, out tensor.Tensor) {
	if !out.IsNil() {
		copyEmpty(cu, out, documentsOf(cu)-out.Shape[0], in, 0)
	}
}

// copyEmptyStateGrads copies the gradient of the outgoing state of each empty document to that of
// its incoming state.
func copyEmptyStateGrads(cu []int64, dout, din tensor.Tensor) {
	if din.IsNil() {
		return
	}
	at := int64(0)
	if !dout.IsNil() {
		at = documentsOf(cu) - dout.Shape[0]
	}
	copyEmpty(cu, din, 0, dout, at)
}

// copyEmpty copies the states of empty documents from `from` to `to`. Tensor `to` starts with
// document toAt, tensor `from` with document fromAt; states that `from` does not have are zero.
func copyEmpty(cu []int64, to tensor.Tensor, toAt int64, from tensor.Tensor, fromAt int64) {
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
