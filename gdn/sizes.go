package gdn

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// Sizes returns the bytes that calls of the core with this batch need, with or without states of
// documents.
func (p *Plan) Sizes(b *sp.Batch) Sizes { return p.sizes(p.layoutOf(b), callKind{withStates: true}) }

// SizesWithout is Sizes for calls without StateIn, StateOut, DStateOut and DStateIn.
func (p *Plan) SizesWithout(b *sp.Batch) Sizes { return p.sizes(p.layoutOf(b), callKind{}) }

// LayerSizes returns the bytes that calls of the layer with this batch need.
func (p *Plan) LayerSizes(b *sp.Batch) Sizes { return p.sizes(p.layoutOf(b), callKind{layer: true}) }

// MaxSizes returns the bytes that calls of the core need with any batch of at most batch sequences
// of seq tokens, sharded evenly, with any documents. It is for memory that is allocated before the
// batches are known. With states, calls may have StateIn, StateOut, DStateOut and DStateIn of one
// document per sequence.
func (p *Plan) MaxSizes(batch, seq int64, states bool) (Sizes, error) {
	return p.maxSizes(batch, seq, callKind{withStates: states})
}

// MaxLayerSizes is MaxSizes for calls of the layer.
func (p *Plan) MaxLayerSizes(batch, seq int64) (Sizes, error) {
	return p.maxSizes(batch, seq, callKind{layer: true})
}

func (p *Plan) maxSizes(batch, seq int64, kind callKind) (Sizes, error) {
	l, err := p.largestLayout(batch, seq)
	if err != nil {
		return Sizes{}, err
	}
	return p.sizes(l, kind), nil
}

// largestLayout is the layout that needs the most memory of all batches of these sizes: a document
// over all ranks has the most positions between which states are sent. Without cu, the device
// returns sizes for documents of any lengths.
func (p *Plan) largestLayout(batch, seq int64) (*layout, error) {
	b, err := sp.SketchBatch(int(p.rank), int(p.size), sp.BatchSpec{Batch: batch, Seq: seq})
	if err != nil {
		return nil, err
	}
	l := new(layout)
	p.fillLayout(l, b)
	for i := range l.segments {
		l.segments[i].cu = nil
	}
	return l, nil
}

func (p *Plan) sizes(l *layout, kind callKind) (size Sizes) {
	kind.keep = !p.layer.NoBackward
	saved, workspace := p.callBytes(l, kind)
	size = Sizes{Saved: saved, Workspace: workspace}
	kind.keep = false // a forward pass without Saved
	_, workspace = p.callBytes(l, kind)
	size.Workspace = max(size.Workspace, workspace)
	if p.layer.NoBackward {
		return Sizes{Workspace: size.Workspace}
	}
	kind.keep, kind.backward = true, true
	_, workspace = p.callBytes(l, kind)
	size.Workspace = max(size.Workspace, workspace)
	// A rank without heads or tokens has Saved as well: all ranks agree that a backward call
	// follows.
	size.Saved = max(size.Saved, p.align)
	return size
}

// callBytes returns the bytes that one call needs.
func (p *Plan) callBytes(l *layout, kind callKind) (saved, workspace int64) {
	c := &p.call
	p.allocate(l, kind, tensor.Tensor{}, tensor.Tensor{})
	var most device.DeltaSizes
	for i := range l.segments {
		size := p.ruleSizes(&l.segments[i])
		if kind.keep {
			c.saved.Take(tensor.U8, size.Saved)
		}
		most.Forward, most.Backward, most.State = max(most.Forward, size.Forward), max(most.Backward, size.Backward),
			max(most.State, size.State)
	}
	scratch := most.Forward
	if kind.backward {
		scratch = most.Backward
	}
	if p.size > 1 {
		scratch = max(scratch, p.method.scratchBytes(l, kind, most))
	}
	return c.saved.Used, c.workspace.Padded() + scratch
}

// allocate allocates the buffers of a call in saved and workspace, or without memory computes their
// sizes.
func (p *Plan) allocate(l *layout, kind callKind, saved, workspace tensor.Tensor) {
	c := &p.call
	c.callKind, c.layout, c.buffers = kind, l, buffers{}
	c.saved = device.Allocator{Mem: saved, Align: p.align}
	c.workspace = device.Allocator{Mem: workspace, Align: p.align}
	if p.hasNorm(kind) {
		p.allocateNorm(c)
	}
	p.method.allocate(c)
}

// ruleSizes returns the sizes of the device's operation on a segment, with states before and after
// the documents. They are the same for all calls, because these share Saved.
func (p *Plan) ruleSizes(x *segment) device.DeltaSizes {
	p.setRuleArgs(x)
	v := p.call.buffers.v
	states := tensor.Of(nil, tensor.F32, x.docs, v.Shape[2], p.layer.KeyDim, p.layer.ValueDim)
	states.Where = v.Where
	p.delta.StateIn, p.delta.StateOut = states, states
	return p.dev.GatedDeltaSizes(&p.delta)
}

// SetPanel changes Layer.Panel for the following calls and for Sizes. A backward call needs the
// panel of its forward call.
func (p *Plan) SetPanel(tokens int64) { p.layer.Panel = tokens }

// setRuleArgs sets the arguments of the device's operation on a segment, without states, Saved and
// Workspace. Out stands for a tensor of its shape.
func (p *Plan) setRuleArgs(x *segment) {
	l, f := &p.layer, &p.call.buffers
	p.delta = device.GatedDelta{Q: x.view(f.q), K: x.view(f.k), V: x.view(f.v), Out: x.view(f.v), G: x.view(f.g),
		Beta: x.view(f.beta), Cu: x.cu, KeyHead: p.keyHead, L2Norm: l.L2Norm, Scale: l.Scale, Chunk: l.Chunk,
		Panel:         l.Panel,
		Deterministic: l.Deterministic}
}

// Reserve makes the communicator allocate, before the first step, the memory that it needs for
// batches of at most batch sequences of seq tokens. Collective.
func (p *Plan) Reserve(batch, seq int64) error {
	l, err := p.largestLayout(batch, seq)
	if err != nil {
		return err
	}
	var most int64
	for _, kind := range []callKind{{}, {backward: true}, {layer: true}, {layer: true, backward: true}} {
		most = max(most, p.method.scratchBytes(l, kind, device.DeltaSizes{}))
	}
	return comm.Reserve(p.comm, 1, most)
}
