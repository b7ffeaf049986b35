package plan

import (
	"maps"
	"slices"

	"ulysses/comm"
	"ulysses/data"
	"ulysses/dryrun"
	"ulysses/internal/clock"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/job/operator"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/train"
)

// Forecast is the predicted cost of a job on one rank. The caller must Close it.
type Forecast struct {
	*assembly.Parts
	trainer  *train.Trainer
	ledger   *comm.Ledger
	cost     // of a step, or of a pass of an evaluation; 0 if only memory was planned
	Rank     int
	device   *dryrun.Device
	Memory   []model.Component
	tokens   int64            // of a step, or of a pass, of all ranks
	Operator *operator.Report // of an operator job; nil for models
	byHeads  bool             // the operator's ranks share heads
}

// subject is what a plan is made for: a model, or the tensors of an operator job.
type subject struct {
	config  *model.Config // nil for operator jobs
	shape   dryrun.Shape  // shapes on which rates are measured, without the compute type
	Lengths []int64       // of the sequences of an operator job
	Heads   [][2]int64    // heads and key heads of each kind of layer

	attention sp.Layer // softmax attention, without DType; the zero Layer = none
}

// SubjectOf returns the subject of a job.
func SubjectOf(j *file.Job) (*subject, error) {
	if !j.IsModelJob() {
		s, err := operator.Describe(j)
		if err != nil {
			return nil, err
		}
		return &subject{Lengths: s.Lengths, Heads: s.Heads, attention: s.Layer,
			shape: dryrun.Shape{Hidden: s.Hidden, Dim: s.Dim, KeyDim: s.KeyDim, ValueDim: s.ValueDim}}, nil
	}
	c, err := j.ReadConfig()
	if err != nil {
		return nil, err
	}
	return SubjectOfModel(c), nil
}

// SubjectOfModel returns the subject of a job with a model.
func SubjectOfModel(c *model.Config) *subject {
	x := &subject{config: c, shape: dryrun.Shape{Hidden: c.HiddenSize, Dim: c.HeadDim},
		Heads: [][2]int64{{c.NumAttentionHeads, c.NumKeyValueHeads}}}
	if c.LinearLayers() < c.NumHiddenLayers {
		x.attention = sp.Layer{Heads: c.NumAttentionHeads, KVHeads: c.NumKeyValueHeads, Dim: c.HeadDim,
			VDim: c.ValueDim(), Causal: true, Dropout: c.AttentionDropout}
	}
	if c.LinearLayers() > 0 {
		x.shape.KeyDim, x.shape.ValueDim = c.LinearKeyHeadDim, c.LinearValueHeadDim
		x.Heads = append(x.Heads, [2]int64{c.LinearNumValueHeads, c.LinearNumKeyHeads})
	}
	return x
}

// Predict dry-runs a resolved job on the ranks of one sequence that may have the most work. It
// returns the forecast of the rank with the most memory, with the longest time of all. If the job
// does not fit, the error has the code OutOfMemory. Without timing only memory is planned.
func Predict(j *file.Job, m *Machine, x *subject, timing bool) (*Forecast, error) {
	ranks, err := heaviest(j, m, x)
	if err != nil {
		return nil, err
	}
	return predictRanks(j, m, x, ranks, timing)
}

// heaviest returns the ranks of a sequence that may have the most work.
func heaviest(j *file.Job, m *Machine, x *subject) ([]int, error) {
	lengths := x.Lengths
	if x.config != nil {
		lengths = []int64{j.Data.Batch * j.Data.Sequence}
	}
	return heaviestOfGroups(j, m, x, Heaviest(lengths, x.Heads, j.Mesh.Ulysses, j.Mesh.Ring))
}

