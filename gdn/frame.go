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

// frame is the tensors of a call. Local ones have n tokens a sequence, h value and k key heads: all
// S tokens of this rank's heads with headsMethod, this rank's rows of all heads with stateMethod.
// With stateMethod, tensors that are written for the caller, or read and not kept, are the caller's
// own.
type frame struct {
	// Kept for the backward pass.
	x       tensor.Tensor // [B, n, C], of a layer: q|k|v before the convolution
	a, b    tensor.Tensor // [B, n, h], of a layer
	q, k    tensor.Tensor // [B, n, k, Dk]; of a layer they are views of y
	v       tensor.Tensor // [B, n, h, Dv]
	g, beta tensor.Tensor // [B, n, h]

	y         tensor.Tensor // [B, n, C], of a layer: q|k|v behind the convolution and SiLU
	out, dout tensor.Tensor // [B, n, h, Dv]
	dx, dy    tensor.Tensor // [B, n, C], of a layer: gradients of x and y, which may be one
	dq, dk    tensor.Tensor // [B, n, k, Dk], or h heads where each value head's own are sent
	dv        tensor.Tensor // [B, n, h, Dv]
	dg, dbeta tensor.Tensor // [B, n, h]
	da, db    tensor.Tensor // [B, n, h], of a layer

	docs    docFrame
	perHead perHeadFrame
	chain   chainFrame
}

// docFrame is the recurrent states of documents [docs, h, Dk, Dv] F32, as the device's calls want
// them, and the memory in which those of all ranks are gathered.
type docFrame struct{ in, out, din, dout, gathered tensor.Tensor }

// perHeadFrame is what headsMethod needs where the value heads of a key head are on several ranks.
type perHeadFrame struct {
	dq, dk    tensor.Tensor // [B, rows, Hv, Dk]: each value head's own, back at its tokens
	sum, term tensor.Tensor // [B, rows, Hk, Dk] F32, where dq and dk are BF16
}

// chainFrame is what stateMethod needs.
type chainFrame struct {
	// Kept for the backward pass: the rows before the first, of a layer [B, W−1, C]; the state
	// before the first local token of each sequence, if its document began before [B, Hv, Dk, Dv];
	// the transition matrix over the rank's tokens, if one document spans them all [B, Hv, Dk, Dk].
	before, state, transition tensor.Tensor

	dbefore                     tensor.Tensor // [B, W−1, C]
	own                         tensor.Tensor // [B, Hv, Dk, Dv]: what this rank sends
	incoming                    tensor.Tensor // [B, Hv, Dk, Dv]: the gradient behind its last token
	spareState, spareTransition tensor.Tensor // [Hv, Dk, Dv], [Hv, Dk, Dk]
}

// lay cuts up memory for a call, or counts it on allocators without memory. What is kept goes to
// keep, which may be ws itself.
func (p *Plan) lay(f *frame, c *cut, kind call, keep, ws *device.Allocator) {
	*f = frame{}
	l := p.layer
	lo, hi, keyLo, keyHi := p.Heads()
	batch, n, h, k := c.line.batch, c.n, hi-lo, keyHi-keyLo
	width := 2*k*l.KeyDim + h*l.ValueDim
	inputs := p.method.layInputs(kind, keep)
	if kind.layer {
		f.x, f.a, f.b = inputs.Take(l.DType, batch, n, width), inputs.Take(l.DType, batch, n, h), inputs.Take(l.DType, batch, n, h)
		f.y = ws.Take(l.DType, batch, n, width)
		f.q, f.k, f.v = p.heads(f.y, k, h)
		f.g, f.beta = ws.Take(tensor.F32, batch, n, h), ws.Take(tensor.F32, batch, n, h)
	} else {
		f.q, f.k = p.take(inputs, l.DType, batch, n, k, l.KeyDim), p.take(inputs, l.DType, batch, n, k, l.KeyDim)
		f.v = p.take(inputs, l.DType, batch, n, h, l.ValueDim)
		f.g, f.beta = p.take(inputs, tensor.F32, batch, n, h, 1).Select(3, 0), p.take(inputs, tensor.F32, batch, n, h, 1).Select(3, 0)
	}
	p.method.layForward(f, c, kind, keep, ws)
	if kind.backward {
		p.layBackward(f, c, kind, ws)
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
	p.method.layBackward(f, c, kind, ws)
}

// layStates allocates the states of documents where the caller's own memory does not serve.
func (p *Plan) layStates(f *frame, c *cut, kind call, ws *device.Allocator) {
	if p.size == 1 {
		return
	}
	l := p.layer
	lo, hi, _, _ := p.Heads()
	in, out, starts, ends := p.method.layDocs(f, c, ws)
	take := func(n int64) tensor.Tensor { return ws.Take(tensor.F32, n, hi-lo, l.KeyDim, l.ValueDim) }
	f.docs.in = take(in)
	if kind.backward {
		f.docs.dout, f.docs.din = take(out), take(starts)
	} else {
		f.docs.out = take(ends)
	}
	f.docs.gathered = ws.Take(tensor.F32, c.docs*l.ValueHeads*l.KeyDim*l.ValueDim)
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
