package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
)

// SwiGLUForward writes y = silu(gate)·up, or gelu(gate)·up. All operands are [T, N].
func (d *Device) SwiGLUForward(_ device.Stream, a *device.SwiGLU) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SwiGLUForward"}
	bf16 := c.alike(2, operand{"gate", a.Gate}, operand{"up", a.Up}, operand{"y", a.Y})
	form := c.form(a.GELU, a.Clamped)
	if c.err != nil {
		return c.err
	}
	p := merge(a.Y, a.Gate, a.Up)
	k := (*C.swiglu_args)(d.args)
	k.y, k.gate, k.up, k.bf16, k.form = a.Y.Data, a.Gate.Data, a.Up.Data, bf16, form
	return d.run(C.K_swiglu_forward, p.divide(&k.axes, true, grain/2, 2))
}

// form returns the form of SwiGLU for the kernels.
func (c *check) form(gelu, clamped bool) C.int64_t {
	switch {
	case gelu && clamped:
		c.fail("GELU and Clamped are both set; set at most one of them")
	case gelu:
		return C.SWIGLU_GELU
	case clamped:
		return C.SWIGLU_CLAMPED
	}
	return C.SWIGLU_SILU
}

// SwiGLUBackward writes dgate and dup. With Restore it also writes y to dy.
func (d *Device) SwiGLUBackward(_ device.Stream, a *device.SwiGLUGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SwiGLUBackward"}
	bf16 := c.alike(2, operand{"gate", a.Gate}, operand{"up", a.Up}, operand{"dy", a.DY}, operand{"dgate", a.DGate},
		operand{"dup", a.DUp})
	form := c.form(a.GELU, a.Clamped)
	if c.err != nil {
		return c.err
	}
	p := merge(a.DGate, a.DUp, a.Gate, a.Up, a.DY)
	k := (*C.swiglu_grad_args)(d.args)
	k.dgate, k.dup, k.gate, k.up, k.dy, k.bf16 = a.DGate.Data, a.DUp.Data, a.Gate.Data, a.Up.Data, a.DY.Data, bf16
	if k.restore = 0; a.Restore {
		k.restore = 1
	}
	k.form = form
	return d.run(C.K_swiglu_backward, p.divide(&k.axes, true, grain/2, 2))
}

// SigmoidGateForward writes y = x·sigmoid(gate). All operands are [T, N] or [T, H, N].
func (d *Device) SigmoidGateForward(_ device.Stream, a *device.SigmoidGate) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SigmoidGateForward"}
	bf16 := c.alike(3, operand{"x", a.X}, operand{"gate", a.Gate}, operand{"y", a.Y})
	if c.err != nil {
		return c.err
	}
	p := merge(a.Y, a.X, a.Gate)
	k := (*C.sigmoid_gate_args)(d.args)
	k.y, k.x, k.gate, k.bf16 = a.Y.Data, a.X.Data, a.Gate.Data, bf16
	return d.run(C.K_sigmoid_gate_forward, p.divide(&k.axes, true, grain/2, 2))
}

// SigmoidGateBackward writes dx and dgate.
func (d *Device) SigmoidGateBackward(_ device.Stream, a *device.SigmoidGateGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SigmoidGateBackward"}
	bf16 := c.alike(3, operand{"x", a.X}, operand{"gate", a.Gate}, operand{"dy", a.DY}, operand{"dx", a.DX},
		operand{"dgate", a.DGate})
	if c.err != nil {
		return c.err
	}
	p := merge(a.DX, a.DGate, a.X, a.Gate, a.DY)
	k := (*C.sigmoid_gate_grad_args)(d.args)
	k.dx, k.dgate, k.x, k.gate, k.dy, k.bf16 = a.DX.Data, a.DGate.Data, a.X.Data, a.Gate.Data, a.DY.Data, bf16
	return d.run(C.K_sigmoid_gate_backward, p.divide(&k.axes, true, grain/2, 2))
}
