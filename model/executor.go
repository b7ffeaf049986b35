package model

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// executor enqueues the operations of a pass on its stream. After the first error it enqueues
// nothing more, and the error is checked once, at the end of the pass. In a dry run it allocates
// memory and enqueues nothing.
type executor struct {
	dev     device.Device
	ctx     *Ctx
	compute tensor.DType // of activations
	err     error
	dry     bool
	groups  []*Group
	group   int // in use, or in use when the error occurred

	// Arguments of operations, kept here so that calls allocate nothing on the heap.
	gemm          device.Gemm
	norm          device.RMSNorm
	addNorm       device.AddRMSNorm
	normGrad      device.RMSNormGrad
	swiGLU        device.SwiGLU
	swiGLUGrad    device.SwiGLUGrad
	embedding     device.Embedding
	embeddingGrad device.EmbeddingGrad
	crossEntropy  device.CrossEntropy
	ropeTable     device.RopeTable
	gate          device.SigmoidGate
	gateGrad      device.SigmoidGateGrad
	gatedNorm     device.GatedRMSNorm
	gatedNormGrad device.GatedRMSNormGrad
	route         device.Route
	routeGrad     device.RouteGrad
	spread        device.SpreadRows
	combine       device.CombineRows
	grouped       device.GroupedGemm
	groupedGrad   device.GroupedGemmWeights
	weightedGrad  device.WeightedSwiGLUGrad
	dropout       device.Dropout
}

// begin prepares a pass, and keeps the memory of the arguments.
func (e *executor) begin(m *Model, c *Ctx) {
	e.dev, e.ctx, e.compute, e.groups = m.dev, c, m.compute, m.groups
	e.err, e.group, e.dry = nil, 0, c.Arena.Sketched()
}

// temp allocates a tensor of the compute type. It is valid until the next reset.
func (e *executor) temp(shape ...int64) tensor.Tensor { return e.alloc(e.compute, shape...) }

// tempF32 allocates an F32 tensor, for statistics and tables. It is valid until the next reset.
func (e *executor) tempF32(shape ...int64) tensor.Tensor { return e.alloc(tensor.F32, shape...) }

func (e *executor) alloc(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t, err := e.ctx.Arena.Tensor(dtype, shape...)
	if e.err == nil {
		e.err = err
	}
	return t
}

// mark returns the used part of the arena; reset frees what was allocated after it.
func (e *executor) mark() int64      { return e.ctx.Arena.Mark() }
func (e *executor) reset(mark int64) { e.ctx.Arena.Reset(mark) }

// phase begins a phase of the clock, end ends it.
func (e *executor) phase(name string) { e.ctx.Clock.Push(name) }
func (e *executor) end()              { e.ctx.Clock.Pop() }

// wait waits until the stream has run all operations. On a device other than the host, the time is
// the phase "wait": operations of other phases run in it. c is the communicator of the pass, whose
// ranks first wait for each other.
func (e *executor) wait(c comm.Comm) {
	if e.dev.Info().Place != tensor.Host {
		e.phase("wait")
		defer e.end()
		if e.err = comm.BarrierBeforeSync(c); e.err != nil {
			return
		}
	}
	e.err = e.ctx.Stream.Sync()
}

// skip reports whether operations are not enqueued.
func (e *executor) skip() bool { return e.err != nil || e.dry }

// gather begins a use of a group's weights.
func (e *executor) gather(group int) {
	if e.err == nil {
		e.group = group
	}
	if !e.skip() && e.ctx.Weights != nil {
		e.err = e.ctx.Weights.Gather(group, e.ctx.Stream)
	}
}

// release ends a use of a group's weights.
func (e *executor) release(group int) {
	if !e.skip() && e.ctx.Weights != nil {
		e.err = e.ctx.Weights.Release(group, e.ctx.Stream)
	}
}

// gradReady reports that the gradients of parameters are complete.
func (e *executor) gradReady(params ...*Param) {
	for _, w := range params {
		if w.Frozen {
			continue
		}
		e.inspect("gradient of ", w.Name, w.Grad)
		if !e.skip() && e.ctx.Weights != nil {
			e.err = e.ctx.Weights.GradReady(w, e.ctx.Stream)
		}
	}
}

// inspect gives a tensor of the group in use to Ctx.Inspect. The name is concatenated only if there
// is such a function.
func (e *executor) inspect(what, of string, t tensor.Tensor) {
	if e.ctx.Inspect != nil && !e.skip() {
		e.err = e.ctx.Inspect(e.groups[e.group].Name+": "+what+of, t)
	}
}

