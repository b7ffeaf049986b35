package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Partial stores a model of which some parameters are frozen: the trained parameters of each group
// with their gradients and states, and the frozen ones as an evaluation stores them, in the compute
// type alone. Both are sharded by the same ZeRO stage. A group that has parameters of one kind only
// takes no part in the other storage: nothing is gathered, reduced or allocated for it there.
type Partial struct {
	Weights // of the trained parameters
	frozen  Weights
	// whether each group has parameters in this storage
	trains, freezes []bool
	orders          [2][]model.Use // of the current pass: of the trained and of the frozen parameters
}

// beside says that a storage is that of the frozen parameters beside other Weights.
type beside struct{ of Weights }

// stream returns the communication stream of the other storage; nil if it has none. Gathers of both
// run on one stream, in the same order on every rank.
func (b *beside) stream() device.Stream {
	if b == nil {
		return nil
	}
	if z, ok := b.of.(*ZeRO); ok {
		return z.commStream
	}
	return nil
}

// weightsName returns the name of the weights in the memory table.
func (o *optimizer) weightsName() string {
	if o.beside != nil {
		return "frozen weights"
	}
	return "weights"
}

// Frozen returns nil: all parameters are in this storage.
func (o *optimizer) Frozen() Weights { return nil }

func anyFrozen(groups []*model.Group) bool {
	for _, g := range groups {
		for _, p := range g.Params {
			if p.Frozen {
				return true
			}
		}
	}
	return false
}

// newPartial allocates the trained parameters, and then the frozen ones. Collective.
func newPartial(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig, stage int, o Offload) (w *Partial, err error) {
	w = &Partial{}
	trained, frozen := model.Halves(groups, false), model.Halves(groups, true)
	n := int64(0)
	for i := range groups {
		w.trains = append(w.trains, len(trained[i].Params) > 0)
		w.freezes = append(w.freezes, len(frozen[i].Params) > 0)
		n += trained[i].Numel()
	}
	if n == 0 {
		return nil, status.Errorf(status.InvalidConfig, "train.freeze: all parameters of the model are frozen; leave some of them out of the list, or evaluate with kind = \"eval\"")
	}
	if w.Weights, err = newWeights(d, world, trained, compute, opt, stage, o); err != nil {
		return nil, err
	}
	o.beside = &beside{w.Weights}
	if w.frozen, err = newWeights(d, world, frozen, compute, nil, stage, o); err != nil {
		w.Weights.Free()
		return nil, err
	}
	return w, nil
}

// Frozen returns the storage of the frozen parameters.
func (w *Partial) Frozen() Weights { return w.frozen }

// Pass gives each storage the uses of groups that have parameters in it.
func (w *Partial) Pass(order []model.Use) error {
	for i := range w.orders {
		w.orders[i] = w.orders[i][:0]
	}
	for _, u := range order {
		if w.trains[u.Group] {
			w.orders[0] = append(w.orders[0], u)
		}
		if u.Access &= model.Reads; w.freezes[u.Group] && u.Access != 0 {
			w.orders[1] = append(w.orders[1], u)
		}
	}
	if err := w.Weights.Pass(w.orders[0]); err != nil {
		return err
	}
	return w.frozen.Pass(w.orders[1])
}

// Gather starts a use of a group in the storages that have parameters of it.
func (w *Partial) Gather(group int, s device.Stream) error {
	return w.both(group, func(x Weights) error { return x.Gather(group, s) })
}

// Release ends a use of a group.
func (w *Partial) Release(group int, s device.Stream) error {
	return w.both(group, func(x Weights) error { return x.Release(group, s) })
}

func (w *Partial) both(group int, call func(Weights) error) error {
	if w.freezes[group] {
		if err := call(w.frozen); err != nil {
			return err
		}
	}
	if !w.trains[group] {
		return nil
	}
	return call(w.Weights)
}

// Loaded must be called after each rank has filled the elements that it owns. Collective.
func (w *Partial) Loaded(s device.Stream) error {
	if err := w.frozen.Loaded(s); err != nil {
		return err
	}
	return w.Weights.Loaded(s)
}

// Components lists the memory of both storages.
func (w *Partial) Components() []model.Component {
	return append(w.frozen.Components(), w.Weights.Components()...)
}

// Arenas returns the arenas of both storages.
func (w *Partial) Arenas() []*device.Arena {
	return append(append([]*device.Arena(nil), w.frozen.Arenas()...), w.Weights.Arenas()...)
}

// Traffic returns the bytes of both storages. Frozen weights are gathered, and nothing of them is
// reduced.
func (w *Partial) Traffic() []Traffic {
	all := w.Weights.Traffic()
	for _, t := range w.frozen.Traffic() {
		if t.Bytes > 0 {
			t.What = "frozen " + t.What
			all = append(all, t)
		}
	}
	return all
}

// Free releases the memory of both storages.
func (w *Partial) Free() {
	w.frozen.Free()
	w.Weights.Free()
}
