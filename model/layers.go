package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// allocateStores allocates the memory of what the pass offloads.
func (m *Model) allocateStores(p *pass) {
	if !p.backward {
		return
	}
	if p.offloadsLayers() {
		p.layers.allocate(p, int64(len(m.blocks)), m.activations.segment() == 1,
			func(i int64) int64 { return p.measure(m.blocks[i]) })
	}
	if p.offloadsInputs() {
		hidden := m.Config.HiddenSize
		p.inputs.allocate(p, m.segments(), true,
			func(int64) int64 { return device.Padded(p.dev, p.tokens*hidden*p.compute.Size()) })
	}
}

// offloadsLayers reports whether the pass offloads activations inside layers.
func (p *pass) offloadsLayers() bool {
	return p.backward && (p.policy[qkv] == Offload || p.policy[attention] == Offload || p.policy[mlpSaved] == Offload)
}

// offloadsInputs reports whether the pass offloads the inputs of segments.
func (p *pass) offloadsInputs() bool { return p.backward && p.policy[blockInput] == Offload }

// inputOf returns memory [T, hidden] for the input of a layer: saved memory for the first layer of
// a segment, otherwise the shared buffer.
func (m *Model) inputOf(p *pass, layer int64) (x tensor.Tensor) {
	k := m.activations.segment()
	if !p.backward || layer == int64(len(m.blocks)) || layer%k != 0 {
		return p.residualStream
	}
	if p.offloadsInputs() {
		p.inputs.beginWrite(p, layer/k)
		x = p.inputs.alloc(p.compute, p.tokens, m.Config.HiddenSize)
	} else {
		before := p.mark()
		x = p.temp(p.tokens, m.Config.HiddenSize)
		p.savedBytes[blockInput] += p.mark() - before
	}
	m.inputs[layer/k] = x
	return x
}

// forward runs the layers' forward halves on the residual stream x, and returns their output.
func (m *Model) forward(p *pass, x tensor.Tensor) tensor.Tensor {
	n := int64(len(m.blocks))
	for i, b := range m.blocks {
		i := int64(i)
		p.gather(1 + int(i))
		if k := m.activations.segment(); p.offloadsInputs() && i%k == 0 {
			p.inputs.endWrite(p, i/k, m.segments())
		}
		y := m.inputOf(p, i+1)
		if p.offloadsLayers() {
			p.layers.beginWrite(p, i)
		}
		p.allocateSaved()
		b.visitSaved(p)
		mark := p.mark()
		m.runLayer(p, i, forwardHalf, y, x)
		p.reset(mark)
		if p.offloadsLayers() {
			p.layers.endWrite(p, i, n)
		}
		p.release(1 + int(i))
		x = y
	}
	return x
}

// visitBackward calls visit for the layers in the order of the backward half: for each segment,
// from the last to the first, the layers whose forward half runs again, which are all but the last,
// and then the backward halves.
func (m *Model) visitBackward(visit func(layer int64, again bool)) {
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

// backwardOrder returns the layers in the order of visitBackward.
func (m *Model) backwardOrder() (layers []int64) {
	m.visitBackward(func(layer int64, _ bool) { layers = append(layers, layer) })
	return layers
}

// backward runs the layers' backward halves, and overwrites d, the gradient of their output, with
// the gradient of their input.
func (m *Model) backward(p *pass, d tensor.Tensor) {
	for s := m.segments() - 1; s >= 0; s-- {
		if p.offloadsInputs() {
			if p.inputs.beginUse(p, s); s > 0 {
				p.inputs.prefetch(p, s-1)
			}
		}
		mark := p.mark()
		lo, hi := m.segmentAt(s)
		m.stream[0] = m.inputs[s]
		for i := lo; i < hi-1; i++ {
			y := p.temp(p.tokens, m.Config.HiddenSize)
			m.stream[i+1-lo] = y
			m.beginLayer(p, i)
			m.runLayer(p, i, forwardAgain, y, m.stream[i-lo])
			m.endLayer(p, i)
		}
		for i := hi - 1; i >= lo; i-- {
			m.beginLayer(p, i)
			m.runLayer(p, i, backwardHalf, m.stream[i-lo], d)
			m.endLayer(p, i)
		}
		p.reset(mark)
		if p.offloadsInputs() {
			p.inputs.endUse(p, s)
		}
	}
	if p.offloadsLayers() {
		p.layers.finish(p)
	}
	if p.offloadsInputs() {
		p.inputs.finish(p)
	}
}

// beginLayer begins the work on a layer in the backward half: it waits for what the layer
// offloaded, and prefetches for the next layer if that has the other slot.
func (m *Model) beginLayer(p *pass, layer int64) {
	p.gather(1 + int(layer))
	if !p.offloadsLayers() {
		return
	}
	p.layers.beginUse(p, layer)
	if p.visited++; p.visited < int64(len(m.visits)) {
		if next := m.visits[p.visited]; next%2 != layer%2 {
			p.layers.prefetch(p, next)
		}
	}
}

func (m *Model) endLayer(p *pass, layer int64) {
	if p.offloadsLayers() {
		p.layers.endUse(p, layer)
	}
	p.release(1 + int(layer))
}
