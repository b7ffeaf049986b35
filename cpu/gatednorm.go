package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// GatedRMSNormForward is y = x·rstd·w·silu(gate), row by row.
func (d *Device) GatedRMSNormForward(_ device.Stream, a *device.GatedRMSNorm) error {
	defer runtime.KeepAlive(a)
	c := check{op: "GatedRMSNormForward"}
	t, bf16 := c.compute("x", a.X)
	shape := gateShape(&c, "x", &a.X, t)
	rows, heads, n := normShape(&c, t, a.X, a.W, a.RStd)
	c.typed("gate", a.Gate, t, shape...)
	c.typed("y", a.Y, t, shape...)
	if c.err != nil {
		return c.err
	}
	per := max(1, grain/2/n)
	_, _, xt, xh := tokens(a.X)
	_, _, gt, gh := tokens(a.Gate)
	_, _, yt, yh := tokens(a.Y)
	*(*C.gated_norm_args)(d.args) = C.gated_norm_args{x: a.X.Data, gate: a.Gate.Data, w: a.W.Data, y: a.Y.Data, rstd: floatsOf(a.RStd),
		rows: C.int64_t(rows), heads: C.int64_t(heads), n: C.int64_t(n), per: C.int64_t(per), bf16: bf16,
		x_token: xt, x_head: xh, gate_token: gt, gate_head: gh, y_token: yt, y_head: yh, eps: C.double(a.Eps)}
	return d.run(C.K_gated_norm_forward, ceil(rows, per))
}

// GatedRMSNormBackward writes dx and dgate and adds to dw.
func (d *Device) GatedRMSNormBackward(_ device.Stream, a *device.GatedRMSNormGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "GatedRMSNormBackward"}
	t, bf16 := c.compute("x", a.X)
	shape := gateShape(&c, "x", &a.X, t)
	rows, heads, n := normShape(&c, t, a.X, a.W, a.RStd)
	c.typed("gate", a.Gate, t, shape...)
	c.typed("dy", a.DY, t, shape...)
	c.typed("dx", a.DX, t, shape...)
	c.typed("dgate", a.DGate, t, shape...)
	c.dense("dw", a.DW, tensor.F32, n)
	if c.err != nil || rows == 0 {
		return c.err
	}
	parts, partial := d.parts(rows, n)
	_, _, xt, xh := tokens(a.X)
	_, _, gt, gh := tokens(a.Gate)
	_, _, yt, yh := tokens(a.DY)
	_, _, dt, dh := tokens(a.DX)
	_, _, et, eh := tokens(a.DGate)
	*(*C.gated_norm_grad_args)(d.args) = C.gated_norm_grad_args{x: a.X.Data, gate: a.Gate.Data, w: a.W.Data, rstd: floatsOf(a.RStd),
		dy: a.DY.Data, dx: a.DX.Data, dgate: a.DGate.Data, dw: floatsOf(a.DW), partial: partial,
		rows: C.int64_t(rows), heads: C.int64_t(heads), n: C.int64_t(n), parts: C.int64_t(parts), bf16: bf16, x_token: xt, x_head: xh,
		gate_token: gt, gate_head: gh, dy_token: yt, dy_head: yh, dx_token: dt, dx_head: dh, dgate_token: et, dgate_head: eh}
	if err := d.run(C.K_gated_norm_backward, parts); err != nil {
		return err
	}
	return d.fold(a.DW, parts, partial)
}
