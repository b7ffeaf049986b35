package main

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// gpuLayer times one decoder layer, forward and backward, as a model of one layer and a vocabulary of 256, whose embedding and head are
// under one part in a thousand of the work. Activations are kept; the peer's are too.
func gpuLayer(o *options) error {
	d, stream, err := o.openGPU()
	if err != nil {
		return err
	}
	defer d.Close()
	for _, s := range o.chosen(o.cases.GPULayer) {
		err := comm.RunLocal(1, func(world comm.Comm) error { return o.timeLayer(d, stream, world, s) })
		if err != nil {
			return err
		}
	}
	return nil
}

func (o *options) timeLayer(d device.Device, stream device.Stream, world comm.Comm, s shape) error {
	cfg, err := model.ConfigFromMap(map[string]any{"model_type": "llama", "vocab_size": int64(256), "hidden_size": s.Hidden, "intermediate_size": s.FFN,
		"num_hidden_layers": int64(1), "num_attention_heads": s.Heads, "num_key_value_heads": s.KVHeads, "head_dim": s.HeadDim,
		"max_position_embeddings": s.Tokens, "rope_theta": 5e5})
	if err != nil {
		return err
	}
	m, err := model.New(d, world, cfg, model.Options{Compute: o.compute})
	if err != nil {
		return err
	}
	defer m.Close()
	table, err := m.Memory(s.Tokens, s.Tokens, true)
	if err != nil {
		return err
	}
	activations, err := device.NewArena(d, "activations", model.Bytes(table))
	if err != nil {
		return err
	}
	defer activations.Free()
	var ids, targets, positions tensor.Tensor
	free, err := build(d, func(a arena) {
		for _, g := range m.Groups() {
			g.Bind(a.take(o.compute, g.Numel()), tensor.Tensor{}, a.take(tensor.F32, g.Numel()))
		}
		ids, targets, positions = a.take(tensor.I32, s.Tokens), a.take(tensor.I32, s.Tokens), a.take(tensor.I32, s.Tokens)
	})
	if err != nil {
		return err
	}
	defer free()
	if err := m.Init(1); err != nil {
		return err
	}
	host := make([]int32, s.Tokens)
	for _, x := range []struct {
		t tensor.Tensor
		f func(i int64) int32
	}{{ids, func(i int64) int32 { return int32(i * 2654435761 >> 7 & 255) }}, {targets, func(i int64) int32 { return int32(i & 255) }},
		{positions, func(i int64) int32 { return int32(i) }}} {
		for i := range host {
			host[i] = x.f(int64(i))
		}
		if err := d.Copy(stream, x.t, tensor.OfInt32(host, s.Tokens)); err != nil {
			return err
		}
		if err := stream.Sync(); err != nil {
			return err
		}
	}
	batch, err := sp.NewBatch(world, sp.BatchSpec{Batch: 1, Seq: s.Tokens})
	if err != nil {
		return err
	}
	c := &model.Ctx{Stream: stream, Arena: activations}
	b := &model.Batch{SP: batch, IDs: ids, Targets: targets, Positions: positions, GradScale: 1 / float64(s.Tokens)}
	times, err := measure(o.repeat, nil, func() error {
		_, err := m.ForwardBackward(c, b) // which waits for the loss
		return err
	})
	if err != nil {
		return err
	}
	emit(s.Name, times, "gflops", cfg.Flops(s.Tokens, float64(s.Tokens)*float64(s.Tokens)/2),
		map[string]any{"op": "forward+backward", "dtype": o.compute.String(), "activations_gib": float64(activations.Bytes()) / (1 << 30)})
	return nil
}
