package device

import "ulysses/tensor"

// DeltaOps are the operations of linear attention by the gated delta rule (Yang, Kautz &
// Hatamizadeh 2024, arXiv:2412.06464) and of the layers around it. Types are as Ops says; besides,
// decays, betas, states and their gradients are F32 whatever the compute type.
//
// A value head's results are a function of its own values and of its key head's alone, and a
// channel's of that channel's, bit for bit: that is what makes a head-sharded layer independent of
// the number of ranks.
type DeltaOps interface {
	// GatedDeltaSizes is the bytes of a call's memory. Cu nil = a bound for any documents of these
	// lengths, StateIn and StateOut then being of any number of documents.
	GatedDeltaSizes(a *GatedDelta) DeltaSizes
	GatedDeltaForward(s Stream, a *GatedDelta) error
	GatedDeltaBackward(s Stream, a *GatedDeltaGrad) error

	DeltaState(s Stream, a *DeltaState) error
	DeltaStateGrad(s Stream, a *DeltaStateGrad) error
	DeltaFold(s Stream, a *DeltaFold) error

	DeltaGatesForward(s Stream, a *DeltaGates) error
	DeltaGatesBackward(s Stream, a *DeltaGatesGrad) error
	Conv1dForward(s Stream, a *Conv1d) error
	Conv1dBackward(s Stream, a *Conv1dGrad) error
	GatedRMSNormForward(s Stream, a *GatedRMSNorm) error
	GatedRMSNormBackward(s Stream, a *GatedRMSNormGrad) error
	SigmoidGateForward(s Stream, a *SigmoidGate) error
	SigmoidGateBackward(s Stream, a *SigmoidGateGrad) error
}

// DeltaSizes are bytes: of GatedDelta.Saved, of its Workspace in either direction, and of the
// Workspace of DeltaState and DeltaStateGrad over as many tokens. Aligned to Info.Align.
type DeltaSizes struct{ Saved, Forward, Backward, State int64 }

// GatedDelta is, per value head and document, token after token, with S [Dk, Dv] the state, k and q
// those of the value head's key head:
//
//	S ← exp(g)·S;  u = beta·(v − Sᵀk);  S ← S + k·uᵀ;  out = scale·Sᵀq
//
// computed in chunks (section 3.3 of the paper). L2Norm puts x·rsqrt(Σx² + 1e-6) in the place of q
// and k. g is the natural logarithm of the decay, at most 0 and as low as it likes: decays are
// products in log space, and no exponential of a positive number is taken.
type GatedDelta struct {
	Q, K    tensor.Tensor `op:"in"`  // [T, Hk, Dk]; last axis dense, other strides free
	V       tensor.Tensor `op:"in"`  // [T, Hv, Dv]; likewise
	Out     tensor.Tensor `op:"out"` // [T, Hv, Dv]; likewise
	G, Beta tensor.Tensor `op:"in"`  // [T, Hv] F32, any strides
	// documents, host memory: n+1 entries from 0 to T, not decreasing
	Cu []int64 `op:"documents"`
	// key head of each value head, not decreasing; nil = h/(Hv/Hk)
	KeyHead []int64 `op:"heads=V"`
	L2Norm  bool
	Scale   float64 // the caller resolves 0 = 1/sqrt(Dk)
	Chunk   int64   // at most so many tokens a chunk, 16 or more; 0 = the device's choice

	// [i, Hv, Dk, Dv] dense: before the first i documents; nil or none = zero
	StateIn tensor.Tensor `op:"in,optional"`
	// [j, Hv, Dk, Dv] dense, written: behind the last j documents; nil = not wanted
	StateOut tensor.Tensor `op:"out,optional"`

	Saved     tensor.Tensor `op:"out,optional"` // U8, for the backward pass; nil = there will be none
	Workspace tensor.Tensor `op:"scratch"`      // U8
}

// GatedDeltaGrad is its derivative, with the arguments that forward had (Out is not read, StateOut
// not written). dq, dk, dv, dg, dbeta are written. dq and dk of a key head are summed over its
// value heads in index order, from each one's own gradient rounded to the type of dq; with PerHead
// they have Hv heads, each value head's own.
type GatedDeltaGrad struct {
	GatedDelta `op:"unused=Out"`
	DOut       tensor.Tensor `op:"in"`           // [T, Hv, Dv]
	DStateOut  tensor.Tensor `op:"in,optional"`  // as StateOut; nil = zero
	DQ, DK     tensor.Tensor `op:"out"`          // [T, Hk, Dk], with PerHead [T, Hv, Dk]
	DV         tensor.Tensor `op:"out"`          // [T, Hv, Dv]
	DG, DBeta  tensor.Tensor `op:"out"`          // [T, Hv] F32, any strides
	DStateIn   tensor.Tensor `op:"out,optional"` // as StateIn, written; nil = not wanted
	PerHead    bool
}

