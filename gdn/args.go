package gdn

import "ulysses/tensor"

// Args are the tensors of one call of the core. q, k, v and out have the layer's type; decays,
// betas and states are F32. Forward reads Q, K, V, G, Beta and StateIn and writes Out, StateOut and
// Saved; Backward reads Saved and StateIn, and looks at no other. Strides are free but for a dense
// last axis; G and Beta have any.
type Args struct {
	Q, K    tensor.Tensor // [B, rows, Hk, Dk]
	V, Out  tensor.Tensor // [B, rows, Hv, Dv]
	G, Beta tensor.Tensor // [B, rows, Hv] F32; g is the natural logarithm of the decay, at most 0

	// States are whole on every rank, dense, one for each document of the batch, and optional:
	// before its first token (nil = zero), and behind its last one. StateOut costs StateBytesSent.
	StateIn, StateOut tensor.Tensor // [docs, Hv, Dk, Dv] F32

	// U8, Sizes.Saved bytes, aligned to Info.Align; nil = there will be no Backward
	Saved tensor.Tensor
	// U8, Sizes.Workspace bytes, aligned to Info.Align; its contents are of no use between calls
	Workspace tensor.Tensor
}

// Grads are the gradients of the core: DOut and DStateOut are read, the others are written. Strides
// as those of Args.
type Grads struct {
	DOut      tensor.Tensor // [B, rows, Hv, Dv]
	DStateOut tensor.Tensor // [docs, Hv, Dk, Dv] F32, optional: nil = zero. The same on every rank
	DQ, DK    tensor.Tensor // [B, rows, Hk, Dk]
	DV        tensor.Tensor // [B, rows, Hv, Dv]
	DG, DBeta tensor.Tensor // [B, rows, Hv] F32
	// [docs, Hv, Dk, Dv] F32, optional, whole on every rank; only with StateIn. It costs
	// StateBytesSent
	DStateIn tensor.Tensor
}

// LayerArgs are the tensors of one call of a layer: convolution and SiLU of q|k|v, gates, and the
// rule; all of the layer's type, but ALog and DtBias may be F32. LayerForward reads QKV, A, B and
// the weights; LayerBackward reads Saved and the weights. Activations have free strides but for a
// dense last axis, weights are dense.
type LayerArgs struct {
	QKV tensor.Tensor // [B, rows, 2·Hk·Dk + Hv·Dv]: q|k|v before the convolution
	// [B, rows, Hv]: g = −exp(ALog)·softplus(a + DtBias), beta = sigmoid(b)
	A, B         tensor.Tensor
	Conv         tensor.Tensor // [2·Hk·Dk + Hv·Dv, ConvWidth]
	ALog, DtBias tensor.Tensor // [Hv]
	Out          tensor.Tensor // [B, rows, Hv, Dv]

	// U8, LayerSizes.Saved bytes, aligned to Info.Align; nil = there will be no LayerBackward
	Saved     tensor.Tensor
	Workspace tensor.Tensor // U8, LayerSizes.Workspace bytes, likewise
}

// LayerGrads are the gradients of a layer: DOut is read; those of activations are written; those of
// weights are added to, and are this rank's part: their sum over the ranks is the gradient.
type LayerGrads struct {
	DOut           tensor.Tensor // [B, rows, Hv, Dv]
	DQKV           tensor.Tensor // [B, rows, 2·Hk·Dk + Hv·Dv]
	DA, DB         tensor.Tensor // [B, rows, Hv]
	DConv          tensor.Tensor // [2·Hk·Dk + Hv·Dv, ConvWidth] F32
	DALog, DDtBias tensor.Tensor // [Hv] F32
}

// Sizes are bytes of Saved and Workspace.
type Sizes struct{ Saved, Workspace int64 }
