package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// angleWork is the cost of one angle of the table, in elements of other operations.
const angleWork = 64

// RopeTable writes scale times the cosine and sine of positions [T] times frequencies [half] to cos
// and sin [T, half], with Length also times the gain of the position. An angle is one F32 product;
// all else is computed in double precision.
func (d *Device) RopeTable(_ device.Stream, a *device.RopeTable) error {
	defer runtime.KeepAlive(a)
	c := check{op: "RopeTable"}
	c.dense("positions", a.Positions, tensor.I32, whatever)
	c.dense("freq", a.Freq, tensor.F32, whatever)
	n, half := a.Positions.Shape[0], a.Freq.Shape[0]
	c.dense("cos", a.Cos, tensor.F32, n, half)
	c.dense("sin", a.Sin, tensor.F32, n, half)
	if a.Length < 0 {
		c.fail("length is %d; it must be at least 0", a.Length)
	}
	if c.err != nil || half == 0 {
		return c.err
	}
	scale := a.Scale
	if scale == 0 {
		scale = 1
	}
	perTask := max(1, grain/angleWork/half)
	*(*C.rope_table_args)(d.args) = C.rope_table_args{positions: (*C.int32_t)(a.Positions.Data), freq: floatsOf(a.Freq),
		cos: floatsOf(a.Cos), sin: floatsOf(a.Sin), tokens: C.int64_t(n), half: C.int64_t(half),
		per_task: C.int64_t(perTask),
		scale:    C.double(scale), beta: C.double(a.Beta), length: C.int64_t(a.Length)}
	return d.run(C.K_rope_table, ceilDiv(n, perTask))
}

// Rope rotates the first 2·half features of each head and copies the others. With W, it normalizes
// the head first (RMSNorm) and writes RStd.
func (d *Device) Rope(_ device.Stream, a *device.Rope) error {
	defer runtime.KeepAlive(a)
	c := check{op: "Rope"}
	t, bf16 := c.compute("x", a.X)
	c.typed("x", a.X, t, whatever, whatever, whatever)
	c.typed("y", a.Y, t, a.X.Shape[:3]...)
	c.dense("cos", a.Cos, tensor.F32, a.X.Shape[0], whatever)
	half := a.Cos.Shape[1]
	c.dense("sin", a.Sin, tensor.F32, a.X.Shape[0], half)
	dim := a.X.Shape[2]
	if 2*half > dim {
		c.fail("x is %v and cos is %v; a head must have two features for each angle", a.X, a.Cos)
	}
	normed := !a.W.IsNil()
	if normed {
		c.dense("w", a.W, t, dim)
		c.rows("rstd", a.RStd, a.X.Shape[0], a.X.Shape[1])
	}
	if normed && a.Inverse {
		c.fail("W with Inverse; for the gradient, call Rope with Inverse alone and then RMSNormBackward")
	}
	if c.err != nil {
		return c.err
	}
	n, heads := a.X.Shape[0], a.X.Shape[1]
	perTask := max(1, grain/max(1, heads*dim))
	p := (*C.rope_args)(d.args)
	*p = C.rope_args{x: a.X.Data, cos: floatsOf(a.Cos), sin: floatsOf(a.Sin), y: a.Y.Data, tokens: C.int64_t(n),
		heads: C.int64_t(heads), dim: C.int64_t(dim), half: C.int64_t(half), per_task: C.int64_t(perTask),
		bf16: bf16, sign: 1}
	p.x_token, p.x_head = headStrides(a.X)
	p.y_token, p.y_head = headStrides(a.Y)
	if a.Inverse {
		p.sign = -1
	}
	if normed {
		p.w, p.rstd, p.rstd_token, p.eps, p.centre = a.W.Data, floatsOf(a.RStd), C.int64_t(a.RStd.Stride[0]),
			C.double(a.Eps), C.float(a.Centre)
	}
	return d.run(C.K_rope, ceilDiv(n, perTask))
}
