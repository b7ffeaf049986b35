package main

import (
	"ulysses/device"
	"ulysses/tensor"
)

// gpuOps times single operations of a decoder layer and of the optimizer, on the shape of the first
// chosen case of gpu_layer. Operations that memory limits are given in GB/s, with each input and
// output counted once; "copy" shows the rate of the memory itself. Matrix products are given in
// GFLOP/s: forward, gradient of the input, gradient of the weights.
func gpuOps(o *options) error {
	d, stream, err := o.openGPU(0)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := o.roofs(d, stream); err != nil {
		return err
	}
	chosen := o.chosen(o.cases.GPULayer)
	for _, s := range chosen[:min(1, len(chosen))] {
		x := &opBench{o: o, d: d, s: stream, shape: s}
		free, err := build(d, x.allocate)
		if err != nil {
			return err
		}
		for _, t := range []tensor.Tensor{x.a, x.b, x.all, x.hidden, x.wide, x.up, x.logits, x.state[1]} {
			if err == nil {
				err = o.randomize(d, stream, t)
			}
		}
		if err == nil {
			err = d.Fill(stream, x.state[3], 1) // second moments
		}
		if err == nil {
			err = x.run()
		}
		free()
		if err != nil {
			return err
		}
	}
	return nil
}

// opBench holds the operands of the timed operations.
type opBench struct {
	o *options
	d device.Device
	s device.Stream
	shape
	a, b, c, w    tensor.Tensor    // [T, hidden] three times, [hidden]
	all           tensor.Tensor    // [T, q, k and v]
	hidden, wide  tensor.Tensor    // [T, 2·FFN], [T, FFN]
	up            tensor.Tensor    // [2·FFN, hidden], the largest weights
	grad          tensor.Tensor    // gradient of up, F32
	dw, rstd      tensor.Tensor    // F32
	cos, sin      tensor.Tensor    // [T, D/2]
	table, ids    tensor.Tensor    // [vocabulary, hidden], [T]
	dtable        tensor.Tensor    // F32
	logits, nll   tensor.Tensor    // [rows, 32·hidden] of the type of a model's logits, [rows] F32
	dlogits, want tensor.Tensor    // gradient of logits; targets
	state         [4]tensor.Tensor // weights, gradients and both moments of AdamW
	low, sum      tensor.Tensor
}

// allocate allocates all operands.
func (x *opBench) allocate(a arena) {
	t, h, f, kind := x.Tokens, x.Hidden, x.FFN, x.o.compute
	x.a, x.b, x.c, x.w = a.alloc(kind, t, h), a.alloc(kind, t, h), a.alloc(kind, t, h), a.alloc(kind, h)
	x.all = a.alloc(kind, t, (x.Heads+2*x.KVHeads)*x.HeadDim)
	x.hidden, x.wide = a.alloc(kind, t, 2*f), a.alloc(kind, t, f)
	x.up, x.grad = a.alloc(kind, 2*f, h), a.alloc(tensor.F32, 2*f, h)
	x.dw, x.rstd = a.alloc(tensor.F32, h), a.alloc(tensor.F32, t)
	x.cos, x.sin = a.alloc(tensor.F32, t, x.HeadDim/2), a.alloc(tensor.F32, t, x.HeadDim/2)
	vocabulary := max(256, 8*h)
	x.table, x.ids, x.dtable = a.alloc(kind, vocabulary, h), a.alloc(tensor.I32, t), a.alloc(tensor.F32, vocabulary, h)
	rows, logits := max(1, t/16), tensor.F32
	if x.d.Info().LogitsBF16 {
		logits = kind
	}
	x.logits, x.nll, x.dlogits, x.want = a.alloc(logits, rows, 32*h), a.alloc(tensor.F32, rows),
		a.alloc(kind, rows, 32*h), a.alloc(tensor.I32, rows)
	n := f * h * 2
	for i := range x.state {
		x.state[i] = a.alloc(tensor.F32, n)
	}
	x.low, x.sum = a.alloc(kind, n), a.alloc(tensor.F64, 1)
}

// bytesOf returns the size of some tensors in bytes.
func bytesOf(ts ...tensor.Tensor) (n int64) {
	for _, t := range ts {
		n += t.Numel() * t.DType.Size()
	}
	return n
}

