package gdn

import (
	"ulysses/device"
	"ulysses/tensor"
)

// callKind is what determines the memory and the communication of a call.
type callKind struct {
	layer, backward bool
	keep            bool // Saved is given
	withStates      bool // states of documents, or their gradients, are given
	recompute       bool
}

// documentStates are states [docs, ·, Dk, Dv] F32 before and after documents, and the gradients of
// the states after and before them. Each may be nil.
type documentStates struct{ in, out, dout, din tensor.Tensor }

func (x *documentStates) any() bool {
	return !x.in.IsNil() || !x.out.IsNil() || !x.dout.IsNil() || !x.din.IsNil()
}

// call is a call in progress. A plan has one, so that calls allocate nothing on the heap.
type call struct {
	callKind
	stream device.Stream
	layout *layout

	// of Saved and Workspace; without memory while sizes are computed
	saved, workspace device.Allocator
	scratch          tensor.Tensor // the rest of Workspace, used by one operation after the other
	buffers          buffers

	// the caller's
	args       Args
	grads      Grads
	layerArgs  LayerArgs
	layerGrads LayerGrads
	states     documentStates
}

// kept returns the allocator of tensors that the backward pass reads.
func (c *call) kept() *device.Allocator {
	if c.keep {
		return &c.saved
	}
	return &c.workspace
}

// out returns the caller's tensor for the output.
func (c *call) out() tensor.Tensor {
	if c.layer {
		return c.layerArgs.Out
	}
	return c.args.Out
}

// dout returns the caller's gradient of the output.
func (c *call) dout() tensor.Tensor {
	if c.layer {
		return c.layerGrads.DOut
	}
	return c.grads.DOut
}

// buffers are the tensors of a call on this rank. n is the number of tokens of a sequence, h and k
// are the numbers of value and key heads: with Heads all tokens and this rank's heads, with State
// this rank's tokens and all heads. With State, tensors that the call writes for the caller, or
// reads and does not keep, are the caller's own.
type buffers struct {
	// kept for the backward pass
	x       tensor.Tensor // [B, n, C], of a layer: q|k|v before the convolution
	a, b    tensor.Tensor // [B, n, h], of a layer
	q, k    tensor.Tensor // [B, n, k, Dk]; of a layer views of y
	v       tensor.Tensor // [B, n, h, Dv]; of a layer a view of y
	g, beta tensor.Tensor // [B, n, h] F32

	y         tensor.Tensor // [B, n, C], of a layer: q|k|v after the convolution and SiLU
	out, dout tensor.Tensor // [B, n, h, Dv]
	dx, dy    tensor.Tensor // [B, n, C], of a layer: gradients of x and y; may be the same tensor
	dq, dk    tensor.Tensor // [B, n, k, Dk], with perValueHead [B, n, h, Dk]
	dv        tensor.Tensor // [B, n, h, Dv]
	dg, dbeta tensor.Tensor // [B, n, h] F32
	da, db    tensor.Tensor // [B, n, h], of a layer

	// dq and dk have a head for each value head and are not summed over the value heads of a key
	// head
	perValueHead bool

	// [B, W−1, C], of a layer with State: the tokens before this rank's first, which the
	// convolution reads, and their gradients. halo is kept for the backward pass.
	halo, dhalo tensor.Tensor

	// of a layer with a gated norm, for the tokens of this rank: the rule's output and the inverse
	// of its RMS, kept for the backward pass, and the gradient of the rule's output
	mixed, dmixed tensor.Tensor // [B, n, Hv, Dv]
	rstd          tensor.Tensor // [B, n·Hv] F32

	docs     documentStates // [docs, h, Dk, Dv], arguments of the device's operations
	gathered tensor.Tensor  // flat F32: states of all documents of the batch
}

// localSizes are the sizes of the tensors in buffers.
type localSizes struct{ batch, tokens, values, keys, channels int64 }

func (p *base) localSizes(l *layout, h headRange) localSizes {
	return localSizes{l.shards.batch, l.tokens, h.values(), h.keys(),
		2*h.keys()*p.layer.KeyDim + h.values()*p.layer.ValueDim}
}

// allocateInputs allocates the inputs of the forward pass. inputs is the allocator of tensors that
// come from the caller.
func (p *base) allocateInputs(c *call, n localSizes, inputs *device.Allocator) {
	l, f, ws := &p.layer, &c.buffers, &c.workspace
	if c.layer {
		f.x = inputs.Take(l.DType, n.batch, n.tokens, n.channels)
		f.a, f.b = inputs.Take(l.DType, n.batch, n.tokens, n.values), inputs.Take(l.DType, n.batch, n.tokens, n.values)
		f.y = ws.Take(l.DType, n.batch, n.tokens, n.channels)
		f.q, f.k, f.v = p.splitHeads(f.y, n.keys, n.values)
		f.g, f.beta = ws.Take(tensor.F32, n.batch, n.tokens, n.values), ws.Take(tensor.F32, n.batch, n.tokens, n.values)
		return
	}
	f.q = p.allocateHeads(inputs, l.DType, n.batch, n.tokens, n.keys, l.KeyDim)
	f.k = p.allocateHeads(inputs, l.DType, n.batch, n.tokens, n.keys, l.KeyDim)
	f.v = p.allocateHeads(inputs, l.DType, n.batch, n.tokens, n.values, l.ValueDim)
	f.g, f.beta = p.allocateGate(inputs, n.batch, n.tokens, n.values),
		p.allocateGate(inputs, n.batch, n.tokens, n.values)
}

// allocateConvGrads allocates the gradients of a layer between the convolution and the rule.
func (p *base) allocateConvGrads(c *call, n localSizes) {
	f, ws := &c.buffers, &c.workspace
	f.dy = ws.Take(p.layer.DType, n.batch, n.tokens, n.channels)
	f.dq, f.dk, f.dv = p.splitHeads(f.dy, n.keys, n.values)
	f.dg, f.dbeta = ws.Take(tensor.F32, n.batch, n.tokens, n.values), ws.Take(tensor.F32, n.batch, n.tokens, n.values)
}

// allocateDocs allocates the states of documents. in and out are the largest numbers of documents
// of a device call, starts and ends the numbers of documents whose states before and after them
// this rank writes.
func (p *base) allocateDocs(c *call, heads, in, out, starts, ends int64) {
	l, f, ws := &p.layer, &c.buffers, &c.workspace
	states := func(docs int64) tensor.Tensor { return ws.Take(tensor.F32, docs, heads, l.KeyDim, l.ValueDim) }
	f.docs.in = states(in)
	if c.backward {
		f.docs.dout, f.docs.din = states(out), states(starts)
	} else {
		f.docs.out = states(ends)
	}
	f.gathered = ws.Take(tensor.F32, c.layout.docs*l.ValueHeads*l.KeyDim*l.ValueDim)
}
