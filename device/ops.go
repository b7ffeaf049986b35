package device

import "ulysses/tensor"

// Ops are the operations. T is tokens (rows), N features. Gradients of weights are always added to
// what is there, gradients of activations are written unless an Add flag says otherwise.
//
// Activations, their gradients and the weights they meet have one type in a call, the compute type:
// F32, or BF16 where Info.Compute has it. Sums are in F32 all the same. F32 whatever the compute
// type are: statistics (LSE, RStd, NLL), tables (Cos, Sin, Freq), logits, gradients of weights (DW,
// DTable, a ColumnSum's dst) and what the optimizer holds. C of a Gemm is either.
//
// Denormals, in arguments and results, may count as zero, but for Copy, Fill, Add, Scale and
// embeddings.
type Ops interface {
	// Copy writes src into dst of the same shape: any strides, any axes up to tensor.MaxDims; types
	// may differ (cast).
	Copy(s Stream, dst, src tensor.Tensor) error
	// Fill writes value into every element of dst, strides allowed.
	Fill(s Stream, dst tensor.Tensor, value float64) error
	// Add writes a + b into dst (same shape, last axis dense); dst may be a or b.
	Add(s Stream, dst, a, b tensor.Tensor) error
	// Scale multiplies x (dense) by f in place.
	Scale(s Stream, x tensor.Tensor, f float64) error
	// ColumnSum adds the sum over rows of x [T, N] to dst [N] (F32): the gradient of a bias.
	ColumnSum(s Stream, dst, x tensor.Tensor) error
	// Sum writes Σx into out (F64, one element); SumSquares adds Σx² to out. x is dense F32; the
	// sums are in float64.
	Sum(s Stream, out, x tensor.Tensor) error
	SumSquares(s Stream, out, x tensor.Tensor) error

	Gemm(s Stream, a *Gemm) error

	RMSNormForward(s Stream, a *RMSNorm) error
	RMSNormBackward(s Stream, a *RMSNormGrad) error
	RopeTable(s Stream, a *RopeTable) error
	Rope(s Stream, a *Rope) error
	SwiGLUForward(s Stream, a *SwiGLU) error
	SwiGLUBackward(s Stream, a *SwiGLUGrad) error
	EmbeddingForward(s Stream, a *Embedding) error
	EmbeddingBackward(s Stream, a *EmbeddingGrad) error
	CrossEntropy(s Stream, a *CrossEntropy) error

	// AttentionWorkspace is the bytes of Attention.Workspace for a call; with CuQ nil, a bound for
	// any documents of these lengths.
	AttentionWorkspace(a *Attention, backward bool) int64
	AttentionForward(s Stream, a *Attention) error
	AttentionBackward(s Stream, a *AttentionGrad) error

	AdamW(s Stream, a *AdamW) error
	SGD(s Stream, a *SGD) error

	DeltaOps
}

// The arguments of the methods of Ops that take them one by one.
type (
	Copy struct {
		Dst tensor.Tensor `op:"out,host"`
		Src tensor.Tensor `op:"in,host"`
	}
	Fill struct {
		Dst   tensor.Tensor `op:"out"`
		Value float64
	}
	Add struct {
		Dst  tensor.Tensor `op:"out"`
		A, B tensor.Tensor `op:"in"`
	}
	Scale struct {
		X tensor.Tensor `op:"in,out"`
		F float64
	}
	ColumnSum struct {
		Dst tensor.Tensor `op:"add"`
		X   tensor.Tensor `op:"in"`
	}
	Sum struct {
		Out tensor.Tensor `op:"out"`
		X   tensor.Tensor `op:"in"`
	}
	SumSquares struct {
		Out tensor.Tensor `op:"add"`
		X   tensor.Tensor `op:"in"`
	}
)

// Gemm is C[M, N] = A[M, K]·B[K, N] (+ Bias) (+ C). A and B may be transposed views: one of their
// strides is 1. C's last axis is dense. Where C is BF16, the sum over K, addend and all, is rounded
// once.
type Gemm struct {
	A, B tensor.Tensor `op:"in"` // of the compute type
	// of the compute type or F32
	C tensor.Tensor `op:"out,in=Accumulate"`
	// [N], of B's type; not together with Accumulate
	Bias       tensor.Tensor `op:"in,optional"`
	Accumulate bool          // add to C
}

