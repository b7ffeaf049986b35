package main

import (
	"fmt"
	"maps"
	"runtime"
	"time"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// layered is a model of some layers, its weights and a batch, on one
// rank. The policy for saved activations is keep. close frees all memory.
type layered struct {
	*model.Model
	c       model.Ctx
	b       model.Batch
	cfg     *model.Config
	weights *residentWeights
	free    []func()
}

func (l *layered) close() {
	for i := len(l.free) - 1; i >= 0; i-- {
		l.free[i]()
	}
}

// config describes a Llama model or, if the shape is of linear attention, a model of Qwen3.5's kind
// in which all layers have linear attention.
func (s shape) config(layers int64) (*model.Config, error) {
	c := map[string]any{"model_type": "llama", "vocab_size": max(256, s.Vocab), "hidden_size": s.Hidden,
		"intermediate_size": s.FFN,
		"num_hidden_layers": layers, "num_attention_heads": s.Heads, "num_key_value_heads": s.KVHeads,
		"head_dim":                s.HeadDim,
		"max_position_embeddings": s.Tokens, "rope_theta": 5e5}
	if s.Linear {
		maps.Copy(c, map[string]any{"model_type": "qwen3_5_text", "full_attention_interval": layers + 1,
			"partial_rotary_factor": 0.25,
			"linear_num_key_heads":  s.KVHeads, "linear_num_value_heads": s.Heads, "linear_key_head_dim": s.HeadDim,
			"linear_value_head_dim":  s.HeadDim,
			"linear_conv_kernel_dim": convWidth})
	}
	return model.ConfigFromMap(c)
}

// layered makes a model for a sequence of s.Tokens tokens over the ranks of c.
func (o *options) layered(d device.Device, stream device.Stream, c comm.Comm, s shape, layers int64) (_ *layered,
	err error) {
	l := &layered{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.cfg, err = s.config(layers); err != nil {
		return nil, err
	}
	if l.Model, err = model.New(d, c, l.cfg, model.Options{Compute: o.compute, Overlap: o.overlapped}); err != nil {
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
			g.Bind(a.alloc(o.compute, g.Numel()), tensor.Tensor{}, a.alloc(tensor.F32, g.Numel()))
		}
		l.b.IDs, l.b.Targets, l.b.Positions = a.alloc(tensor.I32, rows), a.alloc(tensor.I32, rows),
			a.alloc(tensor.I32, rows)
	})
	if err != nil {
		return nil, err
	}
	l.free = append(l.free, free)
	if !o.expected {
		if err = l.Init(1); err != nil {
			return nil, err
		}
	}
	if err = l.fillBatch(d, stream, lo, hi); err != nil {
		return nil, err
	}
	if l.b.SP, err = sp.NewBatch(c, sp.BatchSpec{Batch: 1, Seq: s.Tokens}); err != nil {
		return nil, err
	}
	l.weights = &residentWeights{stream: stream, world: c, timed: 1}
	l.c = model.Ctx{Stream: stream, Arena: activations, Weights: l.weights}
	return l, nil
}

// fillBatch writes the ids, targets and positions of tokens [lo, hi).
func (l *layered) fillBatch(d device.Device, stream device.Stream, lo, hi int64) error {
	host := make([]int32, hi-lo)
	for _, x := range []struct {
		t tensor.Tensor
		f func(i int64) int32
	}{{l.b.IDs, func(i int64) int32 { return int32(i * 2654435761 >> 7 & 255) }},
		{l.b.Targets, func(i int64) int32 { return int32(i & 255) }},
		{l.b.Positions, func(i int64) int32 { return int32(i) }}} {
		for i := range host {
			host[i] = x.f(lo + int64(i))
		}
		if err := d.Copy(stream, x.t, tensor.OfInt32(host, hi-lo)); err != nil {
			return err
		}
		if err := stream.Sync(); err != nil {
			return err
		}
	}
	return nil
}

// pass runs the model forward and backward once.
func (l *layered) pass() error {
	_, err := l.ForwardBackward(&l.c, &l.b)
	return err
}

// residentWeights is a model.Weights whose layer groups are always gathered. It uses the calls of a
// pass to take times. Without host it times each use of the timed group: the forward half and the
// backward half of a layer, or the head. All ranks begin together, and the time ends when the GPU
// has ended it. With host it times the host from the start of the pass to its last operation and
// waits for nothing.
type residentWeights struct {
	stream device.Stream
	world  comm.Comm
	timed  int // group
	host   bool
	begun  time.Time
	took   []float64 // seconds of each use; with host, of the host
}

func (w *residentWeights) Pass([]model.Use) error {
	w.begun, w.took = time.Now(), w.took[:0]
	return nil
}

func (w *residentWeights) Gather(group int, _ device.Stream) error {
	if w.host || group != w.timed {
		return nil
	}
	if err := w.stream.Sync(); err != nil {
		return err
	}
	err := w.world.Barrier()
	w.begun = time.Now()
	return err
}