// Gemm computes c = a·b + bias; bias may be nil.
func (e *executor) Gemm(c, a, b, bias tensor.Tensor) {
	if !e.skip() {
		e.gemm = device.Gemm{A: a, B: b, C: c, Bias: bias}
		e.err = e.dev.Gemm(e.ctx.Stream, &e.gemm)
	}
}

// GemmAdd computes c += a·b.
func (e *executor) GemmAdd(c, a, b tensor.Tensor) {
	if !e.skip() {
		e.gemm = device.Gemm{A: a, B: b, C: c, Accumulate: true}
		e.err = e.dev.Gemm(e.ctx.Stream, &e.gemm)
	}
}

func (e *executor) Copy(dst, src tensor.Tensor) {
	if !e.skip() {
		e.err = e.dev.Copy(e.ctx.Stream, dst, src)
	}
}

func (e *executor) fill(dst tensor.Tensor, value float64) {
	if !e.skip() {
		e.err = e.dev.Fill(e.ctx.Stream, dst, value)
	}
}

func (e *executor) Add(dst, a, b tensor.Tensor) {
	if !e.skip() {
		e.err = e.dev.Add(e.ctx.Stream, dst, a, b)
	}
}

// Scale multiplies x by f, unless f is 1.
func (e *executor) Scale(x tensor.Tensor, f float64) {
	if !e.skip() && f != 1 {
		e.err = e.dev.Scale(e.ctx.Stream, x, f)
	}
}

func (e *executor) ColumnSum(dst, x tensor.Tensor) {
	if !e.skip() {
		e.err = e.dev.ColumnSum(e.ctx.Stream, dst, x)
	}
}

func (e *executor) Sum(out, x tensor.Tensor) {
	if !e.skip() {
		e.err = e.dev.Sum(e.ctx.Stream, out, x)
	}
}

// Norm computes y = rmsnorm(x)·(w.centre + w), and the statistics rstd for NormBack.
func (e *executor) Norm(y, x tensor.Tensor, w *Param, rstd tensor.Tensor, eps float64) {
	if !e.skip() {
		e.norm = device.RMSNorm{X: x, W: w.Value, Y: y, RStd: rstd, Eps: eps, Centre: w.centre}
		e.err = e.dev.RMSNormForward(e.ctx.Stream, &e.norm)
	}
}

// AddNorm computes sum = a + b, and Norm of sum. y may be a or b, but not sum.
func (e *executor) AddNorm(sum, y, a, b tensor.Tensor, w *Param, rstd tensor.Tensor, eps float64) {
	if !e.skip() {
		e.addNorm = device.AddRMSNorm{A: a, B: b, W: w.Value, Sum: sum, Y: y, RStd: rstd, Eps: eps, Centre: w.centre}
		e.err = e.dev.AddRMSNorm(e.ctx.Stream, &e.addNorm)
	}
}

// NormBack computes dx from dy, with add dx += it. It adds to the gradient of w, which is complete
// then.
func (e *executor) NormBack(dx, dy, x tensor.Tensor, w *Param, rstd tensor.Tensor, add bool) {
	mark, dw := e.mark(), e.gradOf(w)
	if !e.skip() {
		e.normGrad = device.RMSNormGrad{X: x, W: w.Value, RStd: rstd, DY: dy, DX: dx, DW: dw, AddDX: add,
			Centre: w.centre}
		e.err = e.dev.RMSNormBackward(e.ctx.Stream, &e.normGrad)
	}
	e.reset(mark)
	e.gradReady(w)
}

// RopeTable computes cos and sin of the positions' angles, times scale (0 = 1), and with length
// above 0 also times the gain of queries.
func (e *executor) RopeTable(cos, sin, positions, freq tensor.Tensor, scale, beta float64, length int64) {
	if !e.skip() {
		e.ropeTable = device.RopeTable{Positions: positions, Freq: freq, Cos: cos, Sin: sin, Scale: scale, Beta: beta,
			Length: length}
		e.err = e.dev.RopeTable(e.ctx.Stream, &e.ropeTable)
	}
}

// SigmoidGate computes y = x·sigmoid(gate).
func (e *executor) SigmoidGate(y, x, gate tensor.Tensor) {
	if !e.skip() {
		e.gate = device.SigmoidGate{X: x, Gate: gate, Y: y}
		e.err = e.dev.SigmoidGateForward(e.ctx.Stream, &e.gate)
	}
}