// RMSNorm is y = x · rsqrt(mean(x²) + eps) · (w + Centre) over the last axis (Zhang & Sennrich
// 2019). Leading axes may be strided: [T, N] rows or [T, H, D] heads.
type RMSNorm struct {
	X tensor.Tensor `op:"in"`  // [..., N]
	W tensor.Tensor `op:"in"`  // [N]
	Y tensor.Tensor `op:"out"` // [..., N]; may be X
	// [rows] dense, rows = product of the leading axes: saved for backward
	RStd tensor.Tensor `op:"out"`
	Eps  float64
	// 0, or 1 for weights that are stored as their distance from 1; the sum is taken in F32
	Centre float64
}

// RMSNormGrad is its derivative: dx is written, or added to with AddDX (the residual path); dw is
// added to.
type RMSNormGrad struct {
	X, W, RStd, DY tensor.Tensor `op:"in"`
	DX             tensor.Tensor `op:"out,in=AddDX"` // may be DY
	DW             tensor.Tensor `op:"add"`
	AddDX          bool
	Centre         float64
}

// RopeTable writes cos and sin [T, R/2] of positions[t]·freq[i], the angle in float64, times Scale
// (1 when 0).
type RopeTable struct {
	Positions tensor.Tensor `op:"in"`  // [T] I32
	Freq      tensor.Tensor `op:"in"`  // [R/2] F32
	Cos, Sin  tensor.Tensor `op:"out"` // [T, R/2]
	Scale     float64
}

// Rope rotates the first R features of each head by the table, pairing feature i with i + R/2 (Su
// et al. 2021, in the layout of Hugging Face); the rest is copied. Inverse is the transposed
// rotation, its derivative. y may be x.
type Rope struct {
	X        tensor.Tensor `op:"in"`  // [T, H, D], last axis dense
	Y        tensor.Tensor `op:"out"` // [T, H, D], last axis dense
	Cos, Sin tensor.Tensor `op:"in"`  // [T, R/2], R <= D
	Inverse  bool

	// With W, x is first what RMSNorm makes of it, rounded to its type (Qwen3's normalization of
	// queries and keys): not with Inverse.
	W      tensor.Tensor `op:"in,optional"`  // [D]
	RStd   tensor.Tensor `op:"out,optional"` // [T, H] F32, last axis dense: as RMSNorm saves it
	Eps    float64
	Centre float64
}

// SwiGLU is y = silu(gate)·up (Shazeer 2020). Rows may be strided, the last axis is dense.
type SwiGLU struct {
	Gate, Up tensor.Tensor `op:"in"`  // [T, F]
	Y        tensor.Tensor `op:"out"` // [T, F]
}

// SwiGLUGrad is its derivative; dgate, dup may be gate, up.
type SwiGLUGrad struct {
	Gate, Up   tensor.Tensor `op:"in"`
	DY         tensor.Tensor `op:"in,out=Restore"`
	DGate, DUp tensor.Tensor `op:"out"`
	// DY becomes y: a layer that did not keep it needs it again, for a gradient of weights
	Restore bool
}

// Embedding is y[t] = table[ids[t]]. Ids are checked by the data reader; one out of range is an
// error of kind Internal.
type Embedding struct {
	Table tensor.Tensor `op:"in"`  // [V, N]
	IDs   tensor.Tensor `op:"in"`  // [T] I32
	Y     tensor.Tensor `op:"out"` // [T, N]
}

// EmbeddingGrad adds dy[t] to dtable[ids[t]], in the order of t.
type EmbeddingGrad struct {
	IDs, DY tensor.Tensor `op:"in"`
	DTable  tensor.Tensor `op:"add"`
}

