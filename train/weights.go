package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// Weights is what the trainer needs of whoever holds the parameters; model.Weights is the model's
// side of it. Replicated (ZeRO stage 0) is the simplest one: every rank holds everything, gradients
// are summed over all ranks after the last micro step. Rajbhandari et al. 2020.
type Weights interface {
	model.Weights
	// Begin starts an optimizer step of so many micro steps: gradients are zero.
	Begin(s device.Stream, micros int64) error
	// Reduce completes the gradients: after it every rank sees the gradient of the global loss. It
	// returns its Euclidean norm.
	Reduce(s device.Stream) (norm float64, err error)
	// Update takes the optimizer's step t ≥ 1 with the gradient times scale.
	Update(s device.Stream, lr, scale float64, t int64) error
	// Loaded is called when each rank has filled the parts of the parameters that it keeps.
	Loaded(s device.Stream) error
	// Whole gathers a group between steps: its weights, or its gradients before the next Begin, F32
	// [numel] (weights of an evaluation: of the compute type), to be read before the next call.
	// Between Whole of weights and Begin gradients are lost. Collective.
	Whole(group int, grads bool, s device.Stream) (tensor.Tensor, error)
	// State is what this rank keeps of a group.
	State(group int) State
	// Components is the memory held, for the table; Arenas is where it lies.
	Components() []model.Component
	Arenas() []*device.Arena
	// Traffic is what the formulas say that this rank has sent so far to hold them as it does.
	Traffic() []Traffic
	Free()
}

// NewWeights holds the parameters as ZeRO stage 0 to 3 does. A nil optimizer is for an evaluation.
func NewWeights(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig, stage int) (Weights, error) {
	if stage == 0 || world.Size() == 1 {
		return NewReplicated(d, world, groups, compute, opt)
	}
	return NewSharded(d, world, groups, compute, opt, stage)
}

// Replicated holds the parameters, their gradients and the optimizer's moments whole on every rank,
// each in one flat buffer, so that the reduction is one call and so is the optimizer's step.
// Parameters lie in the order of the groups.
type Replicated struct {
	dev     device.Device
	world   comm.Comm
	opt     *OptimizerConfig
	compute tensor.DType
	groups  []*model.Group
	places  []device.Range // of each group
	decay   []device.Range // where the weight decay applies; nil would be everywhere
	ready   readiness

	values      tensor.Tensor // [numel] of the compute type
	masters     tensor.Tensor // [numel] F32, when training in another type
	grads, m, v tensor.Tensor // [numel] F32; m, v for adamw alone
	squares
	buffers    []*device.Arena
	reductions int64        // so far
	adamw      device.AdamW // arguments, kept so that no step allocates
	sgd        device.SGD
}

// NewReplicated allocates and binds the parameters of the groups, whose values have the compute
// type.
func NewReplicated(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig) (*Replicated, error) {
	w := &Replicated{dev: d, world: world, opt: opt, compute: compute, groups: groups, decay: []device.Range{}, squares: newSquares()}
	n := int64(0)
	for _, g := range groups {
		w.places = append(w.places, device.Range{Lo: n, Hi: n + g.Numel()})
		n += g.Numel()
	}
	plan := w.plan(n)
	if err := fits(d, components(plan)); err != nil {
		return nil, err
	}
	var err error
	if w.buffers, err = allocate(d, plan); err != nil {
		w.Free()
		return nil, err
	}
	at := int64(0)
	for i, g := range groups {
		values, masters := w.part(w.values, i), w.part(w.masters, i)
		g.Attach(values, w.part(w.grads, i))
		g.Own(0, values, masters)
		for _, p := range g.Params {
			w.ready.add(p)
			if p.Decay {
				w.decay = addRange(w.decay, device.Range{Lo: at, Hi: at + p.Numel()})
			}
			at += p.Numel()
		}
	}
	return w, nil
}