func (w *residentWeights) Release(group int, _ device.Stream) error {
	switch {
	case w.host && group == 0: // the embedding, in both halves of the pass; the last release counts
		w.took = append(w.took[:0], time.Since(w.begun).Seconds())
	case !w.host && group == w.timed:
		err := w.stream.Sync()
		w.took = append(w.took, time.Since(w.begun).Seconds())
		return err
	}
	return nil
}

func (w *residentWeights) GradReady(*model.Param, device.Stream) error { return nil }

// gpuLayer times one decoder layer, forward and backward, without the rest of the model, on the
// ranks that share its sequence. A time is the time of the slowest rank.
func gpuLayer(o *options) error { return o.layers(o.cases.GPULayer) }

// gpuHybrid times a layer of linear attention of Qwen3.5's shape: projections, convolution, gates,
// gated delta rule, gated norm, and the MLP.
func gpuHybrid(o *options) error { return o.layers(o.cases.GPUHybrid) }

func (o *options) layers(cases []shape) error {
	d, stream, err := o.openGPU(o.world.Rank())
	if err != nil {
		return err
	}
	defer d.Close()
	c, transport, err := backends.OpenComm(d, o.world, o.comm)
	if err != nil {
		return err
	}
	if c != o.world {
		defer c.Close()
	}
	if o.world.Size() == 1 {
		if err := o.roofs(d, stream); err != nil {
			return err
		}
	}
	return o.each(cases, func(s shape) error {
		l, err := o.layered(d, stream, c, s, 1)
		if err != nil {
			return err
		}
		defer l.close()
		return o.timeLayer(l, s, transport)
	})
}

// timeLayer times passes of a layer after 3 passes that are not timed, and prints a line for each
// half and one for both. It is collective.
func (o *options) timeLayer(l *layered, s shape, transport string) error {
	halves := make([][]float64, 3) // forward, backward, both
	both, err := o.repeated(3, func() (float64, error) {
		if err := l.pass(); err != nil {
			return 0, err
		}
		for h, t := range l.weights.took {
			halves[h] = append(halves[h], t)
		}
		return l.weights.took[0] + l.weights.took[1], nil
	})
	if err != nil {
		return err
	}
	warm := len(halves[0]) - len(both)
	halves[0], halves[1], halves[2] = halves[0][warm:], halves[1][warm:], both
	more := map[string]any{"activations_gib": float64(l.c.Arena.Bytes()) / (1 << 30), "ranks": o.world.Size(),
		"comm": transport}
	flops := l.cfg.Flops(s.Tokens,
		float64(s.Tokens)*float64(s.Tokens)/2) - 6*float64(s.Tokens)*float64(l.cfg.VocabSize*l.cfg.HiddenSize)
	for h, op := range []string{"forward", "backward", "forward+backward"} {
		if err := slowest(o.world, halves[h]); err != nil {
			return err
		}
		if o.world.Rank() == 0 {
			o.row(s.Name, op, halves[h], work{flops: flops * []float64{1. / 3, 2. / 3, 1}[h]}, more)
		}
	}
	return nil
}

// gpuLoss times the head: the final norm, the projection to the vocabulary and the loss, forward
// and backward together.
func gpuLoss(o *options) error {
	d, stream, err := o.openGPU(0)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := o.roofs(d, stream); err != nil {
		return err
	}
	return o.each(o.cases.GPULoss, func(s shape) error {
		l, err := o.layered(d, stream, comm.Local(1)[0], s, 1)
		if err != nil {
			return err
		}
		defer l.close()
		l.weights.timed = len(l.Groups()) - 1
		times, err := o.repeated(3, func() (float64, error) {
			err := l.pass()
			return l.weights.took[0], err
		})
		if err == nil {
			o.row(s.Name, "forward+backward", times, work{flops: 6 * float64(s.Tokens) * float64(s.Hidden*s.Vocab)},
				nil)
		}
		return err
	})
}

// gpuHost times the host while it enqueues a pass, per layer. The layers are so small that the GPU
// is never behind. It also counts the calls into C and the allocations of a pass.
func gpuHost(o *options) error {
	d, stream, err := o.openGPU(0)
	if err != nil {
		return err
	}
	defer d.Close()
	const layers = 8
	l, err := o.layered(d, stream, comm.Local(1)[0],
		shape{Tokens: 64, Hidden: 256, FFN: 512, HeadDim: 64, Heads: 4, KVHeads: 2}, layers)
	if err != nil {
		return err
	}
	defer l.close()
	l.weights.host = true
	pass := func() (float64, error) {
		if err := l.pass(); err != nil {
			return 0, err
		}
		return l.weights.took[0] / layers, nil
	}
	if _, err := repeated(0, 3, pass); err != nil { // not timed
		return err
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	calls := runtime.NumCgoCall()
	times, err := repeated(0, o.repeat, pass)
	if err != nil {
		return err
	}
	calls = runtime.NumCgoCall() - calls
	runtime.ReadMemStats(&after)
	each := func(n float64) float64 { return n / float64(o.repeat) }
	emit(fmt.Sprintf("enqueue a layer, of %d", layers), times, "per_s", 1e9, map[string]any{"op": "host",
		"calls_a_pass": each(float64(calls)), "allocations_a_pass": each(float64(after.Mallocs - before.Mallocs))})
	return nil
}
