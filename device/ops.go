package device

import "ulysses/tensor"

// Ops has the operations. In shapes, T is the number of tokens (rows) and N of features. An
// operation adds gradients of weights to their tensor. It writes gradients of activations, unless
// an Add flag is set.
//
// In one call, activations, their gradients and weights have one type, the compute type: F32, or
// BF16 if Info.Compute has it. Sums are in F32 for both. Statistics (LSE, RStd, NLL), tables (Cos,
// Sin, Freq), logits, gradients of weights (DW, DTable, Dst of a ColumnSum) and the tensors of the
// optimizer are F32 for both. C of a Gemm has either type.
//
// Denormals in arguments and results may be treated as zero, except by Copy, Fill, Add, Scale, the
// embeddings and the sum of AddRMSNorm.
//
// This interface is the list of the operations, see operations.go.
type Ops interface {
	// Copy writes src into dst, which has the same shape. Strides are arbitrary, there are up to
	// tensor.MaxDims axes, and types may differ (cast). One of the two may be in host memory; it is
	// then dense and has the type of the other. A source in host memory may be changed when the
	// call returns, but not if it is memory of AllocHost (HostAllocator): the stream reads that
	// when it runs the copy. A destination in host memory is complete after Sync.
	Copy(s Stream, dst, src tensor.Tensor) error
	// Fill writes value into every element of dst. Strides are arbitrary.
	Fill(s Stream, dst tensor.Tensor, value float64) error
	// Add writes a + b into dst. The shapes are equal and the last axes dense; dst may be a or b.
	Add(s Stream, dst, a, b tensor.Tensor) error
	// Scale multiplies x (dense) by f in place.
	Scale(s Stream, x tensor.Tensor, f float64) error
	// ColumnSum adds the sum over the rows of x [T, N] to dst [N] (F32): the gradient of a bias.
	ColumnSum(s Stream, dst, x tensor.Tensor) error
	// Sum writes Σx into out (F64, one element). SumSquares adds Σx² to out. x is dense F32. The
	// sums are in float64.
	Sum(s Stream, out, x tensor.Tensor) error
	SumSquares(s Stream, out, x tensor.Tensor) error

	Gemm(s Stream, a *Gemm) error

	RMSNormForward(s Stream, a *RMSNorm) error
	AddRMSNorm(s Stream, a *AddRMSNorm) error
	RMSNormBackward(s Stream, a *RMSNormGrad) error
	RopeTable(s Stream, a *RopeTable) error
	Rope(s Stream, a *Rope) error
	SwiGLUForward(s Stream, a *SwiGLU) error
	SwiGLUBackward(s Stream, a *SwiGLUGrad) error
	Dropout(s Stream, a *Dropout) error
	EmbeddingForward(s Stream, a *Embedding) error
	EmbeddingBackward(s Stream, a *EmbeddingGrad) error
	CrossEntropy(s Stream, a *CrossEntropy) error

	// AttentionWorkspace returns the bytes of Attention.Workspace for a call or its gradient. If
	// CuQ and CuK are nil, it returns a bound for any documents with as many tokens, and for any
	// shifts if Shift is not nil.
	AttentionWorkspace(a *Attention, backward bool) int64
	AttentionForward(s Stream, a *Attention) error
	AttentionBackward(s Stream, a *AttentionGrad) error

	AdamW(s Stream, a *AdamW) error
	SGD(s Stream, a *SGD) error

	DeltaOps
	ExpertOps
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
// strides is 1. The last axis of C is dense. If C is BF16, the sum over K, including Bias and C, is
// rounded once.
type Gemm struct {
	A, B tensor.Tensor `op:"in"` // of the compute type
	// of the compute type or F32
	C tensor.Tensor `op:"out,in=Accumulate"`
	// [N], of the type of B; not together with Accumulate
	Bias       tensor.Tensor `op:"in,optional"`
	Accumulate bool          // add to C
}

// RMSNorm is y = x · rsqrt(mean(x²) + eps) · (w + Centre) over the last axis (Zhang & Sennrich
// 2019). Leading axes may be strided: [T, N] rows or [T, H, D] heads.
type RMSNorm struct {
	X tensor.Tensor `op:"in"`  // [..., N]
	W tensor.Tensor `op:"in"`  // [N]
	Y tensor.Tensor `op:"out"` // [..., N]; may be X
	// [rows] dense, rows = product of the leading axes; saved for the backward pass
	RStd tensor.Tensor `op:"out"`
	Eps  float64
	// 0, or 1 for weights that are stored minus 1; w + Centre is computed in F32
	Centre float64
}

// AddRMSNorm is Sum = A + B and Y = RMSNorm of Sum: a residual connection and the norm after it, in
// one pass over memory. Results are bitwise equal to Add followed by RMSNormForward. The gradient
// of A and of B is that of Sum plus RMSNormBackward of Sum (AddDX).
type AddRMSNorm struct {
	A, B tensor.Tensor `op:"in"`  // [..., N]
	W    tensor.Tensor `op:"in"`  // [N]
	Sum  tensor.Tensor `op:"out"` // [..., N], rounded before the norm reads it; may be A or B
	Y    tensor.Tensor `op:"out"` // [..., N]; may be A or B, but not Sum
	// as RMSNorm's
	RStd   tensor.Tensor `op:"out"`
	Eps    float64
	Centre float64
}

// RMSNormGrad is the derivative of RMSNorm. With AddDX (the residual path) it adds to DX.
type RMSNormGrad struct {
	X, W, RStd, DY tensor.Tensor `op:"in"`
	DX             tensor.Tensor `op:"out,in=AddDX"` // may be DY
	DW             tensor.Tensor `op:"add"`
	AddDX          bool
	Centre         float64
}

// RopeTable writes cos and sin of positions[t]·freq[i], times Scale (0 = 1). The angle is one F32
// product, as in transformers, so that both rotate by the same angle at long positions. With Length
// above 0, cos and sin are also multiplied by 1 + Beta·ln(1 + ⌊positions[t]/Length⌋), the gain of
// queries in Ministral 3: a rotation of a whole head by this table is the rotation times the gain.
type RopeTable struct {
	Positions tensor.Tensor `op:"in"`  // [T] I32, with Length at least 0
	Freq      tensor.Tensor `op:"in"`  // [R/2] F32
	Cos, Sin  tensor.Tensor `op:"out"` // [T, R/2]
	Scale     float64
	Beta      float64
	Length    int64 // positions
}

// Rope rotates the first R features of each head by the table and copies the others (Su et al.
// 2021). It pairs feature i with feature i + R/2, the layout of Hugging Face. Inverse is the
// transposed rotation, which is the derivative. Y may be X.
type Rope struct {
	X        tensor.Tensor `op:"in"`  // [T, H, D], last axis dense
	Y        tensor.Tensor `op:"out"` // [T, H, D], last axis dense
	Cos, Sin tensor.Tensor `op:"in"`  // [T, R/2], R <= D
	Inverse  bool

	// With W, RMSNorm is applied to X before the rotation, and its result is rounded to the type of
	// X (Qwen3's normalization of queries and keys). Not together with Inverse.
	W      tensor.Tensor `op:"in,optional"`  // [D]
	RStd   tensor.Tensor `op:"out,optional"` // [T, H] F32, last axis dense, as RMSNorm.RStd
	Eps    float64
	Centre float64
}

// SwiGLU is y = silu(gate)·up (Shazeer 2020). Rows may be strided; the last axis is dense. With
// GELU, it is gelu(gate)·up in the approximation by tanh (Hendrycks & Gimpel 2016), g·σ(2u) with
// u = √(2/π)·(g + 0.044715·g³). Clamped is the form of gpt-oss: g·σ(1.702·g)·(u + 1) with g =
// min(gate, 7) and u = min(max(up, -7), 7). Where a limit is reached, the gradient is 0.
type SwiGLU struct {
	Gate, Up      tensor.Tensor `op:"in"`  // [T, F]
	Y             tensor.Tensor `op:"out"` // [T, F]
	GELU, Clamped bool          // at most one of them
}

// SwiGLUGrad is the derivative of SwiGLU. DGate may be Gate, and DUp may be Up.
type SwiGLUGrad struct {
	Gate, Up   tensor.Tensor `op:"in"`
	DY         tensor.Tensor `op:"in,out=Restore"`
	DGate, DUp tensor.Tensor `op:"out"`
	// Restore overwrites DY with y. A layer that did not keep y needs it for a gradient of weights.
	Restore       bool
	GELU, Clamped bool // as SwiGLU's
}

// Dropout is y[t, i] = x[t, i] / (1 - P) for the elements that it keeps, and 0 for the others. With
// Add, the result is added to y. The choice is a function of Seed, the token's number and i alone
// (ref.Keeps, with head 0), so it is the same on every mesh. The backward pass of y = dropout(x) is
// the same operation on dy. Y may be X.
type Dropout struct {
	X      tensor.Tensor `op:"in"`         // [T, N]
	Y      tensor.Tensor `op:"out,in=Add"` // [T, N]
	Tokens tensor.Tensor `op:"in"`         // [T] I64: numbers of the tokens
	P      float64       // probability that an element becomes 0, in [0, 1)
	Seed   int64
	Add    bool
}

// Embedding is y[t] = table[ids[t]]. The data reader checks the ids. An id out of range is an error
// of status Internal; a GPU reports it at Sync.
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

// CrossEntropy is nll = logsumexp(logits) - logits[target] for each row, in F32, and its gradient
// (softmax - onehot)·GradScale. A target of -100 has nll 0 and gradient 0. Without DLogits, no
// gradient is computed. With Softcap c > 0, a logit x is first replaced by c·tanh(x/c).
type CrossEntropy struct {
	// [T, V] F32, or BF16 on a device with Info.LogitsBF16; last axis dense
	Logits  tensor.Tensor `op:"in"`
	Targets tensor.Tensor `op:"in"`  // [T] I32
	NLL     tensor.Tensor `op:"out"` // [T] F32
	// [T, V] of the compute type; BF16 if Logits are; may be Logits if of the same type
	DLogits   tensor.Tensor `op:"out,optional"`
	GradScale float64
	Softcap   float64 // 0 = off
}

// Limits of soft caps of scores. Kernels multiply by the reciprocal of a cap, in F32 and with
// denormals as zero, so beyond the limits scores would lose their digits.
const MinSoftcap, MaxSoftcap = 1e-30, 1e30

// IsSoftcap reports whether c is a soft cap within the limits, or 0 for none.
func IsSoftcap(c float64) bool {
	x := float32(c)
	return x >= MinSoftcap && x <= MaxSoftcap || c == 0
}

// Attention is softmax(bias + cap(scale·q·kᵀ))·v for packed documents, without an S×S matrix (Dao
// 2023).
//
// CuQ and CuK divide the token axes of queries and of keys into documents. They are in host memory
// and have n+1 entries from 0 to T, not decreasing. The queries of document i see the keys of
// document i only. Query row i is aligned with key row i + Shift of the document; without Shift,
// the last query of a document is aligned with its last key. Causal allows the keys up to the
// aligned one. A window [l, r] allows l keys before and r keys after the aligned one. A block mask
// allows the keys of its blocks. Everything that is set must allow a key. A query that sees no key
// has out 0, lse -inf (with Sinks: the sink) and zero gradients. A query whose scores are all -inf
// has NaN in out.
//
// The order is: score·Scale, Softcap, Slopes, masks, softmax with Sinks, Dropout, product with v.
// The LSE is over the biased and capped scores and the sink, without dropout.
type Attention struct {
	// [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]; last axis dense, other strides arbitrary
	Q, K, V tensor.Tensor `op:"in"`
	// [Tq, Hq, Dv] of the type of Q; F32 with Carry
	Out tensor.Tensor `op:"in=Carry,out"`
	// [Tq, Hq] F32, arbitrary strides; natural logarithm
	LSE tensor.Tensor `op:"in=Carry,out"`
	// [Hq] F32: the logit of a key without a value, which every query of the head sees (gpt-oss)
	Sinks tensor.Tensor `op:"in,optional"`
	// [Hq] F32: a key at distance j from the aligned one, negative before it, has the bias slope·j
	// (ALiBi, Press et al. 2022)
	Slopes tensor.Tensor `op:"in,optional"`
	// U8 [Hq or 1, ⌈QuerySeq/BlockRows⌉, ⌈KeySeq/BlockColumns⌉], dense: 0 hides a block of queries
	// and keys of a sequence, in each sequence of the batch
	BlockMask tensor.Tensor `op:"in,optional"`
	CuQ, CuK  []int64       `op:"documents"`
	Shift     []int64       `op:"shifts"` // of each document; nil = CuK[i+1] - CuQ[i+1]
	// key head of each query head, not decreasing; nil = h/(Hq/Hkv)
	KVHead  []int64 `op:"heads=Q"`
	Causal  bool
	Window  *Window // nil = unbounded
	Scale   float64 // the caller resolves 0 = 1/sqrt(D)
	Softcap float64 // c > 0: a scaled score x becomes c·tanh(x/c); 0 = off

	// Dropout is the probability that a softmax weight becomes 0; the others are divided by 1 -
	// Dropout. The choice is a function of Seed, head, query and key alone (ref.Keeps): HeadAt plus
	// the head, QueryAt plus the row of the query, KeyAt plus the row of the key.
	Dropout      float64
	Seed, HeadAt int64
	// The numbers of the first query and key among all tokens of the batch, and the tokens of a
	// sequence of queries and of keys. BlockMask needs them all; Dropout needs the first two.
	QueryAt, KeyAt, QuerySeq, KeySeq int64
	BlockRows, BlockColumns          int64

	// Carry adds keys to a softmax that has begun: Out, in F32, and LSE are the result over the
	// keys of earlier calls, or 0 and -inf, or 0 and the sink (Sinks is then nil). Backward ignores
	// it.
	Carry bool
	// U8, at least AttentionWorkspace bytes, aligned to Info.Align
	Workspace tensor.Tensor `op:"scratch"`

	// Deterministic makes the gradient bitwise reproducible on a device where it otherwise is not.
	// AttentionWorkspace depends on it.
	Deterministic bool
}

// AttentionKernels is a device with several kernels for attention, which names its choice before a
// call.
type AttentionKernels interface {
	// AttentionKernel returns the name of the kernel for attention, or its gradient, of these
	// types, shapes and masks. CuQ, CuK, the memory of the tensors and Workspace may be absent. The
	// error is Unsupported, with the reason, if no kernel supports the call.
	AttentionKernel(a *Attention, backward bool) (string, error)
}

// Window limits the keys of a query. A negative side is unlimited.
type Window struct{ Left, Right int64 }

// Unbounded is a side of a window without a bound. Sums with it do not overflow.
const Unbounded = int64(1) << 60

// Sides returns how many keys before and after the aligned one a query sees. With a causal mask
// there is none after it.
func (w *Window) Sides(causal bool) (left, right int64) {
	left, right = Unbounded, Unbounded
	if w != nil && w.Left >= 0 {
		left = min(left, w.Left)
	}
	if w != nil && w.Right >= 0 {
		right = min(right, w.Right)
	}
	if causal {
		right = 0
	}
	return left, right
}

// AttentionGrad is the derivative of Attention, with Out and LSE of the forward pass. DK and DV of
// a key head are summed over its query heads in index order; they are zero for a key head without
// query heads. If a softmax was carried through several calls, each gradient call has Out and LSE
// of the last, and the gradients of the calls add up.
type AttentionGrad struct {
	Attention
	DOut tensor.Tensor `op:"in"` // [Tq, Hq, Dv], of the type of Q
	// shapes of Q, K, V; all of the type of Q, or all F32
	DQ, DK, DV tensor.Tensor `op:"out"`
	// [Hq] F32: -Σ exp(sink - lse)·(dout·out) over all queries of the call; needs Sinks
	DSinks tensor.Tensor `op:"out,optional"`
	// [Hq] F32: the sum of the scores' gradients times their distances; needs Slopes
	DSlopes tensor.Tensor `op:"out,optional"`
}

// Range is the elements [Lo, Hi) of a flat tensor.
type Range struct{ Lo, Hi int64 }

// AdamW is one step of Loshchilov & Hutter 2019 as in PyTorch: w ← w·(1 - lr·wd); m, v with bias
// correction for step t ≥ 1; w ← w - lr·m̂/(sqrt(v̂) + eps). The gradient is multiplied by
// GradScale. All tensors are dense F32 of one length; one call updates many parameters.
type AdamW struct {
	W    tensor.Tensor `op:"in,out"`
	G    tensor.Tensor `op:"in"`
	M, V tensor.Tensor `op:"in,out"`
	// dense BF16 of that length; receives the new w, rounded
	Low                                           tensor.Tensor `op:"out,optional"`
	LR, Beta1, Beta2, Eps, WeightDecay, GradScale float64
	// elements to which weight decay applies, ascending; nil = all
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
