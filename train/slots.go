package train

import (
	"ulysses/device"
	"ulysses/tensor"
)

// residency assigns layer groups to slots. It has no device memory, so expected.pass can run a copy
// of it over the order of a pass.
type residency struct {
	slots  []occupancy
	filled int64 // number of assignments so far
}

// occupancy is the group in a slot.
type occupancy struct {
	numel int64 // size of the slot in elements
	group int   // -1 = none
	users int   // uses of the group that have begun and not ended
	since int64 // value of residency.filled after the slot was assigned
}

// find returns the slot of a group, -1 = none.
func (r *residency) find(group int) int {
	for i := range r.slots {
		if r.slots[i].group == group {
			return i
		}
	}
	return -1
}

// assign assigns a slot to a group of numel elements: of the slots without users that are large
// enough, the one that was assigned longest ago. It returns -1 if there is none.
func (r *residency) assign(group int, numel int64) int {
	slot := -1
	for i := range r.slots {
		if s := &r.slots[i]; s.users == 0 && s.numel >= numel && (slot < 0 || s.since < r.slots[slot].since) {
			slot = i
		}
	}
	if slot >= 0 {
		r.filled++
		r.slots[slot].group, r.slots[slot].since = group, r.filled
	}
	return slot
}

// clear empties all slots.
func (r *residency) clear() {
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

// slots is the memory for whole groups during a pass, the larger slot first.
type slots struct {
	residency
	all []slot // the memory of each slot of residency
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
