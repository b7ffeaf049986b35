package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// Sharded holds parameters as ZeRO does (Rajbhandari et al. 2020, arXiv:1910.02054, section 5), cut
// over all ranks, data and sequence alike, group by group: of a group's elements rank r owns
// comm.Shard(numel, ranks, r). Stage 1 cuts the optimizer's state, moments and F32 masters; stage 2
// the gradients as well; stage 3 the values too.
//
// What is cut is whole for the stretch of work that needs it, in one of two slots: values are
// gathered while the stretch before computes, gradients are summed into their owners' shards while
// the next one does, on a stream of their own. Sums are in rank order, as Replicated's are.
type Sharded struct {
	dev     device.Device
	world   comm.Comm
	beside  comm.Comm     // the same ranks, for calls on side
	side    device.Stream // gathers and sums
	opt     *OptimizerConfig
	compute tensor.DType
	stage   int
	groups  []cutGroup
	own     int64 // elements of all shards of this rank
	order   []model.Use
	next    int // stretch to come
	ready   readiness

	values  tensor.Tensor // stage 3 [own], else [numel], of the compute type
	masters tensor.Tensor // [own] F32, when training in another type
	grads   tensor.Tensor // stage 1 [numel], else [own] F32
	m, v    tensor.Tensor // [own] F32, for adamw
	squares
	gathered    slots // stage 3: values
	summed      slots // stages 2 and 3: gradients
	gatheredMem [2]tensor.Tensor
	summedMem   [2]tensor.Tensor
	updated     device.Event
	expected    expected
	buffers     []*device.Arena
	adamw       device.AdamW // arguments, kept so that no step allocates
	sgd         device.SGD
}

// cutGroup is a group and what this rank owns of it.
type cutGroup struct {
	*model.Group
	numel  int64
	at     int64   // where the whole lies in flat buffers of everything
	lo, hi int64   // elements of the group that are this rank's
	shard  int64   // where these lie in flat buffers of shards
	rows   []int64 // elements of each rank
	decay  []device.Range
}

// whole views the group in a flat buffer of everything.
func (g *cutGroup) whole(t tensor.Tensor) tensor.Tensor { return t.Slice(0, g.at, g.at+g.numel) }

// part views the group's elements that this rank owns in a flat buffer of everything, or of one
// group (at = 0).
func (g *cutGroup) part(t tensor.Tensor, at int64) tensor.Tensor {
	return t.Slice(0, at+g.lo, at+g.hi)
}

// shardOf views them in a flat buffer of shards.
func (g *cutGroup) shardOf(t tensor.Tensor) tensor.Tensor {
	return t.Slice(0, g.shard, g.shard+g.hi-g.lo)
}

// NewSharded allocates the shards of stage 1, 2 or 3 and lends the parameters out, whose values
// have the compute type. A nil optimizer is for an evaluation.
func NewSharded(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig, stage int) (*Sharded, error) {
	w := &Sharded{dev: d, world: world, beside: comm.Side(world), opt: opt, compute: compute, stage: stage, squares: newSquares()}
	numel, largest := w.cut(groups)
	w.expected.open(len(groups), largest)
	plan := w.plan(numel, largest)
	if err := fits(d, components(plan)); err != nil {
		return nil, err
	}
	err := func() (err error) {
		if w.buffers, err = allocate(d, plan); err != nil {
			return err
		}
		if w.side, err = d.NewStream(); err != nil {
			return err
		}
		if w.updated, err = d.NewEvent(); err != nil {
			return err
		}
		if err = w.gathered.open(d, w.gatheredMem[:]); err != nil {
			return err
		}
		return w.summed.open(d, w.summedMem[:])
	}()
	if err != nil {
		w.Free()
		return nil, err
	}
	w.lend()
	return w, nil
}

// cut says what this rank owns, and returns the elements of everything and of the two largest
// groups.
func (w *Sharded) cut(groups []*model.Group) (numel int64, largest [2]int64) {
	size, rank := int64(w.world.Size()), int64(w.world.Rank())
	for _, g := range groups {
		c := cutGroup{Group: g, numel: g.Numel(), at: numel, shard: w.own, rows: make([]int64, size), decay: []device.Range{}}
		for r := range size {
			lo, hi := comm.Shard(c.numel, size, r)
			c.rows[r] = hi - lo
		}
		c.lo, c.hi = comm.Shard(c.numel, size, rank)
		at := int64(0)
		for _, p := range g.Params {
			if lo, hi := max(at, c.lo), min(at+p.Numel(), c.hi); p.Decay && lo < hi {
				c.decay = addRange(c.decay, device.Range{Lo: lo - c.lo, Hi: hi - c.lo})
			}
			at += p.Numel()
			w.ready.add(p)
		}
		numel, w.own = numel+c.numel, w.own+c.hi-c.lo
		w.groups = append(w.groups, c)
		if c.numel > largest[0] {
			largest[0], largest[1] = c.numel, largest[0]
		} else {
			largest[1] = max(largest[1], c.numel)
		}
	}
	return numel, largest
}

