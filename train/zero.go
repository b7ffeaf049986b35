package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// NewWeights allocates the parameters for ZeRO stage 0 to 3, on the world of the mesh. compute is
// the type of the weights that passes read. opt is nil for an evaluation. o says where the
// optimizer's states are. Frozen parameters are stored as in an evaluation, and experts as the axis
// expert of the mesh divides them. Collective.
func NewWeights(d device.Device, mesh *comm.Mesh, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig,
	stage int, o Offload) (Weights, error) {
	if opt != nil && anyFrozen(groups) {
		return newPartial(d, mesh, groups, compute, opt, stage, o)
	}
	return newDivided(d, mesh, groups, compute, opt, stage, o)
}

// newWeights stores all parameters of the groups in the same way.
func newWeights(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig,
	stage int, o Offload) (Weights, error) {
	o.stage = stage
	if opt == nil {
		o = Offload{FreeHost: o.FreeHost, PerNode: o.PerNode, what: o.what, stage: stage, stream: o.stream}
	}
	var w Weights
	var err error
	if opt != nil && !o.checked {
		if err = opt.checkGroups(groups); err != nil {
			return nil, err
		}
	}
	switch {
	case o.Gradients && world.Size() == 1:
		w, err = NewZeRO(d, world, groups, compute, opt, 2, o)
	case o.Gradients && stage < 2:
		err = status.Errorf(status.InvalidConfig,
			"memory.gradients: gradients are offloaded by shards, and parallel.zero = %d does not shard them over the %d ranks; set parallel.zero = 2 or 3",
			stage, world.Size())
	case stage == 0 || world.Size() == 1:
		w, err = NewReplicated(d, world, groups, compute, opt, o)
	default:
		w, err = NewZeRO(d, world, groups, compute, opt, stage, o)
	}
	if err != nil { // a nil pointer in w is not a nil interface
		return nil, err
	}
	return w, nil
}

// ZeRO shards parameters by layer groups over all ranks, data and sequence alike (Rajbhandari et
// al. 2019, arXiv:1910.02054, section 5): rank r owns elements comm.Shard(numel, ranks, r) of a
// group. Stage 1 shards the optimizer state, which is the moments and the F32 master weights. Stage
// 2 also shards the gradients, stage 3 also the weights.
//
// During a use of a group, its weights and gradients are whole, each in one of two slots. A
// communication stream gathers the weights of the next group while the current group computes, and
// reduces gradients into the shards of their owners while the next group computes. In stage 1 it
// reduces them in the last pass of a step (gradientSums). Sums are in rank order, as in Replicated.
type ZeRO struct {
	optimizer
	world      comm.Comm
	commWorld  comm.Comm     // the same ranks, for calls on commStream
	commStream device.Stream // gathers weights and reduces gradients
	// commStream belongs to another storage
	sharesStream bool
	compute      tensor.DType
	stage        int
	groups       []zeroGroup
	numel        []int64 // elements of each group
	own          int64   // elements of all shards of this rank
	uses
	ready readiness
	sums  gradientSums // of stage 1

	values  tensor.Tensor // stage 3 [own], else [numel], of the compute type
	masters tensor.Tensor // [own] F32, when training in another type
	grads   tensor.Tensor // stage 1 [numel], else [own] F32
	m, v    tensor.Tensor // [own] F32, for adamw
	squares
	gathered    slots // stage 3: whole weights
	reduced     slots // stages 2 and 3: whole gradients, until they are reduced
	gatheredMem [2]tensor.Tensor
	reducedMem  [2]tensor.Tensor
	updated     device.Event // recorded when Update has finished
	expected    expected
	buffers     []*device.Arena
}

// zeroGroup is a layer group and this rank's shard of it.
type zeroGroup struct {
	*model.Group
	numel  int64
	offset int64   // index of the group in flat buffers of all elements
	lo, hi int64   // this rank owns elements [lo, hi) of the group
	shard  int64   // index of these elements in flat buffers of this rank's shards
	counts []int64 // elements that each rank owns
	decay  []decays
	summed bool // gradients of this step are in host memory
}

// whole returns the group in a flat buffer of all elements.
func (g *zeroGroup) whole(t tensor.Tensor) tensor.Tensor {
	return t.Slice(0, g.offset, g.offset+g.numel)
}

// ownIn returns this rank's elements in a buffer in which the group begins at an offset.
func (g *zeroGroup) ownIn(t tensor.Tensor, offset int64) tensor.Tensor {
	return t.Slice(0, offset+g.lo, offset+g.hi)
}

// shardOf returns this rank's elements in a flat buffer of shards.
func (g *zeroGroup) shardOf(t tensor.Tensor) tensor.Tensor {
	return t.Slice(0, g.shard, g.shard+g.hi-g.lo)
}

// NewZeRO allocates the shards of stage 1, 2 or 3. compute is the type of the weights that passes
// read. opt is nil for an evaluation. Collective.
func NewZeRO(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig,
	stage int, o Offload) (*ZeRO, error) {
	w := &ZeRO{optimizer: newOptimizer(d, opt, o), world: world, commWorld: comm.OnCommStream(world), compute: compute,
		stage: stage, squares: newSquares()}
	numel, largest := w.shard(groups)
	w.expected.open(len(groups))
	err := func() (err error) {
		if w.buffers, err = w.allocate(w.plan(numel, largest), compute); err != nil {
			return err
		}
		if w.commStream = o.stream; w.commStream != nil {
			w.sharesStream = true
		} else if w.commStream, err = d.NewStream(); err != nil {
			return err
		}
		if w.updated, err = d.NewEvent(); err != nil {
			return err
		}
		var stream device.Stream
		if stage == 1 && overlaps(d, world.Size()) {
			stream = w.commStream
		}
		if err = w.sums.open(d, len(groups), stream); err != nil {
			return err
		}
		if err = w.gathered.open(d, w.gatheredMem[:]); err != nil {
			return err
		}
		return w.reduced.open(d, w.reducedMem[:])
	}()
	if err != nil {
		w.Free()
		return nil, err
	}
	w.attachResident()
	if opt == nil {
		return w, nil
	}
	for i := range w.groups {
		g := &w.groups[i]
		w.add(bucket{State: w.State(i), grads: w.shardGrads(g)}, g.decay)
	}
	return w, nil
}

