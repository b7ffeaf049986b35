// Package train is the step loop: data → forward → loss → backward → reduce → clip → step → log.
package train

import (
	"math"
	"time"

	"ulysses/comm"
	"ulysses/data"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// Setup is what a trainer is made of; the job wires it.
type Setup struct {
	Device    device.Device
	Mesh      *comm.Mesh
	Model     *model.Model
	Weights   Weights
	Train     *data.Set // nil for an evaluation
	Eval      *data.Set // nil when there is nothing to evaluate
	Data      *data.Config
	Optimizer *OptimizerConfig
	OnNaN     string       // "stop" or "skip"
	Memory    MemoryConfig // the zero value: everything is "auto"
	FreeHost  int64        // bytes of the host's memory that this rank may take; 0 = nobody knows
	Steps     int64
	EvalEvery int64 // 0 = at the end only
	Clock     *clock.Clock
	Metrics   *Metrics     // rank 0's; nil elsewhere
	Resumed   int64        // steps that earlier runs have done
	Updates   int64        // of them, those in which the optimizer stepped
	Keep      *Checkpoints // nil = the run cannot be stopped and resumed
	// asked after every step: whether this rank is to stop; nil = never
	Stop func() bool
	// called between the passes and the reduction of each step: where tests let a rank fail
	Probe  func(step int64) error
	Trace  *Trace              // steps to record; nil = none
	OnStep func(*Record) error // on every rank, after the step; nil = nobody asks
	OnEval func(*EvalRecord)
	// on every rank, when the run leaves out its first step: where its NaN or infinity was first
	// seen
	OnSkip func(why string)
}

// Trainer runs the steps of one rank. Everything it needs is allocated by New.
type Trainer struct {
	Setup
	stream  device.Stream
	arena   *device.Arena // activations
	host    *device.Arena // those that are offloaded; nil = none
	inputs  *device.Arena // tokens of this rank's shard
	ids     tensor.Tensor // [rows] I32; likewise targets, positions
	targets tensor.Tensor
	places  tensor.Tensor
	counts  tensor.Tensor // [2] I64 on the host: valid targets, tokens; then [1] bytes
	sums    tensor.Tensor // [2] F64 on the host: NLL, targets
	micros  []*data.MicroBatch
	// [rows of the global batch] I64 on the host, where data.budget deals them
	lengths tensor.Tensor
	// [5] I64 on the host: peak bytes, somebody is asked to stop, somebody writes; 1 + the last
	// rank whose step is no number, 1 + that of those whose is
	flags   tensor.Tensor
	saver   *saver
	stopped bool
	// of every pass, while one looks for what is not finite
	inspect    func(at string, x tensor.Tensor) error
	diagnosed  bool
	updates    int64             // optimizer steps taken, which skipped steps are not
	planned    []model.Component // of the activations
	considered []Choice
	whole      int64 // tokens that a rank can evaluate by itself
	sent       int64 // bytes that the formulas say this rank's mixers sent
}

// New allocates the activations of the longest batch and says what everything takes. The weights
// have their values by then. Collective.
func New(s Setup) (*Trainer, error) {
	t := &Trainer{Setup: s, counts: tensor.OfInt64(make([]int64, 2), 2), flags: tensor.OfInt64(make([]int64, 5), 5),
		sums: tensor.OfFloat64(make([]float64, 2), 2), updates: s.Updates}
	if s.Keep != nil {
		t.saver = newSaver(&s)
	}
	err := t.plan()
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
	t.micros = make([]*data.MicroBatch, max(1, s.Data.Accumulate))
	if s.Data.Budget > 0 {
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
	tokens, rows := t.MaxRows()
	if err = t.Model.Reserve(tokens); err != nil {
		return err
	}
	inputs := t.inputBytes()
	if err := fits(t.Device, t.components(inputs)); err != nil {
		return err
	}
	if t.arena, err = device.NewArena(t.Device, "activations", model.Bytes(t.planned)); err != nil {
		return err
	}
	if bytes := model.HostBytes(t.planned); bytes > 0 {
		if t.host, err = device.NewHostArena(t.Device, "offloaded activations", bytes); err != nil {
			return err
		}
	}
	if t.inputs, err = device.NewArena(t.Device, "tokens", inputs); err != nil {
		return err
	}
	for _, x := range []*tensor.Tensor{&t.ids, &t.targets, &t.places} {
		if *x, err = t.inputs.Tensor(tensor.I32, rows); err != nil {
			return err
		}
	}
	if t.saver != nil {
		return t.saver.reserve(t.stream)
	}
	return nil
}

// Free gives all memory back but the weights'.
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

// Components is the planned memory of this rank, for the table that is printed before step 1.
func (t *Trainer) Components() []model.Component { return t.components(t.inputs.Bytes()) }

func (t *Trainer) components(inputs int64) []model.Component {
	c := append(t.Weights.Components(), t.planned...)
	return append(append(c, model.Component{Name: "tokens", Bytes: inputs}), t.saver.component()...)
}

// PeakBytes is what was taken of it at most.
func (t *Trainer) PeakBytes() int64 {
	n := t.arena.Peak() + t.inputs.Peak() + t.saver.peak()
	for _, c := range t.Weights.Components() {
		n += c.Bytes
	}
	return n
}

// ExchangeBytes is what the formulas say this rank's mixers have sent so far.
func (t *Trainer) ExchangeBytes() int64 { return t.sent }

// Step is one optimizer step, s counted from 0. The gradient is that of Σ NLL / (valid targets of
// the global batch), whatever the mesh.
func (t *Trainer) Step(s int64) (*Record, error) {
	begin, before := time.Now(), t.Clock.Phases()
	valid, tokens, pairs, err := t.read(s)
	if err != nil {
		return nil, err
	}
	if err := t.Weights.Begin(t.stream, int64(len(t.micros))); err != nil {
		return nil, err
	}
	nll := 0.0
	for i, m := range t.micros {
		began := time.Now()
		l, err := t.pass(m, valid, true, false)
		if err != nil {
			return nil, err
		}
		nll += l.Sum
		t.Trace.span("pass", int64(i)+1, began)
	}
	if t.Probe != nil {
		if err := t.Probe(s + 1); err != nil {
			return nil, err
		}
	}
	r := &Record{Step: s + 1, LR: t.Optimizer.Rate(s, t.Steps), Tokens: tokens, TargetTokens: valid}
	if nll, _, err = t.sumLoss(nll, 0); err != nil {
		return nil, err
	}
	r.Loss = Float(nll / float64(max(1, valid)))
	norm, err := t.Weights.Reduce(t.stream)
	if err != nil {
		return nil, err
	}
	r.GradNorm = Float(norm)
	bad := notFinite(float64(r.Loss)) || notFinite(norm)
	if !bad {
		if err := t.update(r, norm); err != nil {
			return nil, err
		}
	}
	if r.PeakBytes, err = t.agree(bad); err != nil {
		return nil, err
	}
	if f := t.flags.Int64s(); f[3] > 0 {
		if err := t.notANumber(r, int(f[3])-1, f[4] > 0); err != nil {
			return nil, err
		}
	}
	r.Seconds = time.Since(begin).Seconds()
	r.TokensPerSecond = float64(tokens) / r.Seconds
	r.ModelTFLOPS = t.Model.Config.Flops(tokens, pairs) / r.Seconds / 1e12 / float64(t.Mesh.World.Size())
	r.PhaseSeconds = since(before, t.Clock.Phases())
	return r, nil
}

// pass runs the model over one micro step: this rank's shard of its tokens. The micro step's slices
// are read when the stream comes to them; the model waits for the stream, to know the loss, so that
// they may change when the pass is over. Alone, the rank takes all of them.
func (t *Trainer) pass(m *data.MicroBatch, valid int64, backward, alone bool) (model.Loss, error) {
	total := int64(len(m.IDs))
	group := comm.Comm(t.Mesh.Seq)
	if alone {
		group = comm.Local(1)[0]
	}
	lo, hi := comm.Shard(total, group.Size(), group.Rank())
	batch, err := sp.NewBatch(group, sp.BatchSpec{Batch: 1, Seq: total, CuSeqlens: m.CuSeqlens})
	if err != nil {
		return model.Loss{}, err
	}
	b := model.Batch{SP: batch, IDs: t.ids.Slice(0, 0, hi-lo), Targets: t.targets.Slice(0, 0, hi-lo), Positions: t.places.Slice(0, 0, hi-lo)}
	for _, x := range []struct {
		dst tensor.Tensor
		src []int32
	}{{b.IDs, m.IDs}, {b.Targets, m.Targets}, {b.Positions, m.Positions}} {
		if err := t.Device.Copy(t.stream, x.dst, tensor.OfInt32(x.src[lo:hi], hi-lo)); err != nil {
			return model.Loss{}, err
		}
	}
	forward, back := t.Model.BytesSent(batch)
	t.sent += forward
	c := &model.Ctx{Stream: t.stream, Weights: t.Trace.lend(t.Weights), Arena: t.arena, Host: t.host, Clock: t.Clock, Inspect: t.inspect}
	if !backward {
		return t.Model.Forward(c, &b)
	}
	t.sent += back
	if valid > 0 {
		b.GradScale = 1 / float64(valid)
	}
	return t.Model.ForwardBackward(c, &b)
}

// update clips and steps.
func (t *Trainer) update(r *Record, norm float64) error {
	scale := 1.0
	if t.Optimizer.Clip > 0 {
		scale = min(1, t.Optimizer.Clip/(norm+1e-6))
	}
	t.Clock.Push("optimizer")
	defer t.Clock.Pop()
	t.updates++
	if err := t.Weights.Update(t.stream, r.LR, scale, t.updates); err != nil {
		return err
	}
	// weights are read in other orders than this stream's, and the time of the step is to be its
	// own
	return t.stream.Sync()
}

// sumLoss adds numerators and counts over all ranks: sums travel, means do not.
func (t *Trainer) sumLoss(nll float64, targets int64) (float64, int64, error) {
	s := t.sums.Float64s()
	s[0], s[1] = nll, float64(targets)
	err := t.Mesh.World.AllReduce(nil, t.sums, comm.Sum)
	return s[0], int64(s[1]), err
}

// agree is the peak over the ranks, with what they need to know of each other between two steps.
func (t *Trainer) agree(bad bool) (int64, error) {
	f, me := t.flags.Int64s(), int64(t.Mesh.World.Rank())+1
	f[0], f[1], f[2], f[3], f[4] = t.PeakBytes(), 0, 0, 0, me
	if bad {
		f[3], f[4] = me, 0
	}
	if t.Stop != nil && t.Stop() {
		f[1] = 1
	}
	if t.saver != nil {
		if t.saver.writing() {
			f[2] = 1
		}
	}
	err := t.Mesh.World.AllReduce(nil, t.flags, comm.Max)
	return f[0], err
}

func notFinite(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) }

// since is the seconds by phase between two states of the clock.
func since(before, after []clock.Phase) map[string]float64 {
	d := make(map[string]float64, len(after))
	for i, p := range after {
		if i < len(before) {
			p.Seconds -= before[i].Seconds
		}
		d[p.Name] = p.Seconds
	}
	return d
}