// predictRanks is Predict with the ranks that have the most work.
func predictRanks(j *file.Job, m *Machine, x *subject, ranks []int, timing bool) (*Forecast, error) {
	var most *Forecast
	if last := int((j.Mesh.Ring - 1) * j.Mesh.Ulysses); timing && last > 0 && !slices.Contains(ranks, last) {
		ranks = append(slices.Clone(ranks), last) // without a zigzag, the last group of a ring sees the most keys
	}
	for _, rank := range ranks {
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

// Heaviest returns ranks of a sequence such that each other rank has at most as many tokens and
// heads of each kind as one of these.
func Heaviest(lengths []int64, heads [][2]int64, ulysses, ring int64) (ranks []int) {
	var loads [][]int64
	for r := range ulysses * ring {
		var load []int64
		for _, n := range lengths {
			lo, hi := comm.Shard(n, ulysses*ring, r)
			load = append(load, hi-lo)
		}
		for _, n := range heads {
			own, keys := headsOf(n, ulysses, r%ulysses)
			load = append(load, own, keys)
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

// headsOf returns the heads, and the key heads of these, of a rank of a group. heads has the
// numbers of heads and key heads of the layer.
func headsOf(heads [2]int64, ulysses, rank int64) (own, keys int64) {
	lo, hi := comm.Shard(heads[0], ulysses, rank)
	if group := heads[0] / heads[1]; hi > lo {
		keys = (hi-1)/group - lo/group + 1
	}
	return hi - lo, keys
}

// heaviestOfGroups returns, of the ranks of the first group of a ring and the ranks at their
// positions in the other groups, those that need the most memory if all saved activations are
// kept, or if all are recomputed. The groups differ in the rows and keys of attention. If recurrent
// states pass from rank to rank, rank 1 may need more than rank 0, which receives none.
func heaviestOfGroups(j *file.Job, m *Machine, x *subject, first []int) (heaviest []int, err error) {
	states := x.shape.KeyDim > 0 && j.GDN.Strategy != "heads" && j.Mesh.Ulysses > 1
	if states && !slices.Contains(first, 1) {
		first = append(slices.Clone(first), 1)
	}
	if j.Mesh.Ring == 1 && !states || x.config == nil {
		return first, nil
	}
	recomputed := model.Activations{Attention: model.Recompute, QKV: model.Recompute, MLP: model.Recompute}
	var most [2]int64
	var at [2]int
	for _, position := range first {
		for group := range j.Mesh.Ring {
			rank := position + int(group*j.Mesh.Ulysses)
			bytes, err := bytesOf(j, m, x, rank, model.Activations{}, recomputed)
			if err != nil {
				return nil, err
			}
			for i, n := range bytes {
				if n > most[i] {
					most[i], at[i] = n, rank
				}
			}
		}
	}
	return slices.Compact(at[:]), nil
}

// bytesOf returns the bytes of the weights and of a pass on a rank, for each policy of activations.
func bytesOf(j *file.Job, m *Machine, x *subject, rank int, policies ...model.Activations) (bytes []int64, err error) {
	f, err := open(j, m, x, rank)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Layout(); err != nil {
		return nil, err
	}
	tokens := j.Data.Batch * j.Data.Sequence
	for _, a := range policies {
		if err := f.Model.SetActivations(a); err != nil {
			return nil, err
		}
		table, err := f.Model.Memory(f.Model.MostTokens(tokens), tokens, j.Kind == "train")
		if err != nil {
			return nil, err
		}
		bytes = append(bytes, model.Bytes(append(table, f.Weights.Components()...)))
	}
	return bytes, nil
}

// PredictRank is Predict on one rank.
func PredictRank(j *file.Job, m *Machine, x *subject, rank int, timing bool) (*Forecast, error) {
	f, err := open(j, m, x, rank)
	if err != nil {
		return nil, err
	}
	if x.config == nil {
		err = f.predictOperator()
	} else if err = f.prepare(); err == nil && timing {
		err = f.time()
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	f.addWaits(m)
	return f, nil
}

// open returns a forecast of one rank before its dry run.
func open(j *file.Job, m *Machine, x *subject, rank int) (*Forecast, error) {
	clk, ledger := clock.New(), comm.NewLedger()
	d, err := dryrun.Open(m.Info, m.Sizes, m.Rates, clk)
	if err != nil {
		return nil, err
	}
	compute, err := j.ComputeType(m.Info)
	if err != nil {
		return nil, err
	}
	mesh := dryrun.NewMesh(d, rank, int(j.Mesh.World), int(j.Mesh.Ulysses), int(j.Mesh.Ring), int(j.Mesh.Experts),
		ledger, clk)
	mesh.Links = TypicalLinks
	parts := &assembly.Parts{Job: j, Device: d, Mesh: mesh, Clock: clk, Compute: compute, FreeHost: m.Host,
		PerNode: m.Rates.PerNode, Config: x.config, Rates: m.stepRates(), OpenHost: func() (assembly.HostStep, error) {
			return d.Host(), nil
		}}
	return &Forecast{Parts: parts, ledger: ledger, Rank: rank, device: d}, nil
}

// addWaits adds the cost of waiting for other ranks on CPUs. The dry run has counted how often the
// ranks wait and how long they compute in between.
func (f *Forecast) addWaits(m *Machine) {
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

// sharedHeads returns the kinds of layers whose heads the ranks share.
func (f *Forecast) sharedHeads(x *subject) []kindOfHeads {
	if f.Model != nil {
		return x.sharedHeads(f.Model.Linear(), false)
	}
	return x.sharedHeads(nil, f.byHeads)
}

// prepare makes the model and the trainer on the dry-run device, and plans memory.
func (f *Forecast) prepare() (err error) {
	if err = f.Layout(); err != nil {
		return err
	}
	j, setup := f.Job, f.Setup()
	// an evaluation has as many sequences as it can run at once
	sequences := data.Placeholder(max(1, j.Data.Budget/j.Data.Sequence), j.Data.Sequence, j.Documents())
	if j.Kind == "eval" || j.Eval.Split > 0 || len(j.Eval.Path)+len(j.Eval.Set) > 0 {
		setup.Data.Evals = []data.NamedSet{{Set: sequences}}
	}
	if j.Kind == "train" {
		setup.Data.Train, setup.Loop.Steps = sequences, j.Train.Steps
		setup.Checkpoints = &train.Checkpoints{Every: j.Checkpoint.Every, Copy: j.Checkpoint.Copy,
			Best: j.Checkpoint.Best}
	}
	if setup.Extra, err = f.PlanSample(); err != nil {
		return err
	}
	if f.trainer, err = train.New(*setup); err != nil {
		return err
	}
	f.Memory = f.trainer.Components()
	f.tokens = f.trainer.PassTokens() * j.Mesh.Replicas
	if j.Kind == "train" {
		f.tokens *= j.Data.Accumulate
	}
	return nil
}

// time dry-runs steps. The first step does not count, because memory that layers share is then in
// the state in which a step leaves it. A step with one micro-batch and a step with two are run;
// each further micro-batch costs as much as the second.
func (f *Forecast) time() error {
	microBatches := int64(1)
	if f.Job.Kind == "train" {
		microBatches = f.Job.Data.Accumulate
	}
	if _, err := f.step(1); err != nil {
		return err
	}
	one, err := f.step(1)
	if err != nil || microBatches == 1 {
		f.cost = one
		return err
	}
	two, err := f.step(2)
	f.cost = one.plus(two.plus(one, -1), microBatches-1)
	return err
}

// cost is the time and the bytes sent of steps on a rank.
type cost struct {
	dryrun.Account
	Sent map[[2]string]int64 // bytes by axis and operation
}

// plus returns x + times·y.
func (x cost) plus(y cost, times int64) cost {
	sum := cost{x.Plus(y.Account, times), maps.Clone(x.Sent)}
	for key, bytes := range y.Sent {
		sum.Sent[key] += times * bytes
	}
	return sum
}

// total returns the cost since the device was opened.
func (f *Forecast) total() cost {
	x := cost{f.device.Spent(), map[[2]string]int64{}}
	for _, e := range f.ledger.Entries() {
		if !e.Control {
			x.Sent[[2]string{e.Axis, e.Op}] = e.Bytes
		}
	}
	return x
}

// step dry-runs a step of some micro-batches.
func (f *Forecast) step(microBatches int64) (cost, error) {
	before := f.total()
	err := f.trainer.DryRun(microBatches)
	return f.total().plus(before, -1), err
}

// Close frees the trainer and the model.
func (f *Forecast) Close() {
	if f.trainer != nil {
		f.trainer.Free()
	}
	f.Free()
}
