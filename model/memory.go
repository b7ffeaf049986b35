package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// Component is a line of the memory table.
type Component struct {
	Name  string
	Bytes int64
	Host  bool // of the host, where the device has memory of its own
}

// Memory is what a pass takes from its arena at its peak, by component: rows are this rank's,
// tokens the whole sequence's. It is the code of the pass itself, run without memory, so that plan
// and peak are the same number. Parameters, gradients and optimizer states are their owner's.
func (m *Model) Memory(rows, tokens int64, backward bool) ([]Component, error) {
	return m.memory(&m.plans, rows, tokens, backward)
}

// MemoryAlone is Memory of an evaluation in which this rank has all tokens.
func (m *Model) MemoryAlone(tokens int64) ([]Component, error) {
	return m.memory(&m.alone, tokens, tokens, false)
}

func (m *Model) memory(plans *plans, rows, tokens int64, backward bool) ([]Component, error) {
	sizes, err := plans.sizes(m.dev, tokens)
	if err != nil {
		return nil, err
	}
	arena, host := device.Sketch(m.dev, "activations"), device.Sketch(m.dev, "offloaded activations")
	ids := tensor.Of(nil, tensor.I32, rows)
	var p pass
	p.begin(m, &Ctx{Arena: arena, Host: host}, &Batch{IDs: ids, Targets: ids, Positions: ids}, rows, sizes, backward)
	p.plans = plans
	m.execute(&p)
	if p.err != nil {
		return nil, p.err
	}
	var table []Component
	rest := arena.Peak()
	for k, bytes := range p.saved {
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

// Bytes is the sum of a table of the device's memory, HostBytes of the host's.
func Bytes(table []Component) int64 {
	n := int64(0)
	for _, c := range table {
		if !c.Host {
			n += c.Bytes
		}
	}
	return n
}

// HostBytes is described at Bytes.
func HostBytes(table []Component) int64 {
	n := int64(0)
	for _, c := range table {
		if c.Host {
			n += c.Bytes
		}
	}
	return n
}