// CrossEntropy is, per row, nll = logsumexp(logits) - logits[target], in f32, and its gradient
// (softmax - onehot)·GradScale, which may overwrite the logits. A target of -100 gives nll 0 and
// gradient 0. DLogits nil = forward only.
type CrossEntropy struct {
	Logits  tensor.Tensor `op:"in"`  // [T, V] F32, last axis dense
	Targets tensor.Tensor `op:"in"`  // [T] I32
	NLL     tensor.Tensor `op:"out"` // [T] F32
	// [T, V] of the compute type; F32 may be Logits
	DLogits   tensor.Tensor `op:"out,optional"`
	GradScale float64
}

// Attention is softmax(scale·q·kᵀ)·v for packed documents, without an S×S matrix (Dao 2023).
//
// The token axis of queries and of keys is cut into documents by CuQ and CuK (host memory, n+1
// entries from 0 to T, not decreasing); document i's queries see document i's keys alone. Causal is
// aligned bottom-right: query i of a document with sq queries and sk keys sees keys j <= i + sk -
// sq. A window [l, r] leaves keys i+sk-sq-l <= j <= i+sk-sq+r; masks AND. A query that sees no key
// has out 0, lse -inf and zero gradients; one that sees some, of which all scores are -inf, has NaN
// in out.
type Attention struct {
	// [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]; last axis dense, other strides free
	Q, K, V tensor.Tensor `op:"in"`
	Out     tensor.Tensor `op:"out"` // [Tq, Hq, Dv]
	// [Tq, Hq] F32, any strides; natural logarithm; required
	LSE      tensor.Tensor `op:"out"`
	CuQ, CuK []int64       `op:"documents"`
	// key head of each query head, not decreasing; nil = h/(Hq/Hkv)
	KVHead []int64 `op:"heads=Q"`
	Causal bool
	Window *Window // nil = unbounded
	Scale  float64 // the caller resolves 0 = 1/sqrt(D)
	// U8, at least AttentionWorkspace bytes, aligned to Info.Align
	Workspace tensor.Tensor `op:"scratch"`

	// Deterministic has the gradient repeat to the bit on a device of which that is not true of
	// itself. AttentionWorkspace is told so too.
	Deterministic bool
}

// AttentionKernels is a device with several rows of kernels, which can be asked beforehand.
type AttentionKernels interface {
	// AttentionKernel names the row that would serve attention, or its gradient, of such types,
	// shapes and masks. Documents (CuQ, CuK nil: some), memory and Workspace need not be there.
	// Unsupported, with the reason, where no row does.
	AttentionKernel(a *Attention, backward bool) (string, error)
}

// Window bounds the keys of a query; a negative side is unbounded.
type Window struct{ Left, Right int64 }

// AttentionGrad is its derivative (Out, LSE as forward left them); dq, dk, dv are written. Key
// heads that no query head uses get zeros. dk, dv of a key head are summed over its query heads in
// index order.
type AttentionGrad struct {
	Attention
	DOut       tensor.Tensor `op:"in"`  // [Tq, Hq, Dv]
	DQ, DK, DV tensor.Tensor `op:"out"` // shapes of Q, K, V
}

// Range is the elements [Lo, Hi) of a flat tensor.
type Range struct{ Lo, Hi int64 }

// AdamW is one step of Loshchilov & Hutter 2019 as PyTorch does it: w ← w·(1 - lr·wd); m, v with
// bias correction for step t ≥ 1; w ← w - lr·m̂/(sqrt(v̂) + eps). The gradient is read times
// GradScale. All dense F32 of one length: many parameters lie in one call.
type AdamW struct {
	W    tensor.Tensor `op:"in,out"`
	G    tensor.Tensor `op:"in"`
	M, V tensor.Tensor `op:"in,out"`
	// dense BF16 of that length: gets the new w, rounded
	Low                                           tensor.Tensor `op:"out,optional"`
	LR, Beta1, Beta2, Eps, WeightDecay, GradScale float64
	// where the decay applies, ascending; nil = everywhere
	Decay []Range
	Step  int64
}

// SGD is w ← w·(1 - lr·wd) - lr·GradScale·g, without momentum.
type SGD struct {
	W                          tensor.Tensor `op:"in,out"` // as AdamW's
	G                          tensor.Tensor `op:"in"`
	Low                        tensor.Tensor `op:"out,optional"`
	LR, WeightDecay, GradScale float64
	Decay                      []Range
}
