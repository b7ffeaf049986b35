package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// Replicated stores the parameters, their gradients and the optimizer's moments whole on every rank
// (ZeRO stage 0). Each is one flat buffer in the order of the groups, so that one call can reduce
// the gradients of several groups, and one call updates all weights.
type Replicated struct {
	optimizer
	world      comm.Comm
	commWorld  comm.Comm     // the same ranks, for calls on commStream
	commStream device.Stream // reduces gradients; nil = no overlap
	// commStream belongs to another storage
	sharesStream bool
	compute      tensor.DType
	groups       []*model.Group
	ranges       []device.Range // elements of each group
	uses
	ready readiness
	sums  gradientSums

	values      tensor.Tensor // [numel] of the compute type
	masters     tensor.Tensor // [numel] F32, if the compute type is another
	grads, m, v tensor.Tensor // [numel] F32; m and v for AdamW only
	squares
	buffers []*device.Arena
	sent    int64 // bytes of all reductions so far
}

// NewReplicated allocates the parameters of the groups and attaches them. compute is the type of
// the weights that passes read. opt is nil for an evaluation.
func NewReplicated(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig,
	o Offload) (*Replicated, error) {
	w := &Replicated{optimizer: newOptimizer(d, opt, o), world: world, commWorld: comm.OnCommStream(world),
		compute: compute, groups: groups, squares: newSquares()}
	var decay []decays
	n := int64(0)
	for _, g := range groups {
		w.ranges = append(w.ranges, device.Range{Lo: n, Hi: n + g.Numel()})
		n += g.Numel()
	}
	err := func() (err error) {
		if w.buffers, err = w.allocate(w.plan(n), compute); err != nil {
			return err
		}
		if opt != nil && overlaps(d, world.Size()) {
			if w.commStream = o.stream; w.commStream != nil {
				w.sharesStream = true
			} else if w.commStream, err = d.NewStream(); err != nil {
				return err
			}
		}
		return w.sums.open(d, len(groups), w.commStream)
	}()
	if err != nil {
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
			if opt != nil {
				decay = w.addDecay(decay, p, at, at+p.Numel())
			}
			at += p.Numel()
		}
	}
	if opt != nil {
		w.add(bucket{State: w.stateOf(device.Range{Hi: n}), grads: w.grads}, decay)
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
	p := []planned{{"weights", w.compute, n, &w.values, false}}
	if w.OptimizerConfig == nil {
		return p
	}
	p = append(p, planned{"gradients", tensor.F32, n, &w.grads, false}, planned{"norm", tensor.F64, 1, &w.sum, false})
	return append(p, w.optimizer.plan(n, n, "", w.compute, &w.masters, &w.m, &w.v)...)
}

// Free releases the memory.
func (w *Replicated) Free() {
	w.sums.close()
	w.optimizer.close()
	if w.commStream != nil && !w.sharesStream {
		w.commStream.Close()
	}
	for _, b := range w.buffers {
		b.Free()
	}
	w.buffers = nil
}

func (w *Replicated) Components() []model.Component { return allocated(w.dev, w.buffers) }
func (w *Replicated) Arenas() []*device.Arena       { return w.buffers }

// Pass sets the order of the uses of the next pass.
func (w *Replicated) Pass(order []model.Use) error {
	if err := w.uses.begin(order); err != nil {
		return err
	}
	w.sums.pass(order)
	return nil
}

// Gather begins a use of a group, whose parameters are always attached.
func (w *Replicated) Gather(group int, _ device.Stream) error {
	x, err := w.uses.advance(group)
	if err == nil {
		w.sums.gather(x)
	}
	return err
}

// Release ends a use of a group, and starts to reduce its gradients when they are complete.
func (w *Replicated) Release(group int, s device.Stream) error {
	return w.sums.release(group, s, func(group int) error {
		return w.allReduce(w.commWorld, w.commStream, group, group+1)
	})
}

// Loaded does nothing: every rank has all parameters.
func (w *Replicated) Loaded(device.Stream) error { return nil }

func (w *Replicated) GradReady(p *model.Param, _ device.Stream) error { return w.ready.note(p) }

// State returns the whole group.
func (w *Replicated) State(group int) State {
	x := w.stateOf(w.ranges[group])
	x.Lo, x.Hi = 0, w.groups[group].Numel()
	return x
}

// stateOf returns the states of a range of all elements.
func (w *Replicated) stateOf(r device.Range) State {
	cut := func(t tensor.Tensor) tensor.Tensor {
		if t.IsNil() {
			return t
		}
		return t.Slice(0, r.Lo, r.Hi)
	}
	x := State{Lo: r.Lo, Hi: r.Hi, Master: cut(w.values), M: cut(w.m), V: cut(w.v)}
	if !w.masters.IsNil() {
		x.Master, x.Compute = cut(w.masters), x.Master
	}
	return x
}

func (w *Replicated) Portions() []model.Portion { return model.PortionsOf(w.groups, 1) }

func (w *Replicated) Stored() (all []Stored) {
	for _, x := range w.Portions() {
		all = append(all, Stored{x, w.State(x.Index), w.world})
	}
	return all
}

// Whole returns a group without communication. Master weights that are offloaded are copied to the
// memory of the gradients.
func (w *Replicated) Whole(x model.Portion, grads bool, s device.Stream) (tensor.Tensor, error) {
	group := x.Index
	switch {
	case grads:
		return w.slice(w.grads, group), nil
	case !w.masters.IsNil() && w.Offloaded():
		whole := w.slice(w.grads, group)
		return whole, w.dev.Copy(s, whole, w.slice(w.masters, group))
	case !w.masters.IsNil():
		return w.slice(w.masters, group), nil
	}
	return w.slice(w.values, group), nil
}

func (w *Replicated) Begin(s device.Stream, microBatches int64) error {
	w.ready.begin(microBatches)
	if err := w.sums.step(s, microBatches); err != nil {
		return err
	}
	return w.dev.Fill(s, w.grads, 0)
}

// allReduce reduces the gradients of groups [lo, hi).
func (w *Replicated) allReduce(c comm.Comm, s device.Stream, lo, hi int) error {
	grads := w.grads.Slice(0, w.ranges[lo].Lo, w.ranges[hi-1].Hi)
	if grads.Numel() == 0 {
		return nil
	}
	w.sent += comm.AllReduceBytes(c.Rank(), c.Size(), grads.Numel(), grads.DType.Size())
	return c.AllReduce(s, grads, comm.Sum)
}

// Reduce completes the sums of the gradients: one all-reduce of those whose sums have not begun in
// the last pass.
func (w *Replicated) Reduce(s device.Stream) (float64, error) {
	if err := w.ready.check(); err != nil {
		return 0, err
	}
	if err := w.sums.wait(s); err != nil {
		return 0, err
	}
	if err := w.sums.rest(func(lo, hi int) error { return w.allReduce(w.world, s, lo, hi) }); err != nil {
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
	return w.update(s, lr, scale, t)
}

// Traffic returns the bytes of the all-reduces of gradients: 2(P-1)/P of their size for each step.
func (w *Replicated) Traffic() []Traffic {
	return []Traffic{{axisOf(w.world), comm.OpAllReduce, "gradients", w.sent}}
}
