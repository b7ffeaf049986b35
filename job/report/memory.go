package report

import (
	"encoding/json"
	"fmt"
	"slices"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/model"
	"ulysses/tensor"
)

// memoryRow is a component of memory. Each number is the maximum over the ranks.
type memoryRow struct {
	Name          string
	Planned, Peak int64
	Part          bool // a part of the component above; only Planned is known
	Host          bool // host memory, not device memory
}

// memoryRows returns planned and peak memory by component, and the totals of the rank with the
// largest total: of the device, and of the host if any is planned.
func memoryRows(facts []rankFacts) (rows, totals []memoryRow) {
	totals = []memoryRow{{Name: "total"}, {Name: "total, host", Host: true}}
	index := map[string]int{}
	row := func(key, name string, part bool) *memoryRow {
		i, ok := index[key]
		if !ok {
			i = len(rows)
			index[key] = i
			rows = append(rows, memoryRow{Name: name, Part: part})
		}
		return &rows[i]
	}
	for _, f := range facts {
		var planned, peak [2]int64
		for _, m := range f.Memory {
			x, at := row(m.Name, m.Name, false), 0
			if x.Host = m.Host; m.Host {
				at = 1
			}
			x.Planned, x.Peak = max(x.Planned, m.Planned), max(x.Peak, m.Peak)
			planned[at], peak[at] = planned[at]+m.Planned, peak[at]+m.Peak
			for _, c := range m.Components {
				p := row(m.Name+"/"+c.Name, c.Name, true)
				p.Planned = max(p.Planned, c.Bytes)
			}
		}
		for at := range totals {
			totals[at].Planned, totals[at].Peak = max(totals[at].Planned, planned[at]), max(totals[at].Peak, peak[at])
		}
	}
	if totals[1].Planned == 0 {
		totals = totals[:1]
	}
	return rows, totals
}

// largestPlan returns the rank that plans the most memory, on the device or if that is equal on the
// host, of equal ones the first. Rank 0 also gets its plan. Collective.
func (r *Run) largestPlan() (rank int, plan []model.Component, err error) {
	own := r.Trainer.Components()
	totals, err := comm.GatherJSON(r.world(), "planned memory", []int64{model.Bytes(own), model.HostBytes(own)})
	if err != nil {
		return 0, nil, err
	}
	for i := range totals {
		if slices.Compare(totals[i], totals[rank]) > 0 {
			rank = i
		}
	}
	text, err := json.Marshal(own)
	if err != nil {
		return 0, nil, status.Errorf(status.Internal, "planned memory: %w", err)
	}
	if text, err = comm.BroadcastBytes(r.world(), text, rank); err != nil || r.world().Rank() > 0 {
		return rank, nil, err
	}
	return rank, plan, json.Unmarshal(text, &plan)
}

// resident describes the resident memory of the process that has the most. If the device is the
// CPU, the planned memory is a part of it.
func (r *Run) resident(facts []rankFacts) []factRow {
	most, rank, planned := int64(0), 0, int64(0)
	for i, f := range facts {
		if f.Resident > most {
			most, rank = f.Resident, i
		}
		for _, m := range f.Memory {
			planned += m.Planned
		}
	}
	if most == 0 {
		return nil
	}
	process, ranks := fmt.Sprintf("the process of rank %d", rank), 1
	if r.Threads {
		process, ranks = "the process of all ranks", len(facts)
	} else {
		planned /= int64(len(facts))
	}
	rows := []factRow{{"peak resident memory", units.Bytes(most), process}}
	if r.Parts.Device.Info().Place == tensor.Host {
		rows = append(rows, factRow{"planned", units.Bytes(planned), "for " + units.Count(ranks, "rank")},
			factRow{"not planned", units.Bytes(most - planned), "program, data, communicator, copies for checkpoints"})
	}
	return rows
}
