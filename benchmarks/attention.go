package main

import (
	"math"
	"math/rand/v2"
	"unsafe"

	"ulysses/cpu"
	"ulysses/device"
	"ulysses/tensor"
)

// arena is a device.Arena whose allocations cannot fail, because build computes its size with the
// same calls on a sketch.
type arena struct{ *device.Arena }

// alloc allocates a dense tensor.
func (a arena) alloc(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t, err := a.Tensor(dtype, shape...)
	if err != nil {
		panic(err)
	}
	return t
}

// random allocates a dense tensor of normal variates, F32 or BF16.
func (a arena) random(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t := a.alloc(dtype, shape...)
	switch {
	case a.Sketched():
	case dtype == tensor.F32:
		copy(t.Float32s(), normals(t.Numel()))
	default:
		bits := unsafe.Slice((*uint16)(t.Data), t.Numel())
		for i, x := range normals(t.Numel()) {
			bits[i] = tensor.F32ToBF16(x)
		}
	}
	return t
}

// normals returns n standard normal variates, the same in every run.
func normals(n int64) []float32 {
	r, x := rand.New(rand.NewPCG(1, 1)), make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// opened returns the device with a stream. It passes on the error of opening the device.
func opened(d device.Device, err error) (device.Device, device.Stream, error) {
	if err != nil {
		return nil, nil, err
	}
	s, err := d.NewStream()
	if err != nil {
		d.Close()
		return nil, nil, err
	}
	return d, s, nil
}

// onCPU calls bench for each chosen case, with a CPU device of that many workers.
func (o *options) onCPU(workers int, cases []shape,
	bench func(d device.Device, stream device.Stream, s shape) error) error {
	d, stream, err := opened(cpu.New(cpu.Options{Workers: workers}))
	if err != nil {
		return err
	}
	defer d.Close()
	for _, s := range o.chosen(cases) {
		if err := bench(d, stream, s); err != nil {
			return err
		}
	}
	return nil
}

// build calls f on a sketch to compute the size of its tensors, and then on an arena of that size.
// The caller frees the arena.
func build(d device.Device, f func(arena)) (free func(), err error) {
	s := arena{device.Sketch(d, "benchmark")}
	f(s)
	a, err := device.NewArena(d, "benchmark", s.Peak())
	if err != nil {
		return nil, err
	}
	f(arena{a})
	return a.Free, nil
}

// flops returns the FLOP of attention's forward pass, half of them if it is causal. The backward
// pass has 2.5 times as many.
func (s shape) flops() float64 {
	cu, pairs := s.documents(), 0.0
	for i := 1; i < len(cu); i++ {
		n := float64(cu[i] - cu[i-1])
		pairs += n * n
	}
	if s.Causal {
		pairs /= 2
	}
	return 4 * pairs * float64(s.Heads*s.HeadDim)
}

// documents returns the boundaries of the documents; without cu_seqlens there is one document.
func (s shape) documents() []int64 {
	if s.CuSeqlens != nil {
		return s.CuSeqlens
	}
	return []int64{0, s.Tokens}
}

// attention times attention on the CPU, forward and backward together, and with --forward also the
// forward pass.
func attention(o *options) error {
	return o.onCPU(o.threads, o.cases.Attention, func(d device.Device, stream device.Stream, s shape) error {
		var g device.AttentionGrad
		free, err := build(d, func(a arena) { g = attentionTensors(d, a, s, o.compute) })
		if err != nil {
			return err
		}
		defer free()
		forward := func() error { return d.AttentionForward(stream, &g.Attention) }
		both := inOrder(forward, func() error { return d.AttentionBackward(stream, &g) })
		more := map[string]any{"threads": o.threads, "kernels": d.Info().Kernels, "dtype": o.compute.String()}
		if o.forward {
			times, err := measure(o.repeat, nil, forward)
			if err != nil {
				return err
			}
			more["op"] = "forward"
			emit(s.Name, times, "gflops", s.flops(), more)
		}
		times, err := measure(o.repeat, nil, both)
		if err != nil {
			return err
		}
		more["op"] = "forward+backward"
		emit(s.Name, times, "gflops", 3.5*s.flops(), more)
		return nil
	})
}

// headMajor returns functions that allocate [tokens, n, features] tensors in head-major memory, the
// layout that sp gives the kernels: one with random values, one for results.
func (a arena) headMajor(s shape, dtype tensor.DType) (random, result func(n int64) tensor.Tensor) {
	random = func(n int64) tensor.Tensor { return a.random(dtype, n, s.Tokens, s.HeadDim).Permute(1, 0, 2) }
	result = func(n int64) tensor.Tensor { return a.alloc(dtype, n, s.Tokens, s.HeadDim).Permute(1, 0, 2) }
	return random, result
}

// attentionTensors allocates the operands of attention, head-major.
func attentionTensors(d device.Device, a arena, s shape, dtype tensor.DType) (g device.AttentionGrad) {
	random, result := a.headMajor(s, dtype)
	g.Q, g.K, g.V, g.DOut = random(s.Heads), random(s.KVHeads), random(s.KVHeads), random(s.Heads)
	g.Out, g.DQ, g.DK, g.DV = result(s.Heads), result(s.Heads), result(s.KVHeads), result(s.KVHeads)
	g.LSE = a.alloc(tensor.F32, s.Heads, s.Tokens).Permute(1, 0)
	g.CuQ, g.CuK, g.Causal, g.Scale = s.documents(), s.documents(), s.Causal, 1/math.Sqrt(float64(s.HeadDim))
	g.Workspace = a.alloc(tensor.U8,
		max(d.AttentionWorkspace(&g.Attention, false), d.AttentionWorkspace(&g.Attention, true)))
	return g
}
