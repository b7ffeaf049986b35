package plan

import (
	"maps"
	"slices"

	"ulysses/comm"
	"ulysses/data"
	"ulysses/dryrun"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/job/operator"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/train"
)

// Forecast is a job's step on one rank, as the dry run found it.
type Forecast struct {
	*assembly.Parts
	trainer *train.Trainer
	ledger  *comm.Ledger
	took    // in a step, of an evaluation in a pass; nothing where it was only sized
	Rank    int
	device  *dryrun.Device
	Memory  []model.Component
	tokens  int64            // of a step, or pass, of all ranks
	Saved   *operator.Report // of an operator job
}

// subject is what a plan is of: a model, or saved tensors.
type subject struct {
	config *model.Config // nil for saved tensors
	shape  dryrun.Shape  // that rates are measured on, but for the compute type
	Rows   []int64       // that a sequence's ranks share; a model's are the job's
	Heads  [][2]int64    // as many heads, and as many of keys
}

func SubjectOf(j *file.Job) (*subject, error) {
	if !j.IsModelJob() {
		s, err := operator.Describe(j)
		if err != nil {
			return nil, err
		}
		return &subject{Rows: s.Lengths, Heads: s.Heads, shape: dryrun.Shape{Hidden: s.Hidden, Dim: s.Dim, KeyDim: s.KeyDim, ValueDim: s.ValueDim}}, nil
	}
	c, err := j.ReadConfig()
	if err != nil {
		return nil, err
	}
	return SubjectOfModel(c), nil
}

func SubjectOfModel(c *model.Config) *subject {
	x := &subject{config: c, shape: dryrun.Shape{Hidden: c.HiddenSize, Dim: c.HeadDim}, Heads: [][2]int64{{c.NumAttentionHeads, c.NumKeyValueHeads}}}
	if c.LinearLayers() > 0 {
		x.shape.KeyDim, x.shape.ValueDim = c.LinearKeyHeadDim, c.LinearValueHeadDim
		x.Heads = append(x.Heads, [2]int64{c.LinearNumValueHeads, c.LinearNumKeyHeads})
	}
	return x
}

// Predict dry-runs a resolved job on the ranks of one sequence that may need most, and keeps the
// one that takes the most memory; the time is the longest of them. A plan that does not fit is an
// error of kind OutOfMemory. Without timing it is sized alone.
func Predict(j *file.Job, m *Machine, x *subject, timing bool) (*Forecast, error) {
	rows := x.Rows
	if x.config != nil {
		rows = []int64{j.Data.Batch * j.Data.Sequence}
	}
	var most *Forecast
	for _, rank := range Heaviest(rows, x.Heads, j.Mesh.Ulysses) {
		f, err := PredictRank(j, m, x, rank, timing)
		if err != nil {
			if most != nil {
				most.Close()
			}
			return nil, err
		}
		if most == nil {
			most = f
			continue
		}
		slower := max(most.Seconds, f.Seconds)
		if model.Bytes(f.Memory) > model.Bytes(most.Memory) {
			most, f = f, most
		}
		f.Close()
		most.Seconds = slower
	}
	return most, nil
}

// Heaviest are the ranks of a sequence such that every other has no more rows and no more heads of
// any kind than one of them.
func Heaviest(rows []int64, heads [][2]int64, ulysses int64) (ranks []int) {
	var loads [][]int64
	for r := range ulysses {
		var load []int64
		for _, n := range rows {
			lo, hi := comm.Shard(n, ulysses, r)
			load = append(load, hi-lo)
		}
		for _, n := range heads {
			lo, hi := comm.Shard(n[0], ulysses, r)
			keys := int64(0)
			if group := n[0] / n[1]; hi > lo {
				keys = (hi-1)/group - lo/group + 1
			}
			load = append(load, hi-lo, keys)
		}
		within := func(of []int64) bool {
			for i := range load {
				if load[i] > of[i] {
					return false
				}
			}
			return true
		}
		if !slices.ContainsFunc(loads, within) {
			loads, ranks = append(loads, load), append(ranks, int(r))
		}
	}
	return ranks
}

