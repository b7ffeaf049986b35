package device

import "ulysses/tensor"

// Carver hands out aligned parts of a block of bytes that somebody else owns. Without memory it
// only counts: the same calls size a block and cut it up.
type Carver struct {
	Mem   tensor.Tensor // U8
	Align int64
	Used  int64 // bytes
}

// Take is the next part, as a dense tensor.
func (c *Carver) Take(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t := tensor.Of(nil, dtype, shape...)
	lo := c.Padded()
	c.Used = lo + t.Bytes()
	if c.Mem.IsNil() {
		return t
	}
	return c.Mem.At(lo, dtype, shape...)
}

// Rest is what has not been handed out.
func (c *Carver) Rest() tensor.Tensor {
	if c.Mem.IsNil() {
		return tensor.Of(nil, tensor.U8, 0)
	}
	lo := min(c.Padded(), c.Mem.Numel())
	return c.Mem.At(lo, tensor.U8, c.Mem.Numel()-lo)
}

// Padded is what is used, up to where the next part begins.
func (c *Carver) Padded() int64 { return (c.Used + c.Align - 1) / c.Align * c.Align }
