package gdn

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// base is what a plan and its method share.
type base struct {
	dev        device.Device
	comm       comm.Comm
	layer      Layer // with DType, Scale and Strategy resolved
	rank, size int64
	align      int64 // of memory, in bytes
	tokenMajor bool  // local tensors have tokens before heads in memory
	// local key head of each local value head; nil = the rank has all heads
	keyHead []int64
}

// allocateHeads allocates [B, n, H, D] in the order of axes in memory that is fastest on the
// device: heads before tokens, or tokens before heads.
func (p *base) allocateHeads(a *device.Allocator, dtype tensor.DType, batch, n, heads, dim int64) tensor.Tensor {
	if p.tokenMajor {
		return a.Take(dtype, batch, n, heads, dim)
	}
	return a.Take(dtype, heads, batch, n, dim).Permute(1, 2, 0, 3)
}

// allocateGate allocates [B, n, H] F32 in the same order of axes.
func (p *base) allocateGate(a *device.Allocator, batch, n, heads int64) tensor.Tensor {
	return p.allocateHeads(a, tensor.F32, batch, n, heads, 1).Select(3, 0)
}

// splitHeads returns views of q|k|v [B, n, C] as q and k [B, n, keys, Dk] and v [B, n, values, Dv].
func (p *base) splitHeads(x tensor.Tensor, keys, values int64) (q, k, v tensor.Tensor) {
	l := &p.layer
	view := func(offset, heads, dim int64) tensor.Tensor {
		t := x.Slice(2, offset, offset+heads*dim)
		t.NDim, t.Shape[3], t.Stride[3] = 4, dim, t.Stride[2]
		t.Shape[2], t.Stride[2] = heads, dim*t.Stride[2]
		return t
	}
	return view(0, keys, l.KeyDim), view(keys*l.KeyDim, keys, l.KeyDim), view(2*keys*l.KeyDim, values, l.ValueDim)
}

// statesAt returns a view [docs, heads, Dk, Dv] of a flat F32 tensor, from an element on.
func (p *base) statesAt(flat tensor.Tensor, at, docs, heads int64) tensor.Tensor {
	flat = flat.Slice(0, at, flat.Shape[0])
	t := tensor.Of(flat.Data, tensor.F32, docs, heads, p.layer.KeyDim, p.layer.ValueDim)
	t.Where = flat.Where
	return t
}

// copyTokens copies tensors of the tokens of this rank, of which there may be none.
func (p *base) copyTokens(s device.Stream, to, from tensor.Tensor) error {
	if to.Numel() == 0 {
		return nil
	}
	return p.dev.Copy(s, to, from)
}
