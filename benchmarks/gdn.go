package main

import (
	"math"

	"ulysses/cpu"
	"ulysses/device"
	"ulysses/tensor"
)

// gdnChunk is the tokens of a chunk: the device's own choice, named because flops depend on it.
const gdnChunk = 32

// gdnFlops are those of the chunked gated delta rule, triangles counted once: per token and head
// forward 6·Dk·Dv + 2·C·(Dk + Dv), backward 12·Dk·Dv + C·(6·Dk + 4·Dv), with the triangles that it
// computes again.
func (s shape) gdnFlops() (forward, backward float64) {
	d, n := float64(s.HeadDim), float64(s.Tokens*s.Heads)
	return n * (6*d*d + 4*gdnChunk*d), n * (12*d*d + 10*gdnChunk*d)
}

// gdn times the gated delta rule of linear attention: forward alone, and forward and backward.
func gdn(o *options) error {
	d, stream, err := opened(cpu.New(cpu.Options{Workers: o.threads}))
	if err != nil {
		return err
	}
	defer d.Close()
	for _, s := range o.chosen(o.cases.GDN) {
		var g device.GatedDeltaGrad
		free, err := build(d, func(a arena) { g = gdnTensors(d, a, s, o.compute) })
		if err != nil {
			return err
		}
		forward := func() error { return d.GatedDeltaForward(stream, &g.GatedDelta) }
		both := func() error {
			if err := forward(); err != nil {
				return err
			}
			return d.GatedDeltaBackward(stream, &g)
		}
		f, b := s.gdnFlops()
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
		free()
	}
	return nil
}

// gdnTensors is head-major, the layout that the CPU likes. Heads are value heads, key-value heads
// key heads.
func gdnTensors(d device.Device, a arena, s shape, dtype tensor.DType) (g device.GatedDeltaGrad) {
	heads := func(n int64, random bool) tensor.Tensor {
		if random {
			return a.random(dtype, n, s.Tokens, s.HeadDim).Permute(1, 0, 2)
		}
		return a.take(dtype, n, s.Tokens, s.HeadDim).Permute(1, 0, 2)
	}
	g.Q, g.K, g.V, g.DOut = heads(s.KVHeads, true), heads(s.KVHeads, true), heads(s.Heads, true), heads(s.Heads, true)
	g.Out, g.DQ, g.DK, g.DV = heads(s.Heads, false), heads(s.KVHeads, false), heads(s.KVHeads, false), heads(s.Heads, false)
	g.G, g.Beta = a.random(tensor.F32, s.Tokens, s.Heads), a.random(tensor.F32, s.Tokens, s.Heads)
	g.DG, g.DBeta = a.take(tensor.F32, s.Tokens, s.Heads), a.take(tensor.F32, s.Tokens, s.Heads)
	if !a.Sketched() {
		gates(g.G.Float32s(), g.Beta.Float32s())
	}
	g.Cu, g.L2Norm, g.Scale, g.Chunk = s.documents(), true, 1/math.Sqrt(float64(s.HeadDim)), gdnChunk
	sizes := d.GatedDeltaSizes(&g.GatedDelta)
	g.Saved, g.Workspace = a.take(tensor.U8, sizes.Saved), a.take(tensor.U8, max(sizes.Forward, sizes.Backward))
	return g
}
