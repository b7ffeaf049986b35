package device

import "ulysses/tensor"

// Allocator is a bump allocator over memory of the caller. Without memory it only counts bytes, so
// the same code computes the size of a block and divides it into tensors.
type Allocator struct {
	Mem   tensor.Tensor // U8
	Align int64         // of each tensor, in bytes
	Used  int64         // bytes
}

// Take allocates a dense tensor. Its contents are undefined.
func (c *Allocator) Take(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t := tensor.Of(nil, dtype, shape...)
	lo := c.Padded()
	c.Used = lo + t.Bytes()
	if c.Mem.IsNil() {
		return t
	}
	return c.Mem.At(lo, dtype, shape...)
}

// Rest returns the memory that is not allocated.
func (c *Allocator) Rest() tensor.Tensor {
	if c.Mem.IsNil() {
		return tensor.Of(nil, tensor.U8, 0)
	}
	lo := min(c.Padded(), c.Mem.Numel())
	return c.Mem.At(lo, tensor.U8, c.Mem.Numel()-lo)
}

// Padded returns the bytes in use, rounded up to the start of the next allocation.
func (c *Allocator) Padded() int64 { return roundUp(c.Used, c.Align) }
