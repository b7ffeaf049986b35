package cpu

// #include "kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
)

// SwiGLUForward writes silu(gate)·up.
func (d *Device) SwiGLUForward(_ device.Stream, a *device.SwiGLU) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SwiGLUForward"}
	c.rows("gate", a.Gate, whatever, whatever)
	c.rows("up", a.Up, a.Gate.Shape[:2]...)
	c.rows("y", a.Y, a.Gate.Shape[:2]...)
	if c.err != nil {
		return c.err
	}
	p := merge(a.Y, a.Gate, a.Up)
	k := (*C.swiglu_args)(d.args)
	k.y, k.gate, k.up = floatsOf(a.Y), floatsOf(a.Gate), floatsOf(a.Up)
	return d.run(C.K_swiglu_forward, p.cut(&k.axes, true, grain/2, 2))
}

// SwiGLUBackward writes dgate and dup.
func (d *Device) SwiGLUBackward(_ device.Stream, a *device.SwiGLUGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SwiGLUBackward"}
	c.rows("gate", a.Gate, whatever, whatever)
	shape := a.Gate.Shape[:2]
	c.rows("up", a.Up, shape...)
	c.rows("dy", a.DY, shape...)
	c.rows("dgate", a.DGate, shape...)
	c.rows("dup", a.DUp, shape...)
	if c.err != nil {
		return c.err
	}
	p := merge(a.DGate, a.DUp, a.Gate, a.Up, a.DY)
	k := (*C.swiglu_grad_args)(d.args)
	k.dgate, k.dup, k.gate, k.up, k.dy = floatsOf(a.DGate), floatsOf(a.DUp), floatsOf(a.Gate), floatsOf(a.Up), floatsOf(a.DY)
	return d.run(C.K_swiglu_backward, p.cut(&k.axes, true, grain/2, 2))
}
