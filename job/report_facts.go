package job

import (
	"encoding/json"
	"os"
	"runtime"
	"sort"
	"strings"

	"github.com/klauspost/cpuid/v2"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/train"
)

// rankFacts is what a rank knows of its own run, for the report.
type rankFacts struct {
	Host, CPU, Device string
	Threads           int
	Phases            []clock.Phase
	Sent              []comm.Entry
	Formula           []train.Traffic
	Memory            []train.Taken
	Resident          int64   // peak memory of the process; 0 = unknown
	Cores             int     // cores that the process may use
	Waited            float64 // seconds in the steps that the process's threads waited for a core
}

// gatherFacts brings every rank's facts to all ranks. Collective; what it sends itself is not in
// them.
func (s *session) gatherFacts() ([]rankFacts, error) {
	info := s.Device.Info()
	host, _ := os.Hostname()
	waited := max(0, proc.WaitedForCore()-s.queued)
	if s.world.Kind() == "local" {
		waited /= float64(s.world.Size()) // all ranks are in this process
	}
	own, err := json.Marshal(rankFacts{Host: host, CPU: strings.TrimSpace(cpuid.CPU.BrandName), Device: info.Name, Threads: info.Workers,
		Phases: s.Clock.Phases(), Sent: s.Ledger.Entries(), Formula: s.trainer.Traffic(), Memory: s.trainer.Taken(), Resident: proc.ResidentPeak(), Cores: runtime.NumCPU(), Waited: waited})
	if err != nil {
		return nil, status.Errorf(status.Internal, "report: %w", err)
	}
	parts, err := comm.GatherBytes(s.Mesh.World, own)
	if err != nil {
		return nil, err
	}
	all := make([]rankFacts, len(parts))
	for r, part := range parts {
		if err := json.Unmarshal(part, &all[r]); err != nil {
			return nil, status.Errorf(status.Internal, "report: rank %d: %w", r, err)
		}
	}
	return all, nil
}

// phaseRow is one phase over all ranks.
type phaseRow struct {
	Name           string
	Calls          int64
	Mean, Min, Max float64
	Share          float64 // of all phases' means, 0 to 1
}

// phaseRows sums the ranks' clocks up, the longest phase first. Ranks run the same phases; a name
// that one of them lacks counts as 0 there.
func phaseRows(facts []rankFacts) []phaseRow {
	rows, index, seen := []phaseRow{}, map[string]int{}, map[string]int{}
	all := 0.0
	for _, f := range facts {
		for _, p := range f.Phases {
			i, ok := index[p.Name]
			if !ok {
				i = len(rows)
				index[p.Name] = i
				rows = append(rows, phaseRow{Name: p.Name, Calls: p.Calls, Min: p.Seconds})
			}
			r, mean := &rows[i], p.Seconds/float64(len(facts))
			seen[p.Name]++
			r.Mean += mean
			all += mean
			r.Min, r.Max = min(r.Min, p.Seconds), max(r.Max, p.Seconds)
		}
	}
	for i := range rows {
		if r := &rows[i]; all > 0 {
			r.Share = r.Mean / all
		}
		if seen[rows[i].Name] < len(facts) {
			rows[i].Min = 0
		}
	}
	sort.SliceStable(rows, func(i, j int) bool { return rows[i].Mean > rows[j].Mean })
	return rows
}

// trafficRow is what an operation on an axis sent, all ranks together, and what its formula says.
type trafficRow struct {
	Axis, Op, What string
	Calls          int64 // of a rank, at most
	Sent, Formula  int64
	Least, Most    int64 // of a rank
	Equal          bool  // on every rank
	Control        bool  // no formula: counts, sums of losses, flags, errors
}

// trafficRows holds what was counted against the formulas, rank by rank. The last row is control,
// of all axes.
func trafficRows(facts []rankFacts) []trafficRow {
	var rows []trafficRow
	control := trafficRow{Control: true, Axis: "all", Op: "control", What: "counts, sums of losses, norms, flags, errors"}
	at := func(axis, op, what string) *trafficRow {
		for i := range rows {
			if rows[i].Axis == axis && rows[i].Op == op {
				if rows[i].What == "" {
					rows[i].What = what
				}
				return &rows[i]
			}
		}
		rows = append(rows, trafficRow{Axis: axis, Op: op, What: what, Equal: true, Least: -1})
		return &rows[len(rows)-1]
	}
	for _, f := range facts {
		type pair struct{ sent, formula int64 }
		mine := map[[2]string]*pair{}
		of := func(axis, op string) *pair {
			k := [2]string{axis, op}
			if mine[k] == nil {
				mine[k] = &pair{}
			}
			return mine[k]
		}
		for _, x := range f.Formula {
			at(x.Axis, x.Op, x.What)
			of(x.Axis, x.Op).formula += x.Bytes
		}
		calls := int64(0)
		for _, e := range f.Sent {
			if e.Control {
				control.Sent += e.Bytes
				calls += e.Calls
				continue
			}
			r := at(e.Axis, e.Op, "")
			r.Calls = max(r.Calls, e.Calls)
			of(e.Axis, e.Op).sent += e.Bytes
		}
		control.Calls = max(control.Calls, calls)
		for i := range rows {
			r, x := &rows[i], of(rows[i].Axis, rows[i].Op)
			r.Sent += x.sent
			r.Formula += x.formula
			r.Equal = r.Equal && x.sent == x.formula
			if r.Most = max(r.Most, x.sent); r.Least < 0 || x.sent < r.Least {
				r.Least = x.sent
			}
		}
	}
	kept := rows[:0]
	for _, r := range rows {
		if r.Calls > 0 || r.Sent > 0 || r.Formula > 0 {
			kept = append(kept, r)
		}
	}
	return append(kept, control)
}

// memoryRow is a component over all ranks, the largest of each number.
type memoryRow struct {
	Name          string
	Planned, Peak int64
	Part          bool // of the component above it: planned alone
	Host          bool // of the host, apart from the device's
}

// memoryRows holds what was planned against what was taken, component by component; totals are the
// largest rank's, of the device and, where any is planned, of the host.
func memoryRows(facts []rankFacts) (rows, totals []memoryRow) {
	totals = []memoryRow{{Name: "all"}, {Name: "all, of the host", Host: true}}
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
			r, at := row(m.Name, m.Name, false), 0
			if r.Host = m.Host; m.Host {
				at = 1
			}
			r.Planned, r.Peak = max(r.Planned, m.Planned), max(r.Peak, m.Peak)
			planned[at], peak[at] = planned[at]+m.Planned, peak[at]+m.Peak
			for _, c := range m.Parts {
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