// part views a group in a flat buffer, or nothing in one that there is not.
func (w *Replicated) part(all tensor.Tensor, group int) tensor.Tensor {
	if all.IsNil() {
		return all
	}
	return all.Slice(0, w.places[group].Lo, w.places[group].Hi)
}

// plan is the list of buffers: a nil optimizer (evaluation) needs the weights alone.
func (w *Replicated) plan(n int64) []planned {
	p := []planned{{"weights", w.compute, n, &w.values}}
	if w.opt == nil {
		return p
	}
	if w.compute != tensor.F32 {
		p = append(p, planned{"master weights", tensor.F32, n, &w.masters})
	}
	p = append(p, planned{"gradients", tensor.F32, n, &w.grads}, planned{"norm", tensor.F64, 1, &w.sum})
	if w.opt.Name == "adamw" {
		p = append(p, planned{"first moments", tensor.F32, n, &w.m}, planned{"second moments", tensor.F32, n, &w.v})
	}
	return p
}

// Free gives the memory back.
func (w *Replicated) Free() {
	for _, b := range w.buffers {
		b.Free()
	}
	w.buffers = nil
}

func (w *Replicated) Components() []model.Component { return held(w.buffers) }
func (w *Replicated) Arenas() []*device.Arena       { return w.buffers }

// Pass, Need, Done and Loaded have nothing to do: everything is here.
func (w *Replicated) Pass([]model.Use) error           { return nil }
func (w *Replicated) Gather(int, device.Stream) error  { return nil }
func (w *Replicated) Release(int, device.Stream) error { return nil }
func (w *Replicated) Loaded(device.Stream) error       { return nil }

func (w *Replicated) GradReady(p *model.Param, _ device.Stream) error { return w.ready.note(p) }

// State is everything.
func (w *Replicated) State(group int) State {
	x := State{Hi: w.groups[group].Numel(), Exact: w.part(w.values, group), M: w.part(w.m, group), V: w.part(w.v, group)}
	if !w.masters.IsNil() {
		x.Exact, x.Low = w.part(w.masters, group), x.Exact
	}
	return x
}

// Whole has nothing to gather.
func (w *Replicated) Whole(group int, grads bool, _ device.Stream) (tensor.Tensor, error) {
	switch {
	case grads:
		return w.part(w.grads, group), nil
	case !w.masters.IsNil():
		return w.part(w.masters, group), nil
	}
	return w.part(w.values, group), nil
}

func (w *Replicated) Begin(s device.Stream, micros int64) error {
	w.ready.begin(micros)
	return w.dev.Fill(s, w.grads, 0)
}

func (w *Replicated) Reduce(s device.Stream) (float64, error) {
	if err := w.ready.check(); err != nil {
		return 0, err
	}
	w.reductions++
	if err := w.world.AllReduce(s, w.grads, comm.Sum); err != nil {
		return 0, err
	}
	if err := w.dev.Fill(s, w.sum, 0); err != nil {
		return 0, err
	}
	if err := w.dev.SumSquares(s, w.sum, w.grads); err != nil {
		return 0, err
	}
	if err := w.fetchSum(s, w.dev, w.world); err != nil {
		return 0, err
	}
	return w.norm(), nil
}

func (w *Replicated) Update(s device.Stream, lr, scale float64, t int64) error {
	exact, low := w.values, tensor.Tensor{}
	if !w.masters.IsNil() {
		exact, low = w.masters, w.values
	}
	o := w.opt
	if o.Name == "adamw" {
		w.adamw = device.AdamW{W: exact, G: w.grads, M: w.m, V: w.v, Low: low, LR: lr, Beta1: o.Betas[0], Beta2: o.Betas[1], Eps: o.Eps,
			WeightDecay: o.WeightDecay, GradScale: scale, Decay: w.decay, Step: t}
		return w.dev.AdamW(s, &w.adamw)
	}
	w.sgd = device.SGD{W: exact, G: w.grads, Low: low, LR: lr, WeightDecay: o.WeightDecay, GradScale: scale, Decay: w.decay}
	return w.dev.SGD(s, &w.sgd)
}
