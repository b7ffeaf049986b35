package main

import (
	"math"

	"ulysses/device"
	"ulysses/tensor"
)

// convWidth is the width of the convolution of Qwen3.5.
const convWidth = 4

// gpuDelta times the gated delta rule, forward and backward, in the GFLOP/s of the algorithm with
// chunks of 64 tokens. For the first chosen case it also times a copy and the other operations of a
// layer of linear attention, which memory limits.
func gpuDelta(o *options) error {
	d, stream, err := o.openGPU(0)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := o.roofs(d, stream); err != nil {
		return err
	}
	others := false // have been measured
	return o.each(o.cases.GPUDelta, func(s shape) error {
		x := &deltaBench{o: o, d: d, s: stream, shape: s}
		free, err := build(d, x.allocate)
		if err != nil {
			return err
		}
		defer free()
		if err = x.fill(); err == nil {
			err = x.rule()
		}
		if err == nil && !others {
			others, err = true, x.others()
		}
		return err
	})
}

// deltaBench holds the operands of a layer of linear attention. The shape's Heads are value heads,
// its KVHeads key heads.
type deltaBench struct {
	o *options
	d device.Device
	s device.Stream
	shape
	all, mixed    tensor.Tensor // [T, q, k and v], before and after the convolution
	conv, w       tensor.Tensor // [channels, width], [head]
	a, b, perHead tensor.Tensor // [T, Hv], [T, Hv]; [Hv], of ALog and of DtBias
	rstd          tensor.Tensor // F32
	dconv, dw     tensor.Tensor // F32
	dPerHead      tensor.Tensor // F32
	grad          device.GatedDeltaGrad
}

func (x *deltaBench) allocate(a arena) {
	t, kind, g := x.Tokens, x.o.compute, &x.grad
	keys, values := x.KVHeads*x.HeadDim, x.Heads*x.HeadDim
	channels := 2*keys + values
	x.all, x.mixed = a.alloc(kind, t, channels), a.alloc(kind, t, channels)
	x.conv, x.w = a.alloc(kind, channels, convWidth), a.alloc(kind, x.HeadDim)
	x.a, x.b, x.perHead = a.alloc(kind, t, x.Heads), a.alloc(kind, t, x.Heads), a.alloc(tensor.F32, x.Heads)
	x.rstd, x.dconv, x.dw = a.alloc(tensor.F32, t*x.Heads), a.alloc(tensor.F32, channels, convWidth),
		a.alloc(tensor.F32, x.HeadDim)
	x.dPerHead = a.alloc(tensor.F32, x.Heads)
	heads := func(of tensor.Tensor, lo, n int64) tensor.Tensor { return of.Slice(1, lo, lo+n*x.HeadDim).Split(1, n) }
	g.Q, g.K, g.V = heads(x.mixed, 0, x.KVHeads), heads(x.mixed, keys, x.KVHeads), heads(x.mixed, 2*keys, x.Heads)
	g.Out, g.DOut = a.alloc(kind, t, x.Heads, x.HeadDim), a.alloc(kind, t, x.Heads, x.HeadDim)
	g.DQ, g.DK, g.DV = a.alloc(kind, t, x.KVHeads, x.HeadDim), a.alloc(kind, t, x.KVHeads, x.HeadDim),
		a.alloc(kind, t, x.Heads, x.HeadDim)
	g.G, g.Beta, g.DG, g.DBeta = a.alloc(tensor.F32, t, x.Heads), a.alloc(tensor.F32, t, x.Heads),
		a.alloc(tensor.F32, t, x.Heads), a.alloc(tensor.F32, t, x.Heads)
	g.Cu, g.L2Norm, g.Scale = x.documents(), true, 1/math.Sqrt(float64(x.HeadDim))
	sizes := x.d.GatedDeltaSizes(&g.GatedDelta)
	g.Saved, g.Workspace = a.alloc(tensor.U8, sizes.Saved), a.alloc(tensor.U8, max(sizes.Forward, sizes.Backward))
}

