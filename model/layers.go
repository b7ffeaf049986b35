package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// layStores takes the memory of what is offloaded.
func (m *Model) layStores(p *pass) {
	if !p.backward {
		return
	}
	if p.offLayers() {
		p.layers.lay(p, int64(len(m.blocks)), m.activations.segment() == 1, func(i int64) int64 { return p.measure(m.blocks[i]) })
	}
	if p.offInputs() {
		hidden := m.Config.HiddenSize
		p.inputs.lay(p, m.segments(), true, func(int64) int64 { return device.Padded(p.dev, p.rows*hidden*p.compute.Size()) })
	}
}

// offLayers and offInputs say whether the pass offloads parts of layers, and inputs of segments.
func (p *pass) offLayers() bool {
	return p.backward && (p.policy[qkv] == Offload || p.policy[attention] == Offload || p.policy[mlpSaved] == Offload)
}
func (p *pass) offInputs() bool { return p.backward && p.policy[blockInput] == Offload }

// before is where the residual stream before a layer goes: to where it is kept, for the first of a
// segment.
func (m *Model) before(p *pass, layer int64) (x tensor.Tensor) {
	k := m.activations.segment()
	if !p.backward || layer == int64(len(m.blocks)) || layer%k != 0 {
		return p.flow
	}
	if p.offInputs() {
		p.inputs.write(p, layer/k)
		x = p.inputs.alloc(p.compute, p.rows, m.Config.HiddenSize)
	} else {
		before := p.mark()
		x = p.temp(p.rows, m.Config.HiddenSize)
		p.saved[blockInput] += p.mark() - before
	}
	m.inputs[layer/k] = x
	return x
}

// forward takes the residual stream x through the layers.
func (m *Model) forward(p *pass, x tensor.Tensor) tensor.Tensor {
	n := int64(len(m.blocks))
	for i, b := range m.blocks {
		i := int64(i)
		p.need(1 + int(i))
		if k := m.activations.segment(); p.offInputs() && i%k == 0 {
			p.inputs.written(p, i/k, m.segments())
		}
		y := m.before(p, i+1)
		if p.offLayers() {
			p.layers.write(p, i)
		}
		p.allocateSaved()
		b.visitSaved(p)
		mark := p.mark()
		b.forward(p, y, x)
		p.reset(mark)
		if p.offLayers() {
			p.layers.written(p, i, n)
		}
		p.done(1 + int(i))
		x = y
	}
	return x
}

// walkBack is the order of the backward half: of each segment, the last one first, the layers but
// the last again, and then all of them back.
func (m *Model) walkBack(visit func(layer int64, again bool)) {
	for s := m.segments() - 1; s >= 0; s-- {
		lo, hi := m.segmentAt(s)
		for i := lo; i < hi-1; i++ {
			visit(i, true)
		}
		for i := hi - 1; i >= lo; i-- {
			visit(i, false)
		}
	}
}

func (m *Model) visitsOf() (layers []int64) {
	m.walkBack(func(layer int64, _ bool) { layers = append(layers, layer) })
	return layers
}

// backward takes the gradient d of the residual stream back through the layers, in place.
func (m *Model) backward(p *pass, d tensor.Tensor) {
	for s := m.segments() - 1; s >= 0; s-- {
		if p.offInputs() {
			if p.inputs.use(p, s); s > 0 {
				p.inputs.fetch(p, s-1)
			}
		}
		mark := p.mark()
		lo, hi := m.segmentAt(s)
		m.stream[0] = m.inputs[s]
		for i := lo; i < hi-1; i++ {
			y := p.temp(p.rows, m.Config.HiddenSize)
			m.stream[i+1-lo] = y
			m.come(p, i)
			m.blocks[i].again(p, y, m.stream[i-lo])
			m.leave(p, i)
		}
		for i := hi - 1; i >= lo; i-- {
			m.come(p, i)
			m.blocks[i].backward(p, m.stream[i-lo], d)
			m.leave(p, i)
		}
		p.reset(mark)
		if p.offInputs() {
			p.inputs.used(p, s)
		}
	}
	if p.offLayers() {
		p.layers.settle(p)
	}
	if p.offInputs() {
		p.inputs.settle(p)
	}
}

// come begins the work on a layer of the backward half: what it offloaded is back, and that of the
// next one is on its way if it has a slot of its own.
func (m *Model) come(p *pass, layer int64) {
	p.need(1 + int(layer))
	if !p.offLayers() {
		return
	}
	p.layers.use(p, layer)
	if p.visited++; p.visited < int64(len(m.visits)) {
		if next := m.visits[p.visited]; next%2 != layer%2 {
			p.layers.fetch(p, next)
		}
	}
}

func (m *Model) leave(p *pass, layer int64) {
	if p.offLayers() {
		p.layers.used(p, layer)
	}
	p.done(1 + int(layer))
}
