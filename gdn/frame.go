package gdn

import (
	"ulysses/device"
	"ulysses/tensor"
)

// call is a kind of call: what it needs memory for.
type call struct {
	layer, backward bool
	keep            bool // there is Saved
	states          bool // states of documents come or go
}

// frame is the tensors of a call. Local ones have n tokens a batch row, h value and k key heads:
// all S tokens of this rank's heads with Heads, this rank's rows of all heads with State, where
// those that are written for the caller, or read and not kept, are the caller's own.
type frame struct {
	// Kept for the backward pass.
	x       tensor.Tensor // [B, n, C], of a layer: q|k|v before the convolution
	a, b    tensor.Tensor // [B, n, h], of a layer
	before  tensor.Tensor // [B, W−1, C], of a layer with State: the rows before the first
	q, k    tensor.Tensor // [B, n, k, Dk]; of a layer they are parts of y
	v       tensor.Tensor // [B, n, h, Dv]
	g, beta tensor.Tensor // [B, n, h]
	// [B, Hv, Dk, Dv] with State: before the first local token of each row, if its document began
	// before
	state tensor.Tensor
	// [B, Hv, Dk, Dk] with State: over the rank's stretch, if a document comes, fills it and goes
	// on
	transition tensor.Tensor

	y            tensor.Tensor // [B, n, C], of a layer: q|k|v behind the convolution and SiLU
	out, dout    tensor.Tensor // [B, n, h, Dv]
	dy           tensor.Tensor // [B, n, C], of a layer
	dq, dk       tensor.Tensor // [B, n, k, Dk], or h heads where each value head's own travel
	dv           tensor.Tensor // [B, n, h, Dv]
	dg, dbeta    tensor.Tensor // [B, n, h]
	da, db       tensor.Tensor // [B, n, h], of a layer
	dbefore      tensor.Tensor // [B, W−1, C], of a layer with State
	allDQ, allDK tensor.Tensor // [B, rows, Hv, Dk]: each value head's own, come back
	sum, term    tensor.Tensor // [B, rows, Hk, Dk] F32, where these are BF16
	// [B, Hv, Dk, Dv] with State: what this rank sends; the gradient behind its last token
	own, incoming tensor.Tensor

	// of documents, F32, as the device's calls want them
	stateIn, stateOut, dstateIn, dstateOut tensor.Tensor
	spareState, spareTransition            tensor.Tensor // [Hv, Dk, Dv], [Hv, Dk, Dk]
	gathered                               tensor.Tensor // states of documents, come from all ranks
}

// lay cuts up memory for a call, or counts it on allocators without memory. What is kept goes to keep,
// which may be ws itself.
func (p *Plan) lay(f *frame, c *cut, kind call, keep, ws *device.Allocator) {
	*f = frame{}
	l := p.layer
	lo, hi, keyLo, keyHi := p.Heads()
	batch, n, h, k := c.line.batch, c.n, hi-lo, keyHi-keyLo
	width := 2*k*l.KeyDim + h*l.ValueDim
	inputs := keep
	if l.Strategy == State && !kind.keep {
		inputs = &device.Allocator{Align: p.align} // shapes: the caller's own serve
	}
	if kind.layer {
		f.x, f.a, f.b = inputs.Take(l.DType, batch, n, width), inputs.Take(l.DType, batch, n, h), inputs.Take(l.DType, batch, n, h)
		if l.Strategy == State && l.ConvWidth > 1 {
			f.before = keep.Take(l.DType, batch, l.ConvWidth-1, width)
		}
		f.y = ws.Take(l.DType, batch, n, width)
		f.q, f.k, f.v = p.heads(f.y, k, h)
		f.g, f.beta = ws.Take(tensor.F32, batch, n, h), ws.Take(tensor.F32, batch, n, h)
	} else {
		f.q, f.k = p.take(inputs, l.DType, batch, n, k, l.KeyDim), p.take(inputs, l.DType, batch, n, k, l.KeyDim)
		f.v = p.take(inputs, l.DType, batch, n, h, l.ValueDim)
		f.g, f.beta = p.take(inputs, tensor.F32, batch, n, h, 1).Select(3, 0), p.take(inputs, tensor.F32, batch, n, h, 1).Select(3, 0)
	}
	if l.Strategy == State && p.size > 1 && n > 0 {
		f.state, f.transition = keep.Take(tensor.F32, batch, h, l.KeyDim, l.ValueDim), keep.Take(tensor.F32, batch, h, l.KeyDim, l.KeyDim)
		f.own = ws.Take(tensor.F32, batch, h, l.KeyDim, l.ValueDim)
	}
	if kind.backward {
		p.layBackward(f, c, kind, ws)
	} else if l.Strategy == Heads {
		f.out = p.take(ws, l.DType, batch, n, h, l.ValueDim)
	}
	if kind.states {
		p.layStates(f, c, kind, ws)
	}
}

