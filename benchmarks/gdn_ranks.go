package main

import (
	"math"

	"ulysses/comm"
	"ulysses/device"
	rule "ulysses/gdn"
	"ulysses/sp"
	"ulysses/tensor"
)

// gdnRanks times the gated delta rule over ranks, forward and backward together, with each of its
// two strategies. It also prints the bytes that all ranks send.
func gdnRanks(o *options) error {
	return o.onCPU(max(1, o.threads/o.world.Size()), o.cases.GDNRanks,
		func(d device.Device, stream device.Stream, s shape) error {
			for _, strategy := range []rule.Strategy{rule.Heads, rule.State} {
				plan, err := rule.NewPlan(d, o.world,
					rule.Layer{KeyHeads: s.KVHeads, ValueHeads: s.Heads, KeyDim: s.HeadDim, ValueDim: s.HeadDim,
						L2Norm: true, Strategy: strategy, Tokens: s.Tokens})
				if err != nil {
					return err
				}
				batch, err := sp.NewBatch(o.world, sp.BatchSpec{Batch: 1, Seq: s.Tokens, CuSeqlens: s.CuSeqlens})
				if err != nil {
					return err
				}
				var x rule.Args
				var g rule.Grads
				free, err := build(d, func(a arena) {
					n, size := batch.Rows(), plan.SizesWithout(batch)
					x.Q, x.K, x.V = a.random(tensor.F32, 1, n, s.KVHeads, s.HeadDim),
						a.random(tensor.F32, 1, n, s.KVHeads, s.HeadDim), a.random(tensor.F32, 1, n, s.Heads, s.HeadDim)
					g.DOut = a.random(tensor.F32, 1, n, s.Heads, s.HeadDim)
					x.G, x.Beta = a.random(tensor.F32, 1, n, s.Heads), a.random(tensor.F32, 1, n, s.Heads)
					if !a.Sketched() {
						gates(x.G.Float32s(), x.Beta.Float32s())
					}
					f32 := func(shape ...int64) tensor.Tensor { return a.alloc(tensor.F32, shape...) }
					x.Out, g.DV = f32(1, n, s.Heads, s.HeadDim), f32(1, n, s.Heads, s.HeadDim)
					g.DQ, g.DK = f32(1, n, s.KVHeads, s.HeadDim), f32(1, n, s.KVHeads, s.HeadDim)
					g.DG, g.DBeta = f32(1, n, s.Heads), f32(1, n, s.Heads)
					x.Saved, x.Workspace = a.alloc(tensor.U8, size.Saved), a.alloc(tensor.U8, size.Workspace)
				})
				if err != nil {
					return err
				}
				times, err := o.passes(func() error { return plan.Forward(stream, batch, &x) },
					func() error { return plan.Backward(stream, batch, &x, &g) })
				if err != nil {
					return err
				}
				forward, backward := plan.BytesSent(batch)
				sent := []int64{forward + backward}
				if err := o.world.AllReduce(nil, tensor.OfInt64(sent, 1), comm.Sum); err != nil {
					return err
				}
				if o.world.Rank() == 0 {
					f, b := s.gdnFlops(gdnChunk)
					emit(s.Name+"-"+strategy.String(), times, "gflops", f+b,
						map[string]any{"op": "forward+backward", "ranks": o.world.Size(), "threads": o.threads,
							"bytes": sent[0], "comm": o.world.Kind(), "kernels": d.Info().Kernels})
				}
				free()
			}
			return nil
		})
}

// gates replaces normal variates in g by decays -|g|/10, and sets beta to values between 0 and 1.
func gates(g, beta []float32) {
	for i, x := range g {
		g[i] = float32(-0.1 * math.Abs(float64(x)))
		beta[i] = float32(1 / (1 + math.Exp(float64(x))))
	}
}
