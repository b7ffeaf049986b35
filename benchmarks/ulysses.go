package main

import (
	"fmt"
	"math"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// ulysses times attention over sequence shards, forward and backward together, including the
// all-to-alls. A time is that of the slowest rank.
func ulysses(o *options) error {
	return o.onCPU(max(1, o.threads/o.world.Size()), o.cases.Ulysses,
		func(d device.Device, stream device.Stream, s shape) error {
			plan, err := sp.NewPlan(d, o.world,
				sp.Layer{Heads: s.Heads, KVHeads: s.KVHeads, Dim: s.HeadDim, VDim: s.HeadDim, Causal: s.Causal,
					Ring: o.ring})
			if err != nil {
				return err
			}
			batch, err := sp.NewBatch(o.world,
				sp.BatchSpec{Batch: 1, Seq: s.Tokens, CuSeqlens: s.CuSeqlens, Ring: o.ring, Zigzag: o.ring > 1})
			if err != nil {
				return err
			}
			var x sp.Args
			var g sp.Grads
			free, err := build(d, func(a arena) {
				n, size := batch.Rows(), plan.Sizes(batch)
				x.Q, x.K, x.V = a.random(tensor.F32, 1, n, s.Heads, s.HeadDim),
					a.random(tensor.F32, 1, n, s.KVHeads, s.HeadDim), a.random(tensor.F32, 1, n, s.KVHeads, s.HeadDim)
				g.DOut = a.random(tensor.F32, 1, n, s.Heads, s.HeadDim)
				f32 := func(heads int64) tensor.Tensor { return a.alloc(tensor.F32, 1, n, heads, s.HeadDim) }
				x.Out, g.DQ, g.DK, g.DV = f32(s.Heads), f32(s.Heads), f32(s.KVHeads), f32(s.KVHeads)
				x.Saved, x.Workspace = a.alloc(tensor.U8, size.Saved), a.alloc(tensor.U8, size.Workspace)
			})
			if err != nil {
				return err
			}
			defer free()
			times, err := o.passes(func() error { return plan.Forward(stream, batch, &x) },
				func() error { return plan.Backward(stream, batch, &x, &g) })
			if err != nil {
				return err
			}
			if o.world.Rank() == 0 {
				emit(s.Name, times, "gflops", 3.5*s.flops(),
					map[string]any{"op": "forward+backward", "ranks": o.world.Size(), "ring": o.ring,
						"threads": o.threads,
						"comm":    o.world.Kind(), "kernels": d.Info().Kernels})
			}
			return nil
		})
}

// passes times forward and backward together on all ranks, which begin at the same time, and
// returns the times of the slowest rank.
func (o *options) passes(forward, backward func() error) ([]float64, error) {
	times, err := measure(o.repeat, func() { _ = o.world.Barrier() }, inOrder(forward, backward, o.world.Barrier))
	if err != nil {
		return nil, err
	}
	return times, slowest(o.world, times)
}

// inOrder returns a function that calls some functions until one fails.
func inOrder(calls ...func() error) func() error {
	return func() error {
		for _, call := range calls {
			if err := call(); err != nil {
				return err
			}
		}
		return nil
	}
}

// slowest replaces the time of each repetition by that of the slowest rank. It is collective.
func slowest(c comm.Comm, times []float64) error {
	return c.AllReduce(nil, tensor.OfFloat64(times, int64(len(times))), comm.Max)
}

// allToAll times the all-to-all with blocks of equal size, for the sizes in cases.json: the bytes
// that a rank sends, including the block to itself. Each element is a function of sender and index,
// and all received elements are checked.
func allToAll(o *options) error {
	d, stream, err := opened(cpu.New(cpu.Options{Workers: 1}))
	if err != nil {
		return err
	}
	defer d.Close()
	c, size := o.world, int64(o.world.Size())
	for _, bytes := range o.sizes() {
		block := bytes / 4 / size // elements
		var src, dst tensor.Tensor
		free, err := build(d, func(a arena) {
			src, dst = a.alloc(tensor.F32, block*size), a.alloc(tensor.F32, block*size)
		})
		if err != nil {
			return err
		}
		rows := make([]int64, size)
		for j := range rows {
			rows[j] = block
		}
		for i, x := int64(0), src.Float32s(); i < block*size; i++ {
			x[i] = value(int64(c.Rank()), i)
		}
		repeat := 15 // as peers/alltoall.c does
		switch {
		case bytes <= 1<<20:
			repeat = 200
		case bytes <= 4<<20:
			repeat = 50
		}
		times, err := measure(repeat, func() { _ = c.Barrier() },
			func() error { return c.AllToAll(stream, dst, src, rows, rows) })
		if err != nil {
			return err
		}
		wrong := 0
		for i, y := int64(0), dst.Float32s(); i < block*size; i++ {
			if y[i] != value(i/block, int64(c.Rank())*block+i%block) {
				wrong++
			}
		}
		if err := slowest(c, times); err != nil {
			return err
		}
		if wrong > 0 {
			return fmt.Errorf("a2a, %d bytes: rank %d received %d wrong elements", bytes, c.Rank(), wrong)
		}
		if c.Rank() == 0 {
			emit(fmt.Sprint(bytes), times, "GB/s", float64(4*block*size),
				map[string]any{"ranks": size, "comm": c.Kind(), "wrong": wrong})
		}
		free()
	}
	return nil
}

// value is the element that a rank sends at an index.
func value(rank, index int64) float32 { return float32(math.Mod(float64(rank*7919+index), 65521)) }
