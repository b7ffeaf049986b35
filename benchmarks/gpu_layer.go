package main

import (
	"fmt"
	"runtime"
	"time"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// layered is a Llama of some layers and a vocabulary of 256 on one rank, its weights, and a batch.
// Activations are kept.
type layered struct {
	*model.Model
	c       model.Ctx
	b       model.Batch
	cfg     *model.Config
	weights *lent
	free    []func()
}

func (l *layered) close() {
	for i := len(l.free) - 1; i >= 0; i-- {
		l.free[i]()
	}
}

func (o *options) layered(d device.Device, stream device.Stream, c comm.Comm, s shape, layers int64) (l *layered, err error) {
	l = &layered{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	l.cfg, err = model.ConfigFromMap(map[string]any{"model_type": "llama", "vocab_size": int64(256), "hidden_size": s.Hidden, "intermediate_size": s.FFN,
		"num_hidden_layers": layers, "num_attention_heads": s.Heads, "num_key_value_heads": s.KVHeads, "head_dim": s.HeadDim,
		"max_position_embeddings": s.Tokens, "rope_theta": 5e5})
	if err != nil {
		return nil, err
	}
	if l.Model, err = model.New(d, c, l.cfg, model.Options{Compute: o.compute}); err != nil {
		return nil, err
	}
	l.free = append(l.free, l.Model.Close)
	lo, hi := comm.Shard(s.Tokens, c.Size(), c.Rank())
	rows := hi - lo
	if err = l.Reserve(s.Tokens); err != nil {
		return nil, err
	}
	table, err := l.Memory(s.Tokens, rows, true)
	if err != nil {
		return nil, err
	}
	activations, err := device.NewArena(d, "activations", model.Bytes(table))
	if err != nil {
		return nil, err
	}
	l.free = append(l.free, activations.Free)
	l.b.GradScale = 1 / float64(s.Tokens)
	free, err := build(d, func(a arena) {
		for _, g := range l.Groups() {
			g.Bind(a.take(o.compute, g.Numel()), tensor.Tensor{}, a.take(tensor.F32, g.Numel()))
		}
		l.b.IDs, l.b.Targets, l.b.Positions = a.take(tensor.I32, rows), a.take(tensor.I32, rows), a.take(tensor.I32, rows)
	})
	if err != nil {
		return nil, err
	}
	l.free = append(l.free, free)
	if err = l.Init(1); err != nil {
		return nil, err
	}
	host := make([]int32, rows)
	for _, x := range []struct {
		t tensor.Tensor
		f func(i int64) int32
	}{{l.b.IDs, func(i int64) int32 { return int32(i * 2654435761 >> 7 & 255) }}, {l.b.Targets, func(i int64) int32 { return int32(i & 255) }},
		{l.b.Positions, func(i int64) int32 { return int32(i) }}} {
		for i := range host {
			host[i] = x.f(lo + int64(i))
		}
		if err = d.Copy(stream, x.t, tensor.OfInt32(host, rows)); err != nil {
			return nil, err
		}
		if err = stream.Sync(); err != nil {
			return nil, err
		}
	}
	if l.b.SP, err = sp.NewBatch(c, sp.BatchSpec{Batch: 1, Seq: s.Tokens}); err != nil {
		return nil, err
	}
	l.weights = &lent{stream: stream, world: c}
	l.c = model.Ctx{Stream: stream, Arena: activations, Weights: l.weights}
	return l, nil
}

func (l *layered) pass() error {
	_, err := l.ForwardBackward(&l.c, &l.b)
	return err
}

// lent lends weights that are always there, and by what a pass tells it takes times: of each half
// of the first layer, whose ranks it makes begin together and wait for their GPUs; or, with host,
// of the host from the beginning of the pass to its last operation, without waiting for anything.
type lent struct {
	stream device.Stream
	world  comm.Comm
	host   bool
	begun  time.Time
	took   []float64 // forward and backward; or the host's
}

func (w *lent) Pass([]model.Use) error {
	w.begun, w.took = time.Now(), w.took[:0]
	return nil
}

func (w *lent) Gather(group int, _ device.Stream) error {
	if w.host || group != 1 {
		return nil
	}
	if err := w.stream.Sync(); err != nil {
		return err
	}
	err := w.world.Barrier()
	w.begun = time.Now()
	return err
}

func (w *lent) Release(group int, _ device.Stream) error {
	switch {
	case w.host && group == 0: // the embedding's, in the forward and in the backward half: the last one counts
		w.took = append(w.took[:0], time.Since(w.begun).Seconds())
	case !w.host && group == 1:
		err := w.stream.Sync()
		w.took = append(w.took, time.Since(w.begun).Seconds())
		return err
	}
	return nil
}

func (w *lent) GradReady(*model.Param, device.Stream) error { return nil }

// gpuLayer times one decoder layer, forward and backward, and nothing of the model around it, on
// the ranks that share its sequence: the slowest one's time.
func gpuLayer(o *options) error {
	d, stream, err := o.openGPU(o.world.Rank())
	if err != nil {
		return err
	}
	defer d.Close()
	c, way, err := backends.OpenComm(d, o.world, o.comm)
	if err != nil {
		return err
	}
	if c != o.world {
		defer c.Close()
	}
	for _, s := range o.chosen(o.cases.GPULayer) {
		l, err := o.layered(d, stream, c, s, 1)
		if err == nil {
			err = o.timeLayer(l, s, way)
			l.close()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (o *options) timeLayer(l *layered, s shape, way string) error {
	halves := make([][]float64, 3) // forward, backward, both
	for i := range o.repeat + 3 {
		if err := l.pass(); err != nil {
			return err
		}
		if i < 3 {
			continue
		}
		for h, t := range []float64{l.weights.took[0], l.weights.took[1], l.weights.took[0] + l.weights.took[1]} {
			halves[h] = append(halves[h], t)
		}
	}
	more := map[string]any{"dtype": o.compute.String(), "activations_gib": float64(l.c.Arena.Bytes()) / (1 << 30), "ranks": o.world.Size(), "comm": way}
	flops := l.cfg.Flops(s.Tokens, float64(s.Tokens)*float64(s.Tokens)/2)
	for h, op := range []string{"forward", "backward", "forward+backward"} {
		if err := slowest(o.world, halves[h]); err != nil {
			return err
		}
		if more["op"] = op; o.world.Rank() == 0 {
			emit(s.Name, halves[h], "gflops", flops*[]float64{1. / 3, 2. / 3, 1}[h], more)
		}
	}
	return nil
}

// gpuHost times what the host does to enqueue a pass, on layers so small that the GPU keeps up, by
// the layer; with the calls into C and the allocations of a pass.
func gpuHost(o *options) error {
	d, stream, err := o.openGPU(0)
	if err != nil {
		return err
	}
	defer d.Close()
	const layers = 8
	l, err := o.layered(d, stream, comm.Local(1)[0], shape{Tokens: 64, Hidden: 256, FFN: 512, HeadDim: 64, Heads: 4, KVHeads: 2}, layers)
	if err != nil {
		return err
	}
	defer l.close()
	l.weights.host = true
	var times []float64
	var before, after runtime.MemStats
	calls := int64(0)
	for i := range o.repeat + 3 {
		if i == 3 {
			runtime.ReadMemStats(&before)
			calls = runtime.NumCgoCall()
		}
		if err := l.pass(); err != nil {
			return err
		}
		if i >= 3 {
			times = append(times, l.weights.took[0]/layers)
		}
	}
	calls = runtime.NumCgoCall() - calls
	runtime.ReadMemStats(&after)
	each := func(n float64) float64 { return n / float64(o.repeat) }
	emit(fmt.Sprintf("enqueue a layer, of %d", layers), times, "per_s", 1e9, map[string]any{"op": "host",
		"calls_a_pass": each(float64(calls)), "allocations_a_pass": each(float64(after.Mallocs - before.Mallocs))})
	return nil
}
