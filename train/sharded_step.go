package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

func (w *Sharded) Begin(s device.Stream, micros int64) error {
	w.ready.begin(micros)
	return w.dev.Fill(s, w.grads, 0)
}

func (w *Sharded) GradReady(p *model.Param, _ device.Stream) error { return w.ready.note(p) }

// Reduce completes the gradients in their owners' shards.
func (w *Sharded) Reduce(s device.Stream) (float64, error) {
	if err := w.ready.check(); err != nil {
		return 0, err
	}
	if err := w.summed.wait(s); err != nil {
		return 0, err
	}
	if err := w.dev.Fill(s, w.sum, 0); err != nil {
		return 0, err
	}
	if w.stage == 1 {
		every(w.expected.sums)
	}
	for i := range w.groups {
		g := &w.groups[i]
		if w.stage == 1 {
			if err := w.world.ReduceScatter(s, g.part(w.grads, g.at), g.whole(w.grads), g.rows); err != nil {
				return 0, err
			}
		}
		if err := w.dev.SumSquares(s, w.sum, w.shardGrads(g)); err != nil {
			return 0, err
		}
	}
	if err := w.fetchSum(s, w.dev, w.world); err != nil {
		return 0, err
	}
	if err := w.world.AllReduce(nil, w.hostSum, comm.Sum); err != nil {
		return 0, err
	}
	return w.norm(), nil
}

// Update steps the shards; values that are whole on every rank are gathered again.
func (w *Sharded) Update(s device.Stream, lr, scale float64, t int64) error {
	for i := range w.groups {
		if err := w.step(s, &w.groups[i], lr, scale, t); err != nil {
			return err
		}
	}
	w.forget()
	if err := s.Record(w.updated); err != nil {
		return err
	}
	if err := w.side.Wait(w.updated); err != nil {
		return err
	}
	return w.spread(s)
}

func (w *Sharded) step(s device.Stream, g *cutGroup, lr, scale float64, t int64) error {
	if g.hi == g.lo {
		return nil
	}
	exact, grads, low, o := w.exact(g), w.shardGrads(g), tensor.Tensor{}, w.opt
	if !w.masters.IsNil() {
		low = w.shardValues(g)
	}
	if o.Name == "adamw" {
		w.adamw = device.AdamW{W: exact, G: grads, M: g.shardOf(w.m), V: g.shardOf(w.v), Low: low, LR: lr, Beta1: o.Betas[0], Beta2: o.Betas[1],
			Eps: o.Eps, WeightDecay: o.WeightDecay, GradScale: scale, Decay: g.decay, Step: t}
		return w.dev.AdamW(s, &w.adamw)
	}
	w.sgd = device.SGD{W: exact, G: grads, Low: low, LR: lr, WeightDecay: o.WeightDecay, GradScale: scale, Decay: g.decay}
	return w.dev.SGD(s, &w.sgd)
}

// State is this rank's shard.
func (w *Sharded) State(group int) State {
	g := &w.groups[group]
	x := State{Lo: g.lo, Hi: g.hi, Exact: w.exact(g)}
	if !w.masters.IsNil() {
		x.Low = w.shardValues(g)
	}
	if !w.m.IsNil() {
		x.M, x.V = g.shardOf(w.m), g.shardOf(w.v)
	}
	return x
}

// Whole gathers a group in F32 where gradients are whole between steps.
func (w *Sharded) Whole(group int, grads bool, s device.Stream) (tensor.Tensor, error) {
	g := &w.groups[group]
	shard := w.exact(g)
	if grads {
		shard = w.shardGrads(g)
	}
	var all tensor.Tensor
	switch {
	case w.opt == nil && w.stage < 3:
		return g.whole(w.values), nil
	case w.opt == nil:
		all = w.gatheredMem[0]
	case w.stage == 1:
		all = g.whole(w.grads)
	default:
		all = w.summedMem[0]
	}
	w.forget()
	w.expected.wholes[group] += shard.DType.Size()
	all = all.Slice(0, 0, g.numel)
	return all, w.world.AllGather(s, all, shard, g.rows)
}
