package cpu

// #include "kernels.h"
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
	shape := gateShape(&c, "x", &a.X)
	rows, heads, n := normShape(&c, a.X, a.W, a.RStd)
	c.rows("gate", a.Gate, shape...)
	c.rows("y", a.Y, shape...)
	if c.err != nil {
		return c.err
	}
	per := max(1, grain/2/n)
	_, _, xt, xh := tokens(a.X)
	_, _, gt, gh := tokens(a.Gate)
	_, _, yt, yh := tokens(a.Y)
	*(*C.gated_norm_args)(d.args) = C.gated_norm_args{x: floatsOf(a.X), gate: floatsOf(a.Gate), w: floatsOf(a.W), y: floatsOf(a.Y), rstd: floatsOf(a.RStd),
		rows: C.int64_t(rows), heads: C.int64_t(heads), n: C.int64_t(n), per: C.int64_t(per),
		x_token: xt, x_head: xh, gate_token: gt, gate_head: gh, y_token: yt, y_head: yh, eps: C.double(a.Eps)}
	return d.run(C.K_gated_norm_forward, ceil(rows, per))
}

// GatedRMSNormBackward writes dx and dgate and adds to dw.
func (d *Device) GatedRMSNormBackward(_ device.Stream, a *device.GatedRMSNormGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "GatedRMSNormBackward"}
	shape := gateShape(&c, "x", &a.X)
	rows, heads, n := normShape(&c, a.X, a.W, a.RStd)
	c.rows("gate", a.Gate, shape...)
	c.rows("dy", a.DY, shape...)
	c.rows("dx", a.DX, shape...)
	c.rows("dgate", a.DGate, shape...)
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
	*(*C.gated_norm_grad_args)(d.args) = C.gated_norm_grad_args{x: floatsOf(a.X), gate: floatsOf(a.Gate), w: floatsOf(a.W), rstd: floatsOf(a.RStd),
		dy: floatsOf(a.DY), dx: floatsOf(a.DX), dgate: floatsOf(a.DGate), dw: floatsOf(a.DW), partial: partial,
		rows: C.int64_t(rows), heads: C.int64_t(heads), n: C.int64_t(n), parts: C.int64_t(parts), x_token: xt, x_head: xh,
		gate_token: gt, gate_head: gh, dy_token: yt, dy_head: yh, dx_token: dt, dx_head: dh, dgate_token: et, dgate_head: eh}
	if err := d.run(C.K_gated_norm_backward, parts); err != nil {
		return err
	}
	return d.fold(a.DW, parts, partial)
}
