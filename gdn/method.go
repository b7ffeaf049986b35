package gdn

import (
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// method is one way to run the rule over ranks: headsMethod re-shards tokens to heads, stateMethod
// leaves tokens where they are and passes recurrent states on. NewPlan chooses one. The rest of the
// package does not ask which one it is.
type method interface {
	// headRange returns the value heads [lo, hi) that a rank computes and the key heads
	// [keyLo, keyHi) under them.
	headRange(rank int64) (lo, hi, keyLo, keyHi int64)
	// fillCut completes the cut of a batch: the tokens and documents of the device's calls.
	fillCut(c *cut)

	// layInputs returns the allocator of the tensors that come from the caller.
	layInputs(kind call, keep *device.Allocator) *device.Allocator
	// layForward, layBackward and layDocs allocate the method's own tensors. layDocs returns how
	// many documents the states before and behind a device call, and those that the calls write
	// before and behind documents, belong to.
	layForward(f *frame, c *cut, kind call, keep, ws *device.Allocator)
	layBackward(f *frame, c *cut, kind call, ws *device.Allocator)
	layDocs(f *frame, c *cut, ws *device.Allocator) (in, out, starts, ends int64)
	// scratch returns the bytes of workspace that the communication of a call needs, and the
	// device's operations beside the rule itself.
	scratch(c *cut, kind call, most device.DeltaSizes) int64

	// sent returns the bytes that a rank sends in one call, recomputeSent those of this rank in one
	// Recompute, and docSent those of this rank for each document whose state it gathers.
	sent(c *cut, rank int64, kind call) int64
	recomputeSent(b *sp.Batch) int64
	docSent(c *cut) int64
	// describe returns the method's part of Plan.String, and describeSent the bytes that it sends
	// in all, where the tokens of a batch are not known.
	describe() string
	describeSent(all int64) string

	// enter brings the arguments of a forward call into the frame, and enterGrads those of a
	// backward call. leaveGrads brings the gradients of a backward call to the caller. Collective.
	enter(s device.Stream, c *cut, f *frame, a *Args, kind call, scratch tensor.Tensor) error
	enterGrads(s device.Stream, c *cut, f *frame, g *Grads, scratch tensor.Tensor) error
	leaveGrads(s device.Stream, c *cut, f *frame, g *Grads, scratch tensor.Tensor) error
	// enterLayer, enterLayerGrads and leaveLayerGrads are the same for calls of a layer.
	enterLayer(s device.Stream, c *cut, f *frame, a *LayerArgs, kind call, scratch tensor.Tensor) error
	enterLayerGrads(s device.Stream, c *cut, f *frame, g *LayerGrads, scratch tensor.Tensor) error
	leaveLayerGrads(s device.Stream, c *cut, f *frame, g *LayerGrads, scratch tensor.Tensor) error

	// pass brings the recurrent states of documents that began on another rank, and passGrad the
	// gradients of those that go on there. Collective with stateMethod; headsMethod sends nothing.
	pass(s device.Stream, c *cut, f *frame, scratch tensor.Tensor, x *states) error
	passGrad(s device.Stream, c *cut, f *frame, scratch tensor.Tensor, x *states) error
	// beginOutput prepares f.out and the caller's states for the device, and endOutput brings the
	// output to out.
	beginOutput(s device.Stream, f *frame, out tensor.Tensor, x *states) error
	endOutput(s device.Stream, c *cut, f *frame, scratch, out tensor.Tensor) error
	// perHead reports whether the core's dq and dk are those of each value head.
	perHead() bool

	// stateBefore returns the states before a piece's documents, and gradBehind the gradients of
	// those behind them.
	stateBefore(s device.Stream, f *frame, x *piece, in tensor.Tensor) (tensor.Tensor, error)
	gradBehind(s device.Stream, f *frame, x *piece, dout tensor.Tensor) (tensor.Tensor, error)
	// stateBehind returns the memory for the states behind a piece's documents, and gradBefore that
	// for the gradients of those before them. at counts the documents that are written already.
	stateBehind(f *frame, x *piece, out tensor.Tensor, at *int64) tensor.Tensor
	gradBefore(f *frame, x *piece, din tensor.Tensor, at *int64) tensor.Tensor
	// docElements fills the elements of states that each rank gathers and returns this rank's
	// states. scatterDocs copies gathered states to their documents.
	docElements(c *cut, rows []int64, local tensor.Tensor, starts bool) tensor.Tensor
	scatterDocs(s device.Stream, c *cut, gathered, to tensor.Tensor, starts bool) error
}
