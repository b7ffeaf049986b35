package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// gateShape is that of rows [T, N] or of heads [T, H, N], of the compute type d.
func gateShape(c *check, name string, x *tensor.Tensor, d tensor.DType) []int64 {
	shape := x.Shape[:x.NDim]
	if n := len(shape); n != 2 && n != 3 {
		c.fail("%s is %v: want [T, N] or [T, H, N]", name, *x)
	}
	c.typed(name, *x, d, shape...)
	return shape
}

// SigmoidGateForward writes x·sigmoid(gate).
func (d *Device) SigmoidGateForward(_ device.Stream, a *device.SigmoidGate) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SigmoidGateForward"}
	t, bf16 := c.compute("x", a.X)
	shape := gateShape(&c, "x", &a.X, t)
	c.typed("gate", a.Gate, t, shape...)
	c.typed("y", a.Y, t, shape...)
	if c.err != nil {
		return c.err
	}
	p := merge(a.Y, a.X, a.Gate)
	k := (*C.sigmoid_gate_args)(d.args)
	k.y, k.x, k.gate, k.bf16 = a.Y.Data, a.X.Data, a.Gate.Data, bf16
	return d.run(C.K_sigmoid_gate_forward, p.cut(&k.axes, true, grain/2, 2))
}

// SigmoidGateBackward writes dx and dgate.
func (d *Device) SigmoidGateBackward(_ device.Stream, a *device.SigmoidGateGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SigmoidGateBackward"}
	t, bf16 := c.compute("x", a.X)
	shape := gateShape(&c, "x", &a.X, t)
	c.typed("gate", a.Gate, t, shape...)
	c.typed("dy", a.DY, t, shape...)
	c.typed("dx", a.DX, t, shape...)
	c.typed("dgate", a.DGate, t, shape...)
	if c.err != nil {
		return c.err
	}
	p := merge(a.DX, a.DGate, a.X, a.Gate, a.DY)
	k := (*C.sigmoid_gate_grad_args)(d.args)
	k.dx, k.dgate, k.x, k.gate, k.dy, k.bf16 = a.DX.Data, a.DGate.Data, a.X.Data, a.Gate.Data, a.DY.Data, bf16
	return d.run(C.K_sigmoid_gate_backward, p.cut(&k.axes, true, grain/2, 2))
}