func (p *Plan) layBackward(f *frame, c *cut, kind call, ws *device.Allocator) {
	l := p.layer
	lo, hi, keyLo, keyHi := p.Heads()
	batch, n, h, k := c.line.batch, c.n, hi-lo, keyHi-keyLo
	if kind.layer {
		f.dy = ws.Take(l.DType, batch, n, 2*k*l.KeyDim+h*l.ValueDim)
		f.dq, f.dk, f.dv = p.heads(f.dy, k, h)
		f.dg, f.dbeta = ws.Take(tensor.F32, batch, n, h), ws.Take(tensor.F32, batch, n, h)
	}
	if l.Strategy == State {
		if p.size > 1 && n > 0 {
			f.incoming = ws.Take(tensor.F32, batch, h, l.KeyDim, l.ValueDim)
		}
		if kind.layer && l.ConvWidth > 1 {
			f.dbefore = ws.Take(l.DType, batch, l.ConvWidth-1, f.dy.Shape[2])
		}
		return
	}
	f.dout = p.take(ws, l.DType, batch, n, h, l.ValueDim)
	if kind.layer {
		f.da, f.db = ws.Take(l.DType, batch, n, h), ws.Take(l.DType, batch, n, h)
		return
	}
	if p.keysCut {
		k = h
		rows := c.batch.Rows()
		f.allDQ = p.take(ws, l.DType, batch, rows, l.ValueHeads, l.KeyDim)
		f.allDK = p.take(ws, l.DType, batch, rows, l.ValueHeads, l.KeyDim)
		if l.DType != tensor.F32 {
			f.sum, f.term = ws.Take(tensor.F32, batch, rows, l.KeyHeads, l.KeyDim), ws.Take(tensor.F32, batch, rows, l.KeyHeads, l.KeyDim)
		}
	}
	f.dq, f.dk = p.take(ws, l.DType, batch, n, k, l.KeyDim), p.take(ws, l.DType, batch, n, k, l.KeyDim)
	f.dv = p.take(ws, l.DType, batch, n, h, l.ValueDim)
	f.dg, f.dbeta = p.take(ws, tensor.F32, batch, n, h, 1).Select(3, 0), p.take(ws, tensor.F32, batch, n, h, 1).Select(3, 0)
}

// layStates is memory for states of documents, where the caller's own will not do: with Heads each
// rank has its heads of all documents, with State all heads of its documents, one more at the end
// or the beginning for the part of a document that is written and not wanted.
func (p *Plan) layStates(f *frame, c *cut, kind call, ws *device.Allocator) {
	if p.size == 1 {
		return
	}
	l := p.layer
	lo, hi, _, _ := p.Heads()
	in, out := c.docs, c.docs
	starts, ends := c.docs, c.docs
	if l.Strategy == State {
		in, out, starts, ends = c.most, c.most, c.starts+1, c.ends+1
		f.spareState = ws.Take(tensor.F32, hi-lo, l.KeyDim, l.ValueDim)
		f.spareTransition = ws.Take(tensor.F32, hi-lo, l.KeyDim, l.KeyDim)
	}
	take := func(n int64) tensor.Tensor { return ws.Take(tensor.F32, n, hi-lo, l.KeyDim, l.ValueDim) }
	f.stateIn = take(in)
	if kind.backward {
		f.dstateOut, f.dstateIn = take(out), take(starts)
	} else {
		f.stateOut = take(ends)
	}
	f.gathered = ws.Take(tensor.F32, c.docs*l.ValueHeads*l.KeyDim*l.ValueDim)
}

// take carves [B, n, h, D]: heads before tokens in memory, or the other way round where the device
// likes that.
func (p *Plan) take(c *device.Allocator, dtype tensor.DType, batch, n, heads, dim int64) tensor.Tensor {
	if p.tokenMajor {
		return c.Take(dtype, batch, n, heads, dim)
	}
	return c.Take(dtype, heads, batch, n, dim).Permute(1, 2, 0, 3)
}

// heads views q|k|v [B, n, C] as heads of k keys and h values: [B, n, ·, D].
func (p *Plan) heads(x tensor.Tensor, k, h int64) (q, key, v tensor.Tensor) {
	l := p.layer
	part := func(at, heads, dim int64) tensor.Tensor {
		t := x.Slice(2, at, at+heads*dim)
		t.NDim, t.Shape[3], t.Stride[3] = 4, dim, t.Stride[2]
		t.Shape[2], t.Stride[2] = heads, dim*t.Stride[2]
		return t
	}
	return part(0, k, l.KeyDim), part(k*l.KeyDim, k, l.KeyDim), part(2*k*l.KeyDim, h, l.ValueDim)
}

// of is the tokens of a piece: [B, n, …] as [T, …].
func of(t tensor.Tensor, x *piece) tensor.Tensor {
	if t.IsNil() {
		return t
	}
	if x.row < 0 {
		return t.Flatten(0, 1)
	}
	return t.Select(0, x.row)
}
