package plan

import (
	"fmt"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/tensor"
)

// The machine is measured after the run's steps, and only if the steps took long enough: the peak
// takes 60 ms, all rates of a plan half a second.
var (
	MeasurePeakAfter = time.Second
	MeasureAllAfter  = 20 * time.Second // tests shorten it
)

// Expected is the planned time of a step.
type Expected struct {
	Seconds float64
	Phases  map[string]float64 // seconds
}

// Rank is a rank of a run whose machine is measured or planned for.
type Rank struct {
	*assembly.Parts
	LocalRank int // of this rank on its node
}

// Measure returns this machine with the rates of one rank: no rates after a short run, the rate of
// matrix products after a longer one, and all rates after a long one. The rates of a GPU come from
// a table by its name. worked is rank 0's seconds in steps. Collective.
func (r *Rank) Measure(worked float64) (*Machine, error) {
	m := r.unmeasured()
	after := []int64{0, 0} // 1 = long enough for the peak, for all rates
	if r.Job.Kind == "train" && worked > MeasurePeakAfter.Seconds() {
		after[0] = 1
	}
	if after[0] == 1 && worked > MeasureAllAfter.Seconds() {
		after[1] = 1
	}
	if err := r.Mesh.World.Broadcast(nil, tensor.OfInt64(after, 2), 0); err != nil || after[0] == 0 {
		return m, err
	}
	if m.Info.Place != tensor.Host {
		m.recognize(r.Job, r.Compute, r.PerNode)
		return m, nil
	}
	x := SubjectOfModel(r.Config)
	if after[1] == 1 {
		all, err := r.machine(x)
		if err = comm.Agree(r.Mesh.World, err); err != nil {
			return nil, err
		}
		m = all
	}
	var err error
	m.Peak, err = r.measurePeak(m.Info.Workers)
	return m, err
}

// measurePeak measures matrix products on as many ranks of each node as have cores of their own, so
// no rank slows another down. It returns the share of each rank of a node if all ranks share the
// cores.
func (r *Rank) measurePeak(workers int) (peak float64, err error) {
	atOnce, share := sharedBy(r.PerNode, workers)
	if r.LocalRank < atOnce {
		peak, err = dryrun.MeasurePeak(r.Device, r.Compute)
	}
	if err = comm.Agree(r.Mesh.World, err); err != nil {
		return 0, err
	}
	return peak / share, nil
}

// PlanStep returns the planned time of a step on a machine with known rates, otherwise nil. Only
// rank 0 plans.
func (r *Rank) PlanStep(m *Machine) *Expected {
	if m.ready() != nil || r.Mesh.World.Rank() > 0 {
		return nil
	}
	f, err := Predict(r.Job, m, SubjectOfModel(r.Config), true)
	if err != nil { // the run has worked, also if the plan does not fit
		return nil
	}
	defer f.Close()
	return &Expected{f.Seconds, f.Phases}
}

// unmeasured returns the machine without rates.
func (r *Rank) unmeasured() *Machine {
	return &Machine{Info: r.Device.Info(), Sizes: r.Device, Host: r.FreeHost}
}

// machine returns this rank's share of the machine. The rates of a CPU are measured, including the
// effect of other processes. The rates of an unknown GPU are 0.
func (r *Rank) machine(x *subject) (*Machine, error) {
	m := r.unmeasured()
	if m.Info.Place != tensor.Host {
		m.recognize(r.Job, r.Compute, r.PerNode)
		return m, nil
	}
	atOnce := 0
	atOnce, m.Share = sharedBy(r.PerNode, m.Info.Workers)
	if r.LocalRank >= atOnce { // rank 0 makes the plan
		return m, nil
	}
	var err error
	m.Rates, err = dryrun.Measure([]device.Device{r.Device}, sized(r.Job, x, int(r.Job.Mesh.World)).In(r.Compute))
	m.Rates = m.Rates.Shared(m.Share)
	m.Rates.PerNode = r.PerNode
	return m, err
}

// ShareOfPeak returns a rank's model FLOP/s as a share of the peak, and the kind of peak; 0 if the
// peak is unknown.
func (m *Machine) ShareOfPeak(flops float64) (share float64, of string) {
	peak, source := m.Peak, "as measured after the run"
	if m.Info.Place != tensor.Host {
		peak, source = m.Rates.Products, "published for "+m.Info.Name
	}
	if !(peak > 0) || !(flops > 0) {
		return 0, ""
	}
	return flops / peak, fmt.Sprintf("of %sFLOP/s a rank: matrix products, %s", units.Spaced(peak), source)
}
