package model

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/sp"
	"ulysses/tensor"
)

// Ctx is what a pass runs with.
type Ctx struct {
	Stream  device.Stream
	Weights Weights       // nil: parameters are always there and nobody waits for gradients
	Arena   *device.Arena // of Memory's bytes; given back as it was found
	Host    *device.Arena // of Memory's bytes of the host; nil where nothing is offloaded
	Clock   *clock.Clock  // nil: nobody asks

	// Inspect, if there is one, is shown the tensors of a pass in the order of its work: each when
	// the operation that completes it is on the stream, with its place ("layer 3: attention
	// output", "layer 3: gradient of model.layers.3.mlp.down_proj.weight"). It may enqueue on the
	// stream and wait for it; the memory is used for something else afterwards.
	Inspect func(at string, t tensor.Tensor) error
}

// Batch is this rank's shard of one micro step: one flat sequence, whose documents SP knows.
type Batch struct {
	SP  *sp.Batch     // Batch 1
	IDs tensor.Tensor // [rows] I32
	// [rows] I32, the next token's id, -100 = none; shifted globally before sharding
	Targets   tensor.Tensor
	Positions tensor.Tensor // [rows] I32, for RoPE
	GradScale float64       // of the gradient of the sum: 1 / valid targets of the global batch
}

// Loss is a sum and its count; what travels is the pair, means are for reports. It is of this
// rank's shard alone.
type Loss struct {
	Sum    float64 // of negative log likelihoods, nats
	Tokens int64   // valid targets
}

// pass is one pass under way. Its methods are the device's operations with the stream, the
// arguments' memory (so that no call allocates) and the error kept here: after the first error
// nothing runs, and the error is looked at once, at the end.
type pass struct {
	dev      device.Device
	comm     comm.Comm // of the ranks that share the sequence
	c        *Ctx
	batch    *Batch
	err      error
	at       int // group under way, or where the error came
	names    []*Group
	dry      bool // lay out memory, run nothing
	backward bool // activations are saved for the backward pass

	compute   tensor.DType // of activations
	rows      int64        // T, this rank's tokens
	tiles     Tiles
	sizes     sizes
	plans     *plans
	policy    [categories]Policy
	actions   [categories]action
	measuring bool // a walk that counts what is offloaded, on the meter
	meter     device.Allocator
	saved     [categories]int64 // bytes
	*offloader
	visited  int64         // layers that the backward half has come to
	cos, sin tensor.Tensor // [T, R/2] F32
	rstd     tensor.Tensor // [T] F32, of the norm under way
	// [T, hidden], between a norm and its sublayer's output; its gradient on the way back
	act  tensor.Tensor
	flow tensor.Tensor // [T, hidden], the residual stream where nobody keeps it

	gemm     device.Gemm
	norm     device.RMSNorm
	normGrad device.RMSNormGrad
	swi      device.SwiGLU
	swiGrad  device.SwiGLUGrad
	embed    device.Embedding
	embGrad  device.EmbeddingGrad
	cross    device.CrossEntropy
	table    device.RopeTable

	gate          device.SigmoidGate
	gateGrad      device.SigmoidGateGrad
	gatedNorm     device.GatedRMSNorm
	gatedNormGrad device.GatedRMSNormGrad
}

// temp takes memory of the compute type until the next reset.
func (p *pass) temp(shape ...int64) tensor.Tensor { return p.alloc(p.compute, shape...) }

// stat takes F32 memory, of statistics and tables.
func (p *pass) stat(shape ...int64) tensor.Tensor { return p.alloc(tensor.F32, shape...) }

func (p *pass) alloc(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t, err := p.c.Arena.Tensor(dtype, shape...)
	if p.err == nil {
		p.err = err
	}
	return t
}

func (p *pass) mark() int64      { return p.c.Arena.Mark() }
func (p *pass) reset(mark int64) { p.c.Arena.Reset(mark) }

// phase enters a phase of the clock and returns what leaves it.
func (p *pass) phase(name string) { p.c.Clock.Push(name) }
func (p *pass) end()              { p.c.Clock.Pop() }

