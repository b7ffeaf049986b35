package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// headStrides returns the strides of a token and of a head of a tensor [N], [T, N] or [T, H, N].
// Axes that the tensor does not have are stride 0.
func headStrides(t tensor.Tensor) (token, head C.int64_t) {
	if t.NDim > 1 {
		token = C.int64_t(t.Stride[0])
	}
	if t.NDim > 2 {
		head = C.int64_t(t.Stride[1])
	}
	return token, head
}

// normShape checks the operands that the norms share: the input of the compute type t with n
// features, w [n], and one rstd for each row. It returns the number of rows, of heads of a token
// and of features.
func normShape(c *check, t tensor.DType, in operand, w, rstd tensor.Tensor) (rows, heads, n int64) {
	x := in.t
	if x.NDim < 1 || x.NDim > 3 {
		c.fail("%s is %v; want [N], [T, N] or [T, H, N]", in.name, x)
		return 0, 0, 0
	}
	rows, heads, n = 1, 1, x.Dim(-1)
	for _, extent := range x.Shape[:x.NDim-1] {
		rows *= extent
	}
	if x.NDim == 3 {
		heads = x.Shape[1]
	}
	c.typed(in.name, x, t, x.Shape[:x.NDim]...)
	c.dense("w", w, t, n)
	c.dense("rstd", rstd, tensor.F32, rstd.Shape[:rstd.NDim]...)
	if rstd.Numel() != rows {
		c.fail("rstd is %v; want %d elements, one for each row of %s", rstd, rows, in.name)
	}
	if n == 0 {
		c.fail("%s is %v; a norm needs at least one feature", in.name, x)
	}
	return rows, heads, n
}

// RMSNormForward writes rstd and y = x·rstd·(w + centre) for each row.
func (d *Device) RMSNormForward(_ device.Stream, a *device.RMSNorm) error {
	defer runtime.KeepAlive(a)
	c := check{op: "RMSNormForward"}
	return d.normForward(&c, operand{"x", a.X},
		&device.AddRMSNorm{W: a.W, Y: a.Y, RStd: a.RStd, Eps: a.Eps, Centre: a.Centre})
}

// AddRMSNorm writes sum = a + b, and rstd and y = sum·rstd·(w + centre) for each row.
func (d *Device) AddRMSNorm(_ device.Stream, a *device.AddRMSNorm) error {
	defer runtime.KeepAlive(a)
	c := check{op: "AddRMSNorm"}
	c.typed("b", a.B, a.A.DType, a.A.Shape[:a.A.NDim]...)
	c.typed("sum", a.Sum, a.A.DType, a.A.Shape[:a.A.NDim]...)
	if a.Sum.Data == a.Y.Data && a.Sum.Numel() > 0 {
		c.fail("sum and y are the same memory; a and b may be overwritten, but not sum")
	}
	return d.normForward(&c, operand{"a", a.A}, a)
}

// normForward is the norm of x or, with B, of sum = x + b. It does not use a.A.
func (d *Device) normForward(c *check, x operand, a *device.AddRMSNorm) error {
	t, bf16 := c.compute(x.name, x.t)
	rows, heads, n := normShape(c, t, x, a.W, a.RStd)
	c.typed("y", a.Y, t, x.t.Shape[:x.t.NDim]...)
	if c.err != nil {
		return c.err
	}
	perTask := max(1, grain/n)
	p := (*C.norm_args)(d.args)
	*p = C.norm_args{x: x.t.Data, w: a.W.Data, added: a.B.Data, y: a.Y.Data, sum: a.Sum.Data, rstd: floatsOf(a.RStd),
		rows: C.int64_t(rows), heads: C.int64_t(heads), n: C.int64_t(n), per_task: C.int64_t(perTask), bf16: bf16,
		eps:    C.double(a.Eps),
		centre: C.float(a.Centre)}
	p.x_token, p.x_head = headStrides(x.t)
	p.y_token, p.y_head = headStrides(a.Y)
	p.added_token, p.added_head = headStrides(a.B)
	p.sum_token, p.sum_head = headStrides(a.Sum)
	return d.run(C.K_norm_forward, ceilDiv(rows, perTask))
}

