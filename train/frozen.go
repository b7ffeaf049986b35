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
// type alone. Both are sharded by the same ZeRO stage.
type Partial struct {
	storages // of the frozen and of the trained parameters
	trained  Weights
	frozen   Weights
}

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

// newPartial allocates the trained parameters, and then the frozen ones. It returns an interface:
// a nil *Partial would not be a nil Weights, and a refused job frees weights that are not nil.
// Collective.
func newPartial(d device.Device, mesh *comm.Mesh, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig,
	stage int, o Offload) (_ Weights, err error) {
	w := &Partial{}
	trained, frozen := model.Halves(groups, false), model.Halves(groups, true)
	if total(trained) == 0 {
		return nil, status.Errorf(status.InvalidConfig,
			"train.freeze: all parameters of the model are frozen; leave some of them out of the list, or evaluate with kind = \"eval\"")
	}
	if w.trained, err = newDivided(d, mesh, trained, compute, opt, stage, o); err != nil {
		return nil, err
	}
	o.what, o.stream = o.what+"frozen ", streamOf(w.trained)
	if w.frozen, err = newDivided(d, mesh, frozen, compute, nil, stage, o); err != nil {
		w.trained.Free()
		return nil, err
	}
	w.storages = storages{newStorage(w.frozen, frozen, true), newStorage(w.trained, trained, false)}
	return w, nil
}

// The methods of a step concern the trained parameters.

func (w *Partial) Begin(s device.Stream, microBatches int64) error {
	return w.trained.Begin(s, microBatches)
}
func (w *Partial) GradReady(p *model.Param, s device.Stream) error { return w.trained.GradReady(p, s) }
func (w *Partial) Reduce(s device.Stream) (float64, error)         { return w.trained.Reduce(s) }
func (w *Partial) Update(s device.Stream, lr, scale float64, t int64) error {
	return w.trained.Update(s, lr, scale, t)
}
func (w *Partial) Stored() []Stored { return w.trained.Stored() }

// StoredFrozen lists the portions of frozen parameters of which this rank may own elements.
func (w *Partial) StoredFrozen() []Stored { return w.frozen.Stored() }

func (w *Partial) Offloaded() bool { return w.trained.Offloaded() }

// Portions lists the trained portions and then the frozen ones.
func (w *Partial) Portions() []model.Portion {
	all := w.trained.Portions()
	for _, x := range w.frozen.Portions() {
		x.Frozen = true
		all = append(all, x)
	}
	return all
}

// Whole gathers a portion of the storage that has it.
func (w *Partial) Whole(x model.Portion, grads bool, s device.Stream) (tensor.Tensor, error) {
	if x.Frozen {
		return w.frozen.Whole(x, grads, s)
	}
	return w.trained.Whole(x, grads, s)
}

// Traffic returns the bytes of both storages. Frozen weights are gathered, and nothing of them is
// reduced.
func (w *Partial) Traffic() []Traffic {
	all := w.trained.Traffic()
	for _, t := range w.frozen.Traffic() {
		if t.Bytes > 0 {
			t.What = "frozen " + t.What
			all = append(all, t)
		}
	}
	return all
}