// wait lets the stream come past. The time it takes is the work of other phases, where operations
// return before they are done.
func (p *pass) wait() {
	if p.dev.Info().Place != tensor.Host {
		p.phase("wait")
		defer p.end()
		if p.err = comm.BarrierBeforeSync(p.comm); p.err != nil {
			return
		}
	}
	p.err = p.c.Stream.Sync()
}

// skip reports that an operation must not run.
func (p *pass) skip() bool { return p.err != nil || p.dry }

func (p *pass) need(group int) {
	if p.err == nil {
		p.at = group
	}
	if !p.skip() && p.c.Weights != nil {
		p.err = p.c.Weights.Gather(group, p.c.Stream)
	}
}

func (p *pass) done(group int) {
	if !p.skip() && p.c.Weights != nil {
		p.err = p.c.Weights.Release(group, p.c.Stream)
	}
}

func (p *pass) ready(params ...*Param) {
	for _, w := range params {
		p.inspect("gradient of ", w.Name, w.Grad)
		if !p.skip() && p.c.Weights != nil {
			p.err = p.c.Weights.GradReady(w, p.c.Stream)
		}
	}
}

// Gemm is c = a·b (+ bias).
func (p *pass) Gemm(c, a, b, bias tensor.Tensor) {
	if !p.skip() {
		p.gemm = device.Gemm{A: a, B: b, C: c, Bias: bias}
		p.err = p.dev.Gemm(p.c.Stream, &p.gemm)
	}
}

// inspect shows a tensor of the group under way; its name is put together here, where somebody
// asks.
func (p *pass) inspect(what, of string, t tensor.Tensor) {
	if p.c.Inspect != nil && !p.skip() {
		p.err = p.c.Inspect(p.names[p.at].Name+": "+what+of, t)
	}
}

// GemmAdd is c += a·b.
func (p *pass) GemmAdd(c, a, b tensor.Tensor) {
	if !p.skip() {
		p.gemm = device.Gemm{A: a, B: b, C: c, Accumulate: true}
		p.err = p.dev.Gemm(p.c.Stream, &p.gemm)
	}
}

func (p *pass) Copy(dst, src tensor.Tensor) {
	if !p.skip() {
		p.err = p.dev.Copy(p.c.Stream, dst, src)
	}
}

func (p *pass) Add(dst, a, b tensor.Tensor) {
	if !p.skip() {
		p.err = p.dev.Add(p.c.Stream, dst, a, b)
	}
}

func (p *pass) ColumnSum(dst, x tensor.Tensor) {
	if !p.skip() {
		p.err = p.dev.ColumnSum(p.c.Stream, dst, x)
	}
}

func (p *pass) Sum(out, x tensor.Tensor) {
	if !p.skip() {
		p.err = p.dev.Sum(p.c.Stream, out, x)
	}
}

// Norm is y = rmsnorm(x)·w, or ·(1 + w) as the type has it; rstd is left for NormBack.
func (p *pass) Norm(y, x tensor.Tensor, w *Param, rstd tensor.Tensor, eps float64) {
	if !p.skip() {
		p.norm = device.RMSNorm{X: x, W: w.Value, Y: y, RStd: rstd, Eps: eps, Centre: w.centre}
		p.err = p.dev.RMSNormForward(p.c.Stream, &p.norm)
	}
}

// NormBack is dx = its derivative (dx += with add); the gradient of w is added to and is complete.
func (p *pass) NormBack(dx, dy, x tensor.Tensor, w *Param, rstd tensor.Tensor, add bool) {
	if !p.skip() {
		p.normGrad = device.RMSNormGrad{X: x, W: w.Value, RStd: rstd, DY: dy, DX: dx, DW: w.Grad, AddDX: add, Centre: w.centre}
		p.err = p.dev.RMSNormBackward(p.c.Stream, &p.normGrad)
	}
	p.ready(w)
}

func (p *pass) RopeTable(positions, freq tensor.Tensor) {
	if !p.skip() {
		p.table = device.RopeTable{Positions: positions, Freq: freq, Cos: p.cos, Sin: p.sin}
		p.err = p.dev.RopeTable(p.c.Stream, &p.table)
	}
}