// DeltaState sums up a stretch of one document: whatever the state S before it, the state behind it
// is Transition·S + State, head by head.
type DeltaState struct {
	K, V, G, Beta tensor.Tensor `op:"in"` // as GatedDelta's
	KeyHead       []int64       `op:"heads=V"`
	L2Norm        bool
	Chunk         int64
	State         tensor.Tensor `op:"out"`          // [Hv, Dk, Dv] F32 dense, written
	Transition    tensor.Tensor `op:"out,optional"` // [Hv, Dk, Dk] F32 dense, written; nil = not wanted
	Workspace     tensor.Tensor `op:"scratch"`      // U8
}

// DeltaStateGrad is the way back: with D the gradient of the state behind the stretch, that of the
// state before it is Transitionᵀ·D + DState.
type DeltaStateGrad struct {
	Q, K, G, Beta, DOut tensor.Tensor `op:"in"` // as GatedDeltaGrad's
	KeyHead             []int64       `op:"heads=DOut"`
	L2Norm              bool
	Scale               float64
	Chunk               int64
	DState              tensor.Tensor `op:"out"`     // [Hv, Dk, Dv] F32 dense, written
	Workspace           tensor.Tensor `op:"scratch"` // U8
}

// DeltaFold is y = M·x + e head by head, with Transpose Mᵀ·x + e; all F32 and dense. y is not x; it
// may be e.
type DeltaFold struct {
	M         tensor.Tensor `op:"in"`          // [H, K, K]
	X         tensor.Tensor `op:"in"`          // [H, K, N]
	E         tensor.Tensor `op:"in,optional"` // [H, K, N]; nil = 0
	Y         tensor.Tensor `op:"out"`         // [H, K, N]
	Transpose bool
}

// DeltaGates is g = −exp(ALog)·softplus(a + DtBias), beta = sigmoid(b), as Qwen3-Next and Qwen3.5
// have it.
type DeltaGates struct {
	A, B         tensor.Tensor `op:"in"`  // [T, H]; last axis dense
	ALog, DtBias tensor.Tensor `op:"in"`  // [H], of the compute type or F32
	G, Beta      tensor.Tensor `op:"out"` // [T, H] F32, last axis dense
}

// DeltaGatesGrad is its derivative: da, db are written, dalog, ddtbias added to.
type DeltaGatesGrad struct {
	A, B, ALog, DtBias tensor.Tensor `op:"in"`
	DG, DBeta          tensor.Tensor `op:"in"`  // [T, H] F32, last axis dense
	DA, DB             tensor.Tensor `op:"out"` // [T, H]; may be a, b
	DALog, DDtBias     tensor.Tensor `op:"add"` // [H] F32
}

// Conv1d is y[t, c] = silu(Σᵢ w[c, i]·x[t − width + 1 + i, c]), causal and depthwise, in each
// document; what is before a document is zero, but before the first one there is Before.
type Conv1d struct {
	X tensor.Tensor `op:"in"`  // [T, C], last axis dense
	Y tensor.Tensor `op:"out"` // [T, C], last axis dense; not X
	W tensor.Tensor `op:"in"`  // [C, width] dense, width 1 or more
	// [width−1, C], last axis dense, oldest first: the rows before the first document's; nil = zero
	Before tensor.Tensor `op:"in,optional"`
	Cu     []int64       `op:"documents"` // as GatedDelta's
}

// Conv1dGrad is its derivative (Y is not read): dx, dbefore are written, dw is added to.
type Conv1dGrad struct {
	Conv1d  `op:"unused=Y"`
	DY      tensor.Tensor `op:"in"`           // [T, C], last axis dense
	DX      tensor.Tensor `op:"out"`          // [T, C], last axis dense; may be DY
	DW      tensor.Tensor `op:"add"`          // [C, width] F32 dense
	DBefore tensor.Tensor `op:"out,optional"` // [width−1, C], last axis dense; nil = not wanted
}

// GatedRMSNorm is y = x·rsqrt(mean(x²) + eps)·w·silu(gate) over the last axis.
type GatedRMSNorm struct {
	X, Gate tensor.Tensor `op:"in"`  // [T, N] or [T, H, N], last axis dense
	Y       tensor.Tensor `op:"out"` // as X; may be X
	W       tensor.Tensor `op:"in"`  // [N]
	RStd    tensor.Tensor `op:"out"` // [rows] F32 dense, saved for backward
	Eps     float64
}

// GatedRMSNormGrad is its derivative: dx, dgate are written, dw is added to.
type GatedRMSNormGrad struct {
	X, Gate, W, RStd, DY tensor.Tensor `op:"in"`
	DX, DGate            tensor.Tensor `op:"out"` // DX may be DY, DGate may be Gate
	DW                   tensor.Tensor `op:"add"` // [N] F32
}

// SigmoidGate is y = x·sigmoid(gate). All are [T, N] or [T, H, N] with a dense last axis.
type SigmoidGate struct {
	X, Gate tensor.Tensor `op:"in"`
	Y       tensor.Tensor `op:"out"` // may be X
}

// SigmoidGateGrad is the derivative of SigmoidGate.
type SigmoidGateGrad struct {
	X, Gate, DY tensor.Tensor `op:"in"`
	DX, DGate   tensor.Tensor `op:"out"` // DX may be DY, DGate may be Gate
}
