package train

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
)

// Pass notes the order of the stretches to come.
func (w *Sharded) Pass(order []model.Use) error {
	if w.next != len(w.order) {
		return status.Errorf(status.Internal, "train: a pass begins after %d of %d stretches of the last one", w.next, len(w.order))
	}
	w.order, w.next = order, 0
	w.expected.pass(order, w.groups, w.stage)
	return nil
}

// Need makes a group whole for a stretch, and has the values of the next one gathered while this
// one computes.
func (w *Sharded) Gather(group int, s device.Stream) error {
	if w.next == len(w.order) || w.order[w.next].Group != group {
		return status.Errorf(status.Internal, "train: group %d is needed out of turn", group)
	}
	x := w.order[w.next]
	w.next++
	g := &w.groups[group]
	values, grads := w.resident(g)
	if w.stage == 3 && x.Access&model.Reads != 0 {
		slot, err := w.gather(group)
		if err != nil {
			return err
		}
		if slot == nil {
			return status.Errorf(status.Internal, "train: no room to gather group %s", g.Name)
		}
		slot.users++
		if err := s.Wait(slot.filled); err != nil {
			return err
		}
		values = slot.mem.Slice(0, 0, g.numel)
	}
	if w.stage > 1 && x.Access&model.Adds != 0 {
		slot := w.summed.take(group, g.numel)
		if slot == nil {
			return status.Errorf(status.Internal, "train: no room for the gradients of group %s", g.Name)
		}
		slot.users++
		grads = slot.mem.Slice(0, 0, g.numel)
		if err := s.Wait(slot.filled); err != nil { // the sum of what was there
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

// gather brings a group's values into a slot, if they are not there yet; nil when no slot is free.
func (w *Sharded) gather(group int) (*slot, error) {
	if x := w.gathered.find(group); x != nil {
		return x, nil
	}
	g := &w.groups[group]
	x := w.gathered.take(group, g.numel)
	if x == nil {
		return nil, nil
	}
	if err := w.side.Wait(x.used); err != nil {
		return nil, err
	}
	if err := w.beside.AllGather(w.side, x.mem.Slice(0, 0, g.numel), g.shardOf(w.values), g.rows); err != nil {
		return nil, err
	}
	return x, w.side.Record(x.filled)
}

// Done ends a stretch: the values' slot may be used again, the gradients go to their owners.
func (w *Sharded) Release(group int, s device.Stream) error {
	g := &w.groups[group]
	if x := w.gathered.find(group); x != nil && x.users > 0 {
		if x.users--; x.users == 0 {
			if err := s.Record(x.used); err != nil {
				return err
			}
		}
	}
	x := w.summed.find(group)
	if x == nil || x.users == 0 {
		return nil
	}
	x.users, x.group = 0, -1
	if err := s.Record(x.used); err != nil {
		return err
	}
	if err := w.side.Wait(x.used); err != nil {
		return err
	}
	mine := g.part(x.mem, 0)
	if err := w.beside.ReduceScatter(w.side, mine, x.mem.Slice(0, 0, g.numel), g.rows); err != nil {
		return err
	}
	if shard := g.shardOf(w.grads); shard.Numel() > 0 {
		if err := w.dev.Add(w.side, shard, shard, mine); err != nil {
			return err
		}
	}
	return w.side.Record(x.filled)
}
