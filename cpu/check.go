package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"slices"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// check looks at the arguments of one operation for what memory safety needs, and keeps the first
// fault. An extent of whatever in a wanted shape stands for every extent.
type check struct {
	op  string
	err error
}

const whatever = -1

func (c *check) fail(format string, args ...any) {
	if c.err == nil {
		c.err = status.Errorf(status.InvalidArgument, "cpu."+c.op+": "+format, args...)
	}
}

// shape wants host memory of a type and shape.
func (c *check) shape(name string, t tensor.Tensor, d tensor.DType, shape ...int64) {
	ok := t.DType == d && t.Where == tensor.Host && int(t.NDim) == len(shape)
	for i, n := range shape {
		ok = ok && (n == whatever || t.Shape[i] == n)
	}
	if !ok {
		c.fail("%s is %v: want host memory %v%v", name, t, d, slices.Clone(shape))
	}
}

// rows wants F32 of a shape whose last axis is dense.
func (c *check) rows(name string, t tensor.Tensor, shape ...int64) {
	c.typed(name, t, tensor.F32, shape...)
}

// dense wants a shape without gaps.
func (c *check) dense(name string, t tensor.Tensor, d tensor.DType, shape ...int64) {
	c.shape(name, t, d, shape...)
	if !t.Contiguous() {
		c.fail("%s is %v: it must be dense", name, t)
	}
}

// isBF16 is a compute type as kernels are told it: 1 for BF16, 0 for F32.
func isBF16(d tensor.DType) C.int64_t {
	if d == tensor.BF16 {
		return 1
	}
	return 0
}

// compute is the compute type of a call, which is that of its first activation x, and the same as
// kernels are told it. typed wants the others to have it.
func (c *check) compute(name string, x tensor.Tensor) (d tensor.DType, bf16 C.int64_t) {
	if x.DType != tensor.F32 && x.DType != tensor.BF16 {
		c.fail("%s is %v: want f32 or bf16", name, x)
		return tensor.F32, 0
	}
	return x.DType, isBF16(x.DType)
}

// typed wants the compute type d of a shape whose last axis is dense.
func (c *check) typed(name string, t tensor.Tensor, d tensor.DType, shape ...int64) {
	c.shape(name, t, d, shape...)
	if n := t.NDim; n > 0 && t.Shape[n-1] > 1 && t.Stride[n-1] != 1 {
		c.fail("%s is %v: its last axis must be dense", name, t)
	}
}
