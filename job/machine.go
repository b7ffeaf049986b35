package job

import (
	"fmt"
	"runtime"
	"strings"

	"ulysses/device"
	"ulysses/internal/backends"
	"ulysses/internal/rehearsal"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// machine is what a plan is for: a rank's share of it.
type machine struct {
	text  string // what it is, and where its rates come from
	info  device.Info
	sizes rehearsal.Sizes
	rates rehearsal.Rates
	host  int64 // bytes of the host's memory that a rank may take; 0 = nobody knows
	close func()
}

// thisMachine is the one that the plan is made on, with so many ranks at work on it. A CPU's rates are measured.
func thisMachine(j *Job, c *model.Config, perNode int) (*machine, error) {
	t := &j.Device
	open := func() (device.Device, error) {
		d, _, err := backends.Open(backends.Choice{Backend: t.Backend, Threads: int(t.Threads), RanksOnNode: perNode, Deterministic: t.Deterministic})
		return d, err
	}
	d, err := open()
	if err != nil {
		return nil, err
	}
	m := &machine{info: d.Info(), sizes: d, host: freeMemory() / int64(perNode), close: d.Close}
	compute, err := j.compute(m.info)
	if err == nil && m.info.Place == tensor.Host {
		err = m.measure(open, c, compute, perNode)
	} else if err == nil {
		err = m.recognize(j, perNode)
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return m, nil
}

// measure times this host's cores as the ranks will have them. Where these have more threads than there are cores, each gets its part.
func (m *machine) measure(open func() (device.Device, error), c *model.Config, compute tensor.DType, perNode int) error {
	cores, threads := runtime.NumCPU(), max(1, m.info.Workers)
	atOnce := max(1, min(perNode, cores/threads))
	var devices []device.Device
	defer func() {
		for _, d := range devices {
			d.Close()
		}
	}()
	for range atOnce {
		d, err := open()
		if err != nil {
			return err
		}
		devices = append(devices, d)
	}
	var err error
	m.rates, err = rehearsal.Measure(devices, shapeOf(c, compute))
	if err != nil {
		return status.Errorf(status.Of(err), "measuring what this machine does: %w", err)
	}
	m.rates = m.rates.Shared(float64(max(1, perNode*threads)) / float64(max(cores, atOnce*threads)))
	m.rates.PerNode = perNode
	m.text = fmt.Sprintf("%s, kernels %s, %d threads a rank on %d cores, as measured", m.info.Name, m.info.Kernels, threads, cores)
	return nil
}

// shapeOf is what rates depend on of a model.
func shapeOf(c *model.Config, compute tensor.DType) rehearsal.Shape {
	x := rehearsal.Shape{Compute: compute, Hidden: c.HiddenSize, Dim: c.HeadDim}
	if c.LinearLayers() > 0 {
		x.KeyDim, x.ValueDim = c.LinearKeyHeadDim, c.LinearValueHeadDim
	}
	return x
}

// recognize finds a GPU's rates by its name.
func (m *machine) recognize(j *Job, perNode int) error {
	for kind, g := range gpuByName {
		if strings.Contains(strings.ToLower(m.info.Name), kind) {
			err := m.known(g, j)
			m.rates.PerNode = perNode
			return err
		}
	}
	return status.Errorf(status.Unsupported, "plan: what %s does is not known: give its rates in a file with --cluster", m.info.Name)
}
