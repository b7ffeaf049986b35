package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"slices"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// check tests the arguments of one operation that memory safety depends on, and keeps the first
// error. In a required shape, the extent whatever allows every extent.
type check struct {
	op  string
	err error
}

const whatever = -1

// fail keeps an error, unless there is one already.
func (c *check) fail(format string, args ...any) {
	if c.err == nil {
		c.err = status.Errorf(status.InvalidArgument, "cpu."+c.op+": "+format, args...)
	}
}

// shape requires host memory of a type and shape.
func (c *check) shape(name string, t tensor.Tensor, d tensor.DType, shape ...int64) {
	ok := t.DType == d && t.Where == tensor.Host && int(t.NDim) == len(shape)
	for i, n := range shape {
		ok = ok && (n == whatever || t.Shape[i] == n)
	}
	if !ok {
		c.fail("%s is %v; want host memory %v%v (-1 = any extent)", name, t, d, slices.Clone(shape))
	}
}

// rows requires F32 of a shape with a dense last axis.
func (c *check) rows(name string, t tensor.Tensor, shape ...int64) {
	c.typed(name, t, tensor.F32, shape...)
}

// dense requires a type and shape in contiguous memory.
func (c *check) dense(name string, t tensor.Tensor, d tensor.DType, shape ...int64) {
	c.shape(name, t, d, shape...)
	if !t.Contiguous() {
		c.fail("%s is %v; its memory must be contiguous", name, t)
	}
}

// isBF16 returns a compute type as the kernels' argument bf16: 1 for BF16, 0 for F32.
func isBF16(d tensor.DType) C.int64_t {
	if d == tensor.BF16 {
		return 1
	}
	return 0
}

// compute returns the compute type of a call, which is the type of its first activation x, also as
// the kernels' argument bf16. typed requires the same type of the other activations.
func (c *check) compute(name string, x tensor.Tensor) (d tensor.DType, bf16 C.int64_t) {
	if x.DType != tensor.F32 && x.DType != tensor.BF16 {
		c.fail("%s is %v; want f32 or bf16", name, x)
		return tensor.F32, 0
	}
	return x.DType, isBF16(x.DType)
}

// typed requires the compute type d and a shape with a dense last axis.
func (c *check) typed(name string, t tensor.Tensor, d tensor.DType, shape ...int64) {
	c.shape(name, t, d, shape...)
	if n := t.NDim; n > 0 && t.Shape[n-1] > 1 && t.Stride[n-1] != 1 {
		c.fail("%s is %v; its last axis must be dense (stride 1)", name, t)
	}
}

// operand is a tensor with its name in messages.
type operand struct {
	name string
	t    tensor.Tensor
}

// alike requires operands of one compute type and shape, each with a dense last axis and 2 to
// maxAxes axes. It returns the kernels' argument bf16.
func (c *check) alike(maxAxes int, operands ...operand) C.int64_t {
	first := &operands[0]
	d, bf16 := c.compute(first.name, first.t)
	shape := first.t.Shape[:first.t.NDim]
	if n := len(shape); n < 2 || n > maxAxes {
		c.fail("%s is %v; want 2 to %d axes", first.name, first.t, maxAxes)
	}
	for i := range operands {
		c.typed(operands[i].name, operands[i].t, d, shape...)
	}
	return bf16
}

// heads requires that a number of query or value heads can use keyHeads key heads: by the table
// named name if it is not nil, otherwise in groups of equal size.
func (c *check) heads(name string, table []int64, heads, keyHeads int64) {
	switch {
	case table == nil && heads > 0 && (keyHeads == 0 || heads%keyHeads != 0):
		c.fail("%d heads for %d key heads; give %s, because the number of key heads does not divide the heads", heads,
			keyHeads, name)
	case table != nil && int64(len(table)) != heads:
		c.fail("%s has %d entries for %d heads; give one for each head", name, len(table), heads)
	}
	for i, h := range table {
		if h < 0 || h >= keyHeads || i > 0 && h < table[i-1] {
			c.fail("%s[%d] = %d; entries must not decrease and must be in [0, %d)", name, i, h, keyHeads)
			break
		}
	}
}

// memory requires contiguous aligned bytes, at least as many as the function sizes returns.
func (c *check) memory(name string, m tensor.Tensor, bytes int64, sizes string) {
	c.shape(name, m, tensor.U8, whatever)
	if c.err == nil && (m.Numel() < bytes || !m.Contiguous()) {
		c.fail("%s is %v; %s returns %d bytes, which must be contiguous", name, m, sizes, bytes)
	}
	if c.err == nil && uintptr(m.Data)%align != 0 {
		c.fail("%s at %p is not aligned to %d bytes; use memory of Device.Alloc", name, m.Data, align)
	}
}
