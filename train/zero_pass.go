package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
)

// Pass sets the order of the uses of the next pass and counts their collectives.
func (w *ZeRO) Pass(order []model.Use) error {
	if err := w.uses.begin(order); err != nil {
		return err
	}
	w.sums.pass(order)
	w.expected.pass(order, w.numel, w.stage, &w.gathered.residency)
	return nil
}

// Gather attaches a group for a use. In stage 3 it then starts to gather the weights of the next
// group, which overlaps with the computation of this one.
func (w *ZeRO) Gather(group int, s device.Stream) error {
	x, err := w.uses.advance(group)
	if err != nil {
		return err
	}
	w.sums.gather(x)
	g := &w.groups[group]
	values, grads := w.resident(g)
	if w.stage == 3 && x.Access&model.Reads != 0 {
		i, err := w.gather(group)
		if err != nil {
			return err
		}
		if i < 0 {
			return status.Errorf(status.Internal, "train: no slot is free for the weights of layer group %s", g.Name)
		}
		w.gathered.slots[i].users++
		if err := s.Wait(w.gathered.all[i].filled); err != nil {
			return err
		}
		values = w.gathered.all[i].mem.Slice(0, 0, g.numel)
	}
	if w.stage > 1 && x.Access&model.Adds != 0 {
		i := w.reduced.assign(group, g.numel)
		if i < 0 {
			return status.Errorf(status.Internal, "train: no slot is free for the gradients of layer group %s", g.Name)
		}
		w.reduced.slots[i].users++
		grads = w.reduced.all[i].mem.Slice(0, 0, g.numel)
		// Wait until the previous gradients in the slot are reduced.
		if err := s.Wait(w.reduced.all[i].filled); err != nil {
			return err
		}
		if err := w.dev.Fill(s, grads, 0); err != nil {
			return err
		}
	}
	g.Attach(values, grads)
	if w.stage == 3 && w.next < len(w.order) && w.order[w.next].Access&model.Reads != 0 {
		_, err := w.gather(w.order[w.next].Group)
		return err
	}
	return nil
}

// gather starts to gather the weights of a group on the communication stream, unless a slot has
// them. It returns the slot, -1 if none is free.
func (w *ZeRO) gather(group int) (int, error) {
	if i := w.gathered.find(group); i >= 0 {
		return i, nil
	}
	g := &w.groups[group]
	i := w.gathered.assign(group, g.numel)
	if i < 0 {
		return i, nil
	}
	x := &w.gathered.all[i]
	if err := w.commStream.Wait(x.used); err != nil {
		return i, err
	}
	if err := w.commWorld.AllGather(w.commStream, x.mem.Slice(0, 0, g.numel), g.shardOf(w.values),
		g.counts); err != nil {
		return i, err
	}
	return i, w.commStream.Record(x.filled)
}

// Release ends a use of a group. The slot of its weights becomes free after the last use. In stages
// 2 and 3, its gradients are reduce-scattered and added to the shards of their owners, on the
// communication stream. In stage 1, they are reduce-scattered there when they are complete.
func (w *ZeRO) Release(group int, s device.Stream) error {
	g := &w.groups[group]
	if i := w.gathered.find(group); i >= 0 && w.gathered.slots[i].users > 0 {
		if w.gathered.slots[i].users--; w.gathered.slots[i].users == 0 {
			if err := s.Record(w.gathered.all[i].used); err != nil {
				return err
			}
		}
	}
	i := w.reduced.find(group)
	if i < 0 || w.reduced.slots[i].users == 0 {
		return w.sums.release(group, s, func(group int) error {
			return w.reduceWhole(w.commWorld, w.commStream, group)
		})
	}
	w.reduced.slots[i].users, w.reduced.slots[i].group = 0, -1
	x := &w.reduced.all[i]
	if err := s.Record(x.used); err != nil {
		return err
	}
	if err := w.commStream.Wait(x.used); err != nil {
		return err
	}
	own := g.ownIn(x.mem, 0)
	if err := w.commWorld.ReduceScatter(w.commStream, own, x.mem.Slice(0, 0, g.numel), g.counts); err != nil {
		return err
	}
	shard := g.shardOf(w.grads)
	if w.Gradients {
		if err := w.commStream.Record(x.filled); err != nil {
			return err
		}
		add := g.summed
		g.summed = true
		return w.storeGradients(shard, own, add, x.filled)
	}
	if shard.Numel() > 0 {
		if err := w.dev.Add(w.commStream, shard, shard, own); err != nil {
			return err
		}
	}
	return w.commStream.Record(x.filled)
}

// reduceWhole reduce-scatters the gradients of a group in stage 1, in place.
func (w *ZeRO) reduceWhole(c comm.Comm, s device.Stream, group int) error {
	g := &w.groups[group]
	if g.numel == 0 {
		return nil
	}
	w.expected.reductions[group]++
	return c.ReduceScatter(s, g.ownIn(w.grads, g.offset), g.whole(w.grads), g.counts)
}