// SigmoidGate is y = x·sigmoid(gate).
func (p *pass) SigmoidGate(y, x, gate tensor.Tensor) {
	if !p.skip() {
		p.gate = device.SigmoidGate{X: x, Gate: gate, Y: y}
		p.err = p.dev.SigmoidGateForward(p.c.Stream, &p.gate)
	}
}

// SigmoidGateBack turns the gradient d of y into that of x, in place, and writes that of the gate.
func (p *pass) SigmoidGateBack(d, dgate, x, gate tensor.Tensor) {
	if !p.skip() {
		p.gateGrad = device.SigmoidGateGrad{X: x, Gate: gate, DY: d, DX: d, DGate: dgate}
		p.err = p.dev.SigmoidGateBackward(p.c.Stream, &p.gateGrad)
	}
}

// GatedNorm is y = rmsnorm(x)·w·silu(gate); rstd is left for GatedNormBack.
func (p *pass) GatedNorm(y, x, gate tensor.Tensor, w *Param, rstd tensor.Tensor, eps float64) {
	if !p.skip() {
		p.gatedNorm = device.GatedRMSNorm{X: x, Gate: gate, Y: y, W: w.Value, RStd: rstd, Eps: eps}
		p.err = p.dev.GatedRMSNormForward(p.c.Stream, &p.gatedNorm)
	}
}

// GatedNormBack turns the gradient d of y into that of x, in place, and writes that of the gate;
// the gradient of w is added to and is complete.
func (p *pass) GatedNormBack(d, dgate, x, gate tensor.Tensor, w *Param, rstd tensor.Tensor) {
	if !p.skip() {
		p.gatedNormGrad = device.GatedRMSNormGrad{X: x, Gate: gate, W: w.Value, RStd: rstd, DY: d, DX: d, DGate: dgate, DW: w.Grad}
		p.err = p.dev.GatedRMSNormBackward(p.c.Stream, &p.gatedNormGrad)
	}
	p.ready(w)
}

func (p *pass) SwiGLU(y, gate, up tensor.Tensor) {
	if !p.skip() {
		p.swi = device.SwiGLU{Gate: gate, Up: up, Y: y}
		p.err = p.dev.SwiGLUForward(p.c.Stream, &p.swi)
	}
}

// SwiGLUBack writes the gradients over gate and up, and silu(gate)·up over dy.
func (p *pass) SwiGLUBack(dy, gate, up tensor.Tensor) {
	if !p.skip() {
		p.swiGrad = device.SwiGLUGrad{Gate: gate, Up: up, DY: dy, DGate: gate, DUp: up, Restore: true}
		p.err = p.dev.SwiGLUBackward(p.c.Stream, &p.swiGrad)
	}
}

func (p *pass) Embed(y, ids tensor.Tensor, w *Param) {
	if !p.skip() {
		p.embed = device.Embedding{Table: w.Value, IDs: ids, Y: y}
		p.err = p.dev.EmbeddingForward(p.c.Stream, &p.embed)
	}
}

// EmbedBack adds to the gradient of w, which is complete.
func (p *pass) EmbedBack(dy, ids tensor.Tensor, w *Param) {
	if !p.skip() {
		p.embGrad = device.EmbeddingGrad{IDs: ids, DY: dy, DTable: w.Grad}
		p.err = p.dev.EmbeddingBackward(p.c.Stream, &p.embGrad)
	}
	p.ready(w)
}

// CrossEntropy writes nll, and the gradient of the logits, which may take their place, when the
// pass has a backward half.
func (p *pass) CrossEntropy(nll, logits, dlogits, targets tensor.Tensor) {
	if p.skip() {
		return
	}
	p.cross = device.CrossEntropy{Logits: logits, Targets: targets, NLL: nll, GradScale: p.batch.GradScale}
	if p.backward {
		p.cross.DLogits = dlogits
	}
	p.err = p.dev.CrossEntropy(p.c.Stream, &p.cross)
}
