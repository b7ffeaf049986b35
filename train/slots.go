package train

import (
	"ulysses/device"
	"ulysses/tensor"
)

// slot is memory in which one group at a time is whole.
type slot struct {
	mem    tensor.Tensor
	group  int          // whose; -1 = nobody's
	users  int          // stretches under way
	turn   int64        // when it was taken last
	filled device.Event // what the side stream put there, or took from there, is done
	used   device.Event // the last stretch is
}

// slots are the two of one kind, the larger one first.
type slots struct {
	all  []slot
	turn int64
}

func (x *slots) open(d device.Device, mem []tensor.Tensor) error {
	for _, m := range mem {
		if m.IsNil() {
			continue
		}
		s := slot{mem: m, group: -1}
		var err error
		if s.filled, err = d.NewEvent(); err == nil {
			s.used, err = d.NewEvent()
		}
		x.all = append(x.all, s)
		if err != nil {
			return err
		}
	}
	return nil
}

func (x *slots) close() {
	for _, s := range x.all {
		for _, e := range []device.Event{s.filled, s.used} {
			if e != nil {
				e.Close()
			}
		}
	}
	x.all = nil
}

// find is the slot that has the group.
func (x *slots) find(group int) *slot {
	for i := range x.all {
		if x.all[i].group == group {
			return &x.all[i]
		}
	}
	return nil
}

// take gives the group a slot that nobody uses and that has room for it, of several the one that
// was taken longest ago; nil = none.
func (x *slots) take(group int, numel int64) (taken *slot) {
	for i := range x.all {
		if s := &x.all[i]; s.users == 0 && s.mem.Numel() >= numel && (taken == nil || s.turn < taken.turn) {
			taken = s
		}
	}
	if taken != nil {
		x.turn++
		taken.group, taken.turn = group, x.turn
	}
	return taken
}

// forget says that what is in the slots is old.
func (x *slots) forget() {
	for i := range x.all {
		x.all[i].group = -1
	}
}

// wait holds a stream until what the side stream does with the slots is done.
func (x *slots) wait(s device.Stream) error {
	for i := range x.all {
		if err := s.Wait(x.all[i].filled); err != nil {
			return err
		}
	}
	return nil
}
