package job

import (
	"fmt"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/rehearsal"
	"ulysses/tensor"
)

// A run is measured after its steps, and only if these took long enough: the peak takes 60 ms, all rates that a plan needs half a second.
var (
	worthPeak = time.Second
	worthPlan = 20 * time.Second // tests make it short
)

// expected is a step by the plan.
type expected struct {
	seconds float64
	phases  map[string]float64 // seconds
}

// measure returns this machine with the rates that one rank gets done now: none after a short run, that of matrix products after a longer
// one, and all after a long one. On a GPU they are those that are known of its name. worked is rank 0's seconds in steps. Collective.
func (s *session) measure(worked float64) (*machine, error) {
	m := s.unmeasured()
	far := []int64{0, 0}
	if s.Job.Kind == "train" && worked > worthPeak.Seconds() {
		far[0] = 1
	}
	if far[0] == 1 && worked > worthPlan.Seconds() {
		far[1] = 1
	}
	if err := s.Mesh.World.Broadcast(nil, tensor.OfInt64(far, 2), 0); err != nil || far[0] == 0 {
		return m, err
	}
	if m.info.Place != tensor.Host {
		m.recognize(s.Compute, s.perNode)
		return m, nil
	}
	x := subjectOf(s.config)
	if far[1] == 1 {
		all, err := s.machine(x)
		if err = comm.Agree(s.Mesh.World, err); err != nil {
			return nil, err
		}
		m = all
	}
	var err error
	m.peak, err = s.measurePeak(m.info.Workers, x.shape.In(s.Compute))
	return m, err
}

// measurePeak measures matrix products on as many ranks of each node as there are cores for, so that none is slowed down by another, and
// returns what is left to each rank of a node if all share the cores.
func (s *session) measurePeak(workers int, shape rehearsal.Shape) (peak float64, err error) {
	atOnce, share := sharedBy(s.perNode, workers)
	if localRank(s.world) < atOnce {
		peak, err = rehearsal.MeasureProducts(s.Device, shape)
	}
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return 0, err
	}
	return peak / share, nil
}

// plannedStep returns a step by the plan on a machine whose rates are known; else nil. Rank 0 alone plans.
func (s *session) plannedStep(m *machine) *expected {
	if m.ready() != nil || s.Mesh.World.Rank() > 0 {
		return nil
	}
	f, err := foresee(s.Job, m, subjectOf(s.config), true)
	if err != nil { // what did not fit the plan ran all the same
		return nil
	}
	defer f.close()
	return &expected{f.Seconds, f.Phases}
}

func (s *session) unmeasured() *machine {
	return &machine{info: s.Device.Info(), sizes: s.Device, host: s.free}
}

// machine is this rank's share of the machine that it runs on. A CPU's rates are measured, with whatever else is at work; those of a GPU that nobody
// knows are 0.
func (s *session) machine(x *subject) (*machine, error) {
	m := s.unmeasured()
	if m.info.Place != tensor.Host {
		m.recognize(s.Compute, s.perNode)
		return m, nil
	}
	atOnce := 0
	atOnce, m.share = sharedBy(s.perNode, m.info.Workers)
	if localRank(s.world) >= atOnce { // the plan is rank 0's
		return m, nil
	}
	var err error
	m.rates, err = rehearsal.Measure([]device.Device{s.Device}, s.Job.sized(x, int(s.Job.Mesh.World)).In(s.Compute))
	m.rates = m.rates.Shared(m.share)
	m.rates.PerNode = s.perNode
	return m, err
}

// shareOfPeak returns the share of the peak that a rank's model FLOP/s are, and what the peak is; 0 if none is known.
func (m *machine) shareOfPeak(flops float64) (share float64, of string) {
	peak, source := m.peak, "as measured after the run"
	if m.info.Place != tensor.Host {
		peak, source = m.rates.Products, "published for "+m.info.Name
	}
	if !(peak > 0) || !(flops > 0) {
		return 0, ""
	}
	return flops / peak, fmt.Sprintf("of %sFLOP/s a rank: matrix products, %s", spaced(peak), source)
}
