package model

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/sp"
	"ulysses/tensor"
)

// Ctx is the caller's resources for a pass.
type Ctx struct {
	Stream  device.Stream
	Weights Weights       // nil: the parameters are attached, and no gradient is reported
	Arena   *device.Arena // has the bytes that Memory returns; a pass frees what it allocates
	Host    *device.Arena // host memory that Memory returns; nil if nothing is offloaded
	Clock   *clock.Clock  // nil: no times are measured

	// Inspect is optional. It is called with tensors of the pass, in order, each when the operation
	// that completes it is on the stream. at names the tensor: "layer 3: attention output",
	// "layer 3: gradient of model.layers.3.mlp.down_proj.weight". It may enqueue operations on the
	// stream and wait for them. Later operations overwrite the tensor.
	Inspect func(at string, t tensor.Tensor) error
}

// Names of tensors that Ctx.Inspect gets once for each tile of the loss, and once in a pass.
const (
	LogitsName    = "head: logits"             // [tile, V] F32, before Config.LogitSoftcap
	TokenLossName = "head: loss of each token" // [T] F32, 0 without a target
)

// Batch is this rank's shard of a micro-batch: one sequence with the documents of SP.
type Batch struct {
	SP  *sp.Batch     // with Batch 1
	IDs tensor.Tensor // [T] I32
	// [T] I32, the id of the next token, -100 = none; shifted over the whole sequence before
	// sharding
	Targets   tensor.Tensor
	Positions tensor.Tensor // [T] I32, for RoPE
	// Length is the largest position of the global batch plus 1, equal on all ranks. It is needed
	// if Config.Switches.
	Length    int64
	GradScale float64 // factor of the gradient of the sum: 1 / targets of the global batch
	// The dropout of attention is a function of the run's seed, of Number, which is that of the
	// micro-batch's first sequence in the run, and of layer, head, query and key: the same on every
	// mesh. Queries and keys are counted through the micro-batch.
	Seed, Number int64
	// Numbers [T] I64 are the numbers of the tokens in the run, if Model.Drops: the dropout of
	// adapters is a function of Seed, adapter, token and feature.
	Numbers tensor.Tensor

	// If Config.Balances or Model.MovesBiases: the sequence of each token, from 0 on, -1 for tokens
	// without a target, and the targets of each sequence on all ranks together.
	Sequences       tensor.Tensor // [T] I32
	SequenceTargets []int64
}

// Loss is the loss of this rank's shard as a sum and a count, which can be added over ranks.
type Loss struct {
	Sum    float64 // of negative log likelihoods, nats
	Tokens int64   // targets
	// Balance is this rank's share of the loss that balances experts, times the targets and without
	// its coefficient (Config.Balances). It is not part of Sum.
	Balance float64
}

// pass is a pass in progress: its inputs, the executor of its operations, its buffers, and the
// activations that it saves.
type pass struct {
	executor
	passBuffers
	saving

	batch    *Batch
	tokens   int64     // T, of this rank
	first    int64     // the number of the first token of the tile that is computed
	backward bool      // the pass has a backward half
	comm     comm.Comm // of the ranks that share the sequence
	plans    *plans
	sizes    sizes // of the plans' calls
	tiles    Tiles
	balance  balance
	bias     *expertBias
	// with experts that are divided among ranks: the largest number of tokens of these ranks, and
	// the bytes that this rank has sent to experts and back
	expertTokens, expertBytes int64
	temporary                 map[layerWork]int64 // in a dry run, bytes of what has run
}

// passBuffers are the tensors that all layers of a pass share.
type passBuffers struct {
	tables [masks]angles
	rstd   tensor.Tensor // [T] F32, statistics of the last norm
	// [T, hidden]: the output of a norm, then of the sublayer after it; in the backward half the
	// gradient of the norm's output
	act            tensor.Tensor
	residualStream tensor.Tensor // [T, hidden], where it is not saved
}

// angles has cos and sin of the angles of RoPE, [T, R/2] F32. qCos and qSin are the table of
// queries with a gain; nil = cos and sin.
type angles struct{ cos, sin, qCos, qSin tensor.Tensor }

// ofQueries returns the table of queries.
func (a *angles) ofQueries() angles {
	if a.qCos.IsNil() {
		return *a
	}
	return angles{cos: a.qCos, sin: a.qSin}
}

// allocate allocates the buffers for the rest of the pass.
func (b *passBuffers) allocate(e *executor, tokens int64, c *Config) {
	table := func(r *Rope) (a angles) {
		half := c.RotaryDim / 2
		if a.cos, a.sin = e.tempF32(tokens, half), e.tempF32(tokens, half); r.QueryBeta != 0 {
			a.qCos, a.qSin = e.tempF32(tokens, half), e.tempF32(tokens, half)
		}
		return a
	}
	b.tables[fullMask] = table(&c.Rope)
	if b.tables[slidingMask] = b.tables[fullMask]; c.LocalRope != nil {
		b.tables[slidingMask] = table(c.LocalRope)
	}
	b.rstd, b.act, b.residualStream = e.tempF32(tokens), e.temp(tokens, c.HiddenSize), e.temp(tokens, c.HiddenSize)
}

// begin prepares a pass of the model.
func (p *pass) begin(m *Model, c *Ctx, b *Batch, tokens int64, sizes sizes, backward bool) {
	p.executor.begin(m, c)
	p.saving.begin(&m.off, m.activations.policies())
	p.batch, p.tokens, p.first, p.backward = b, tokens, 0, backward
	p.comm, p.plans, p.sizes, p.tiles = m.comm, &m.plans, sizes, m.tiles
	p.expertTokens, p.expertBytes, p.balance, p.bias = tokens, 0, balance{}, &m.bias
}
