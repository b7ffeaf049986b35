package gdn

import "ulysses/tensor"

// Args are the tensors of a call of the core. n is the number of tokens of a sequence on this rank,
// B the number of sequences, Hk and Hv the numbers of key and value heads of the layer. Q, K, V and
// Out have the layer's type; gates and states are F32. Forward reads Q, K, V, G, Beta and StateIn,
// and writes Out, StateOut and Saved. Backward reads only Saved and StateIn. The last axis of Q, K,
// V and Out is dense, all other strides are arbitrary. The memory belongs to the caller.
type Args struct {
	Q, K    tensor.Tensor // [B, n, Hk, Dk]
	V, Out  tensor.Tensor // [B, n, Hv, Dv]
	G, Beta tensor.Tensor // [B, n, Hv] F32; G is the natural logarithm of the decay, at most 0

	// Optional states before the first token of each document (nil = zero) and after the last
	// token. Dense, with the states of all documents of the batch on every rank. StateOut costs the
	// communication that StateBytesSent returns.
	StateIn, StateOut tensor.Tensor // [docs, Hv, Dk, Dv] F32

	// U8, Sizes.Saved bytes, aligned to Info.Align; nil = Backward will not be called
	Saved tensor.Tensor
	// U8, Sizes.Workspace bytes, aligned to Info.Align; its content has no meaning between calls
	Workspace tensor.Tensor
}

// Grads are the gradients of the core. DOut and DStateOut are read, the others are written. Strides
// are as in Args.
type Grads struct {
	DOut      tensor.Tensor // [B, n, Hv, Dv]
	DStateOut tensor.Tensor // [docs, Hv, Dk, Dv] F32, optional: nil = zero. Equal on all ranks
	DQ, DK    tensor.Tensor // [B, n, Hk, Dk]
	DV        tensor.Tensor // [B, n, Hv, Dv]
	DG, DBeta tensor.Tensor // [B, n, Hv] F32
	// [docs, Hv, Dk, Dv] F32, optional, only with StateIn: the gradients of all documents' states
	// on every rank. It costs the communication that StateBytesSent returns.
	DStateIn tensor.Tensor
}

// LayerArgs are the tensors of a call of a layer: the convolution and SiLU of q|k|v, the gates, the
// rule, and with Layer.GatedNorm the gated norm. All have the layer's type, but ALog and DtBias may
// be F32. LayerForward reads QKV, A, B, Z and the weights. LayerBackward reads only Saved, Z and
// the weights. The last axis of activations is dense, their other strides are arbitrary. Weights
// are dense.
type LayerArgs struct {
	QKV tensor.Tensor // [B, n, 2·Hk·Dk + Hv·Dv]: q|k|v before the convolution
	// [B, n, Hv]: g = −exp(ALog)·softplus(a + DtBias), beta = sigmoid(b)
	A, B         tensor.Tensor
	Conv         tensor.Tensor // [2·Hk·Dk + Hv·Dv, ConvWidth]
	ALog, DtBias tensor.Tensor // [Hv]
	Out          tensor.Tensor // [B, n, Hv, Dv]

	// only with Layer.GatedNorm: Out = o·rsqrt(mean(o²) + Eps)·Norm·silu(Z), where o is the rule's
	// output and the mean is over the features of a head
	Z    tensor.Tensor // [B, n, Hv, Dv]
	Norm tensor.Tensor // [Dv]
	Eps  float64

	// U8, LayerSizes.Saved bytes, aligned to Info.Align; nil = LayerBackward will not be called
	Saved tensor.Tensor
	// U8, LayerSizes.Workspace bytes, aligned to Info.Align
	Workspace tensor.Tensor
}

// LayerGrads are the gradients of a layer. DOut is read. Gradients of activations are written.
// Gradients of weights are added to: the gradient of a weight is the sum over the ranks.
type LayerGrads struct {
	DOut           tensor.Tensor // [B, n, Hv, Dv]
	DQKV           tensor.Tensor // [B, n, 2·Hk·Dk + Hv·Dv]
	DA, DB         tensor.Tensor // [B, n, Hv]
	DConv          tensor.Tensor // [2·Hk·Dk + Hv·Dv, ConvWidth] F32
	DALog, DDtBias tensor.Tensor // [Hv] F32
	DZ             tensor.Tensor // [B, n, Hv, Dv], only with Layer.GatedNorm
	DNorm          tensor.Tensor // [Dv] F32, only with Layer.GatedNorm
}

// Sizes are the bytes of Saved and of Workspace.
type Sizes struct{ Saved, Workspace int64 }