// RMSNormBackward writes dx, or with AddDX adds to it, and adds to dw.
func (d *Device) RMSNormBackward(_ device.Stream, a *device.RMSNormGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "RMSNormBackward"}
	t, bf16 := c.compute("x", a.X)
	rows, heads, n := normShape(&c, t, operand{"x", a.X}, a.W, a.RStd)
	c.typed("dy", a.DY, t, a.X.Shape[:a.X.NDim]...)
	c.typed("dx", a.DX, t, a.X.Shape[:a.X.NDim]...)
	c.dense("dw", a.DW, tensor.F32, n)
	if c.err != nil || rows == 0 {
		return c.err
	}
	splits, partial := d.rowSplits(rows, n)
	p := (*C.norm_grad_args)(d.args)
	*p = C.norm_grad_args{x: a.X.Data, w: a.W.Data, rstd: floatsOf(a.RStd), dy: a.DY.Data, dx: a.DX.Data,
		dw: floatsOf(a.DW), partial: partial, rows: C.int64_t(rows), heads: C.int64_t(heads), n: C.int64_t(n),
		splits: C.int64_t(splits), bf16: bf16, centre: C.float(a.Centre)}
	p.x_token, p.x_head = headStrides(a.X)
	p.dy_token, p.dy_head = headStrides(a.DY)
	p.dx_token, p.dx_head = headStrides(a.DX)
	if a.AddDX {
		p.add = 1
	}
	return d.runSplits(C.K_norm_backward, a.DW, splits, partial)
}

// GatedRMSNormForward writes rstd and y = x·rstd·w·silu(gate) for each row.
func (d *Device) GatedRMSNormForward(_ device.Stream, a *device.GatedRMSNorm) error {
	defer runtime.KeepAlive(a)
	c := check{op: "GatedRMSNormForward"}
	bf16 := c.alike(3, operand{"x", a.X}, operand{"gate", a.Gate}, operand{"y", a.Y})
	rows, heads, n := normShape(&c, a.X.DType, operand{"x", a.X}, a.W, a.RStd)
	if c.err != nil {
		return c.err
	}
	perTask := max(1, grain/2/n)
	p := (*C.gated_norm_args)(d.args)
	*p = C.gated_norm_args{x: a.X.Data, gate: a.Gate.Data, w: a.W.Data, y: a.Y.Data, rstd: floatsOf(a.RStd),
		rows: C.int64_t(rows), heads: C.int64_t(heads), n: C.int64_t(n), per_task: C.int64_t(perTask), bf16: bf16,
		eps: C.double(a.Eps)}
	p.x_token, p.x_head = headStrides(a.X)
	p.gate_token, p.gate_head = headStrides(a.Gate)
	p.y_token, p.y_head = headStrides(a.Y)
	return d.run(C.K_gated_norm_forward, ceilDiv(rows, perTask))
}

// GatedRMSNormBackward writes dx and dgate and adds to dw.
func (d *Device) GatedRMSNormBackward(_ device.Stream, a *device.GatedRMSNormGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "GatedRMSNormBackward"}
	bf16 := c.alike(3, operand{"x", a.X}, operand{"gate", a.Gate}, operand{"dy", a.DY}, operand{"dx", a.DX},
		operand{"dgate", a.DGate})
	rows, heads, n := normShape(&c, a.X.DType, operand{"x", a.X}, a.W, a.RStd)
	c.dense("dw", a.DW, tensor.F32, n)
	if c.err != nil || rows == 0 {
		return c.err
	}
	splits, partial := d.rowSplits(rows, n)
	p := (*C.gated_norm_grad_args)(d.args)
	*p = C.gated_norm_grad_args{x: a.X.Data, gate: a.Gate.Data, w: a.W.Data, rstd: floatsOf(a.RStd), dy: a.DY.Data,
		dx: a.DX.Data, dgate: a.DGate.Data, dw: floatsOf(a.DW), partial: partial, rows: C.int64_t(rows),
		heads: C.int64_t(heads), n: C.int64_t(n), splits: C.int64_t(splits), bf16: bf16}
	p.x_token, p.x_head = headStrides(a.X)
	p.gate_token, p.gate_head = headStrides(a.Gate)
	p.dy_token, p.dy_head = headStrides(a.DY)
	p.dx_token, p.dx_head = headStrides(a.DX)
	p.dgate_token, p.dgate_head = headStrides(a.DGate)
	return d.runSplits(C.K_gated_norm_backward, a.DW, splits, partial)
}
