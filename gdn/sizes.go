package gdn

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// Sizes is the bytes that calls of the core with this batch need, whether states of documents come
// and go or not.
func (p *Plan) Sizes(b *sp.Batch) Sizes { return p.sizes(p.cutOf(b), call{states: true}) }

// SizesWithout is Sizes for calls without StateIn, StateOut, DStateOut and DStateIn.
func (p *Plan) SizesWithout(b *sp.Batch) Sizes { return p.sizes(p.cutOf(b), call{}) }

// LayerSizes is the bytes that calls of the layer with this batch need.
func (p *Plan) LayerSizes(b *sp.Batch) Sizes { return p.sizes(p.cutOf(b), call{layer: true}) }

// MaxSizes is the bytes that calls of the core need with any batch of at most these extents cut
// evenly, whatever its documents: for memory that is planned before the batches are known. With
// states, calls may bring StateIn, StateOut, DStateOut and DStateIn of one document a sequence.
func (p *Plan) MaxSizes(batch, seq int64, states bool) (Sizes, error) {
	return p.maxSizes(batch, seq, call{states: states})
}

// MaxLayerSizes is the same for calls of the layer.
func (p *Plan) MaxLayerSizes(batch, seq int64) (Sizes, error) {
	return p.maxSizes(batch, seq, call{layer: true})
}

func (p *Plan) maxSizes(batch, seq int64, kind call) (Sizes, error) {
	c, err := p.anyCut(batch, seq)
	if err != nil {
		return Sizes{}, err
	}
	return p.sizes(c, kind), nil
}

// anyCut stands for all batches of these extents: a document over all ranks has the longest way for
// its states, and needs the most memory for them; how long documents are for the device is left
// open.
func (p *Plan) anyCut(batch, seq int64) (*cut, error) {
	b, err := sp.SketchBatch(int(p.rank), int(p.size), sp.BatchSpec{Batch: batch, Seq: seq})
	if err != nil {
		return nil, err
	}
	c := new(cut)
	p.fillCut(c, b)
	for i := range c.pieces {
		c.pieces[i].cu = nil
	}
	return c, nil
}

func (p *Plan) sizes(c *cut, kind call) (size Sizes) {
	kind.keep = !p.layer.NoBackward
	saved, workspace := p.need(c, kind)
	size = Sizes{Saved: saved, Workspace: workspace}
	kind.keep = false // a forward pass without Saved
	_, workspace = p.need(c, kind)
	size.Workspace = max(size.Workspace, workspace)
	if p.layer.NoBackward {
		return Sizes{Workspace: size.Workspace}
	}
	kind.keep, kind.backward = true, true
	_, workspace = p.need(c, kind)
	size.Workspace = max(size.Workspace, workspace)
	// of a rank without heads or rows too: no memory means no backward, on all ranks alike
	size.Saved = max(size.Saved, p.align)
	return size
}

// need is the bytes of one call.
func (p *Plan) need(c *cut, kind call) (saved, workspace int64) {
	p.kept, p.work = device.Allocator{Align: p.align}, device.Allocator{Align: p.align}
	keep, ws, f := &p.kept, &p.work, &p.sketch
	to := keep
	if !kind.keep {
		to = ws
	}
	p.lay(f, c, kind, to, ws)
	var most device.DeltaSizes
	for i := range c.pieces {
		size := p.deltaSizes(f, &c.pieces[i])
		if kind.keep {
			keep.Take(tensor.U8, size.Saved)
		}
		most.Forward, most.Backward, most.State = max(most.Forward, size.Forward), max(most.Backward, size.Backward), max(most.State, size.State)
	}
	scratch := most.Forward
	if kind.backward {
		scratch = most.Backward
	}
	if p.size > 1 {
		scratch = max(scratch, p.method.scratch(c, kind, most))
	}
	return keep.Used, ws.Padded() + scratch
}

// deltaSizes is what the device needs for a piece, whatever states come and go: the same in all
// calls, as they share Saved.
func (p *Plan) deltaSizes(f *frame, x *piece) device.DeltaSizes {
	p.arguments(f, x)
	states := tensor.Of(nil, tensor.F32, x.docs, f.v.Shape[2], p.layer.KeyDim, p.layer.ValueDim)
	states.Where = f.v.Where
	p.delta.StateIn, p.delta.StateOut = states, states
	return p.dev.GatedDeltaSizes(&p.delta)
}

// channels is the features of q|k|v.
func (l Layer) channels() int64 { return 2*l.KeyHeads*l.KeyDim + l.ValueHeads*l.ValueDim }

// Reserve has the communicator make, before the first step, what it needs beside tensors for
// batches of at most these extents.
func (p *Plan) Reserve(batch, seq int64) error {
	c, err := p.anyCut(batch, seq)
	if err != nil {
		return err
	}
	var most int64
	for _, kind := range []call{{}, {backward: true}, {layer: true}, {layer: true, backward: true}} {
		most = max(most, p.method.scratch(c, kind, device.DeltaSizes{}))
	}
	return comm.Reserve(p.comm, 1, most)
}