// PredictRank is Predict on one rank.
func PredictRank(j *file.Job, m *Machine, x *subject, rank int, timing bool) (*Forecast, error) {
	clk, ledger := clock.New(), comm.NewLedger()
	d, err := dryrun.Open(m.Info, m.Sizes, m.Rates, clk)
	if err != nil {
		return nil, err
	}
	compute, err := j.ComputeType(m.Info)
	if err != nil {
		return nil, err
	}
	mesh := dryrun.NewMesh(d, rank, int(j.Mesh.World), int(j.Mesh.Ulysses), ledger, clk)
	parts := &assembly.Parts{Job: j, Device: d, Mesh: mesh, Clock: clk, Compute: compute, FreeHost: m.Host, Config: x.config}
	f := &Forecast{Parts: parts, ledger: ledger, Rank: rank, device: d}
	if x.config == nil {
		err = f.predictOperator()
	} else if err = f.prepare(); err == nil && timing {
		err = f.time()
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	f.meet(m)
	return f, nil
}

// meet adds the cost of waiting for other ranks on CPUs. The dry run has counted how often the
// ranks wait and how long they compute in between.
func (f *Forecast) meet(m *Machine) {
	all := int64(0)
	for _, n := range f.Waits {
		all += n
	}
	if all == 0 || m.Share == 0 {
		return
	}
	each := dryrun.WaitCost(f.Seconds/float64(all), m.Share)
	for phase, n := range f.Waits {
		f.Phases[phase] += float64(n) * each
		f.Seconds += float64(n) * each
	}
}

func (f *Forecast) prepare() (err error) {
	if err = f.Layout(); err != nil {
		return err
	}
	j, setup := f.Job, f.Setup()
	rows := data.Placeholder(j.Data.Sequence)
	if j.Kind == "train" {
		setup.Data.Train, setup.Loop.Steps = rows, j.Train.Steps
		setup.Checkpoints = &train.Checkpoints{Every: j.Checkpoint.Every}
	} else {
		setup.Data.Eval = rows
	}
	if f.trainer, err = train.New(*setup); err != nil {
		return err
	}
	f.Memory = f.trainer.Components()
	if err := f.hostHolds(); err != nil {
		return err
	}
	tokens, _ := f.trainer.MaxTokens()
	f.tokens = tokens * j.Mesh.Replicas
	if j.Kind == "train" {
		f.tokens *= j.Data.Accumulate
	}
	return nil
}

// hostHolds refuses what the host's free memory is too small for: the trainer, which has it
// already, is told of a device's alone.
func (f *Forecast) hostHolds() error {
	planned, of := model.HostBytes(f.Memory), "of the host's memory "
	if f.Device.Info().Place == tensor.Host {
		planned, of = model.Bytes(f.Memory), ""
	}
	if f.FreeHost > 0 && planned > f.FreeHost {
		return status.Errorf(status.OutOfMemory, "plan: %s %sare planned for each rank, and %s are free for it: use more nodes, a shorter data.sequence or a higher parallel.zero", units.Bytes(planned), of, units.Bytes(f.FreeHost))
	}
	return nil
}

// time dry-runs a step, after one that does not count: memory that layers share is as a step
// leaves it. Micro-batches behind the second are as that one was.
func (f *Forecast) time() error {
	micros := int64(1)
	if f.Job.Kind == "train" {
		micros = f.Job.Data.Accumulate
	}
	if _, err := f.step(1); err != nil {
		return err
	}
	one, err := f.step(1)
	if err != nil || micros == 1 {
		f.took = one
		return err
	}
	two, err := f.step(2)
	f.took = one.plus(two.plus(one, -1), micros-1)
	return err
}

// took is what a step took on a rank.
type took struct {
	dryrun.Account
	Sent map[[2]string]int64 // bytes by axis and operation
}

func (x took) plus(y took, times int64) took {
	sum := took{x.Plus(y.Account, times), maps.Clone(x.Sent)}
	for of, bytes := range y.Sent {
		sum.Sent[of] += times * bytes
	}
	return sum
}

func (f *Forecast) so() took {
	x := took{f.device.Spent(), map[[2]string]int64{}}
	for _, e := range f.ledger.Entries() {
		if !e.Control {
			x.Sent[[2]string{e.Axis, e.Op}] = e.Bytes
		}
	}
	return x
}

func (f *Forecast) step(micros int64) (took, error) {
	before := f.so()
	err := f.trainer.DryRun(micros)
	return f.so().plus(before, -1), err
}

func (f *Forecast) Close() {
	if f.trainer != nil {
		f.trainer.Free()
	}
	f.Free()
}
