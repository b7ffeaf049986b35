package train

import "ulysses/model"

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

// pass counts the operations of a pass. numel is the elements of each group, now the groups that
// are in the slots for values. In this count a use ends before the next one begins. In a pass two
// uses may overlap; the next group then finds no free slot and is gathered when its own use begins.
// That changes when it is gathered, not how often.
func (x *expected) pass(order []model.Use, numel []int64, stage int, now *residency) {
	x.cache.slots, x.cache.filled = append(x.cache.slots[:0], now.slots...), now.filled
	gather := func(u model.Use) int {
		if u.Access&model.Reads == 0 {
			return -1
		}
		if i := x.cache.find(u.Group); i >= 0 {
			return i
		}
		i := x.cache.take(u.Group, numel[u.Group])
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
