package device

import "ulysses/tensor"

// ExpertOps has the operations of mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538; Fedus
// et al. 2022, arXiv:2101.03961). Each token chooses K of E experts; a choice is a slot of the
// token. RouteForward sorts the T·K choices by expert and gives each a row. SpreadRows copies
// tokens to their rows, GroupedGemm multiplies the rows of each expert by its matrix, and
// CombineRows adds the rows of a token. No choice is dropped: an expert has between 0 and T rows.
type ExpertOps interface {
	RouteForward(s Stream, a *Route) error
	RouteBackward(s Stream, a *RouteGrad) error
	SpreadRows(s Stream, a *SpreadRows) error
	CombineRows(s Stream, a *CombineRows) error
	GroupedGemm(s Stream, a *GroupedGemm) error
	GroupedGemmWeights(s Stream, a *GroupedGemmWeights) error
	WeightedSwiGLUBackward(s Stream, a *WeightedSwiGLUGrad) error
}

// Route chooses the K experts of each token with the largest logits; of equal logits, the expert
// with the lower number. The weight of a choice is the softmax over all E at its logit, with
// Normalize divided by the sum over the K of the token, which is the softmax over the K.
//
// With a Bias, the experts with the largest sums of softmax and bias are chosen (Wang et al. 2024,
// arXiv:2408.15664, section 3). The weights do not have the bias. With Normalize they are divided
// by 1e-12 if their sum is smaller, as in ERNIE 4.5.
//
// With Sigmoid, the sigmoid of a logit stands for its softmax (DeepSeek-V3, arXiv:2412.19437,
// section 2.1.2). With Normalize, 1e-20 is added to the sum by which weights are divided.
//
// The experts are in Groups groups of E/Groups consecutive experts, and a token chooses from
// KeptGroups of them: with Sigmoid, the groups whose two largest numbers, of sigmoid and bias, have
// the largest sums; otherwise the groups with the largest logits (DeepSeek-V2, arXiv:2405.04434,
// section 2.2.2). Of equal groups, the lower one is kept.
type Route struct {
	// [T, E], last axis dense; replaced by the softmax over E, or with Sigmoid by sigmoids
	Logits tensor.Tensor `op:"in,out"`
	Bias   tensor.Tensor `op:"in,optional"` // [E] F32, for the choice alone
	// [T, K] I32: the experts of each token, in the order of falling logits, or sums
	Experts tensor.Tensor `op:"out"`
	// [T, K] I32: the row of each choice. Rows are sorted by expert, then by token.
	Rows    tensor.Tensor `op:"out"`
	Weights tensor.Tensor `op:"out"` // [T·K] F32, by row
	// [E+1] I32: the rows of expert e are [Offsets[e], Offsets[e+1])
	Offsets   tensor.Tensor `op:"out"`
	Normalize bool

	Sigmoid            bool
	Groups, KeptGroups int64   // 0 = 1 group; more, up to MaxGroups, with Sigmoid or without Bias
	WeightScale        float64 // factor of the weights; 0 = 1

	// For a loss that balances the experts: the sequence of each token, [T] I32, a negative number
	// for tokens that do not count. Counts and Sums [sequences, E] F64 get the number of choices of
	// each expert, and the sum of its probabilities.
	Sequence     tensor.Tensor `op:"in,optional"`
	Counts, Sums tensor.Tensor `op:"add,optional"`
}

// MaxGroups is the largest number of groups of experts of a Route.
const MaxGroups = 32

// RouteGrad is the derivative of Route with respect to the logits. Probs are the probabilities that
// Route wrote to Logits. With Sequence, the gradient of Σ Scale[s]·Counts[s, e]·p over the tokens
// and experts is added, in which Counts are constants. There is no Sequence with Sigmoid.
type RouteGrad struct {
	Probs, Experts, Rows, Weights tensor.Tensor `op:"in"`
	DWeights                      tensor.Tensor `op:"in"`  // [T·K] F32, by row
	DLogits                       tensor.Tensor `op:"out"` // [T, E] of the compute type
	Sequence, Counts              tensor.Tensor `op:"in,optional"`
	Scale                         tensor.Tensor `op:"in,optional"` // [sequences] F32
	Normalize                     bool

	Sigmoid     bool
	WeightScale float64 // as Route's
}

// SpreadRows is y[rows[t, j]] = x[t] for each slot j of each token t.
type SpreadRows struct {
	X    tensor.Tensor `op:"in"`  // [T, N]
	Rows tensor.Tensor `op:"in"`  // [T, K] I32, a permutation of [0, T·K)
	Y    tensor.Tensor `op:"out"` // [T·K, N]
}

// CombineRows is y[t] = Σ weights[r]·x[r] + ownWeights[t]·own[t] over the rows r of token t. The
// sum is in F32, in the order of the token's slots and then its own row, and rounded once.
type CombineRows struct {
	X       tensor.Tensor `op:"in"`          // [T·K, N]
	Rows    tensor.Tensor `op:"in"`          // [T, K] I32
	Weights tensor.Tensor `op:"in,optional"` // [T·K] F32, by row; nil = 1
	Y       tensor.Tensor `op:"out"`         // [T, N]
	// the output of an expert that all tokens have
	Own        tensor.Tensor `op:"in,optional"` // [T, N]; nil = 0
	OwnWeights tensor.Tensor `op:"in,optional"` // [T] F32; nil = 1
}

// GroupedGemm is C[r] = A[r]·B[e] + Bias[e] for the rows r of each expert e. The result of a row
// does not depend on the other rows.
type GroupedGemm struct {
	A       tensor.Tensor `op:"in"`          // [R, K], last axis dense
	B       tensor.Tensor `op:"in"`          // [E, K, N]; the stride of K or of N is 1
	Bias    tensor.Tensor `op:"in,optional"` // [E, N] of the type of A, last axis dense
	C       tensor.Tensor `op:"out"`         // [R, N] of the type of A, last axis dense
	Offsets tensor.Tensor `op:"in"`          // [E+1] I32, from 0 to R
}

// GroupedGemmWeights is C[e] += Aᵀ·B over the rows of each expert e, the gradient of the matrices.
// It does not change the matrices of experts without rows.
type GroupedGemmWeights struct {
	A, B    tensor.Tensor `op:"in"`  // [R, M] and [R, N], last axes dense
	C       tensor.Tensor `op:"add"` // [E, M, N] F32, last axis dense
	Offsets tensor.Tensor `op:"in"`  // [E+1] I32, from 0 to R
}

// WeightedSwiGLUGrad is the derivative of weights[r]·y[r] for y = SwiGLU: DWeights[r] = dy[r]·y[r],
// and DGate and DUp are the gradients for the gradient weights[r]·dy[r] of y[r]. DGate may be Gate,
// and DUp may be Up. With Restore, DY is overwritten with weights[r]·y[r].
type WeightedSwiGLUGrad struct {
	Gate, Up   tensor.Tensor `op:"in"` // [R, F]
	Weights    tensor.Tensor `op:"in"` // [R] F32
	DY         tensor.Tensor `op:"in,out=Restore"`
	DGate, DUp tensor.Tensor `op:"out"`
	DWeights   tensor.Tensor `op:"out"` // [R] F32
	Restore    bool

	GELU, Clamped bool // as SwiGLU's
}
