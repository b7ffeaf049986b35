package main

import (
	"math"

	"ulysses/device"
	"ulysses/tensor"
)

// gdnChunk is the number of tokens of a chunk. It is the CPU's default, and fixed here because the
// number of FLOP depends on it.
const gdnChunk = 32

// gdnFlops returns the FLOP of the gated delta rule in chunks of so many tokens, with half of each
// square matrix of a chunk counted. For each token and head, the forward pass has 6·Dk·Dv +
// 2·C·(Dk + Dv), the backward pass 12·Dk·Dv + C·(6·Dk + 4·Dv), including the triangles that it
// computes again.
func (s shape) gdnFlops(chunk float64) (forward, backward float64) {
	d, n := float64(s.HeadDim), float64(s.Tokens*s.Heads)
	return n * (6*d*d + 4*chunk*d), n * (12*d*d + 10*chunk*d)
}

// gdn times the gated delta rule on the CPU: the forward pass, and forward and backward together.
func gdn(o *options) error {
	return o.onCPU(o.threads, o.cases.GDN, func(d device.Device, stream device.Stream, s shape) error {
		var g device.GatedDeltaGrad
		free, err := build(d, func(a arena) { g = gdnTensors(d, a, s, o.compute) })
		if err != nil {
			return err
		}
		defer free()
		forward := func() error { return d.GatedDeltaForward(stream, &g.GatedDelta) }
		both := inOrder(forward, func() error { return d.GatedDeltaBackward(stream, &g) })
		f, b := s.gdnFlops(gdnChunk)
		more := map[string]any{"threads": o.threads, "kernels": d.Info().Kernels, "dtype": o.compute.String()}
		times, err := measure(o.repeat, nil, forward)
		if err != nil {
			return err
		}
		emit(s.Name+"-forward", times, "gflops", f, more)
		if times, err = measure(o.repeat, nil, both); err != nil {
			return err
		}
		emit(s.Name, times, "gflops", f+b, more)
		return nil
	})
}

// gdnTensors allocates the operands of the gated delta rule, head-major, which is the fastest
// layout on the CPU. The shape's Heads are value heads, its KVHeads key heads.
func gdnTensors(d device.Device, a arena, s shape, dtype tensor.DType) (g device.GatedDeltaGrad) {
	random, result := a.headMajor(s, dtype)
	g.Q, g.K, g.V, g.DOut = random(s.KVHeads), random(s.KVHeads), random(s.Heads), random(s.Heads)
	g.Out, g.DQ, g.DK, g.DV = result(s.Heads), result(s.KVHeads), result(s.KVHeads), result(s.Heads)
	g.G, g.Beta = a.random(tensor.F32, s.Tokens, s.Heads), a.random(tensor.F32, s.Tokens, s.Heads)
	g.DG, g.DBeta = a.alloc(tensor.F32, s.Tokens, s.Heads), a.alloc(tensor.F32, s.Tokens, s.Heads)
	if !a.Sketched() {
		gates(g.G.Float32s(), g.Beta.Float32s())
	}
	g.Cu, g.L2Norm, g.Scale, g.Chunk = s.documents(), true, 1/math.Sqrt(float64(s.HeadDim)), gdnChunk
	sizes := d.GatedDeltaSizes(&g.GatedDelta)
	g.Saved, g.Workspace = a.alloc(tensor.U8, sizes.Saved), a.alloc(tensor.U8, max(sizes.Forward, sizes.Backward))
	return g
}
