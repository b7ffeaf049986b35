package train

import (
	"ulysses/device"
	"ulysses/model"
)

// Taken is memory that was planned under a name and what was taken of it at most; Parts is what the
// plan is made of, where it has parts.
type Taken struct {
	Name          string
	Planned, Peak int64
	Host          bool // of the host, apart from the device's
	Parts         []model.Component
}

// Taken is the planned memory of this rank, as Components, beside what its arenas have lent at
// most.
func (t *Trainer) Taken() []Taken {
	var all []Taken
	add := func(a *device.Arena, host bool, parts ...model.Component) {
		if a != nil {
			all = append(all, Taken{Name: a.Name(), Planned: a.Bytes(), Peak: a.Peak(), Host: host, Parts: parts})
		}
	}
	for _, a := range t.Weights.Arenas() {
		add(a, false)
	}
	var here, host []model.Component
	for _, c := range t.planned {
		if c.Host {
			host = append(host, c)
		} else {
			here = append(here, c)
		}
	}
	add(t.arena, false, here...)
	add(t.host, true, host...)
	add(t.inputs, false)
	if c := t.saver.component(); len(c) > 0 {
		add(t.saver.arena, c[0].Host)
	}
	return all
}
