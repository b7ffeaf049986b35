package device

import "ulysses/tensor"

// DeltaOps has the operations of linear attention by the gated delta rule (Yang, Kautz &
// Hatamizadeh 2024, arXiv:2412.06464) and of the layers around it. Types are as in Ops. Decays,
// betas, recurrent states and their gradients are F32 for every compute type.
//
// The results of a value head depend on its own values and its key head only, and the results of a
// channel on that channel only. On the CPU, and with GatedDelta.Deterministic on every device, they
// are bitwise equal for any other heads in the call. Therefore a layer whose heads are sharded has
// bitwise equal results for every number of ranks. Without Deterministic, a device may divide
// sequences by the shape of the call; results are bitwise reproducible, and equal up to rounding
// for other numbers of heads.
type DeltaOps interface {
	// GatedDeltaSizes returns the bytes of a call's memory. If Cu is nil, it returns a bound for
	// any documents with as many tokens, and for any number of states in StateIn and StateOut.
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

// DeltaSizes has sizes in bytes: of GatedDelta.Saved, of its Workspace in the forward and in the
// backward pass, and of the Workspace of DeltaState and DeltaStateGrad over as many tokens. The
// memory is aligned to Info.Align.
type DeltaSizes struct{ Saved, Forward, Backward, State int64 }

// GatedDelta is the gated delta rule. For each value head and document, token by token, with the
// recurrent state S [Dk, Dv], and with q and k of the value head's key head:
//
//	S ← exp(g)·S;  u = beta·(v − Sᵀk);  S ← S + k·uᵀ;  out = scale·Sᵀq
//
// It is computed in chunks (section 3.3 of the paper). L2Norm replaces q and k by
// x·rsqrt(Σx² + 1e-6). g is the natural logarithm of the decay. It is at most 0 and has no lower
// limit: decays are multiplied in log space, and no exponential of a positive number is computed.
type GatedDelta struct {
	Q, K    tensor.Tensor `op:"in"`  // [T, Hk, Dk]; last axis dense, other strides arbitrary
	V       tensor.Tensor `op:"in"`  // [T, Hv, Dv]; as Q
	Out     tensor.Tensor `op:"out"` // [T, Hv, Dv]; as Q
	G, Beta tensor.Tensor `op:"in"`  // [T, Hv] F32, arbitrary strides
	// documents, host memory: n+1 entries from 0 to T, not decreasing
	Cu []int64 `op:"documents"`
	// key head of each value head, not decreasing; nil = h/(Hv/Hk)
	KeyHead []int64 `op:"heads=V"`
	L2Norm  bool
	Scale   float64 // the caller resolves 0 = 1/sqrt(Dk)
	Chunk   int64   // largest number of tokens of a chunk, at least 16; 0 = the device chooses
	// Panel is the number of tokens for which the workspace has intermediate results at a time, at
	// least two chunks; 0 = the device chooses. It must be the same in both passes. The CPU has no
	// intermediate results of many tokens, and does not use it.
	Panel int64

	// Deterministic: the results of a head are bitwise equal for any other heads and documents in
	// the call.
	Deterministic bool

	// [i, Hv, Dk, Dv] dense: the states before the first i documents; absent or i = 0: zero
	StateIn tensor.Tensor `op:"in,optional"`
	// [j, Hv, Dk, Dv] dense: the states after the last j documents
	StateOut tensor.Tensor `op:"out,optional"`

	// U8; for the backward pass, absent if there is none
	Saved     tensor.Tensor `op:"out,optional"`
	Workspace tensor.Tensor `op:"scratch"` // U8
}

// GatedDeltaGrad is the derivative of GatedDelta, with the arguments of the forward pass. Out and
// the contents of StateOut are not used. DQ and DK of a key head are the sums, in index order, of
// the gradients of its value heads, each rounded to the type of DQ. With PerHead they have Hv heads
// and are not summed.
type GatedDeltaGrad struct {
	GatedDelta `op:"unused=Out"`
	DOut       tensor.Tensor `op:"in"`           // [T, Hv, Dv]
	DStateOut  tensor.Tensor `op:"in,optional"`  // as StateOut; absent = zero
	DQ, DK     tensor.Tensor `op:"out"`          // [T, Hk, Dk], with PerHead [T, Hv, Dk]
	DV         tensor.Tensor `op:"out"`          // [T, Hv, Dv]
	DG, DBeta  tensor.Tensor `op:"out"`          // [T, Hv] F32, arbitrary strides
	DStateIn   tensor.Tensor `op:"out,optional"` // as StateIn
	PerHead    bool
}

// DeltaState summarizes a range of tokens of one document: for a state S before the range, the
// state after it is Transition·S + State, for each head.
type DeltaState struct {
	K, V, G, Beta tensor.Tensor `op:"in"` // as in GatedDelta
	KeyHead       []int64       `op:"heads=V"`
	L2Norm        bool
	Chunk, Panel  int64
	State         tensor.Tensor `op:"out"`          // [Hv, Dk, Dv] F32 dense
	Transition    tensor.Tensor `op:"out,optional"` // [Hv, Dk, Dk] F32 dense
	Workspace     tensor.Tensor `op:"scratch"`      // U8
}

// DeltaStateGrad is the backward pass of DeltaState: if D is the gradient of the state after the
// range, the gradient of the state before it is Transitionᵀ·D + DState.
type DeltaStateGrad struct {
	Q, K, G, Beta, DOut tensor.Tensor `op:"in"` // as in GatedDeltaGrad
	KeyHead             []int64       `op:"heads=DOut"`
	L2Norm              bool
	Scale               float64
	Chunk, Panel        int64
	DState              tensor.Tensor `op:"out"`     // [Hv, Dk, Dv] F32 dense
	Workspace           tensor.Tensor `op:"scratch"` // U8
}

// DeltaFold is y = M·x + e for each head, or Mᵀ·x + e with Transpose. All tensors are dense F32. Y
// may be E but not X.
type DeltaFold struct {
	M         tensor.Tensor `op:"in"`          // [H, K, K]
	X         tensor.Tensor `op:"in"`          // [H, K, N]
	E         tensor.Tensor `op:"in,optional"` // [H, K, N]; absent = zero
	Y         tensor.Tensor `op:"out"`         // [H, K, N]
	Transpose bool
}

// DeltaGates is g = −exp(ALog)·softplus(a + DtBias) and beta = sigmoid(b), as in Qwen3-Next and
// Qwen3.5.
type DeltaGates struct {
	A, B         tensor.Tensor `op:"in"`  // [T, H]; last axis dense
	ALog, DtBias tensor.Tensor `op:"in"`  // [H], of the compute type or F32
	G, Beta      tensor.Tensor `op:"out"` // [T, H] F32, last axis dense
}

// DeltaGatesGrad is the derivative of DeltaGates.
type DeltaGatesGrad struct {
	A, B, ALog, DtBias tensor.Tensor `op:"in"`
	DG, DBeta          tensor.Tensor `op:"in"`  // [T, H] F32, last axis dense
	DA, DB             tensor.Tensor `op:"out"` // [T, H]; may be A, B
	DALog, DDtBias     tensor.Tensor `op:"add"` // [H] F32
}

// Conv1d is y[t, c] = silu(Σᵢ w[c, i]·x[t − width + 1 + i, c]), causal and depthwise, within each
// document. The rows before a document are zero; the rows before the first document are Before.
type Conv1d struct {
	X tensor.Tensor `op:"in"`  // [T, C], last axis dense
	Y tensor.Tensor `op:"out"` // [T, C], last axis dense; not X
	W tensor.Tensor `op:"in"`  // [C, width] dense, width 1 or more
	// [width−1, C], last axis dense: the rows before the first document, oldest first; absent =
	// zero
	Before tensor.Tensor `op:"in,optional"`
	Cu     []int64       `op:"documents"` // as in GatedDelta
}

// Conv1dGrad is the derivative of Conv1d. Y is not used.
type Conv1dGrad struct {
	Conv1d  `op:"unused=Y"`
	DY      tensor.Tensor `op:"in"`           // [T, C], last axis dense
	DX      tensor.Tensor `op:"out"`          // [T, C], last axis dense; may be DY
	DW      tensor.Tensor `op:"add"`          // [C, width] F32 dense
	DBefore tensor.Tensor `op:"out,optional"` // [width−1, C], last axis dense
}

// GatedRMSNorm is y = x·rsqrt(mean(x²) + eps)·w·silu(gate) over the last axis.
type GatedRMSNorm struct {
	X, Gate tensor.Tensor `op:"in"`  // [T, N] or [T, H, N], last axis dense
	Y       tensor.Tensor `op:"out"` // as X; may be X
	W       tensor.Tensor `op:"in"`  // [N]
	RStd    tensor.Tensor `op:"out"` // [rows] F32 dense; saved for the backward pass
	Eps     float64
}

// GatedRMSNormGrad is the derivative of GatedRMSNorm.
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
