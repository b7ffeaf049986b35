package train

import (
	"math"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// Sharded holds parameters as ZeRO does (Rajbhandari et al. 2020, arXiv:1910.02054, section 5), cut over all ranks, data and sequence alike,
// group by group: of a group's elements rank r owns sp.Shard(numel, ranks, r). Stage 1 cuts the optimizer's state, moments and F32 masters;
// stage 2 the gradients as well; stage 3 the values too.
//
// What is cut is whole for the stretch of work that needs it, in one of two slots: values are gathered while the stretch before computes,
// gradients are summed into their owners' shards while the next one does, on a stream of their own. Sums are in rank order, as
// Replicated's are.
type Sharded struct {
	dev     device.Device
	world   comm.Comm
	side    device.Stream // gathers and sums
	opt     *OptimizerConfig
	compute tensor.DType
	stage   int
	groups  []cutGroup
	own     int64 // elements of all shards of this rank
	order   []model.Stretch
	next    int // stretch to come
	ready   readiness

	values      tensor.Tensor // stage 3 [own], else [numel], of the compute type
	masters     tensor.Tensor // [own] F32, when training in another type
	grads       tensor.Tensor // stage 1 [numel], else [own] F32
	m, v        tensor.Tensor // [own] F32, for adamw
	sum         tensor.Tensor // F64 [1]
	hostSum     tensor.Tensor
	gathered    slots // stage 3: values
	summed      slots // stages 2 and 3: gradients
	gatheredMem [2]tensor.Tensor
	summedMem   [2]tensor.Tensor
	updated     device.Event
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

// part views the group's elements that this rank owns in a flat buffer of everything, or of one group (at = 0).
func (g *cutGroup) part(t tensor.Tensor, at int64) tensor.Tensor {
	return t.Slice(0, at+g.lo, at+g.hi)
}

// shardOf views them in a flat buffer of shards.
func (g *cutGroup) shardOf(t tensor.Tensor) tensor.Tensor {
	return t.Slice(0, g.shard, g.shard+g.hi-g.lo)
}

// NewSharded allocates the shards of stage 1, 2 or 3 and lends the parameters out, whose values have the compute type. A nil optimizer is for
// an evaluation.
func NewSharded(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig, stage int) (*Sharded, error) {
	w := &Sharded{dev: d, world: world, opt: opt, compute: compute, stage: stage, hostSum: tensor.OfFloat64(make([]float64, 1), 1)}
	numel, largest := w.cut(groups)
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

// cut says what this rank owns, and returns the elements of everything and of the two largest groups.
func (w *Sharded) cut(groups []*model.Group) (numel int64, largest [2]int64) {
	size, rank := int64(w.world.Size()), int64(w.world.Rank())
	for _, g := range groups {
		c := cutGroup{Group: g, numel: g.Numel(), at: numel, shard: w.own, rows: make([]int64, size), decay: []device.Range{}}
		for r := range size {
			lo, hi := sp.Shard(c.numel, size, r)
			c.rows[r] = hi - lo
		}
		c.lo, c.hi = sp.Shard(c.numel, size, rank)
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
		values, grads, exact := tensor.Tensor{}, tensor.Tensor{}, w.shardValues(g)
		if w.stage < 3 {
			values = w.values.Slice(0, g.at, g.at+g.numel)
		}
		if w.stage == 1 && w.opt != nil {
			grads = w.grads.Slice(0, g.at, g.at+g.numel)
		}
		g.Lend(values, grads)
		master := tensor.Tensor{}
		if !w.masters.IsNil() {
			master = g.shardOf(w.masters)
		}
		g.Keep(g.lo, exact, master)
	}
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

// Loaded spreads what was loaded, or drawn, into the shards.
func (w *Sharded) Loaded(s device.Stream) error {
	w.gathered.forget()
	return w.spread(s)
}

// spread gathers the values that are whole on every rank from their owners.
func (w *Sharded) spread(s device.Stream) error {
	if w.stage == 3 {
		return nil
	}
	for i := range w.groups {
		g := &w.groups[i]
		if err := w.world.AllGather(s, w.values.Slice(0, g.at, g.at+g.numel), g.part(w.values, g.at), g.rows); err != nil {
			return err
		}
	}
	return nil
}

func (w *Sharded) Begin(s device.Stream, micros int64) error {
	w.ready.begin(micros)
	return w.dev.Fill(s, w.grads, 0)
}

func (w *Sharded) GradReady(p *model.Param, _ device.Stream) error { return w.ready.note(p) }

// Reduce completes the gradients in their owners' shards.
func (w *Sharded) Reduce(s device.Stream) (float64, error) {
	if err := w.ready.check(); err != nil {
		return 0, err
	}
	if err := w.summed.wait(s); err != nil {
		return 0, err
	}
	if err := w.dev.Fill(s, w.sum, 0); err != nil {
		return 0, err
	}
	for i := range w.groups {
		g := &w.groups[i]
		if w.stage == 1 {
			if err := w.world.ReduceScatter(s, g.part(w.grads, g.at), w.grads.Slice(0, g.at, g.at+g.numel), g.rows); err != nil {
				return 0, err
			}
		}
		if err := w.dev.SumSquares(s, w.sum, w.shardGrads(g)); err != nil {
			return 0, err
		}
	}
	if err := w.dev.Copy(s, w.hostSum, w.sum); err != nil {
		return 0, err
	}
	if err := comm.Meet(w.world); err != nil {
		return 0, err
	}
	if err := s.Sync(); err != nil {
		return 0, err
	}
	if err := w.world.AllReduce(nil, w.hostSum, comm.Sum); err != nil {
		return 0, err
	}
	return math.Sqrt(w.hostSum.Float64s()[0]), nil
}

// Update steps the shards; values that are whole on every rank are gathered again.
func (w *Sharded) Update(s device.Stream, lr, scale float64, t int64) error {
	for i := range w.groups {
		if err := w.step(s, &w.groups[i], lr, scale, t); err != nil {
			return err
		}
	}
	w.gathered.forget()
	if err := s.Record(w.updated); err != nil {
		return err
	}
	if err := w.side.Wait(w.updated); err != nil {
		return err
	}
	return w.spread(s)
}

func (w *Sharded) step(s device.Stream, g *cutGroup, lr, scale float64, t int64) error {
	if g.hi == g.lo {
		return nil
	}
	exact, grads, low, o := w.exact(g), w.shardGrads(g), tensor.Tensor{}, w.opt
	if !w.masters.IsNil() {
		low = w.shardValues(g)
	}
	if o.Name == "adamw" {
		w.adamw = device.AdamW{W: exact, G: grads, M: g.shardOf(w.m), V: g.shardOf(w.v), Low: low, LR: lr, Beta1: o.Betas[0], Beta2: o.Betas[1],
			Eps: o.Eps, WeightDecay: o.WeightDecay, GradScale: scale, Decay: g.decay, Step: t}
		return w.dev.AdamW(s, &w.adamw)
	}
	w.sgd = device.SGD{W: exact, G: grads, Low: low, LR: lr, WeightDecay: o.WeightDecay, GradScale: scale, Decay: g.decay}
	return w.dev.SGD(s, &w.sgd)
}

// Pass notes the order of the stretches to come.
func (w *Sharded) Pass(order []model.Stretch) error {
	if w.next != len(w.order) {
		return status.Errorf(status.Internal, "train: a pass begins after %d of %d stretches of the last one", w.next, len(w.order))
	}
	w.order, w.next = order, 0
	return nil
}

// Need makes a group whole for a stretch, and has the values of the next one gathered while this one computes.
func (w *Sharded) Need(group int, s device.Stream) error {
	if w.next == len(w.order) || w.order[w.next].Group != group {
		return status.Errorf(status.Internal, "train: group %d is needed out of turn", group)
	}
	x := w.order[w.next]
	w.next++
	g := &w.groups[group]
	var values, grads tensor.Tensor
	if w.stage == 3 && x.Use&model.Reads != 0 {
		slot, err := w.gather(group)
		if err != nil {
			return err
		}
		if slot == nil {
			return status.Errorf(status.Internal, "train: no room to gather group %s", g.Name)
		}
		slot.users++
		if err := s.Wait(slot.filled); err != nil {
			return err
		}
		values = slot.mem.Slice(0, 0, g.numel)
	} else if w.stage < 3 {
		values = w.values.Slice(0, g.at, g.at+g.numel)
	}
	if w.stage == 1 && w.opt != nil {
		grads = w.grads.Slice(0, g.at, g.at+g.numel)
	} else if x.Use&model.Adds != 0 {
		slot := w.summed.take(group, g.numel)
		if slot == nil {
			return status.Errorf(status.Internal, "train: no room for the gradients of group %s", g.Name)
		}
		slot.users++
		grads = slot.mem.Slice(0, 0, g.numel)
		if err := s.Wait(slot.filled); err != nil { // the sum of what was there
			return err
		}
		if err := w.dev.Fill(s, grads, 0); err != nil {
			return err
		}
	}
	g.Lend(values, grads)
	if w.stage == 3 && w.next < len(w.order) && w.order[w.next].Use&model.Reads != 0 {
		_, err := w.gather(w.order[w.next].Group)
		return err
	}
	return nil
}

// gather brings a group's values into a slot, if they are not there yet; nil when no slot is free.
func (w *Sharded) gather(group int) (*slot, error) {
	if x := w.gathered.find(group); x != nil {
		return x, nil
	}
	g := &w.groups[group]
	x := w.gathered.take(group, g.numel)
	if x == nil {
		return nil, nil
	}
	if err := w.side.Wait(x.used); err != nil {
		return nil, err
	}
	if err := w.world.AllGather(w.side, x.mem.Slice(0, 0, g.numel), g.shardOf(w.values), g.rows); err != nil {
		return nil, err
	}
	return x, w.side.Record(x.filled)
}

// Done ends a stretch: the values' slot may be used again, the gradients go to their owners.
func (w *Sharded) Done(group int, s device.Stream) error {
	g := &w.groups[group]
	if x := w.gathered.find(group); x != nil && x.users > 0 {
		if x.users--; x.users == 0 {
			if err := s.Record(x.used); err != nil {
				return err
			}
		}
	}
	x := w.summed.find(group)
	if x == nil || x.users == 0 {
		return nil
	}
	x.users, x.group = 0, -1
	if err := s.Record(x.used); err != nil {
		return err
	}
	if err := w.side.Wait(x.used); err != nil {
		return err
	}
	mine := g.part(x.mem, 0)
	if err := w.world.ReduceScatter(w.side, mine, x.mem.Slice(0, 0, g.numel), g.rows); err != nil {
		return err
	}
	if shard := g.shardOf(w.grads); shard.Numel() > 0 {
		if err := w.dev.Add(w.side, shard, shard, mine); err != nil {
			return err
		}
	}
	return w.side.Record(x.filled)
}

// State is this rank's shard.
func (w *Sharded) State(group int) State {
	g := &w.groups[group]
	x := State{Lo: g.lo, Hi: g.hi, Exact: w.exact(g)}
	if !w.masters.IsNil() {
		x.Low = w.shardValues(g)
	}
	if !w.m.IsNil() {
		x.M, x.V = g.shardOf(w.m), g.shardOf(w.v)
	}
	return x
}

// Whole gathers a group in F32 where gradients are whole between steps.
func (w *Sharded) Whole(group int, grads bool, s device.Stream) (tensor.Tensor, error) {
	g := &w.groups[group]
	shard := w.exact(g)
	if grads {
		shard = w.shardGrads(g)
	}
	var all tensor.Tensor
	switch {
	case w.opt == nil && w.stage < 3:
		return w.values.Slice(0, g.at, g.at+g.numel), nil
	case w.opt == nil:
		all = w.gatheredMem[0]
	case w.stage == 1:
		all = w.grads.Slice(0, g.at, g.at+g.numel)
	default:
		all = w.summedMem[0]
	}
	w.gathered.forget()
	all = all.Slice(0, 0, g.numel)
	return all, w.world.AllGather(s, all, shard, g.rows)
}
