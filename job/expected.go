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
	m, known := &machine{info: s.Device.Info(), sizes: s.Device, host: s.free}, true
	if m.info.Place == tensor.Host {
		var err error
		m.rates, err = rehearsal.Measure([]device.Device{s.Device}, x.shape.In(s.Compute))
		if err = comm.Agree(s.Mesh.World, err); err != nil {
			return 0, err
		}
		m.rates.PerNode = s.perNode
	} else {
		m.recognize(s.Compute, s.perNode)
		known = m.ready() == nil
	}
	if !known || s.Mesh.World.Rank() > 0 {
		return 0, nil
	}
	f, err := foresee(s.Job, m, x, true)
	if err != nil { // what did not fit the plan ran all the same
		return 0, nil
	}
	defer f.close()
	return f.Seconds, nil
}
