package main

import (
	"math"
	"math/rand/v2"
	"unsafe"

	"ulysses/cpu"
	"ulysses/device"
	"ulysses/tensor"
)

// arena is an arena that a benchmark can do without error checks on: its plan is a sketch of the
// same calls.
type arena struct{ *device.Arena }

func (a arena) take(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t, err := a.Tensor(dtype, shape...)
	if err != nil {
		panic(err)
	}
	return t
}

// random takes a dense tensor of normal variates, F32 or BF16.
func (a arena) random(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t := a.take(dtype, shape...)
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

// normals are n standard normal variates, the same in every run.
func normals(n int64) []float32 {
	r, x := rand.New(rand.NewPCG(1, 1)), make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// opened gives the device a stream.
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

// build lays f's tensors out on a sketch, then for real.
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

// flops counts causal as half; forward and backward together are 3.5 forwards.
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

func (s shape) documents() []int64 {
	if s.CuSeqlens != nil {
		return s.CuSeqlens
	}
	return []int64{0, s.Tokens}
}

func attention(o *options) error {
	d, stream, err := opened(cpu.New(cpu.Options{Workers: o.threads}))
	if err != nil {
		return err
	}
	defer d.Close()
	for _, s := range o.chosen(o.cases.Attention) {
		var g device.AttentionGrad
		free, err := build(d, func(a arena) { g = attentionTensors(d, a, s, o.compute) })
		if err != nil {
			return err
		}
		forward := func() error { return d.AttentionForward(stream, &g.Attention) }
		both := func() error {
			if err := forward(); err != nil {
				return err
			}
			return d.AttentionBackward(stream, &g)
		}
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
		free()
	}
	return nil
}

// attentionTensors is head-major, the layout that sp gives the kernels.
func attentionTensors(d device.Device, a arena, s shape, dtype tensor.DType) (g device.AttentionGrad) {
	heads := func(n int64, random bool) tensor.Tensor {
		var t tensor.Tensor
		if random {
			t = a.random(dtype, n, s.Tokens, s.HeadDim)
		} else {
			t = a.take(dtype, n, s.Tokens, s.HeadDim)
		}
		return t.Permute(1, 0, 2)
	}
	g.Q, g.K, g.V, g.DOut = heads(s.Heads, true), heads(s.KVHeads, true), heads(s.KVHeads, true), heads(s.Heads, true)
	g.Out, g.DQ, g.DK, g.DV = heads(s.Heads, false), heads(s.Heads, false), heads(s.KVHeads, false), heads(s.KVHeads, false)
	g.LSE = a.take(tensor.F32, s.Heads, s.Tokens).Permute(1, 0)
	g.CuQ, g.CuK, g.Causal, g.Scale = s.documents(), s.documents(), s.Causal, 1/math.Sqrt(float64(s.HeadDim))
	g.Workspace = a.take(tensor.U8, max(d.AttentionWorkspace(&g.Attention, false), d.AttentionWorkspace(&g.Attention, true)))
	return g
}