// plan is the list of buffers.
func (w *Sharded) plan(numel int64, largest [2]int64) []planned {
	p := []planned{{"weights", w.compute, numel, &w.values}}
	if w.stage == 3 {
		p = []planned{{"weights, shard", w.compute, w.own, &w.values},
			{"weights, largest layer", w.compute, largest[0], &w.gatheredMem[0]}, {"weights, second layer", w.compute, largest[1], &w.gatheredMem[1]}}
	}
	if w.opt == nil {
		return p
	}
	if w.compute != tensor.F32 {
		p = append(p, planned{"master weights, shard", tensor.F32, w.own, &w.masters})
	}
	if w.stage == 1 {
		p = append(p, planned{"gradients", tensor.F32, numel, &w.grads})
	} else {
		p = append(p, planned{"gradients, shard", tensor.F32, w.own, &w.grads},
			planned{"gradients, largest layer", tensor.F32, largest[0], &w.summedMem[0]}, planned{"gradients, second layer", tensor.F32, largest[1], &w.summedMem[1]})
	}
	p = append(p, planned{"norm", tensor.F64, 1, &w.sum})
	if w.opt.Name == "adamw" {
		p = append(p, planned{"first moments, shard", tensor.F32, w.own, &w.m}, planned{"second moments, shard", tensor.F32, w.own, &w.v})
	}
	return p
}

// lend binds what stays where it is and says which elements of each parameter are kept here.
func (w *Sharded) lend() {
	for i := range w.groups {
		g := &w.groups[i]
		g.Attach(w.resident(g))
		master := tensor.Tensor{}
		if !w.masters.IsNil() {
			master = g.shardOf(w.masters)
		}
		g.Own(g.lo, w.shardValues(g), master)
	}
}

// resident is what of a group is whole on every rank all the time.
func (w *Sharded) resident(g *cutGroup) (values, grads tensor.Tensor) {
	if w.stage < 3 {
		values = g.whole(w.values)
	}
	if w.stage == 1 && w.opt != nil {
		grads = g.whole(w.grads)
	}
	return values, grads
}

// shardValues is the values that this rank owns.
func (w *Sharded) shardValues(g *cutGroup) tensor.Tensor {
	if w.stage < 3 {
		return g.part(w.values, g.at)
	}
	return g.shardOf(w.values)
}

// exact is what the optimizer steps.
func (w *Sharded) exact(g *cutGroup) tensor.Tensor {
	if w.masters.IsNil() {
		return w.shardValues(g)
	}
	return g.shardOf(w.masters)
}

// shardGrads is the gradients that this rank owns, once they are summed.
func (w *Sharded) shardGrads(g *cutGroup) tensor.Tensor {
	if w.stage == 1 {
		return g.part(w.grads, g.at)
	}
	return g.shardOf(w.grads)
}

// Free gives the memory back.
func (w *Sharded) Free() {
	w.gathered.close()
	w.summed.close()
	if w.updated != nil {
		w.updated.Close()
	}
	if w.side != nil {
		w.side.Close()
	}
	for _, b := range w.buffers {
		b.Free()
	}
	w.buffers = nil
}

func (w *Sharded) Components() []model.Component { return held(w.buffers) }
func (w *Sharded) Arenas() []*device.Arena       { return w.buffers }

// Loaded spreads what was loaded, or drawn, into the shards.
func (w *Sharded) Loaded(s device.Stream) error {
	w.forget()
	return w.spread(s)
}

// forget says that gathered values are old.
func (w *Sharded) forget() {
	w.gathered.forget()
	w.expected.forget()
}

// spread gathers the values that are whole on every rank from their owners.
func (w *Sharded) spread(s device.Stream) error {
	if w.stage == 3 {
		return nil
	}
	every(w.expected.gathers)
	for i := range w.groups {
		g := &w.groups[i]
		if err := w.world.AllGather(s, g.whole(w.values), g.part(w.values, g.at), g.rows); err != nil {
			return err
		}
	}
	return nil
}