// SigmoidGateBack overwrites d, the gradient of y, with the gradient of x, and writes dgate.
func (e *executor) SigmoidGateBack(d, dgate, x, gate tensor.Tensor) {
	if !e.skip() {
		e.gateGrad = device.SigmoidGateGrad{X: x, Gate: gate, DY: d, DX: d, DGate: dgate}
		e.err = e.dev.SigmoidGateBackward(e.ctx.Stream, &e.gateGrad)
	}
}

// GatedNorm computes y = rmsnorm(x)·w·silu(gate), and the statistics rstd for GatedNormBack.
func (e *executor) GatedNorm(y, x, gate tensor.Tensor, w *Param, rstd tensor.Tensor, eps float64) {
	if !e.skip() {
		e.gatedNorm = device.GatedRMSNorm{X: x, Gate: gate, Y: y, W: w.Value, RStd: rstd, Eps: eps}
		e.err = e.dev.GatedRMSNormForward(e.ctx.Stream, &e.gatedNorm)
	}
}

// GatedNormBack overwrites d, the gradient of y, with the gradient of x, and writes dgate. It adds
// to the gradient of w, which is complete then.
func (e *executor) GatedNormBack(d, dgate, x, gate tensor.Tensor, w *Param, rstd tensor.Tensor) {
	mark, dw := e.mark(), e.gradOf(w)
	if !e.skip() {
		e.gatedNormGrad = device.GatedRMSNormGrad{X: x, Gate: gate, W: w.Value, RStd: rstd, DY: d, DX: d,
			DGate: dgate, DW: dw}
		e.err = e.dev.GatedRMSNormBackward(e.ctx.Stream, &e.gatedNormGrad)
	}
	e.reset(mark)
	e.gradReady(w)
}

// form is a form of SwiGLU, see device.SwiGLU.
type form uint8

const (
	formSiLU form = iota
	formGELU
	formClamped
)

// SwiGLU computes y = silu(gate)·up, or another form.
func (e *executor) SwiGLU(y, gate, up tensor.Tensor, f form) {
	if !e.skip() {
		e.swiGLU = device.SwiGLU{Gate: gate, Up: up, Y: y, GELU: f == formGELU, Clamped: f == formClamped}
		e.err = e.dev.SwiGLUForward(e.ctx.Stream, &e.swiGLU)
	}
}

// SwiGLUBack overwrites gate and up with their gradients, and dy, the gradient of SwiGLU's output,
// with that output.
func (e *executor) SwiGLUBack(dy, gate, up tensor.Tensor, f form) {
	if !e.skip() {
		e.swiGLUGrad = device.SwiGLUGrad{Gate: gate, Up: up, DY: dy, DGate: gate, DUp: up, Restore: true,
			GELU: f == formGELU, Clamped: f == formClamped}
		e.err = e.dev.SwiGLUBackward(e.ctx.Stream, &e.swiGLUGrad)
	}
}

// Embed writes the lines of the table w that ids name to y.
func (e *executor) Embed(y, ids tensor.Tensor, w *Param) {
	if !e.skip() {
		e.embedding = device.Embedding{Table: w.Value, IDs: ids, Y: y}
		e.err = e.dev.EmbeddingForward(e.ctx.Stream, &e.embedding)
	}
}

// EmbedBack adds to the gradient of w, which is complete then.
func (e *executor) EmbedBack(dy, ids tensor.Tensor, w *Param) {
	if !e.skip() {
		e.embeddingGrad = device.EmbeddingGrad{IDs: ids, DY: dy, DTable: w.Grad}
		e.err = e.dev.EmbeddingBackward(e.ctx.Stream, &e.embeddingGrad)
	}
	e.gradReady(w)
}

// CrossEntropy writes the negative log likelihoods nll, and the gradient dlogits of gradScale·Σnll
// unless it is nil. dlogits may be logits. softcap is the cap of logits, 0 = none.
func (e *executor) CrossEntropy(nll, logits, dlogits, targets tensor.Tensor, gradScale, softcap float64) {
	if !e.skip() {
		e.crossEntropy = device.CrossEntropy{Logits: logits, Targets: targets, NLL: nll, DLogits: dlogits,
			GradScale: gradScale, Softcap: softcap}
		e.err = e.dev.CrossEntropy(e.ctx.Stream, &e.crossEntropy)
	}
}
