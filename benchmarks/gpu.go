package main

import (
	"fmt"
	"maps"
	"math"
	"os"
	"strings"
	"time"

	"ulysses/backends"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// The suites gpu_* run on the device of --device, in the compute type of --dtype. Their peer is
// peers/torch_gpu.py.

// openGPU opens the device of a rank. Rank 0 prints a line about it.
func (o *options) openGPU(rank int) (device.Device, device.Stream, error) {
	d, _, err := backends.Open(backends.Choice{Backend: o.device, Threads: o.threads, LocalRank: rank, RanksOnNode: 1})
	d, s, err := opened(d, err)
	if err != nil {
		return nil, nil, err
	}
	if rank == 0 {
		emit("device", []float64{1}, "gib", float64(d.Info().Memory)/1.073741824,
			map[string]any{"name": d.Info().Name, "kernels": d.Info().Kernels})
	}
	return d, s, nil
}

// each calls f for the cases that --cases selects. A case that fails is named on standard error,
// and the others follow, so that time on a GPU is not lost; each returns the first error. A case
// that does not fit into the memory of the GPU is skipped. Several ranks would wait for the rank
// that failed, so they end with it.
func (o *options) each(cases []shape, f func(s shape) error) (first error) {
	for _, s := range o.chosen(cases) {
		err := f(s)
		switch {
		case err == nil:
		case o.world != nil && o.world.Size() > 1:
			return err
		case status.Of(err) == status.OutOfMemory:
			fmt.Fprintf(os.Stderr, "%s: SKIPPED: %v\n", s.Name, err)
		default:
			fmt.Fprintf(os.Stderr, "%s: %v\n", s.Name, err)
			if first == nil {
				first = err
			}
		}
	}
	return first
}

// steady returns the seconds of a call of f, which enqueues work on s. Each time is the mean of as
// many calls as take about 30 ms, after which the host waits once, so the cost of the first launch
// and of the wait is small. Before the timing, f runs for o.warm, so the GPU reaches its clock
// rate. With --expected, f is called once, and the time is 0.
func (o *options) steady(s device.Stream, f func() error) ([]float64, error) {
	if o.expected {
		if err := f(); err != nil {
			return nil, err
		}
		return []float64{0}, s.Sync()
	}
	mean := func(n int) (float64, error) {
		t, err := seconds(func() error {
			for range n {
				if err := f(); err != nil {
					return err
				}
			}
			return s.Sync()
		})
		return t / float64(n), err
	}
	n := 1
	for began := time.Now(); ; {
		t, err := mean(n)
		if err != nil {
			return nil, err
		}
		n = max(1, min(1000, int(math.Ceil(0.03/t))))
		if time.Since(began) > o.warm {
			break
		}
	}
	return o.repeated(0, func() (float64, error) { return mean(n) })
}

// work is what a call has to do at least: FLOP of the algorithm, and bytes of inputs and outputs,
// each counted once. 0 bytes: they are not counted.
type work struct{ flops, bytes float64 }

// row prints the line of an operation: its rate is in GFLOP/s or, for an operation without counted
// FLOP, in GB/s.
func (o *options) row(name, op string, times []float64, w work, more map[string]any) {
	line := map[string]any{"op": op, "dtype": o.compute.String(), "flops": w.flops, "bytes": w.bytes}
	maps.Copy(line, more)
	if o.expected {
		times = []float64{0}
	}
	if w.flops > 0 {
		emit(name, times, "gflops", w.flops, line)
	} else {
		emit(name, times, "gbs", w.bytes, line)
	}
}

// roofs times a copy of 2 GiB and a large matrix product, with which the operations of a suite are
// compared. Both are small on a CPU.
func (o *options) roofs(d device.Device, s device.Stream) error {
	n := int64(8192)
	if d.Info().Kind != "cuda" || strings.Contains(d.Info().Name, "emulated") {
		n = 64
	}
	var from, to, a, b, c tensor.Tensor
	free, err := build(d, func(x arena) {
		from, to = x.alloc(o.compute, 8*n*n), x.alloc(o.compute, 8*n*n)
		a, b, c = x.alloc(o.compute, n, n), x.alloc(o.compute, n, n), x.alloc(o.compute, n, n)
	})
	if err != nil {
		return err
	}
	defer free()
	for _, t := range []tensor.Tensor{from, a, b} {
		if err := o.randomize(d, s, t); err != nil {
			return err
		}
	}
	for _, r := range []struct {
		name string
		work
		f func() error
	}{{"copy", work{bytes: float64(bytesOf(from, to))}, func() error { return d.Copy(s, to, from) }},
		{"product", work{flops: 2 * float64(n*n*n)},
			func() error { return d.Gemm(s, &device.Gemm{A: a, B: b.Permute(1, 0), C: c}) }}} {
		times, err := o.steady(s, r.f)
		if err != nil {
			return err
		}
		o.row(r.name, "roof", times, r.work, nil)
	}
	return nil
}

// gpuAttention times the forward pass and the backward pass of attention. Tensors [T, H, D] have
// the memory layout that the device prefers.
func gpuAttention(o *options) error { return o.gpuAttention(o.cases.GPUAttention) }

// gpuMasks times attention with options for which cuDNN has no kernels, or none that repeats its
// bits. The FLOP are of the pairs of queries and keys that are kept.
func gpuMasks(o *options) error { return o.gpuAttention(o.cases.GPUMasks) }

// gpuWgmma times attention with kernels that ULYSSES_KERNEL selects (gpu.py).
func gpuWgmma(o *options) error { return o.gpuAttention(o.cases.GPUWgmma) }

func (o *options) gpuAttention(cases []shape) error {
	d, stream, err := o.openGPU(0)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := o.roofs(d, stream); err != nil {
		return err
	}
	return o.each(cases, func(s shape) error {
		var g device.AttentionGrad
		free, err := build(d, func(a arena) {
			_, take := a.headMajor(s, o.compute)
			if d.Info().TokenMajor {
				take = func(heads int64) tensor.Tensor { return a.alloc(o.compute, s.Tokens, heads, s.HeadDim) }
			}
			g = device.AttentionGrad{Attention: device.Attention{Q: take(s.Heads), K: take(s.KVHeads),
				V: take(s.KVHeads), Out: take(s.Heads), LSE: a.alloc(tensor.F32, s.Heads, s.Tokens).Permute(1, 0),
				CuQ: s.documents(), CuK: s.documents(), KVHead: s.KVHead, Causal: s.Causal,
				Scale: 1 / math.Sqrt(float64(s.HeadDim))},
				DOut: take(s.Heads), DQ: take(s.Heads), DK: take(s.KVHeads), DV: take(s.KVHeads)}
			s.mask(a, &g)
			bytes := max(d.AttentionWorkspace(&g.Attention, false), d.AttentionWorkspace(&g.Attention, true))
			g.Workspace = a.alloc(tensor.U8, bytes)
		})
		if err != nil {
			return err
		}
		defer free()
		for _, x := range []tensor.Tensor{g.Q, g.K, g.V, g.DOut} {
			if err := o.randomize(d, stream, x); err != nil {
				return err
			}
		}
		if err := o.fillMask(d, stream, s, &g); err != nil {
			return err
		}
		return o.timeAttention(d, stream, s, &g)
	})
}

// timeAttention times both passes of attention and prints a line for each.
func (o *options) timeAttention(d device.Device, stream device.Stream, s shape, g *device.AttentionGrad) error {
	in, flops := float64(bytesOf(g.Q, g.K, g.V, g.Out, g.LSE)), s.flops()
	if s.Window > 0 || s.Block > 0 {
		flops = 4 * s.kept() * float64(s.Heads*s.HeadDim)
	}
	for _, pass := range []struct {
		op string
		work
		run func() error
	}{
		{"forward", work{flops, in}, func() error { return d.AttentionForward(stream, &g.Attention) }},
		{"backward", work{2.5 * flops, in + float64(bytesOf(g.DOut, g.DQ, g.DK, g.DV))},
			func() error { return d.AttentionBackward(stream, g) }},
	} {
		times, err := o.steady(stream, pass.run)
		if err != nil {
			return err
		}
		o.row(s.Name, pass.op, times, pass.work, map[string]any{"workspace_mib": g.Workspace.Numel() >> 20})
	}
	return nil
}

// repeated calls f `warm` times, then --repeat times, and returns the results of the latter calls.
// f returns the seconds that it measured. On one rank there are fewer calls, at least one of each,
// if they take longer than --longest.
func (o *options) repeated(warm int, f func() (float64, error)) (times []float64, err error) {
	limit := o.longest
	if o.world != nil && o.world.Size() > 1 {
		limit = 0
	}
	if _, err = calls(warm, limit/10, f); err != nil {
		return nil, err
	}
	return calls(o.repeat, limit, f)
}

// randomize fills a tensor whose memory has no gaps with normal variates, in the order of its
// memory. The same 2¹⁶ variates repeat. With --expected it does nothing.
func (o *options) randomize(d device.Device, s device.Stream, t tensor.Tensor) error {
	if o.expected {
		return nil
	}
	dense := tensor.Of(t.Data, t.DType, t.Numel())
	dense.Where = t.Where
	values := normals(min(t.Numel(), 1<<16))
	for at := int64(0); at < t.Numel(); at += int64(len(values)) {
		n := min(int64(len(values)), t.Numel()-at)
		if err := d.Copy(s, dense.Slice(0, at, at+n), tensor.OfFloat32(values[:n], n)); err != nil {
			return err
		}
	}
	return s.Sync()
}
