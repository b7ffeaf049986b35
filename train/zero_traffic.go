package train

import "ulysses/model"

// expected counts the collectives of each group. It computes them from the order of a pass, before
// the pass begins. Stage 1 has one reduction of a group for each step. Traffic uses these counts;
// tests and the report of a run compare it with the bytes that were sent.
type expected struct {
	gathers    []int64 // all-gathers of weights in the compute type
	reductions []int64 // reduce-scatters of gradients in F32
	wholes     []int64 // sum of the bytes of an element over all calls of Whole
	cache      residency
}

func (x *expected) open(groups int) {
	x.gathers, x.reductions, x.wholes = make([]int64, groups), make([]int64, groups), make([]int64, groups)
}

// pass counts the collectives of a pass. numel is the elements of each group, now the groups in the
// slots for weights. In this count a use ends before the next use begins. In a pass two uses may
// overlap. Then the next group has no free slot and is gathered when its own use begins, which
// changes when it is gathered, but not how often.
func (x *expected) pass(order []model.Use, numel []int64, stage int, now *residency) {
	x.cache.slots, x.cache.filled = append(x.cache.slots[:0], now.slots...), now.filled
	gather := func(u model.Use) int {
		if u.Access&model.Reads == 0 {
			return -1
		}
		if i := x.cache.find(u.Group); i >= 0 {
			return i
		}
		i := x.cache.assign(u.Group, numel[u.Group])
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
		if i+1 < len(order) { // the next group is gathered while this one computes
			gather(order[i+1])
		}
		if used >= 0 {
			x.cache.slots[used].users--
		}
	}
}

// addOne counts one collective of each group.
func addOne(counts []int64) {
	for i := range counts {
		counts[i]++
	}
}
