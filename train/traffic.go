package train

import (
	"ulysses/comm"
	"ulysses/model"
)

// Traffic is what one operation on one axis of the mesh must have sent to other ranks, by formula.
type Traffic struct {
	Axis, Op string
	What     string // that travels
	Bytes    int64  // of this rank
}

// Traffic is what the formulas say that this rank has sent so far, but for control: counts, sums of
// losses, flags, errors.
func (t *Trainer) Traffic() []Traffic {
	return append([]Traffic{{"sequence", comm.OpAllToAll, "queries, keys, values, outputs and states, and their gradients", t.sent}}, t.Weights.Traffic()...)
}

// Traffic is one all-reduce of all gradients a step: 2(P-1)/P of them.
func (w *Replicated) Traffic() []Traffic {
	return []Traffic{{"world", comm.OpAllReduce, "gradients", w.reductions * comm.AllReduceBytes(w.world.Rank(), w.world.Size(), w.grads.Numel(), w.gradBytes())}}
}

func (w *Replicated) gradBytes() int64 {
	if w.grads.IsNil() {
		return 0 // an evaluation's
	}
	return w.grads.DType.Size()
}

// expected counts, for each group of weights, the gathers and sums that a stage takes, from the
// order of the work, which is known before it begins. In stage 3 a group is gathered for each
// stretch that reads it, unless one of two slots still has it.
type expected struct {
	gathers []int64 // of values, of the compute type
	sums    []int64 // of gradients, F32
	wholes  []int64 // bytes of a value in those that Whole gathered, added up
	slots   [2]expectedSlot
	turn    int64
}

type expectedSlot struct {
	numel int64 // room
	group int   // whose; -1 = nobody's
	turn  int64
}

func (x *expected) open(groups int, room [2]int64) {
	x.gathers, x.sums, x.wholes = make([]int64, groups), make([]int64, groups), make([]int64, groups)
	for i, n := range room {
		x.slots[i] = expectedSlot{numel: n, group: -1}
	}
}

// pass expects what a pass in this order takes in a stage.
func (x *expected) pass(order []model.Use, groups []cutGroup, stage int) {
	for i, s := range order {
		if stage > 1 && s.Access&model.Adds != 0 {
			x.sums[s.Group]++
		}
		if stage < 3 {
			continue
		}
		if s.Access&model.Reads != 0 {
			x.read(s.Group, groups[s.Group].numel, -1)
		}
		// gathered while this stretch computes
		if i+1 < len(order) && order[i+1].Access&model.Reads != 0 {
			next := order[i+1].Group
			x.read(next, groups[next].numel, s.Group)
		}
	}
}

// read expects a gather into the slot that was filled longest ago and has room, but for the one in
// use, unless the group is there.
func (x *expected) read(group int, numel int64, inUse int) {
	var to *expectedSlot
	for i := range x.slots {
		s := &x.slots[i]
		if s.group == group {
			return
		}
		if s.numel >= numel && (s.group != inUse || inUse < 0) && (to == nil || s.turn < to.turn) {
			to = s
		}
	}
	if to == nil {
		return // when its stretch begins there will be one
	}
	x.turn++
	to.group, to.turn = group, x.turn
	x.gathers[group]++
}

// every expects one of each group.
func every(counts []int64) {
	for i := range counts {
		counts[i]++
	}
}

func (x *expected) forget() {
	for i := range x.slots {
		x.slots[i].group = -1
	}
}

// Traffic is (P-1) times this rank's shards for every gather, and everybody else's shards for every
// sum.
func (w *Sharded) Traffic() []Traffic {
	var gathered, summed int64
	rank := w.world.Rank()
	for i := range w.groups {
		rows, x := w.groups[i].rows, &w.expected
		gathered += comm.AllGatherBytes(rank, rows, x.gathers[i]*w.compute.Size()+x.wholes[i])
		summed += comm.ReduceScatterBytes(rank, rows, x.sums[i]*4)
	}
	return []Traffic{{"world", comm.OpAllGather, "weights", gathered}, {"world", comm.OpReduceScatter, "gradients", summed}}
}
