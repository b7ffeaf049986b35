package train

import (
	"ulysses/device"
	"ulysses/model"
)

// storages store the parameters of a model in several storages. A group that has no parameters in a
// storage takes no part in it: nothing is gathered, reduced or allocated for it there.
type storages []storage

// storage is one of several.
type storage struct {
	Weights
	has    []bool // whether each group has parameters in it
	frozen bool   // no gradients are added
	order  []model.Use
}

// newStorage returns the storage w of some parameters of each group.
func newStorage(w Weights, groups []*model.Group, frozen bool) storage {
	x := storage{Weights: w, frozen: frozen}
	for _, g := range groups {
		x.has = append(x.has, len(g.Params) > 0)
	}
	return x
}

// Pass gives each storage the uses of groups that have parameters in it.
func (p storages) Pass(order []model.Use) error {
	for i := range p {
		x := &p[i]
		x.order = x.order[:0]
		for _, u := range order {
			if x.frozen {
				u.Access &= model.Reads
			}
			if x.has[u.Group] && u.Access != 0 {
				x.order = append(x.order, u)
			}
		}
		if err := x.Weights.Pass(x.order); err != nil {
			return err
		}
	}
	return nil
}

// each calls f for the storages that have parameters of a group.
func (p storages) each(group int, f func(w Weights) error) error {
	for i := range p {
		if !p[i].has[group] {
			continue
		}
		if err := f(p[i].Weights); err != nil {
			return err
		}
	}
	return nil
}

// Gather starts a use of a group.
func (p storages) Gather(group int, s device.Stream) error {
	return p.each(group, func(w Weights) error { return w.Gather(group, s) })
}

// Release ends a use of a group.
func (p storages) Release(group int, s device.Stream) error {
	return p.each(group, func(w Weights) error { return w.Release(group, s) })
}

// Loaded must be called after each rank has filled the elements that it owns. Collective.
func (p storages) Loaded(s device.Stream) error {
	for i := range p {
		if err := p[i].Loaded(s); err != nil {
			return err
		}
	}
	return nil
}

// Components lists the memory of all storages.
func (p storages) Components() (all []model.Component) {
	for i := range p {
		all = append(all, p[i].Components()...)
	}
	return all
}

// Arenas returns the arenas of all storages.
func (p storages) Arenas() (all []*device.Arena) {
	for i := range p {
		all = append(all, p[i].Arenas()...)
	}
	return all
}

// Free releases the memory of all storages.
func (p storages) Free() {
	for i := range p {
		p[i].Free()
	}
}
