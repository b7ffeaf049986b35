package train

import (
	"ulysses/device"
	"ulysses/model"
)

// Taken is memory that was planned under a name and what was taken of it at most; Parts is what the plan is made of, where it has parts.
type Taken struct {
	Name          string
	Planned, Peak int64
	Parts         []model.Component
}

// Taken is the planned memory of this rank, as Components, beside what its arenas have lent at most.
func (t *Trainer) Taken() []Taken {
	var all []Taken
	for _, a := range t.Weights.Arenas() {
		all = append(all, taken(a))
	}
	all = append(all, Taken{Name: t.arena.Name(), Planned: model.Bytes(t.planned), Peak: t.arena.Peak(), Parts: t.planned})
	return append(all, taken(t.inputs))
}

func taken(a *device.Arena) Taken { return Taken{Name: a.Name(), Planned: a.Bytes(), Peak: a.Peak()} }
