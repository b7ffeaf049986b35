package gdn

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/sp"
)

func unbuilt(op string) error { return status.Errorf(status.Unsupported, "%s is not built", op) }

// Forward computes Out, and StateOut if given, of the batch. Collective. It allocates nothing.
func (p *Plan) Forward(s device.Stream, b *sp.Batch, a *Args) error { return unbuilt("gdn.Forward") }

// Backward computes the gradients from DOut, DStateOut and what Forward left in Saved. Collective. It allocates nothing.
func (p *Plan) Backward(s device.Stream, b *sp.Batch, a *Args, g *Grads) error {
	return unbuilt("gdn.Backward")
}

// Recompute writes Out again from Saved and StateIn. It is collective with Heads; with State it sends nothing.
func (p *Plan) Recompute(s device.Stream, b *sp.Batch, a *Args) error {
	return unbuilt("gdn.Recompute")
}

// LayerForward is Forward with the convolution and the gates before it. Collective.
func (p *Plan) LayerForward(s device.Stream, b *sp.Batch, a *LayerArgs) error {
	return unbuilt("gdn.LayerForward")
}

// LayerBackward is its derivative. Collective.
func (p *Plan) LayerBackward(s device.Stream, b *sp.Batch, a *LayerArgs, g *LayerGrads) error {
	return unbuilt("gdn.LayerBackward")
}

// LayerRecompute writes Out again from Saved and the weights. It is collective with Heads; with State it sends nothing.
func (p *Plan) LayerRecompute(s device.Stream, b *sp.Batch, a *LayerArgs) error {
	return unbuilt("gdn.LayerRecompute")
}

// Sizes is the bytes that calls of the core with this batch need, whether states of documents come and go or not.
func (p *Plan) Sizes(b *sp.Batch) Sizes { return Sizes{} }

// MaxSizes is the bytes that calls of the core without StateIn, StateOut, DStateOut and DStateIn need with any batch of at most these extents cut
// evenly, whatever its documents: for memory that is planned before the batches are known.
func (p *Plan) MaxSizes(batch, seq int64) (Sizes, error) { return Sizes{}, unbuilt("gdn.MaxSizes") }

// LayerSizes and MaxLayerSizes are the same for LayerForward, LayerBackward and LayerRecompute.
func (p *Plan) LayerSizes(b *sp.Batch) Sizes { return Sizes{} }

// MaxLayerSizes is described at LayerSizes.
func (p *Plan) MaxLayerSizes(batch, seq int64) (Sizes, error) {
	return Sizes{}, unbuilt("gdn.MaxLayerSizes")
}

// BytesSent is what this rank sends to others in one Forward and one Backward, LayerBytesSent in one LayerForward and one LayerBackward.
func (p *Plan) BytesSent(b *sp.Batch) (forward, backward int64) { return 0, 0 }

// LayerBytesSent is described at BytesSent.
func (p *Plan) LayerBytesSent(b *sp.Batch) (forward, backward int64) { return 0, 0 }

// StateBytesSent is what this rank sends on top in a Forward that is asked for StateOut, and in a Backward that is asked for DStateIn.
func (p *Plan) StateBytesSent(b *sp.Batch) (forward, backward int64) { return 0, 0 }

// RecomputeBytesSent is what this rank sends in one Recompute or LayerRecompute: nothing with State.
func (p *Plan) RecomputeBytesSent(b *sp.Batch) int64 { return 0 }

// Reserve has the communicator make, before the first step, what it needs beside tensors for batches of at most these extents.
func (p *Plan) Reserve(batch, seq int64) error { return unbuilt("gdn.Reserve") }
