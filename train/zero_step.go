package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

func (w *ZeRO) Begin(s device.Stream, microBatches int64) error {
	w.ready.begin(microBatches)
	return w.dev.Fill(s, w.grads, 0)
}

func (w *ZeRO) GradReady(p *model.Param, _ device.Stream) error { return w.ready.note(p) }

// Reduce completes the gradients in the shards of their owners. Stages 2 and 3 have reduced them
// during the passes; stage 1 does it here.
func (w *ZeRO) Reduce(s device.Stream) (float64, error) {
	if err := w.ready.check(); err != nil {
		return 0, err
	}
	if err := w.reduced.wait(s); err != nil {
		return 0, err
	}
	if err := w.dev.Fill(s, w.sum, 0); err != nil {
		return 0, err
	}
	if w.stage == 1 {
		addOne(w.expected.reductions)
	}
	for i := range w.groups {
		g := &w.groups[i]
		if w.stage == 1 {
			if err := w.world.ReduceScatter(s, g.ownIn(w.grads, g.offset), g.whole(w.grads), g.counts); err != nil {
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

// Update runs the optimizer on the shards. Stages 1 and 2 then gather the weights.
func (w *ZeRO) Update(s device.Stream, lr, scale float64, t int64) error {
	if err := w.update(s, lr, scale, t); err != nil {
		return err
	}
	w.gathered.clear()
	if err := s.Record(w.updated); err != nil {
		return err
	}
	if err := w.commStream.Wait(w.updated); err != nil {
		return err
	}
	return w.gatherValues(s)
}

// Loaded gathers the weights after each rank has filled its shards.
func (w *ZeRO) Loaded(s device.Stream) error {
	w.gathered.clear()
	return w.gatherValues(s)
}

// gatherValues gathers the compute weights of all groups in stages 1 and 2, where they are always
// whole on every rank.
func (w *ZeRO) gatherValues(s device.Stream) error {
	if w.stage == 3 {
		return nil
	}
	addOne(w.expected.gathers)
	for i := range w.groups {
		g := &w.groups[i]
		if err := w.world.AllGather(s, g.whole(w.values), g.ownIn(w.values, g.offset), g.counts); err != nil {
			return err
		}
	}
	return nil
}

// State returns this rank's shard.
func (w *ZeRO) State(group int) State {
	g := &w.groups[group]
	x := State{Lo: g.lo, Hi: g.hi, Master: w.master(g)}
	if !w.masters.IsNil() {
		x.Compute = w.shardValues(g)
	}
	if !w.m.IsNil() {
		x.M, x.V = g.shardOf(w.m), g.shardOf(w.v)
	}
	return x
}

// Whole gathers a group in F32 into the memory of the gradients, or in the compute type if there is
// no optimizer.
func (w *ZeRO) Whole(group int, grads bool, s device.Stream) (tensor.Tensor, error) {
	g := &w.groups[group]
	shard := w.master(g)
	if grads {
		shard = w.shardGrads(g)
	}
	evaluation := w.OptimizerConfig == nil
	var all tensor.Tensor
	switch {
	case evaluation && w.stage < 3:
		return g.whole(w.values), nil
	case evaluation:
		all = w.gatheredMem[0]
	case w.stage == 1:
		all = g.whole(w.grads)
	default:
		all = w.reducedMem[0]
	}
	w.gathered.clear()
	w.expected.wholes[group] += shard.DType.Size()
	all = all.Slice(0, 0, g.numel)
	if !grads && w.Offloaded() && !w.masters.IsNil() && shard.Numel() > 0 {
		own := g.ownIn(all, 0)
		if err := w.dev.Copy(s, own, shard); err != nil {
			return all, err
		}
		shard = own
	}
	return all, w.world.AllGather(s, all, shard, g.counts)
}
