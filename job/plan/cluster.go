package plan

import (
	"ulysses/internal/units"
	"ulysses/job/file"
)

// applyRates replaces the rates and the memory of a machine by the values of a --cluster file.
func applyRates(c *file.Cluster, m *Machine) {
	x := &c.Rates
	for _, r := range []struct {
		to    *float64
		given float64
		unit  float64
	}{{&m.Rates.Products, x.Products, 1e12}, {&m.Rates.Attention, x.Attention, 1e12},
		{&m.Rates.Gradient, x.Gradient, 1e12}, {&m.Rates.Delta, x.Delta, 1e12},
		{&m.Rates.Memory, x.Memory, 1e9}, {&m.Rates.Copies, x.Copies, 1e9}, {&m.Rates.Host, x.Host, 1e9},
		{&m.Rates.Node, x.Node, 1e9}, {&m.Rates.Network, x.Network, 1e9},
		{&m.Rates.Launch, x.Launch, 1e-6}, {&m.Rates.Latency, x.Latency, 1e-6}, {&m.Rates.Message, x.Message, 1e-6}} {
		if r.given > 0 {
			*r.to = r.given * r.unit
		}
	}
	if x.Delta > 0 {
		m.Rates.DeltaBack = 0 // as measured here; the backward pass has the given rate as well
	}
	if c.Memory > 0 {
		m.Info.Memory = units.FromGiB(c.Memory)
	}
	if c.HostMemory > 0 {
		m.Host = units.FromGiB(c.HostMemory) / c.PerNode
	}
	m.Rates.PerNode = int(c.PerNode)
}

// clusterMachine returns one rank's share of the cluster.
func clusterMachine(c *file.Cluster, j *file.Job, x *subject) (m *Machine, err error) {
	if c.Device == "here" {
		m, err = thisMachine(j, x, int(c.PerNode))
	} else {
		m, err = gpuByName[c.Device].machine(j)
	}
	if err != nil {
		return nil, err
	}
	if c.Device != "here" {
		m.Rates.Host = gpuByName[c.Device].hostRate(int(j.Device.Threads), 0, int(c.PerNode))
	}
	m.cluster = c
	applyRates(c, m)
	return m, nil
}
