package cpu

// #include "kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// gateShape is that of rows [T, N] or of heads [T, H, N].
func gateShape(c *check, name string, x *tensor.Tensor) []int64 {
	shape := x.Shape[:x.NDim]
	if n := len(shape); n != 2 && n != 3 {
		c.fail("%s is %v: want [T, N] or [T, H, N]", name, *x)
	}
	c.rows(name, *x, shape...)
	return shape
}

// SigmoidGateForward writes x·sigmoid(gate).
func (d *Device) SigmoidGateForward(_ device.Stream, a *device.SigmoidGate) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SigmoidGateForward"}
	shape := gateShape(&c, "x", &a.X)
	c.rows("gate", a.Gate, shape...)
	c.rows("y", a.Y, shape...)
	if c.err != nil {
		return c.err
	}
	p := merge(a.Y, a.X, a.Gate)
	k := (*C.sigmoid_gate_args)(d.args)
	k.y, k.x, k.gate = floatsOf(a.Y), floatsOf(a.X), floatsOf(a.Gate)
	return d.run(C.K_sigmoid_gate_forward, p.cut(&k.axes, true, grain/2, 2))
}

// SigmoidGateBackward writes dx and dgate.
func (d *Device) SigmoidGateBackward(_ device.Stream, a *device.SigmoidGateGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SigmoidGateBackward"}
	shape := gateShape(&c, "x", &a.X)
	c.rows("gate", a.Gate, shape...)
	c.rows("dy", a.DY, shape...)
	c.rows("dx", a.DX, shape...)
	c.rows("dgate", a.DGate, shape...)
	if c.err != nil {
		return c.err
	}
	p := merge(a.DX, a.DGate, a.X, a.Gate, a.DY)
	k := (*C.sigmoid_gate_grad_args)(d.args)
	k.dx, k.dgate, k.x, k.gate, k.dy = floatsOf(a.DX), floatsOf(a.DGate), floatsOf(a.X), floatsOf(a.Gate), floatsOf(a.DY)
	return d.run(C.K_sigmoid_gate_backward, p.cut(&k.axes, true, grain/2, 2))
}
