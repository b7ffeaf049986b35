// Package train runs the training loop: data, forward, loss, backward, reduce, clip, update, log.
//
// NewWeights stores the parameters for ZeRO stages 0 to 3 (Rajbhandari et al. 2019,
// arXiv:1910.02054). Checkpoints.Resume fills them from a checkpoint. A Setup has the device, the
// mesh, the model, its Weights and the data. New chooses which activations are kept, allocates all
// memory and returns a Trainer. Trainer.Run runs the steps, the evaluations and the checkpoints;
// Step and Evaluate run one step and one evaluation.
package train

import (
	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/data"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// Trainer runs the steps of one rank. New allocates everything that it needs.
type Trainer struct {
	Setup
	planner planner
	stream  device.Stream
	arena   *device.Arena // activations
	host    *device.Arena // offloaded activations; nil = none
	inputs  *device.Arena // tokenInputs
	tokenInputs

	sequenceOf      []int32 // of each token of a micro-batch, see model.Batch.Sequences
	sequenceTargets []int64
	numberOf        []int64 // of each token of a micro-batch, see model.Batch.Numbers

	microBatches []*data.MicroBatch // of the current step
	length       int64              // of the global batch of the current step, for model.Batch.Length
	lengthMax    tensor.Tensor      // [1] I64 on the host
	counts       tensor.Tensor      // [2] I64 on the host: valid targets, tokens
	sums         tensor.Tensor      // [3] F64 on the host: NLL, loss of balance, targets
	lengths      tensor.Tensor      // [globalBatch] I64 on the host; with data.budget only

	agreed   agreed // of the last step
	saver    *saver // nil = no checkpoints
	stopped  bool
	complete bool            // see Complete
	best     checkpoint.Best // of Setup.Track
	improved bool            // the evaluation after the current step is the best so far
	// the model calls inspect with every tensor of a pass; nil = no calls
	inspect   func(at string, x tensor.Tensor) error
	evalSet   int   // index of the evaluation set of the current pass
	alone     bool  // the current pass has a sequence that this rank evaluates alone
	diagnosed bool  // a skipped step was diagnosed
	updates   int64 // steps in which the optimizer updated the weights
	maxAlone  int64 // largest sequence, in tokens, that a rank evaluates alone; 0 = none
	sent      int64 // bytes that the token mixers of this rank have sent, by formula
	// the same for counts of experts, and for rows of experts of other ranks
	balanceSent, expertSent int64
}

// New chooses which activations are kept and allocates the memory for the longest micro-batch. The
// weights must have their values. Collective.
func New(s Setup) (*Trainer, error) {
	t := &Trainer{Setup: s, counts: tensor.OfInt64(make([]int64, 2), 2), sums: tensor.OfFloat64(make([]float64, 3), 3),
		lengthMax: tensor.OfInt64(make([]int64, 1), 1), updates: s.Loop.Updates}
	if s.Checkpoints != nil {
		t.saver = newSaver(&s)
	}
	s.Model.SetSequences(t.mostSequences())
	if err := t.track(); err != nil {
		return nil, err
	}
	t.planner = planner{Setup: &t.Setup, saver: t.saver}
	err := t.planner.run()
	if err == nil {
		err = t.allocate()
	}
	if err = comm.Agree(s.Mesh.World, err); err == nil {
		err = t.planAlone()
	}
	if err != nil {
		t.Free()
		return nil, err
	}
	t.microBatches = make([]*data.MicroBatch, max(1, s.Data.Config.Accumulate))
	if s.Data.Config.Budget > 0 {
		t.lengths = tensor.OfInt64(make([]int64, s.globalBatch()), s.globalBatch())
	}
	if err = t.Weights.Loaded(t.stream); err == nil {
		err = t.stream.Sync()
	}
	if err != nil {
		t.Free()
		return nil, err
	}
	return t, nil
}

func (t *Trainer) allocate() (err error) {
	if t.stream, err = t.Device.NewStream(); err != nil {
		return err
	}
	tokens, shard := t.MaxTokens()
	if err = t.Model.Reserve(tokens); err != nil {
		return err
	}
	if err := fits(t.Device, t.Memory.Stage, t.Components()); err != nil {
		return err
	}
	if t.arena, err = device.NewArena(t.Device, "activations", model.Bytes(t.planner.activations)); err != nil {
		return err
	}
	if bytes := model.HostBytes(t.planner.activations); bytes > 0 {
		if t.host, err = device.NewHostArena(t.Device, "offloaded activations", bytes); err != nil {
			return err
		}
	}
	if t.inputs, err = device.NewArena(t.Device, "tokens", t.inputBytes()); err != nil {
		return err
	}
	for _, x := range t.tokenInputs.of(t.Model) {
		if *x.tensor, err = t.inputs.Tensor(x.dtype, shard); err != nil {
			return err
		}
	}
	if t.saver != nil {
		return t.saver.reserve(t.stream)
	}
	return nil
}

// planAlone sets maxAlone to the number of tokens that each rank can evaluate alone in its memory.
// It is 0 if each sequence has only one rank. Collective.
func (t *Trainer) planAlone() error {
	var err error
	n := int64(0)
	if t.Mesh.Seq.Size() > 1 && len(t.Data.Evals) > 0 {
		var table []model.Component
		for n = t.ids.Shape[0]; n > 0; n /= 2 {
			if table, err = t.Model.MemoryAlone(n); err != nil || model.Bytes(table) <= t.arena.Bytes() {
				break
			}
		}
	}
	least := []int64{-n}
	if e := t.Mesh.World.AllReduce(nil, tensor.OfInt64(least, 1), comm.Max); err == nil {
		err = e
	}
	t.maxAlone = -least[0]
	return err
}

// Free releases all memory except that of the weights.
func (t *Trainer) Free() {
	t.saver.free()
	for _, a := range []*device.Arena{t.arena, t.host, t.inputs} {
		if a != nil {
			a.Free()
		}
	}
	if t.stream != nil {
		t.stream.Close()
	}
}

// Components returns the planned memory of this rank, for the table that is printed before step 1.
func (t *Trainer) Components() []model.Component { return t.planner.components() }

// Choices returns the choices that the planner considered, ordered by time. It leaves out choices
// for which another one needs no more memory and no more time.
func (t *Trainer) Choices() []Choice { return t.planner.listed() }

// PeakBytes returns the largest number of bytes of device memory in use so far.
func (t *Trainer) PeakBytes() int64 {
	n := t.arena.Peak() + t.inputs.Peak() + t.saver.peak()
	return n + model.Bytes(t.Weights.Components()) + model.Bytes(t.Extra)
}

// Allocation is an allocation of this rank: its planned size and its largest use so far, in bytes.
type Allocation struct {
	Name          string
	Planned, Peak int64
	Host          bool              // memory of the host, for a device that has its own memory
	Components    []model.Component // what Planned consists of; nil = one component
}

// Allocations returns the allocations of this rank. Their planned sizes are the sizes in
// Components.
func (t *Trainer) Allocations() []Allocation {
	var all []Allocation
	add := func(a *device.Arena, host bool, components ...model.Component) {
		if a != nil {
			all = append(all,
				Allocation{Name: a.Name(), Planned: a.Bytes(), Peak: a.Peak(), Host: host, Components: components})
		}
	}
	for _, a := range t.Weights.Arenas() {
		add(a, a.Place() != t.Device.Info().Place)
	}
	var own, host []model.Component
	for _, c := range t.planner.activations {
		if c.Host {
			host = append(host, c)
		} else {
			own = append(own, c)
		}
	}
	add(t.arena, false, own...)
	add(t.host, true, host...)
	add(t.inputs, false)
	for _, c := range t.Extra {
		all = append(all, Allocation{Name: c.Name, Planned: c.Bytes, Peak: c.Bytes})
	}
	if c := t.saver.component(); len(c) > 0 {
		add(t.saver.arena, c[0].Host)
	}
	return all
}

// Traffic returns the bytes that this rank must have sent so far, by formula. It leaves out control
// messages: counts, sums of losses, errors, and the values that ranks agree on after a step.
func (t *Trainer) Traffic() []Traffic {
	all := append([]Traffic{{"sequence", comm.OpAllToAll,
		"queries, keys, values, outputs and states, and their gradients", t.sent}}, t.Weights.Traffic()...)
	if t.Model.CountsExperts() {
		all = append(all, Traffic{"sequence", comm.OpAllReduce, "counts of experts", t.balanceSent})
	}
	if t.Mesh.Expert != nil {
		all = append(all, Traffic{"expert", comm.OpAllToAll, "inputs and outputs of experts, and their gradients",
			t.expertSent})
	}
	return all
}
