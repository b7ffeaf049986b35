package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// offloadStore offloads one kind of item of a pass: the saved activations of layers, or the inputs
// of segments. An item is written in one of two slots in device memory. It is copied to the host
// while the next item is computed, and back to the same slot, before it is used, while the previous
// one is computed. Copies run on a stream of their own, ordered by events.
type offloadStore struct {
	slots     [2]slot
	host      []tensor.Tensor  // F32 in host memory, of each item
	allocator device.Allocator // of the slot that is written
	// the last two items stay in their slots until they are used, and are not copied
	keepLast bool
}

// slot is device memory for one item at a time.
type slot struct {
	mem    tensor.Tensor // U8
	item   int64         // the item in it; -1 = none
	ready  device.Event  // recorded when the layer that wrote or used the item has finished
	copied device.Event  // recorded when the copy to or from the host has finished
}

// offloader has the stores of a model. Both use the same stream for copies.
type offloader struct {
	copies         device.Stream
	layers, inputs offloadStore
}

// openOffloader creates the stream and the events, once.
func (m *Model) openOffloader() (err error) {
	if m.off.copies != nil {
		return nil
	}
	if m.off.copies, err = m.dev.NewStream(); err != nil {
		return err
	}
	for _, st := range []*offloadStore{&m.off.layers, &m.off.inputs} {
		st.host = make([]tensor.Tensor, len(m.blocks))
		for i := range st.slots {
			if st.slots[i].ready, err = m.dev.NewEvent(); err != nil {
				return err
			}
			if st.slots[i].copied, err = m.dev.NewEvent(); err != nil {
				return err
			}
		}
	}
	return nil
}

// close closes the stream and the events.
func (o *offloader) close() {
	for _, st := range []*offloadStore{&o.layers, &o.inputs} {
		for _, s := range st.slots {
			for _, e := range []device.Event{s.ready, s.copied} {
				if e != nil {
					e.Close()
				}
			}
		}
	}
	if o.copies != nil {
		o.copies.Close()
	}
}

// allocate allocates memory for items of the given bytes: two slots of the largest size, and host
// memory for each item that is copied.
func (st *offloadStore) allocate(p *pass, items int64, keepLast bool, bytes func(item int64) int64) {
	st.keepLast = keepLast
	most := int64(0)
	for i := range items {
		n := bytes(i)
		most = max(most, n)
		st.host[i] = tensor.Of(nil, tensor.F32, n/4) // sizes are padded
		if st.copied(i, items) {
			t, err := p.ctx.Host.Tensor(tensor.F32, n/4)
			if st.host[i] = t; p.err == nil {
				p.err = err
			}
		}
	}
	for i := range st.slots {
		st.slots[i].item = -1
		st.slots[i].mem = tensor.Tensor{}
		if int64(i) < items {
			st.slots[i].mem = p.alloc(tensor.U8, most)
		}
	}
}

func (st *offloadStore) slot(item int64) *slot { return &st.slots[item%2] }

// alloc allocates a tensor in the slot that is written.
func (st *offloadStore) alloc(dtype tensor.DType, shape ...int64) tensor.Tensor {
	return st.allocator.Take(dtype, shape...)
}

// copied reports whether an item is copied to the host.
func (st *offloadStore) copied(item, items int64) bool {
	return st.host[item].Numel() > 0 && !(st.keepLast && item >= items-2)
}

// beginWrite makes an item's slot the one that is written, after the copy of its previous item.
func (st *offloadStore) beginWrite(p *pass, item int64) {
	s := st.slot(item)
	st.allocator = device.Allocator{Mem: s.mem, Align: p.dev.Info().Align}
	if !p.skip() {
		s.item = item
		p.err = p.ctx.Stream.Wait(s.copied)
	}
}

// endWrite copies the item to the host.
func (st *offloadStore) endWrite(p *pass, item, items int64) {
	if p.skip() {
		return
	}
	s := st.slot(item)
	if p.err = p.ctx.Stream.Record(s.ready); p.err == nil && st.copied(item, items) {
		st.copy(p, item, false)
	}
}

// prefetch starts copying an item back to its slot, if another item is there.
func (st *offloadStore) prefetch(p *pass, item int64) {
	if s := st.slot(item); !p.skip() && s.item != item {
		s.item = item
		if st.host[item].Numel() > 0 {
			st.copy(p, item, true)
		}
	}
}

// copy enqueues a copy from slot to host, or back, after the layer that wrote or used the slot.
func (st *offloadStore) copy(p *pass, item int64, back bool) {
	s, host := st.slot(item), st.host[item]
	to, from := host, s.mem.At(0, tensor.F32, host.Numel())
	if back {
		to, from = from, to
	}
	if p.err = p.copies.Wait(s.ready); p.err != nil {
		return
	}
	if p.err = p.dev.Copy(p.copies, to, from); p.err != nil {
		return
	}
	p.err = p.copies.Record(s.copied)
}

// beginUse makes the pass's stream wait until an item is in its slot.
func (st *offloadStore) beginUse(p *pass, item int64) {
	st.prefetch(p, item)
	if !p.skip() {
		p.err = p.ctx.Stream.Wait(st.slot(item).copied)
	}
}

// endUse records that the layer that used the item has finished.
func (st *offloadStore) endUse(p *pass, item int64) {
	if !p.skip() {
		p.err = p.ctx.Stream.Record(st.slot(item).ready)
	}
}

// finish makes the pass's stream wait for the copies in progress: the slots' memory is freed at the
// end of the pass.
func (st *offloadStore) finish(p *pass) {
	for i := range st.slots {
		if !p.skip() && !st.slots[i].mem.IsNil() {
			p.err = p.ctx.Stream.Wait(st.slots[i].copied)
		}
	}
}
