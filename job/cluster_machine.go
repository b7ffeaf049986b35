package job

import (
	"ulysses/job/file"
)

// applyRates puts a cluster's own figures in the place of known ones.
func applyRates(c *file.Cluster, m *machine) {
	x := &c.Rates
	for _, r := range []struct {
		to    *float64
		given float64
		unit  float64
	}{{&m.rates.Products, x.Products, 1e12}, {&m.rates.Attention, x.Attention, 1e12}, {&m.rates.Gradient, x.Gradient, 1e12}, {&m.rates.Delta, x.Delta, 1e12},
		{&m.rates.Memory, x.Memory, 1e9}, {&m.rates.Copies, x.Copies, 1e9}, {&m.rates.Node, x.Node, 1e9}, {&m.rates.Network, x.Network, 1e9},
		{&m.rates.Launch, x.Launch, 1e-6}, {&m.rates.Latency, x.Latency, 1e-6}} {
		if r.given > 0 {
			*r.to = r.given * r.unit
		}
	}
	if c.Memory > 0 {
		m.info.Memory = int64(c.Memory * (1 << 30))
	}
	if c.HostMemory > 0 {
		m.host = int64(c.HostMemory*(1<<30)) / c.PerNode
	}
	m.rates.PerNode = int(c.PerNode)
}

// clusterMachine is a rank's share of the cluster.
func clusterMachine(c *file.Cluster, j *file.Job, x *subject) (m *machine, err error) {
	if c.Device == "here" {
		m, err = thisMachine(j, x, int(c.PerNode))
	} else {
		m, err = gpuByName[c.Device].machine(j)
	}
	if err != nil {
		return nil, err
	}
	applyRates(c, m)
	return m, nil
}
