package main

import (
	"ulysses/device"
	"ulysses/tensor"
)

// gemm times batches of matrix products on the CPU.
func gemm(o *options) error {
	return o.onCPU(o.threads, o.cases.Gemm, func(d device.Device, stream device.Stream, s shape) error {
		var a, b, c tensor.Tensor // [batch, M, K], [batch, K, N], [batch, M, N]
		free, err := build(d, func(m arena) {
			a, b, c = m.random(o.compute, s.Batch, s.M, s.K), m.random(o.compute, s.Batch, s.K, s.N),
				m.alloc(o.compute, s.Batch, s.M, s.N)
			if s.Form == "tn" {
				a = tensor.Of(a.Data, o.compute, s.Batch, s.K, s.M).Permute(0, 2, 1)
			}
			if s.Form == "nt" {
				b = tensor.Of(b.Data, o.compute, s.Batch, s.N, s.K).Permute(0, 2, 1)
			}
		})
		if err != nil {
			return err
		}
		defer free()
		times, err := measure(o.repeat, nil, func() error {
			for i := range s.Batch {
				if err := d.Gemm(stream,
					&device.Gemm{A: a.Select(0, i), B: b.Select(0, i), C: c.Select(0, i)}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		emit(s.Name, times, "gflops", 2*float64(s.Batch*s.M*s.N*s.K),
			map[string]any{"threads": o.threads, "kernels": d.Info().Kernels, "dtype": o.compute.String(),
				"form": s.Form})
		return nil
	})
}
