package job

import (
	"fmt"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/internal/units"
	"ulysses/tensor"
)

// The machine is measured after the run's steps, and only if the steps took long enough: the peak
// takes 60 ms, all rates of a plan half a second.
var (
	worthPeak = time.Second
	worthPlan = 20 * time.Second // tests shorten it
)

// expected is the planned time of a step.
type expected struct {
	seconds float64
	phases  map[string]float64 // seconds
}

// measure returns this machine with the rates of one rank: no rates after a short run, the rate of
// matrix products after a longer one, and all rates after a long one. The rates of a GPU come from
// a table by its name. worked is rank 0's seconds in steps. Collective.
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

// measurePeak measures matrix products on as many ranks of each node as have cores of their own, so
// no rank slows another down. It returns the share of each rank of a node if all ranks share the
// cores.
func (s *session) measurePeak(workers int, shape dryrun.Shape) (peak float64, err error) {
	atOnce, share := sharedBy(s.perNode, workers)
	if localRank(s.world) < atOnce {
		peak, err = dryrun.MeasureProducts(s.Device, shape)
	}
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return 0, err
	}
	return peak / share, nil
}

// plannedStep returns the planned time of a step on a machine with known rates, otherwise nil. Only
// rank 0 plans.
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

// machine returns this rank's share of the machine. The rates of a CPU are measured, including the
// effect of other processes. The rates of an unknown GPU are 0.
func (s *session) machine(x *subject) (*machine, error) {
	m := s.unmeasured()
	if m.info.Place != tensor.Host {
		m.recognize(s.Compute, s.perNode)
		return m, nil
	}
	atOnce := 0
	atOnce, m.share = sharedBy(s.perNode, m.info.Workers)
	if localRank(s.world) >= atOnce { // rank 0 makes the plan
		return m, nil
	}
	var err error
	m.rates, err = dryrun.Measure([]device.Device{s.Device}, sized(s.Job, x, int(s.Job.Mesh.World)).In(s.Compute))
	m.rates = m.rates.Shared(m.share)
	m.rates.PerNode = s.perNode
	return m, err
}

// shareOfPeak returns a rank's model FLOP/s as a share of the peak, and the kind of peak; 0 if the
// peak is unknown.
func (m *machine) shareOfPeak(flops float64) (share float64, of string) {
	peak, source := m.peak, "as measured after the run"
	if m.info.Place != tensor.Host {
		peak, source = m.rates.Products, "published for "+m.info.Name
	}
	if !(peak > 0) || !(flops > 0) {
		return 0, ""
	}
	return flops / peak, fmt.Sprintf("of %sFLOP/s a rank: matrix products, %s", units.Spaced(peak), source)
}
