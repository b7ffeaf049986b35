package main

import (
	"fmt"
	"math"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/sp"
	"ulysses/tensor"
)

// ulysses is attention over sequence shards, forward and backward, with its all-to-alls: the
// slowest rank's time.
func ulysses(o *options) error {
	d, stream, err := opened(cpu.New(cpu.Options{Workers: max(1, o.threads/o.world.Size())}))
	if err != nil {
		return err
	}
	defer d.Close()
	for _, s := range o.chosen(o.cases.Ulysses) {
		plan, err := sp.NewPlan(d, o.world, sp.Layer{Heads: s.Heads, KVHeads: s.KVHeads, Dim: s.HeadDim, VDim: s.HeadDim, Causal: s.Causal})
		if err != nil {
			return err
		}
		batch, err := sp.NewBatch(o.world, sp.BatchSpec{Batch: 1, Seq: s.Tokens, CuSeqlens: s.CuSeqlens})
		if err != nil {
			return err
		}
		var x sp.Args
		var g sp.Grads
		free, err := build(d, func(a arena) {
			n, size := batch.Rows(), plan.Sizes(batch)
			x.Q, x.K, x.V = a.random(tensor.F32, 1, n, s.Heads, s.HeadDim), a.random(tensor.F32, 1, n, s.KVHeads, s.HeadDim), a.random(tensor.F32, 1, n, s.KVHeads, s.HeadDim)
			g.DOut = a.random(tensor.F32, 1, n, s.Heads, s.HeadDim)
			f32 := func(heads int64) tensor.Tensor { return a.take(tensor.F32, 1, n, heads, s.HeadDim) }
			x.Out, g.DQ, g.DK, g.DV = f32(s.Heads), f32(s.Heads), f32(s.KVHeads), f32(s.KVHeads)
			x.Saved, x.Workspace = a.take(tensor.U8, size.Saved), a.take(tensor.U8, size.Workspace)
		})
		if err != nil {
			return err
		}
		times, err := o.passes(func() error { return plan.Forward(stream, batch, &x) }, func() error { return plan.Backward(stream, batch, &x, &g) })
		if err != nil {
			return err
		}
		if o.world.Rank() == 0 {
			emit(s.Name, times, "gflops", 3.5*s.flops(), map[string]any{"op": "forward+backward", "ranks": o.world.Size(), "threads": o.threads,
				"comm": o.world.Kind(), "kernels": d.Info().Kernels})
		}
		free()
	}
	return nil
}

// passes times forward and backward on all ranks together: the slowest rank's times.
func (o *options) passes(forward, backward func() error) ([]float64, error) {
	times, err := measure(o.repeat, func() { _ = o.world.Barrier() }, func() error {
		if err := forward(); err != nil {
			return err
		}
		if err := backward(); err != nil {
			return err
		}
		return o.world.Barrier()
	})
	if err != nil {
		return nil, err
	}
	return times, slowest(o.world, times)
}

// slowest makes each repetition's time that of the slowest rank.
func slowest(c comm.Comm, times []float64) error {
	return c.AllReduce(nil, tensor.OfFloat64(times, int64(len(times))), comm.Max)
}

// allToAll is the exchange alone, equal parts, in the sizes of cases.json (bytes a rank sends, its
// own part included). Every element is a function of sender and index, and is checked.
func allToAll(o *options) error {
	d, stream, err := opened(cpu.New(cpu.Options{Workers: 1}))
	if err != nil {
		return err
	}
	defer d.Close()
	c, size := o.world, int64(o.world.Size())
	for _, bytes := range o.cases.AllToAll {
		part := bytes / 4 / size
		var src, dst tensor.Tensor
		free, err := build(d, func(a arena) {
			src, dst = a.take(tensor.F32, part*size), a.take(tensor.F32, part*size)
		})
		if err != nil {
			return err
		}
		rows := make([]int64, size)
		for j := range rows {
			rows[j] = part
		}
		for i, x := int64(0), src.Float32s(); i < part*size; i++ {
			x[i] = value(int64(c.Rank()), i)
		}
		repeat := 15 // as peers/alltoall.c does
		switch {
		case bytes <= 1<<20:
			repeat = 200
		case bytes <= 4<<20:
			repeat = 50
		}
		times, err := measure(repeat, func() { _ = c.Barrier() }, func() error { return c.AllToAll(stream, dst, src, rows, rows) })
		if err != nil {
			return err
		}
		wrong := 0
		for i, y := int64(0), dst.Float32s(); i < part*size; i++ {
			if y[i] != value(i/part, int64(c.Rank())*part+i%part) {
				wrong++
			}
		}
		if err := slowest(c, times); err != nil {
			return err
		}
		if wrong > 0 {
			return fmt.Errorf("a2a of %d bytes: %d wrong elements on rank %d", bytes, wrong, c.Rank())
		}
		if c.Rank() == 0 {
			emit(fmt.Sprint(bytes), times, "GB/s", float64(bytes*size), map[string]any{"ranks": size, "comm": c.Kind(), "wrong": wrong})
		}
		free()
	}
	return nil
}

func value(rank, index int64) float32 { return float32(math.Mod(float64(rank*7919+index), 65521)) }
