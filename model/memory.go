package model

import (
	"fmt"
	"slices"
	"strings"

	"ulysses/device"
	"ulysses/tensor"
)

// Component is a line of the memory table.
type Component struct {
	Name  string
	Bytes int64
	Host  bool // host memory, if the device has its own
}

// Memory returns the peak memory of a pass by component. local is the number of tokens of this
// rank, tokens of the whole sequence. It runs the code of the pass without memory, so the numbers
// are exact. Parameters, gradients and optimizer states are not included.
func (m *Model) Memory(local, tokens int64, backward bool) ([]Component, error) {
	return m.memory(&m.plans, local, tokens, backward)
}

// MemoryAlone is Memory of a Forward in which this rank has all tokens.
func (m *Model) MemoryAlone(tokens int64) ([]Component, error) {
	return m.memory(&m.alone, tokens, tokens, false)
}

func (m *Model) memory(plans *plans, local, tokens int64, backward bool) ([]Component, error) {
	sizes, err := plans.sizes(m.dev, tokens)
	if err != nil {
		return nil, err
	}
	arena, host := device.Sketch(m.dev, "activations"), device.Sketch(m.dev, "offloaded activations")
	ids := tensor.Of(nil, tensor.I32, local)
	var p pass
	p.begin(m, &Ctx{Arena: arena, Host: host}, &Batch{IDs: ids, Targets: ids, Positions: ids}, local, sizes, backward)
	p.plans = plans
	p.temporary = map[layerWork]int64{}
	m.execute(&p)
	if p.err != nil {
		return nil, p.err
	}
	var table []Component
	rest := arena.Peak()
	for k, bytes := range p.savedBytes {
		if bytes > 0 {
			table = append(table, Component{Name: "saved: " + categoryNames[k], Bytes: bytes})
			rest -= bytes
		}
	}
	table = append(table, Component{Name: "working memory", Bytes: rest})
	if host.Peak() > 0 {
		table = append(table, Component{Name: "offloaded activations (host)", Bytes: host.Peak(), Host: true})
	}
	return table, nil
}

// Bytes returns the sum of the components in device memory.
func Bytes(table []Component) int64 {
	n := int64(0)
	for _, c := range table {
		if !c.Host {
			n += c.Bytes
		}
	}
	return n
}

// HostBytes returns the sum of the components in host memory.
func HostBytes(table []Component) int64 {
	n := int64(0)
	for _, c := range table {
		if c.Host {
			n += c.Bytes
		}
	}
	return n
}

// half is a part of the work on a layer, which takes temporary memory only.
type half uint8

const (
	forwardHalf half = iota
	forwardAgain
	backwardHalf
)

// layerWork is a half of layers that are alike.
type layerWork struct {
	kind int
	half half
}

// runLayer runs a half of a layer. Layers that are alike take the same memory: a dry run runs one
// of them, and allocates as much for the others.
func (m *Model) runLayer(p *pass, layer int64, h half, y, x tensor.Tensor) {
	b := m.blocks[layer]
	run := [...]func(*block, *pass, tensor.Tensor, tensor.Tensor){(*block).forward, (*block).forwardAgain,
		(*block).backward}[h]
	if !p.dry {
		run(b, p, y, x)
		return
	}
	work := layerWork{m.kinds()[layer], h}
	bytes, known := p.temporary[work]
	if !known {
		arena := p.ctx.Arena
		p.ctx.Arena = device.Sketch(p.dev, arena.Name())
		run(b, p, y, x)
		bytes = p.ctx.Arena.Peak()
		p.ctx.Arena, p.temporary[work] = arena, bytes
	}
	mark := p.mark()
	p.alloc(tensor.U8, bytes)
	p.reset(mark)
}

// kinds returns the kind of each layer. Layers of a kind differ in numbers alone, so all passes
// take the same memory for them.
func (m *Model) kinds() []int {
	if len(m.layerKinds) > 0 {
		return m.layerKinds
	}
	var first []int // layer of each kind
	for i := range m.blocks {
		kind := slices.IndexFunc(first, func(j int) bool { return m.alike(i, j) })
		if kind < 0 {
			kind = len(first)
			first = append(first, i)
		}
		m.layerKinds = append(m.layerKinds, kind)
	}
	return m.layerKinds
}

// alike reports whether two layers have the same sublayers and parameters.
func (m *Model) alike(i, j int) bool {
	a, full := m.blocks[i].mixer.(*softmaxAttention)
	b, both := m.blocks[j].mixer.(*softmaxAttention)
	if full != both || full && (a.mask != b.mask || a.noRope != b.noRope) {
		return false
	}
	inLayer := func(layer int) string { return fmt.Sprintf("model.layers.%d.", layer) }
	before, of := inLayer(i), inLayer(j)
	return slices.EqualFunc(m.groups[1+i].Params, m.groups[1+j].Params, func(x, y *Param) bool {
		return strings.TrimPrefix(x.Name, before) == strings.TrimPrefix(y.Name, of) && slices.Equal(x.Shape, y.Shape) &&
			x.Frozen == y.Frozen && (x.adapter == nil) == (y.adapter == nil)
	})
}
