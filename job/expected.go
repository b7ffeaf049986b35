package job

import (
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/rehearsal"
	"ulysses/tensor"
)

// worth is how long a run's steps must have taken before it is measured what they should have: that takes half a second.
const worth = 20 * time.Second

// plannedStep is the time of a step by the plan, in seconds, at the rates of this machine with all its ranks at work now; 0 where they are not known, and
// after a short run. worked is rank 0's seconds in steps. Collective.
func (s *session) plannedStep(worked float64) (float64, error) {
	long := []int64{0}
	if s.Job.Kind == "train" && worked > worth.Seconds() {
		long[0] = 1
	}
	if err := s.Mesh.World.Broadcast(nil, tensor.OfInt64(long, 1), 0); err != nil || long[0] == 0 {
		return 0, err
	}
	x := subjectOf(s.config)
	m, err := s.machine(x)
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return 0, err
	}
	if m.ready() != nil || s.Mesh.World.Rank() > 0 {
		return 0, nil
	}
	f, err := foresee(s.Job, m, x, true)
	if err != nil { // what did not fit the plan ran all the same
		return 0, nil
	}
	defer f.close()
	return f.Seconds, nil
}

// machine is this rank's share of the machine that it runs on. A CPU's rates are measured, with whatever else is at work; those of a GPU that nobody
// knows are 0.
func (s *session) machine(x *subject) (*machine, error) {
	m := &machine{info: s.Device.Info(), sizes: s.Device, host: s.free}
	if m.info.Place != tensor.Host {
		m.recognize(s.Compute, s.perNode)
		return m, nil
	}
	var err error
	m.rates, err = rehearsal.Measure([]device.Device{s.Device}, x.shape.In(s.Compute))
	m.rates.PerNode = s.perNode
	return m, err
}
