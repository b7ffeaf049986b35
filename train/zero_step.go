package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

func (w *ZeRO) Begin(s device.Stream, microBatches int64) error {
	w.ready.begin(microBatches)
	// Wait for the reductions of a step that has ended without Reduce.
	if err := w.reduced.wait(s); err != nil {
		return err
	}
	if err := w.sums.step(s, microBatches); err != nil {
		return err
	}
	if w.Gradients { // the first gradients of a group overwrite the sums of the previous step
		for i := range w.groups {
			w.groups[i].summed = false
		}
		return nil
	}
	return w.dev.Fill(s, w.grads, 0)
}

func (w *ZeRO) GradReady(p *model.Param, _ device.Stream) error { return w.ready.note(p) }

// Reduce completes the gradients in the shards of their owners. Stages 2 and 3 have reduced them
// during the passes, and stage 1 during the last pass, if the device allows an overlap.
func (w *ZeRO) Reduce(s device.Stream) (float64, error) {
	if err := w.ready.check(); err != nil {
		return 0, err
	}
	if err := w.reduced.wait(s); err != nil {
		return 0, err
	}
	if w.stage == 1 {
		if err := w.reduceRest(s); err != nil {
			return 0, err
		}
	}
	if err := w.dev.Fill(s, w.sum, 0); err != nil {
		return 0, err
	}
	for i := range w.groups {
		if w.groups[i].lo == w.groups[i].hi {
			continue
		}
		grads, err := w.onDevice(s, w.shardGrads(&w.groups[i]), w.reducedMem[0])
		if err != nil {
			return 0, err
		}
		if err := w.dev.SumSquares(s, w.sum, grads); err != nil {
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

// reduceRest completes the reductions of stage 1.
func (w *ZeRO) reduceRest(s device.Stream) error {
	if err := w.sums.wait(s); err != nil {
		return err
	}
	return w.sums.rest(func(lo, hi int) error {
		for i := lo; i < hi; i++ {
			if err := w.reduceWhole(w.world, s, i); err != nil {
				return err
			}
		}
		return nil
	})
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
		if g.numel == 0 {
			continue
		}
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

func (w *ZeRO) Portions() []model.Portion {
	groups := make([]*model.Group, len(w.groups))
	for i := range w.groups {
		groups[i] = w.groups[i].Group
	}
	return model.PortionsOf(groups, 1)
}

func (w *ZeRO) Stored() (all []Stored) {
	for _, x := range w.Portions() {
		all = append(all, Stored{x, w.State(x.Index), w.world})
	}
	return all
}

// Whole gathers a group in F32 into the memory of the gradients, or in the compute type if there is
// no optimizer.
func (w *ZeRO) Whole(x model.Portion, grads bool, s device.Stream) (tensor.Tensor, error) {
	group := x.Index
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
	shard, err := w.onDevice(s, shard, g.ownIn(all, 0))
	if err != nil {
		return all, err
	}
	return all, w.world.AllGather(s, all, shard, g.counts)
}

// onDevice returns a shard in device memory: the shard, or a copy at the beginning of mem if it is
// in host memory.
func (w *ZeRO) onDevice(s device.Stream, shard, mem tensor.Tensor) (tensor.Tensor, error) {
	if shard.Where == w.dev.Info().Place {
		return shard, nil
	}
	mem = mem.Slice(0, 0, shard.Numel())
	if shard.Numel() == 0 {
		return mem, nil
	}
	return mem, w.dev.Copy(s, mem, shard)
}