// fill gives all inputs random values, and computes the gates from them.
func (x *deltaBench) fill() error {
	for _, t := range []tensor.Tensor{x.all, x.mixed, x.conv, x.w, x.a, x.b, x.perHead, x.grad.DOut} {
		if err := x.o.randomize(x.d, x.s, t); err != nil {
			return err
		}
	}
	return x.d.DeltaGatesForward(x.s, x.gates())
}

func (x *deltaBench) gates() *device.DeltaGates {
	return &device.DeltaGates{A: x.a, B: x.b, ALog: x.perHead, DtBias: x.perHead, G: x.grad.G, Beta: x.grad.Beta}
}

// rule times both passes of the gated delta rule.
func (x *deltaBench) rule() error {
	forward, backward := x.gdnFlops(64)
	g := &x.grad
	in := float64(bytesOf(g.Q, g.K, g.V, g.G, g.Beta, g.Out))
	for _, pass := range []struct {
		op string
		work
		f func() error
	}{
		{"forward", work{forward, in}, func() error { return x.d.GatedDeltaForward(x.s, &x.grad.GatedDelta) }},
		{"backward", work{backward, in + float64(bytesOf(g.DQ, g.DK, g.DV, g.DG, g.DBeta))},
			func() error { return x.d.GatedDeltaBackward(x.s, &x.grad) }},
	} {
		times, err := x.o.steady(x.s, pass.f)
		if err != nil {
			return err
		}
		x.o.row(x.Name, pass.op, times, pass.work, map[string]any{"workspace_mib": g.Workspace.Numel() >> 20})
	}
	return nil
}

// others times the other operations of the layer.
func (x *deltaBench) others() error {
	d, s, g, flat := x.d, x.s, &x.grad, func(t tensor.Tensor) tensor.Tensor { return t.Split(1, 1).Select(1, 0) }
	conv := device.Conv1d{X: x.all, Y: x.mixed, W: x.conv, Cu: x.documents()}
	convBack := device.Conv1dGrad{Conv1d: conv, DY: x.mixed, DX: x.mixed, DW: x.dconv}
	norm := device.GatedRMSNorm{X: g.Out, Gate: g.DOut, Y: g.Out, W: x.w, RStd: x.rstd, Eps: 1e-6}
	normBack := device.GatedRMSNormGrad{X: g.Out, Gate: g.DOut, W: x.w, RStd: x.rstd, DY: g.DV, DX: g.DV, DGate: g.DOut,
		DW: x.dw}
	gate := device.SigmoidGate{X: g.Out, Gate: g.DOut, Y: g.Out}
	gateBack := device.SigmoidGateGrad{X: g.Out, Gate: g.DOut, DY: g.DV, DX: g.DV, DGate: g.DOut}
	gatesBack := device.DeltaGatesGrad{A: x.a, B: x.b, ALog: x.perHead, DtBias: x.perHead, DG: g.DG, DBeta: g.DBeta,
		DA: x.a, DB: x.b, DALog: x.dPerHead, DDtBias: x.dPerHead}
	small := bytesOf(x.a, x.b, g.G, g.Beta)
	return x.o.memory(s, []memoryOp{
		{"copy", bytesOf(x.all, x.mixed), func() error { return d.Copy(s, flat(x.mixed), flat(x.all)) }},
		{"conv1d", bytesOf(x.all, x.mixed), func() error { return d.Conv1dForward(s, &conv) }},
		{"conv1d backward", bytesOf(x.all, x.mixed, x.mixed), func() error { return d.Conv1dBackward(s, &convBack) }},
		{"delta gates", small, func() error { return d.DeltaGatesForward(s, x.gates()) }},
		{"delta gates backward", bytesOf(x.a, x.b) + small,
			func() error { return d.DeltaGatesBackward(s, &gatesBack) }},
		{"gated norm", 3 * bytesOf(g.Out), func() error { return d.GatedRMSNormForward(s, &norm) }},
		{"gated norm backward", 5 * bytesOf(g.Out), func() error { return d.GatedRMSNormBackward(s, &normBack) }},
		{"sigmoid gate", 3 * bytesOf(g.Out), func() error { return d.SigmoidGateForward(s, &gate) }},
		{"sigmoid gate backward", 5 * bytesOf(g.Out), func() error { return d.SigmoidGateBackward(s, &gateBack) }},
	})
}
