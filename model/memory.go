package model

import (
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
