package cpu

// #include "kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// floatsOf is a tensor's memory for C.
func floatsOf(t tensor.Tensor) *C.float { return (*C.float)(t.Data) }

// Add writes a + b into dst.
func (d *Device) Add(_ device.Stream, dst, a, b tensor.Tensor) error {
	defer runtime.KeepAlive(dst.Data)
	defer runtime.KeepAlive(a.Data)
	defer runtime.KeepAlive(b.Data)
	c := check{op: "Add"}
	c.rows("dst", dst, dst.Shape[:dst.NDim]...)
	c.rows("a", a, dst.Shape[:dst.NDim]...)
	c.rows("b", b, dst.Shape[:dst.NDim]...)
	if c.err != nil {
		return c.err
	}
	p := merge(dst, a, b)
	k := (*C.add_args)(d.args)
	k.dst, k.a, k.b = floatsOf(dst), floatsOf(a), floatsOf(b)
	return d.run(C.K_add, p.cut(&k.axes, true, grain, 1))
}

// Scale multiplies x by f in place.
func (d *Device) Scale(_ device.Stream, x tensor.Tensor, f float64) error {
	defer runtime.KeepAlive(x.Data)
	c := check{op: "Scale"}
	c.dense("x", x, tensor.F32, x.Shape[:x.NDim]...)
	if c.err != nil {
		return c.err
	}
	*(*C.scale_args)(d.args) = C.scale_args{x: floatsOf(x), n: C.int64_t(x.Numel()), piece: grain, f: C.float(f)}
	return d.run(C.K_scale, ceil(x.Numel(), grain))
}
