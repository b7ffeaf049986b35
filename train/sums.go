package train

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// uses follows the uses of layer groups in a pass.
type uses struct {
	order []model.Use
	next  int // index in order of the next use
}

// begin sets the order of the next pass.
func (u *uses) begin(order []model.Use) error {
	if u.next != len(u.order) {
		return status.Errorf(status.Internal,
			"train: a pass begins after %d of %d uses of layer groups of the previous pass", u.next, len(u.order))
	}
	u.order, u.next = order, 0
	return nil
}

// advance returns the next use, which must be one of the given group.
func (u *uses) advance(group int) (x model.Use, err error) {
	if u.next == len(u.order) || u.order[u.next].Group != group {
		return x, status.Errorf(status.Internal, "train: layer group %d is not the next one in the order of the pass",
			group)
	}
	u.next++
	return u.order[u.next-1], nil
}

// gradientSums schedules the sums of gradients over the ranks in stages 0 and 1, in which a rank
// has the whole gradient of each group. The gradient of a group is complete after the last use that
// adds to it, in the last training pass of a step. Its sum then begins on the communication stream,
// while the pass goes on with earlier layers.
//
// Without a communication stream, all sums are left to Reduce. A device whose operations are
// complete when the call returns has none: nothing can overlap there, and ranks that reduce once
// wait for one another once.
type gradientSums struct {
	stream   device.Stream // the communication stream; nil = none
	complete device.Event  // recorded when the gradient of a group is complete
	ended    device.Event  // recorded on the communication stream after each sum
	passes   int64         // training passes of the step that have not begun
	left     []int         // uses of each group in the last pass that add to its gradient and have not begun
	adds     []bool        // whether the use of each group that began last adds to its gradient
	begun    []bool        // whether the sum of each group has begun in this step
}

// overlaps reports whether sums of gradients can overlap with a pass on a device.
func overlaps(d device.Device, ranks int) bool {
	return ranks > 1 && d.Info().Place != tensor.Host
}

// open prepares for a number of groups. The stream stays the caller's. The caller calls close, also
// after an error.
func (x *gradientSums) open(d device.Device, groups int, stream device.Stream) (err error) {
	x.stream, x.left, x.adds, x.begun = stream, make([]int, groups), make([]bool, groups), make([]bool, groups)
	if stream == nil {
		return nil
	}
	if x.complete, err = d.NewEvent(); err == nil {
		x.ended, err = d.NewEvent()
	}
	return err
}

func (x *gradientSums) close() {
	for _, e := range []device.Event{x.complete, x.ended} {
		if e != nil {
			e.Close()
		}
	}
}

// step begins a step of the given number of training passes. Work of s that follows may overwrite
// the gradients: s waits for the sums of a step that has ended without Reduce, as the search for
// NaN does.
func (x *gradientSums) step(s device.Stream, passes int64) error {
	x.passes = passes
	clear(x.begun)
	return x.wait(s)
}

// wait makes s wait for the sums that have begun.
func (x *gradientSums) wait(s device.Stream) error {
	if x.stream == nil {
		return nil
	}
	return s.Wait(x.ended)
}

// pass begins a pass with the given uses.
func (x *gradientSums) pass(order []model.Use) {
	if x.stream == nil {
		return
	}
	training := false
	clear(x.left)
	for _, u := range order {
		if u.Access&model.Adds != 0 {
			training = true
			x.left[u.Group]++
		}
	}
	if !training {
		return
	}
	if x.passes--; x.passes != 0 { // not the last one
		clear(x.left)
	}
}

// gather begins a use.
func (x *gradientSums) gather(u model.Use) {
	if x.stream == nil {
		return
	}
	x.adds[u.Group] = u.Access&model.Adds != 0 && x.left[u.Group] > 0
	if x.adds[u.Group] {
		x.left[u.Group]--
	}
}

// release ends the current use of a group, which stream s has run. If the gradient is complete, it
// calls sum, which enqueues the sum on the communication stream.
func (x *gradientSums) release(group int, s device.Stream, sum func(group int) error) error {
	if x.stream == nil || !x.adds[group] || x.left[group] > 0 {
		return nil
	}
	x.adds[group], x.begun[group] = false, true
	if err := s.Record(x.complete); err != nil {
		return err
	}
	if err := x.stream.Wait(x.complete); err != nil {
		return err
	}
	if err := sum(group); err != nil {
		return err
	}
	return x.stream.Record(x.ended)
}

// rest calls sum for the groups [lo, hi) whose sums have not begun, all adjacent ones at once.
func (x *gradientSums) rest(sum func(lo, hi int) error) error {
	for lo := 0; lo < len(x.begun); lo++ {
		hi := lo
		for hi < len(x.begun) && !x.begun[hi] {
			hi++
		}
		if hi == lo {
			continue
		}
		if err := sum(lo, hi); err != nil {
			return err
		}
		lo = hi
	}
	return nil
}
