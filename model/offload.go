package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// store is what a pass offloads of one sort, item by item: layers, or the inputs of segments. An
// item is written in one of two slots of the device's memory; from there it goes to its place in
// the host's while the next one computes, and before it is needed it comes back into the slot that
// it was in, while the one before computes. The traffic has a stream of its own, ordered by events.
type store struct {
	slots     [2]slot
	places    []tensor.Tensor  // F32, of the host
	allocator device.Allocator // of the slot that is written
	// the last two items stay in their slots until they are needed: they do not travel
	resides bool
}

type slot struct {
	mem   tensor.Tensor // U8
	item  int64         // whose values are there; -1 = nobody's
	ready device.Event  // the layer that wrote or used it is done
	moved device.Event  // it is on the host, or back
}

// offloader is what the stores of a model share.
type offloader struct {
	side           device.Stream
	layers, inputs store
}

// open makes the stream and the events, once.
func (m *Model) open() (err error) {
	if m.off.side != nil {
		return nil
	}
	if m.off.side, err = m.dev.NewStream(); err != nil {
		return err
	}
	for _, st := range []*store{&m.off.layers, &m.off.inputs} {
		st.places = make([]tensor.Tensor, len(m.blocks))
		for i := range st.slots {
			if st.slots[i].ready, err = m.dev.NewEvent(); err != nil {
				return err
			}
			if st.slots[i].moved, err = m.dev.NewEvent(); err != nil {
				return err
			}
		}
	}
	return nil
}

// close gives them back.
func (o *offloader) close() {
	for _, st := range []*store{&o.layers, &o.inputs} {
		for _, s := range st.slots {
			for _, e := range []device.Event{s.ready, s.moved} {
				if e != nil {
					e.Close()
				}
			}
		}
	}
	if o.side != nil {
		o.side.Close()
	}
}

// lay takes the memory for items of these bytes: two slots of the largest, and the places of all on
// the host.
func (st *store) lay(p *pass, items int64, resides bool, bytes func(item int64) int64) {
	st.resides = resides
	most := int64(0)
	for i := range items {
		n := bytes(i)
		most = max(most, n)
		st.places[i] = tensor.Of(nil, tensor.F32, n/4) // sizes are padded
		if st.travels(i, items) {
			t, err := p.c.Host.Tensor(tensor.F32, n/4)
			if st.places[i] = t; p.err == nil {
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

func (st *store) slot(item int64) *slot { return &st.slots[item%2] }

// take is memory of the slot that is written.
func (st *store) alloc(dtype tensor.DType, shape ...int64) tensor.Tensor {
	return st.allocator.Take(dtype, shape...)
}

// travels says whether an item leaves the device at all.
func (st *store) travels(item, items int64) bool {
	return st.places[item].Numel() > 0 && !(st.resides && item >= items-2)
}

// write gives an item its slot, when what was there is on the host.
func (st *store) write(p *pass, item int64) {
	s := st.slot(item)
	st.allocator = device.Allocator{Mem: s.mem, Align: p.dev.Info().Align}
	if !p.skip() {
		s.item = item
		p.err = p.c.Stream.Wait(s.moved)
	}
}

// written sends the item to the host.
func (st *store) written(p *pass, item, items int64) {
	if p.skip() {
		return
	}
	s := st.slot(item)
	if p.err = p.c.Stream.Record(s.ready); p.err == nil && st.travels(item, items) {
		st.move(p, item, false)
	}
}

// fetch brings an item back, if it is not there.
func (st *store) fetch(p *pass, item int64) {
	if s := st.slot(item); !p.skip() && s.item != item {
		s.item = item
		if st.places[item].Numel() > 0 {
			st.move(p, item, true)
		}
	}
}

// move copies between slot and host on the side stream, behind the layer that wrote or used the
// slot.
func (st *store) move(p *pass, item int64, back bool) {
	s, host := st.slot(item), st.places[item]
	to, from := host, s.mem.At(0, tensor.F32, host.Numel())
	if back {
		to, from = from, to
	}
	if p.err = p.side.Wait(s.ready); p.err != nil {
		return
	}
	if p.err = p.dev.Copy(p.side, to, from); p.err != nil {
		return
	}
	p.err = p.side.Record(s.moved)
}

// use waits for an item that was fetched; used says that the layer is done with it.
func (st *store) use(p *pass, item int64) {
	st.fetch(p, item)
	if !p.skip() {
		p.err = p.c.Stream.Wait(st.slot(item).moved)
	}
}

func (st *store) used(p *pass, item int64) {
	if !p.skip() {
		p.err = p.c.Stream.Record(st.slot(item).ready)
	}
}

// settle lets the pass end behind what still travels: its memory is used for something else then.
func (st *store) settle(p *pass) {
	for i := range st.slots {
		if !p.skip() && !st.slots[i].mem.IsNil() {
			p.err = p.c.Stream.Wait(st.slots[i].moved)
		}
	}
}
