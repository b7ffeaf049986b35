package train

import (
	"ulysses/device"
	"ulysses/tensor"
)

// residency decides which layer group is in which slot. It holds no memory: the traffic formula
// runs a copy of it over the order of a pass.
type residency struct {
	slots  []occupancy
	filled int64 // how often a slot was filled so far
}

// occupancy is the group in a slot.
type occupancy struct {
	numel int64 // elements for which the slot has room
	group int   // -1 = none
	users int   // uses of the group that have begun and not ended
	since int64 // value of residency.filled when the group came
}

// find returns the slot that has the group, -1 if there is none.
func (r *residency) find(group int) int {
	for i := range r.slots {
		if r.slots[i].group == group {
			return i
		}
	}
	return -1
}

// take assigns a slot to a group of numel elements: among the slots without users that have room,
// the one that was filled longest ago. It returns -1 if there is none.
func (r *residency) take(group int, numel int64) int {
	taken := -1
	for i := range r.slots {
		if s := &r.slots[i]; s.users == 0 && s.numel >= numel && (taken < 0 || s.since < r.slots[taken].since) {
			taken = i
		}
	}
	if taken >= 0 {
		r.filled++
		r.slots[taken].group, r.slots[taken].since = group, r.filled
	}
	return taken
}

// forget empties all slots.
func (r *residency) forget() {
	for i := range r.slots {
		r.slots[i].group = -1
	}
}

// slot is the memory of one group.
type slot struct {
	mem    tensor.Tensor
	filled device.Event // recorded when the communication stream has filled or read the slot
	used   device.Event // recorded when the last use of the group has ended
}

// slots is the memory in which whole groups lie during a pass, the larger slot first.
type slots struct {
	residency
	all []slot // of each slot of residency
}

func (x *slots) open(d device.Device, mem []tensor.Tensor) error {
	for _, m := range mem {
		if m.IsNil() {
			continue
		}
		s := slot{mem: m}
		var err error
		if s.filled, err = d.NewEvent(); err == nil {
			s.used, err = d.NewEvent()
		}
		x.all = append(x.all, s)
		x.slots = append(x.slots, occupancy{numel: m.Numel(), group: -1})
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
	x.all, x.slots = nil, nil
}

// wait makes a stream wait until the communication stream has finished with all slots.
func (x *slots) wait(s device.Stream) error {
	for i := range x.all {
		if err := s.Wait(x.all[i].filled); err != nil {
			return err
		}
	}
	return nil
}
