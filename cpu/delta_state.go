package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// DeltaState computes the effect of a range of tokens on the recurrent state S: after the range it
// is transition·S + state. state [H, Dk, Dv] is the state from zero; transition [H, Dk, Dk], which
// may be nil, is the state from the unit matrix without values.
func (d *Device) DeltaState(_ device.Stream, a *device.DeltaState) error {
	defer runtime.KeepAlive(a)
	c := check{op: "DeltaState"}
	heads := a.V.Shape[1]
	typ, bf16 := c.compute("k", a.K)
	checkDeltaHeads(&c, typ, a.K, a.G, a.Beta, a.KeyHead, heads)
	c.typed("v", a.V, typ, a.K.Shape[0], whatever, whatever)
	c.dense("state", a.State, tensor.F32, heads, a.K.Shape[2], a.V.Shape[2])
	if !a.Transition.IsNil() {
		c.dense("transition", a.Transition, tensor.F32, heads, a.K.Shape[2], a.K.Shape[2])
	}
	if c.err != nil {
		return c.err
	}
	l := d.planRange(&c, a.K, a.V, a.KeyHead, a.Chunk, a.Workspace)
	if c.err != nil {
		return c.err
	}
	p := (*C.delta_args)(d.args)
	*p = rangeArgs(a.K, a.V, a.G, a.Beta)
	p.v, p.bf16 = a.V.Data, bf16
	p.v_t, p.v_h = strides(a.V)
	p.state, p.transition = floatsOf(a.State), floatsOf(a.Transition)
	pointDelta(p, &l, a.Workspace.Data, a.L2Norm)
	return d.run(C.K_delta_state, heads)
}

// DeltaStateGrad computes the gradient of the state before a range of tokens, for a zero gradient
// of the state after the range: the backward pass over the chunks without the other gradients.
func (d *Device) DeltaStateGrad(_ device.Stream, a *device.DeltaStateGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "DeltaStateGrad"}
	heads := a.DOut.Shape[1]
	typ, bf16 := c.compute("k", a.K)
	checkDeltaHeads(&c, typ, a.K, a.G, a.Beta, a.KeyHead, heads)
	c.typed("q", a.Q, typ, a.K.Shape[0], a.K.Shape[1], a.K.Shape[2])
	c.typed("dout", a.DOut, typ, a.K.Shape[0], whatever, whatever)
	c.dense("dstate", a.DState, tensor.F32, heads, a.K.Shape[2], a.DOut.Shape[2])
	if c.err != nil {
		return c.err
	}
	l := d.planRange(&c, a.K, a.DOut, a.KeyHead, a.Chunk, a.Workspace)
	if c.err != nil {
		return c.err
	}
	p := (*C.delta_args)(d.args)
	*p = rangeArgs(a.K, a.DOut, a.G, a.Beta)
	p.q, p.dout, p.scale, p.bf16 = a.Q.Data, a.DOut.Data, C.float(a.Scale), bf16
	p.q_t, p.q_h = strides(a.Q)
	p.dout_t, p.dout_h = strides(a.DOut)
	p.state = floatsOf(a.DState)
	pointDelta(p, &l, a.Workspace.Data, a.L2Norm)
	return d.run(C.K_delta_state_grad, heads)
}

// planRange returns the layout for a range of tokens, which is one document, and writes its tables
// to the workspace. values gives the number of value heads and of their features.
func (d *Device) planRange(c *check, k, values tensor.Tensor, keyHead []int64, chunk int64,
	workspace tensor.Tensor) deltaLayout {
	if k.Shape[2] < 1 || values.Shape[2] < 1 {
		c.fail("keys have %d features and values %d; both need at least 1", k.Shape[2], values.Shape[2])
	}
	scratch := int64(C.delta_state_floats(C.int64_t(k.Shape[2]), C.int64_t(values.Shape[2])))
	cu := [2]int64{0, values.Shape[0]}
	a := device.GatedDelta{K: k, V: values, KeyHead: keyHead, Chunk: chunk, Cu: cu[:]}
	l := d.planDelta(&a, scratch, false, nil)
	c.memory("workspace", workspace, l.bytes, "GatedDeltaSizes")
	if c.err == nil {
		d.planDelta(&a, scratch, false, workspace.Data)
	}
	return l
}

// rangeArgs returns the arguments that DeltaState and DeltaStateGrad share.
func rangeArgs(k, values, g, beta tensor.Tensor) C.delta_args {
	p := C.delta_args{
		k: k.Data, g: floatsOf(g), beta: floatsOf(beta),
		heads: C.int64_t(values.Shape[1]), key_heads: C.int64_t(k.Shape[1]), d_k: C.int64_t(k.Shape[2]),
		d_v:    C.int64_t(values.Shape[2]),
		tokens: C.int64_t(values.Shape[0]),
	}
	p.k_t, p.k_h = strides(k)
	p.g_t, p.g_h = strides(g)
	p.beta_t, p.beta_h = strides(beta)
	return p
}

// DeltaFold computes y = m·x (+ e) for each head, with mᵀ instead of m if Transpose is set. m is
// [H, Dk, Dk], x, y and e are [H, Dk, Dv]; e may be y.
func (d *Device) DeltaFold(s device.Stream, a *device.DeltaFold) error {
	defer runtime.KeepAlive(a)
	c := check{op: "DeltaFold"}
	heads, k, n := a.X.Shape[0], a.X.Shape[1], a.X.Shape[2]
	c.dense("m", a.M, tensor.F32, heads, k, k)
	c.dense("x", a.X, tensor.F32, heads, k, n)
	c.dense("y", a.Y, tensor.F32, heads, k, n)
	if !a.E.IsNil() {
		c.dense("e", a.E, tensor.F32, heads, k, n)
	}
	if c.err != nil {
		return c.err
	}
	if a.Y.Numel() == 0 {
		return nil
	}
	if !a.E.IsNil() && a.E.Data != a.Y.Data {
		if err := d.Copy(s, a.Y, a.E); err != nil {
			return err
		}
	}
	for h := range heads {
		g := device.Gemm{A: a.M.Select(0, h), B: a.X.Select(0, h), C: a.Y.Select(0, h), Accumulate: !a.E.IsNil()}
		if a.Transpose {
			g.A = g.A.Permute(1, 0)
		}
		if err := d.Gemm(s, &g); err != nil {
			return err
		}
	}
	return nil
}
