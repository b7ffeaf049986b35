package main

import (
	"math"
	"time"

	"ulysses/backends"
	"ulysses/device"
	"ulysses/tensor"
)

// The suites gpu_* run on the device of --device, in the type of --dtype; peers/torch_gpu.py is
// what they are held against.

// openGPU opens the device of a rank.
func (o *options) openGPU(rank int) (device.Device, device.Stream, error) {
	d, _, err := backends.Open(backends.Choice{Backend: o.device, Threads: o.threads, LocalRank: rank, RanksOnNode: 1})
	d, s, err := opened(d, err)
	if err != nil {
		return nil, nil, err
	}
	if rank == 0 {
		emit("device", []float64{1}, "gib", float64(d.Info().Memory)/1.073741824, map[string]any{"name": d.Info().Name, "kernels": d.Info().Kernels})
	}
	return d, s, nil
}

// steady times f, which enqueues. The host waits once for as many calls as take some tens of
// milliseconds, so that what it costs to begin and to be told of the end is not in the time; half a
// second of calls come first, for the clocks.
func (o *options) steady(s device.Stream, f func() error) ([]float64, error) {
	calls := func(n int) (float64, error) {
		began := time.Now()
		for range n {
			if err := f(); err != nil {
				return 0, err
			}
		}
		err := s.Sync()
		return time.Since(began).Seconds() / float64(n), err
	}
	n := 1
	for began := time.Now(); ; {
		t, err := calls(n)
		if err != nil {
			return nil, err
		}
		n = max(1, min(1000, int(math.Ceil(0.03/t))))
		if time.Since(began) > o.warm {
			break
		}
	}
	times := make([]float64, o.repeat)
	for i := range times {
		var err error
		if times[i], err = calls(n); err != nil {
			return nil, err
		}
	}
	return times, nil
}

// gpuAttention times forward and backward apart; [T, H, D] lies as the device likes it.
func gpuAttention(o *options) error {
	d, stream, err := o.openGPU(0)
	if err != nil {
		return err
	}
	defer d.Close()
	for _, s := range o.chosen(o.cases.GPUAttention) {
		var g device.AttentionGrad
		free, err := build(d, func(a arena) {
			take := func(heads int64) tensor.Tensor {
				if d.Info().TokenMajor {
					return a.take(o.compute, s.Tokens, heads, s.HeadDim)
				}
				return a.take(o.compute, heads, s.Tokens, s.HeadDim).Permute(1, 0, 2)
			}
			g = device.AttentionGrad{Attention: device.Attention{Q: take(s.Heads), K: take(s.KVHeads), V: take(s.KVHeads), Out: take(s.Heads),
				LSE: a.take(tensor.F32, s.Heads, s.Tokens).Permute(1, 0), CuQ: s.documents(), CuK: s.documents(), KVHead: s.KVHead, Causal: s.Causal,
				Scale: 1 / math.Sqrt(float64(s.HeadDim))},
				DOut: take(s.Heads), DQ: take(s.Heads), DK: take(s.KVHeads), DV: take(s.KVHeads)}
			bytes := max(d.AttentionWorkspace(&g.Attention, false), d.AttentionWorkspace(&g.Attention, true))
			g.Workspace = a.take(tensor.U8, bytes)
		})
		if err != nil {
			return err
		}
		err = func() error {
			for _, x := range []tensor.Tensor{g.Q, g.K, g.V, g.DOut} {
				if err := randomize(d, stream, x); err != nil {
					return err
				}
			}
			return o.timeAttention(d, stream, s, &g)
		}()
		free()
		if err != nil {
			return err
		}
	}
	return nil
}

func (o *options) timeAttention(d device.Device, stream device.Stream, s shape, g *device.AttentionGrad) error {
	more := map[string]any{"dtype": o.compute.String(), "workspace_mib": g.Workspace.Numel() >> 20}
	for _, half := range []struct {
		op    string
		flops float64
		run   func() error
	}{
		{"forward", s.flops(), func() error { return d.AttentionForward(stream, &g.Attention) }},
		{"backward", 2.5 * s.flops(), func() error { return d.AttentionBackward(stream, g) }},
	} {
		times, err := o.steady(stream, half.run)
		if err != nil {
			return err
		}
		more["op"] = half.op
		emit(s.Name, times, "gflops", half.flops, more)
	}
	return nil
}

// randomize fills a tensor of any strides with the same 2¹⁶ normal variates over and over, in the
// order of its memory.
func randomize(d device.Device, s device.Stream, t tensor.Tensor) error {
	dense := tensor.Of(t.Data, t.DType, t.Numel())
	dense.Where = t.Where
	piece := normals(min(t.Numel(), 1<<16))
	for at := int64(0); at < t.Numel(); at += int64(len(piece)) {
		n := min(int64(len(piece)), t.Numel()-at)
		if err := d.Copy(s, dense.Slice(0, at, at+n), tensor.OfFloat32(piece[:n], n)); err != nil {
			return err
		}
	}
	return s.Sync()
}