// run times all operations and prints a line for each.
func (x *opBench) run() error {
	d, s, f := x.d, x.s, x.FFN
	vocabulary := x.table.Shape[0]
	ids := make([]int32, x.Tokens)
	for i := range ids {
		ids[i] = int32(int64(i) * 2654435761 >> 7 % vocabulary)
	}
	if err := d.Copy(s, x.ids, tensor.OfInt32(ids, x.Tokens)); err != nil {
		return err
	}
	if err := s.Sync(); err != nil {
		return err
	}
	q := x.all.Slice(1, 0, x.Heads*x.HeadDim)
	heads := func(t tensor.Tensor) tensor.Tensor { return t.Split(1, x.Heads) }
	gate, up := x.hidden.Slice(1, 0, f), x.hidden.Slice(1, f, 2*f)
	norm := device.RMSNorm{X: x.a, W: x.w, Y: x.b, RStd: x.rstd, Eps: 1e-5}
	addNorm := device.AddRMSNorm{A: x.a, B: x.b, W: x.w, Sum: x.c, Y: x.b, RStd: x.rstd, Eps: 1e-5}
	normBack := device.RMSNormGrad{X: x.a, W: x.w, RStd: x.rstd, DY: x.b, DX: x.c, DW: x.dw, AddDX: true}
	rope := device.Rope{X: heads(q), Y: heads(x.c), Cos: x.cos, Sin: x.sin}
	glu := device.SwiGLU{Gate: gate, Up: up, Y: x.wide}
	gluBack := device.SwiGLUGrad{Gate: gate, Up: up, DY: x.wide, DGate: gate, DUp: up, Restore: true}
	embed := device.Embedding{Table: x.table, IDs: x.ids, Y: x.c}
	embedBack := device.EmbeddingGrad{IDs: x.ids, DY: x.c, DTable: x.dtable}
	loss := device.CrossEntropy{Logits: x.logits, Targets: x.want, NLL: x.nll, DLogits: x.dlogits, GradScale: 1}
	adamw := device.AdamW{W: x.state[0], G: x.state[1], M: x.state[2], V: x.state[3], Low: x.low, LR: 1e-4, Beta1: 0.9,
		Beta2: 0.95, Eps: 1e-8, GradScale: 1, Step: 1}
	if x.o.compute == tensor.F32 {
		adamw.Low = tensor.Tensor{}
	}
	half := x.hidden.Numel() / 2
	flat := tensor.Of(x.hidden.Data, x.hidden.DType, 2*half)
	flat.Where = x.hidden.Where
	err := x.o.memory(s, []memoryOp{
		{"copy", bytesOf(x.hidden),
			func() error { return d.Copy(s, flat.Slice(0, 0, half), flat.Slice(0, half, 2*half)) }},
		{"copy of heads", 2 * bytesOf(q), func() error { return d.Copy(s, x.c, q) }},
		{"add", 3 * bytesOf(x.a), func() error { return d.Add(s, x.c, x.a, x.b) }},
		{"norm", 2 * bytesOf(x.a), func() error { return d.RMSNormForward(s, &norm) }},
		{"add and norm", 4 * bytesOf(x.a), func() error { return d.AddRMSNorm(s, &addNorm) }},
		{"norm backward", 4 * bytesOf(x.a), func() error { return d.RMSNormBackward(s, &normBack) }},
		{"rope", 2*bytesOf(q) + bytesOf(x.cos, x.sin), func() error { return d.Rope(s, &rope) }},
		{"swiglu", bytesOf(x.hidden, x.wide), func() error { return d.SwiGLUForward(s, &glu) }},
		{"swiglu backward", 2 * bytesOf(x.hidden, x.wide), func() error { return d.SwiGLUBackward(s, &gluBack) }},
		{"embedding", 2 * bytesOf(x.c), func() error { return d.EmbeddingForward(s, &embed) }},
		{"embedding backward", bytesOf(x.c) + 2*min(bytesOf(x.dtable), 4*x.c.Numel()),
			func() error { return d.EmbeddingBackward(s, &embedBack) }},
		{"cross-entropy", bytesOf(x.logits, x.dlogits), func() error { return d.CrossEntropy(s, &loss) }},
		{"fill", bytesOf(x.grad), func() error { return d.Fill(s, x.grad, 0) }},
		{"sum of squares", bytesOf(x.state[1]), func() error { return d.SumSquares(s, x.sum, x.state[1]) }},
		{"adamw", 2*bytesOf(x.state[0], x.state[2], x.state[3]) + bytesOf(x.state[1], adamw.Low),
			func() error { return d.AdamW(s, &adamw) }},
	})
	if err != nil {
		return err
	}
	return x.products()
}

// memoryOp is an operation that memory limits, with the bytes of its inputs and outputs.
type memoryOp struct {
	name  string
	bytes int64
	f     func() error
}

// memory times operations that memory limits and prints a line for each.
func (o *options) memory(s device.Stream, ops []memoryOp) error {
	for _, op := range ops {
		times, err := o.steady(s, op.f)
		if err != nil {
			return err
		}
		o.row(op.name, "memory", times, work{bytes: float64(op.bytes)}, nil)
	}
	return nil
}

// products times the matrix products of the layer's projections. Their matrices use the memory of
// other operands that are large enough.
func (x *opBench) products() error {
	h := x.Hidden
	matrix := func(t tensor.Tensor, rows, columns int64) tensor.Tensor {
		p := tensor.Of(t.Data, t.DType, rows, columns)
		p.Where = t.Where
		return p
	}
	for _, p := range []struct {
		name    string
		in, out int64
		x, y    tensor.Tensor
	}{{"qkv", h, x.all.Shape[1], x.a, x.all}, {"out", x.Heads * x.HeadDim, h, x.a, x.b},
		{"gate and up", h, 2 * x.FFN, x.a, x.hidden}, {"down", x.FFN, h, x.wide, x.a}} {
		in, out := matrix(p.x, x.Tokens, p.in), matrix(p.y, x.Tokens, p.out)
		w, dw := matrix(x.up, p.out, p.in), matrix(x.grad, p.out, p.in)
		for _, g := range []struct {
			name string
			device.Gemm
		}{{"forward", device.Gemm{A: in, B: w.Permute(1, 0), C: out}},
			{"to the input", device.Gemm{A: out, B: w, C: in}},
			{"to the weights", device.Gemm{A: out.Permute(1, 0), B: in, C: dw, Accumulate: true}}} {
			// new values, because results of one product are operands of the next and grow
			for _, t := range []tensor.Tensor{in, out, w} {
				if err := x.o.randomize(x.d, x.s, t); err != nil {
					return err
				}
			}
			times, err := x.o.steady(x.s, func() error { return x.d.Gemm(x.s, &g.Gemm) })
			if err != nil {
				return err
			}
			x.o.row(p.name+" "+g.name, "product", times,
				work{2 * float64(x.Tokens) * float64(p.in*p.out), float64(bytesOf(g.A, g.B, g.C))}, nil)
		}
	}
	return nil
}