// shard computes the elements that this rank owns. It returns the number of all elements and the
// elements of the two largest groups.
func (w *ZeRO) shard(groups []*model.Group) (numel int64, largest [2]int64) {
	size, rank := int64(w.world.Size()), int64(w.world.Rank())
	for _, g := range groups {
		c := zeroGroup{Group: g, numel: g.Numel(), offset: numel, shard: w.own, counts: make([]int64, size)}
		for r := range size {
			lo, hi := comm.Shard(c.numel, size, r)
			c.counts[r] = hi - lo
		}
		c.lo, c.hi = comm.Shard(c.numel, size, rank)
		at := int64(0)
		for _, p := range g.Params {
			if w.OptimizerConfig != nil {
				c.decay = w.addDecay(c.decay, p, max(at, c.lo)-c.lo, min(at+p.Numel(), c.hi)-c.lo)
			}
			at += p.Numel()
			w.ready.add(p)
		}
		numel, w.own = numel+c.numel, w.own+c.hi-c.lo
		w.groups, w.numel = append(w.groups, c), append(w.numel, c.numel)
		if c.numel > largest[0] {
			largest[0], largest[1] = c.numel, largest[0]
		} else {
			largest[1] = max(largest[1], c.numel)
		}
	}
	return numel, largest
}

// plan returns the buffers.
func (w *ZeRO) plan(numel int64, largest [2]int64) []planned {
	const name = "weights"
	p := []planned{{name, w.compute, numel, &w.values, false}}
	if w.stage == 3 {
		p = []planned{{name + ", shard", w.compute, w.own, &w.values, false},
			{name + ", largest layer", w.compute, largest[0], &w.gatheredMem[0], false},
			{name + ", second layer", w.compute, largest[1], &w.gatheredMem[1], false}}
	}
	if w.OptimizerConfig == nil {
		return p
	}
	if w.stage == 1 {
		p = append(p, planned{"gradients", tensor.F32, numel, &w.grads, false})
	} else {
		p = append(p, planned{gradientShard, tensor.F32, w.own, &w.grads, w.Gradients},
			planned{"gradients, largest layer", tensor.F32, largest[0], &w.reducedMem[0], false},
			planned{"gradients, second layer", tensor.F32, largest[1], &w.reducedMem[1], false})
	}
	p = append(p, planned{"norm", tensor.F64, 1, &w.sum, false})
	_, shard := comm.Shard(largest[0], int64(w.world.Size()), 0)
	return append(p, w.optimizer.plan(w.own, shard, ", shard", w.compute, &w.masters, &w.m, &w.v)...)
}

// attachResident attaches the weights and gradients that are always whole on every rank, and the
// elements that this rank owns.
func (w *ZeRO) attachResident() {
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

// resident returns the weights and gradients of a group that are always whole on every rank; nil
// otherwise.
func (w *ZeRO) resident(g *zeroGroup) (values, grads tensor.Tensor) {
	if w.stage < 3 {
		values = g.whole(w.values)
	}
	if w.stage == 1 && w.OptimizerConfig != nil {
		grads = g.whole(w.grads)
	}
	return values, grads
}

// shardValues returns the compute weights that this rank owns.
func (w *ZeRO) shardValues(g *zeroGroup) tensor.Tensor {
	if w.stage < 3 {
		return g.ownIn(w.values, g.offset)
	}
	return g.shardOf(w.values)
}

// master returns the weights of this rank that the optimizer updates.
func (w *ZeRO) master(g *zeroGroup) tensor.Tensor {
	if w.masters.IsNil() {
		return w.shardValues(g)
	}
	return g.shardOf(w.masters)
}

// shardGrads returns the gradients that this rank owns.
func (w *ZeRO) shardGrads(g *zeroGroup) tensor.Tensor {
	if w.stage == 1 {
		return g.ownIn(w.grads, g.offset)
	}
	return g.shardOf(w.grads)
}

// Free releases the memory.
func (w *ZeRO) Free() {
	w.gathered.close()
	w.reduced.close()
	w.sums.close()
	w.optimizer.close()
	if w.updated != nil {
		w.updated.Close()
	}
	if w.commStream != nil && !w.sharesStream {
		w.commStream.Close()
	}
	for _, b := range w.buffers {
		b.Free()
	}
	w.buffers = nil
}

func (w *ZeRO) Components() []model.Component { return allocated(w.dev, w.buffers) }
func (w *ZeRO) Arenas() []*device.Arena       { return w.buffers }

// Traffic returns (P-1) times the size of this rank's shard for each all-gather, and the size of
// the shards of all other ranks for each reduce-scatter.
func (w *ZeRO) Traffic() []Traffic {
	var gathered, reduced int64
	rank := w.world.Rank()
	for i := range w.groups {
		counts, x := w.groups[i].counts, &w.expected
		gathered += comm.AllGatherBytes(rank, counts, x.gathers[i]*w.compute.Size()+x.wholes[i])
		reduced += comm.ReduceScatterBytes(rank, counts, x.reductions[i]*4)
	}
	axis := axisOf(w.world)
	return []Traffic{{axis, comm.OpAllGather, "weights", gathered}, {axis, comm.OpReduceScatter, "gradients", reduced}}
}
