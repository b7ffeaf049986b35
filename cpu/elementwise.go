package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// floatsOf returns the memory of an F32 tensor as a C pointer.
func floatsOf(t tensor.Tensor) *C.float { return (*C.float)(t.Data) }

// Add writes a + b to dst.
func (d *Device) Add(_ device.Stream, dst, a, b tensor.Tensor) error {
	defer runtime.KeepAlive(dst.Data)
	defer runtime.KeepAlive(a.Data)
	defer runtime.KeepAlive(b.Data)
	c := check{op: "Add"}
	t, bf16 := c.compute("dst", dst)
	c.typed("dst", dst, t, dst.Shape[:dst.NDim]...)
	c.typed("a", a, t, dst.Shape[:dst.NDim]...)
	c.typed("b", b, t, dst.Shape[:dst.NDim]...)
	if c.err != nil {
		return c.err
	}
	p := merge(dst, a, b)
	k := (*C.add_args)(d.args)
	k.dst, k.a, k.b, k.bf16 = dst.Data, a.Data, b.Data, bf16
	return d.run(C.K_add, p.divide(&k.axes, true, grain, 1))
}

// Scale multiplies x by f in place.
func (d *Device) Scale(_ device.Stream, x tensor.Tensor, f float64) error {
	defer runtime.KeepAlive(x.Data)
	c := check{op: "Scale"}
	t, bf16 := c.compute("x", x)
	c.dense("x", x, t, x.Shape[:x.NDim]...)
	if c.err != nil {
		return c.err
	}
	*(*C.scale_args)(d.args) = C.scale_args{x: x.Data, n: C.int64_t(x.Numel()), per_task: grain, bf16: bf16,
		f: C.float(f)}
	return d.run(C.K_scale, ceilDiv(x.Numel(), grain))
}
