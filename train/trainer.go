// Package train runs the training loop: data, forward, loss, backward, reduce, clip, update, log.
//
// A Setup names the device, the mesh, the model, its Weights and the data. New chooses which
// activations are kept, allocates all memory and returns a Trainer. Run then runs the steps, the
// evaluations and the checkpoints; Step and Evaluate are one of each. Weights stores the parameters
// for ZeRO stages 0 to 3 (Rajbhandari et al. 2019, arXiv:1910.02054).
package train

import (
	"ulysses/comm"
	"ulysses/data"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// Trainer runs the steps of one rank. New allocates everything that it needs.
type Trainer struct {
	Setup
	planner   planner
	stream    device.Stream
	arena     *device.Arena // activations
	host      *device.Arena // offloaded activations; nil = none
	inputs    *device.Arena // ids, targets and positions
	ids       tensor.Tensor // [shard] I32, and so are targets and positions
	targets   tensor.Tensor
	positions tensor.Tensor

	microBatches []*data.MicroBatch // of the current step
	counts       tensor.Tensor      // [2] I64 on the host: valid targets, tokens
	sums         tensor.Tensor      // [2] F64 on the host: NLL, targets
	lengths      tensor.Tensor      // [globalBatch] I64 on the host; with data.budget only

	agreed  agreed // after the last step
	saver   *saver // nil = no checkpoints
	stopped bool
	// is called with every tensor of a pass; nil = none
	inspect   func(at string, x tensor.Tensor) error
	diagnosed bool
	updates   int64 // steps in which the optimizer updated the weights
	whole     int64 // a rank evaluates sequences of up to so many tokens alone
	sent      int64 // bytes that the mixers of this rank have sent, by formula
}

// New chooses which activations are kept and allocates the memory of the longest micro-batch. The
// weights have their values already. Collective.
func New(s Setup) (*Trainer, error) {
	t := &Trainer{Setup: s, counts: tensor.OfInt64(make([]int64, 2), 2), sums: tensor.OfFloat64(make([]float64, 2), 2), updates: s.Loop.Updates}
	if s.Checkpoints != nil {
		t.saver = newSaver(&s)
	}
	t.planner = planner{Setup: &t.Setup, copy: t.saver.component()}
	err := t.planner.run()
	if err == nil {
		err = t.allocate()
	}
	if err = comm.Agree(s.Mesh.World, err); err == nil {
		err = t.planWhole()
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
	if err := fits(t.Device, t.Components()); err != nil {
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
	for _, x := range []*tensor.Tensor{&t.ids, &t.targets, &t.positions} {
		if *x, err = t.inputs.Tensor(tensor.I32, shard); err != nil {
			return err
		}
	}
	if t.saver != nil {
		return t.saver.reserve(t.stream)
	}
	return nil
}

// planWhole sets how many tokens a rank can evaluate alone in the memory that it has. It is 0 where
// a sequence has one rank anyway. Collective.
func (t *Trainer) planWhole() error {
	var err error
	n := int64(0)
	if t.Mesh.Seq.Size() > 1 && t.Data.Eval != nil {
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
	t.whole = -least[0]
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

// Components lists the planned memory of this rank, for the table that is printed before step 1.
func (t *Trainer) Components() []model.Component { return t.planner.components() }

// Choices lists the ways to run that the planner considered and that are worth showing, by time.
func (t *Trainer) Choices() []Choice { return t.planner.listed() }

// PeakBytes returns the largest use of the planned memory of the device so far.
func (t *Trainer) PeakBytes() int64 {
	n := t.arena.Peak() + t.inputs.Peak() + t.saver.peak()
	for _, c := range t.Weights.Components() {
		n += c.Bytes
	}
	return n
}

// Taken is an allocation: its planned size and its largest use so far.
type Taken struct {
	Name          string
	Planned, Peak int64
	Host          bool              // the host's memory, where the device has its own
	Parts         []model.Component // what Planned consists of; nil = one part
}

// Taken lists the allocations of this rank. Their planned sizes are those of Components.
func (t *Trainer) Taken() []Taken {
	var all []Taken
	add := func(a *device.Arena, host bool, parts ...model.Component) {
		if a != nil {
			all = append(all, Taken{Name: a.Name(), Planned: a.Bytes(), Peak: a.Peak(), Host: host, Parts: parts})
		}
	}
	for _, a := range t.Weights.Arenas() {
		add(a, false)
	}
	var here, host []model.Component
	for _, c := range t.planner.activations {
		if c.Host {
			host = append(host, c)
		} else {
			here = append(here, c)
		}
	}
	add(t.arena, false, here...)
	add(t.host, true, host...)
	add(t.inputs, false)
	if c := t.saver.component(); len(c) > 0 {
		add(t.saver.arena, c[0].Host)
	}
	return all
}

// Traffic returns the bytes that this rank must have sent so far, by formula. It leaves out control
// messages: counts, sums of losses, agreed, errors.
func (t *Trainer) Traffic() []Traffic {
	return append([]Traffic{{"sequence", comm.OpAllToAll, "queries, keys, values, outputs and states, and their gradients", t.sent}}, t.Weights.Traffic()...)
}
