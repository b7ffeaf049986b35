package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
)

// SwiGLUForward writes silu(gate)·up.
func (d *Device) SwiGLUForward(_ device.Stream, a *device.SwiGLU) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SwiGLUForward"}
	t, bf16 := c.compute("gate", a.Gate)
	c.typed("gate", a.Gate, t, whatever, whatever)
	c.typed("up", a.Up, t, a.Gate.Shape[:2]...)
	c.typed("y", a.Y, t, a.Gate.Shape[:2]...)
	if c.err != nil {
		return c.err
	}
	p := merge(a.Y, a.Gate, a.Up)
	k := (*C.swiglu_args)(d.args)
	k.y, k.gate, k.up, k.bf16 = a.Y.Data, a.Gate.Data, a.Up.Data, bf16
	return d.run(C.K_swiglu_forward, p.cut(&k.axes, true, grain/2, 2))
}

// SwiGLUBackward writes dgate and dup, and y over dy with Restore.
func (d *Device) SwiGLUBackward(_ device.Stream, a *device.SwiGLUGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SwiGLUBackward"}
	t, bf16 := c.compute("gate", a.Gate)
	c.typed("gate", a.Gate, t, whatever, whatever)
	shape := a.Gate.Shape[:2]
	c.typed("up", a.Up, t, shape...)
	c.typed("dy", a.DY, t, shape...)
	c.typed("dgate", a.DGate, t, shape...)
	c.typed("dup", a.DUp, t, shape...)
	if c.err != nil {
		return c.err
	}
	p := merge(a.DGate, a.DUp, a.Gate, a.Up, a.DY)
	k := (*C.swiglu_grad_args)(d.args)
	k.dgate, k.dup, k.gate, k.up, k.dy, k.bf16 = a.DGate.Data, a.DUp.Data, a.Gate.Data, a.Up.Data, a.DY.Data, bf16
	if k.restore = 0; a.Restore {
		k.restore = 1
	}
	return d.run(C.K_swiglu_backward, p.cut(&k.axes, true, grain/2, 2))
}
