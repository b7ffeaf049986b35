package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// tokens are the strides of the leading axes of [T, N] or [T, H, N] as a token's and a head's, with
// the counts of both.
func tokens(t tensor.Tensor) (tokens, heads int64, token, head C.int64_t) {
	switch t.NDim {
	case 1:
		return 1, 1, 0, 0
	case 2:
		return t.Shape[0], 1, C.int64_t(t.Stride[0]), 0
	}
	return t.Shape[0], t.Shape[1], C.int64_t(t.Stride[0]), C.int64_t(t.Stride[1])
}

// normShape checks what forward and backward share and returns rows, heads and features; x is of
// the compute type t.
func normShape(c *check, t tensor.DType, x, w, rstd tensor.Tensor) (rows, heads, n int64) {
	if x.NDim < 1 || x.NDim > 3 {
		c.fail("x is %v: want [N], [T, N] or [T, H, N]", x)
		return 0, 0, 0
	}
	tokens, heads, _, _ := tokens(x)
	rows, n = tokens*heads, x.Dim(-1)
	c.typed("x", x, t, x.Shape[:x.NDim]...)
	c.dense("w", w, t, n)
	c.dense("rstd", rstd, tensor.F32, rstd.Shape[:rstd.NDim]...)
	if rstd.Numel() != rows {
		c.fail("rstd is %v: want %d elements", rstd, rows)
	}
	if n == 0 {
		c.fail("x is %v: a mean over no features", x)
	}
	return rows, heads, n
}

// RMSNormForward is y = x·rstd·(w + centre), row by row.
func (d *Device) RMSNormForward(_ device.Stream, a *device.RMSNorm) error {
	defer runtime.KeepAlive(a)
	c := check{op: "RMSNormForward"}
	t, bf16 := c.compute("x", a.X)
	rows, heads, n := normShape(&c, t, a.X, a.W, a.RStd)
	c.typed("y", a.Y, t, a.X.Shape[:a.X.NDim]...)
	if c.err != nil {
		return c.err
	}
	per := max(1, grain/n)
	_, _, xt, xh := tokens(a.X)
	_, _, yt, yh := tokens(a.Y)
	*(*C.norm_args)(d.args) = C.norm_args{x: a.X.Data, w: a.W.Data, y: a.Y.Data, rstd: floatsOf(a.RStd), rows: C.int64_t(rows),
		heads: C.int64_t(heads), n: C.int64_t(n), per: C.int64_t(per), bf16: bf16, x_token: xt, x_head: xh, y_token: yt, y_head: yh, eps: C.double(a.Eps), centre: C.float(a.Centre)}
	return d.run(C.K_norm_forward, ceil(rows, per))
}

// RMSNormBackward writes dx, or adds to it, and adds to dw.
func (d *Device) RMSNormBackward(_ device.Stream, a *device.RMSNormGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "RMSNormBackward"}
	t, bf16 := c.compute("x", a.X)
	rows, heads, n := normShape(&c, t, a.X, a.W, a.RStd)
	c.typed("dy", a.DY, t, a.X.Shape[:a.X.NDim]...)
	c.typed("dx", a.DX, t, a.X.Shape[:a.X.NDim]...)
	c.dense("dw", a.DW, tensor.F32, n)
	if c.err != nil || rows == 0 {
		return c.err
	}
	parts, partial := d.parts(rows, n)
	_, _, xt, xh := tokens(a.X)
	_, _, yt, yh := tokens(a.DY)
	_, _, dt, dh := tokens(a.DX)
	p := (*C.norm_grad_args)(d.args)
	*p = C.norm_grad_args{x: a.X.Data, w: a.W.Data, rstd: floatsOf(a.RStd), dy: a.DY.Data, dx: a.DX.Data, dw: floatsOf(a.DW),
		partial: partial, rows: C.int64_t(rows), heads: C.int64_t(heads), n: C.int64_t(n), parts: C.int64_t(parts), bf16: bf16,
		x_token: xt, x_head: xh, dy_token: yt, dy_head: yh, dx_token: dt, dx_head: dh, centre: C.float(a.Centre)}
	if a.AddDX {
		p.add = 1
	}
	if err := d.run(C.K_norm_backward, parts); err != nil {
		return err
	}
	return d.fold(a.DW, parts, partial)
}
