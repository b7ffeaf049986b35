package train

import (
	"ulysses/comm"
	"ulysses/model"
)

// expected counts the collective operations of each group, from the order of a pass, before the
// pass begins. Traffic is computed from these counts; tests and the run's report compare it with
// the bytes that were sent.
type expected struct {
	gathers    []int64 // all-gathers of values, of the compute type
	reductions []int64 // reduce-scatters of gradients, F32
	wholes     []int64 // bytes of an element in all calls of Whole, added up
	cache      residency
}

func (x *expected) open(groups int) {
	x.gathers, x.reductions, x.wholes = make([]int64, groups), make([]int64, groups), make([]int64, groups)
}

// pass counts the operations of a pass. now is which groups are in the slots for values. A use ends
// in this count before the next one begins. In a pass two uses may overlap; the next group then
// finds no free slot and is gathered when its own use begins: as often, only later.
func (x *expected) pass(order []model.Use, groups []zeroGroup, stage int, now *residency) {
	x.cache.slots, x.cache.filled = append(x.cache.slots[:0], now.slots...), now.filled
	gather := func(u model.Use) int {
		if u.Access&model.Reads == 0 {
			return -1
		}
		if i := x.cache.find(u.Group); i >= 0 {
			return i
		}
		i := x.cache.take(u.Group, groups[u.Group].numel)
		if i >= 0 {
			x.gathers[u.Group]++
		}
		return i
	}
	for i, u := range order {
		if stage > 1 && u.Access&model.Adds != 0 {
			x.reductions[u.Group]++
		}
		if stage < 3 {
			continue
		}
		used := gather(u)
		if used >= 0 {
			x.cache.slots[used].users++
		}
		if i+1 < len(order) { // gathered while this use computes
			gather(order[i+1])
		}
		if used >= 0 {
			x.cache.slots[used].users--
		}
	}
}

// addOne counts one operation of each group.
func addOne(counts []int64) {
	for i := range counts {
		counts[i]++
	}
}

// Traffic is (P-1) times this rank's shard for each all-gather, and the shards of all other ranks
// for each reduce-scatter.
func (w *ZeRO) Traffic() []Traffic {
	var gathered, reduced int64
	rank := w.world.Rank()
	for i := range w.groups {
		counts, x := w.groups[i].counts, &w.expected
		gathered += comm.AllGatherBytes(rank, counts, x.gathers[i]*w.compute.Size()+x.wholes[i])
		reduced += comm.ReduceScatterBytes(rank, counts, x.reductions[i]*4)
	}
	return []Traffic{{"world", comm.OpAllGather, "weights", gathered}, {"world", comm.OpReduceScatter, "gradients", reduced}}
}
