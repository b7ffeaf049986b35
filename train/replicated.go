package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// Replicated stores the parameters, their gradients and the optimizer's moments whole on every rank
// (ZeRO stage 0). Each is one flat buffer in the order of the groups, so that one call reduces all
// gradients and one call updates all weights.
type Replicated struct {
	dev     device.Device
	world   comm.Comm
	opt     optimizer
	compute tensor.DType
	groups  []*model.Group
	ranges  []device.Range // elements of each group
	decay   []device.Range // elements to which weight decay applies; not nil, which means all
	ready   readiness

	values      tensor.Tensor // [numel] of the compute type
	masters     tensor.Tensor // [numel] F32, if the compute type is another
	grads, m, v tensor.Tensor // [numel] F32; m and v for AdamW only
	squares
	buffers    []*device.Arena
	reductions int64 // calls of Reduce so far
}

// NewReplicated allocates the parameters of the groups and attaches them. compute is the type of
// the weights that passes read. opt is nil for an evaluation.
func NewReplicated(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig) (*Replicated, error) {
	w := &Replicated{dev: d, world: world, opt: optimizer{OptimizerConfig: opt}, compute: compute, groups: groups, decay: []device.Range{}, squares: newSquares()}
	n := int64(0)
	for _, g := range groups {
		w.ranges = append(w.ranges, device.Range{Lo: n, Hi: n + g.Numel()})
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
		values, masters := w.slice(w.values, i), w.slice(w.masters, i)
		g.Attach(values, w.slice(w.grads, i))
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

// slice returns a group's elements of a flat buffer; nil for a nil buffer.
func (w *Replicated) slice(all tensor.Tensor, group int) tensor.Tensor {
	if all.IsNil() {
		return all
	}
	return all.Slice(0, w.ranges[group].Lo, w.ranges[group].Hi)
}

// plan returns the buffers for n elements. An evaluation needs only the weights.
func (w *Replicated) plan(n int64) []planned {
	p := []planned{{"weights", w.compute, n, &w.values}}
	if w.opt.OptimizerConfig == nil {
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

// Free releases the memory.
func (w *Replicated) Free() {
	for _, b := range w.buffers {
		b.Free()
	}
	w.buffers = nil
}

func (w *Replicated) Components() []model.Component { return allocated(w.buffers) }
func (w *Replicated) Arenas() []*device.Arena       { return w.buffers }

// Pass, Gather, Release and Loaded do nothing: every rank has all parameters.
func (w *Replicated) Pass([]model.Use) error           { return nil }
func (w *Replicated) Gather(int, device.Stream) error  { return nil }
func (w *Replicated) Release(int, device.Stream) error { return nil }
func (w *Replicated) Loaded(device.Stream) error       { return nil }

func (w *Replicated) GradReady(p *model.Param, _ device.Stream) error { return w.ready.note(p) }

// State returns the whole group.
func (w *Replicated) State(group int) State {
	x := State{Hi: w.groups[group].Numel(), Master: w.slice(w.values, group), M: w.slice(w.m, group), V: w.slice(w.v, group)}
	if !w.masters.IsNil() {
		x.Master, x.Compute = w.slice(w.masters, group), x.Master
	}
	return x
}

// Whole returns the group without communication.
func (w *Replicated) Whole(group int, grads bool, _ device.Stream) (tensor.Tensor, error) {
	switch {
	case grads:
		return w.slice(w.grads, group), nil
	case !w.masters.IsNil():
		return w.slice(w.masters, group), nil
	}
	return w.slice(w.values, group), nil
}

func (w *Replicated) Begin(s device.Stream, microBatches int64) error {
	w.ready.begin(microBatches)
	return w.dev.Fill(s, w.grads, 0)
}

// Reduce runs one all-reduce of all gradients.
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
	x := State{Master: w.values, M: w.m, V: w.v}
	if !w.masters.IsNil() {
		x.Master, x.Compute = w.masters, w.values
	}
	return w.opt.update(w.dev, s, x, w.grads, w.decay, lr, scale, t)
}

// Traffic returns the bytes of one all-reduce of all gradients for each step: 2(P-1)/P of their
// size.
func (w *Replicated) Traffic() []Traffic {
	size := int64(0) // an evaluation has no gradients
	if !w.grads.IsNil() {
		size = w.grads.DType.Size()
	}
	return []Traffic{{"world", comm.OpAllReduce, "gradients", w.reductions * comm.AllReduceBytes(w.world.Rank(), w.world.Size(), w.grads.Numel(), size)}}
}
