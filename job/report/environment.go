package report

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"ulysses/comm"
	"ulysses/internal/units"
	"ulysses/job/file"
)

// environment describes the program, the machines, the device and the communicator of the run.
func (r *Run) environment(facts []rankFacts, t *traceFile) []factRow {
	const layout = "2006-01-02 15:04:05 MST"
	end, info := time.Now(), r.Parts.Device.Info()
	threads := distinct(facts, func(f rankFacts) string { return units.Count(f.Threads, "thread") })
	rows := []factRow{
		{"program", r.Program, ""},
		{"began", r.Began.Format(layout), ""},
		{"ended", end.Format(layout), "after " + end.Sub(r.Began).Round(time.Second).String()},
		{"hosts", hosts(facts), ""},
		{"processors", distinct(facts, func(f rankFacts) string { return f.CPU }), runtime.GOOS + "/" + runtime.GOARCH},
		{"ranks", fmt.Sprintf("%d × %s", len(facts), threads), ""},
		{"device", info.Kind + ": " + distinct(facts, func(f rankFacts) string { return f.Device }), ""},
		{"kernels", info.Kernels, "computing in " + file.DTypeName(r.Parts.Compute)},
		{"communicator", r.world().Kind(), ""},
	}
	if lib := strings.Join(strings.Fields(comm.Library()), " "); lib != "" {
		rows = append(rows, factRow{"MPI", lib, ""})
	}
	if plan := r.Parts.Model.Linear(); plan != nil {
		rows = append(rows, factRow{"linear attention", plan.String(), ""})
	}
	if t != nil {
		rows = append(rows,
			factRow{"trace.json",
				fmt.Sprintf("steps %d to %d, %s spans, %s", t.First, t.Last, units.Grouped(t.Spans), t.clocks()),
				fmt.Sprintf("%d spans did not fit", t.Lost)})
	}
	rows = append(rows, variables()...)
	for i := range rows {
		rows[i].Value = r.job().Shown(rows[i].Value)
	}
	return rows
}

// distinct returns the different values of a fact over the ranks, separated by commas.
func distinct(facts []rankFacts, value func(rankFacts) string) string {
	var all []string
	for _, f := range facts {
		if x := value(f); !slices.Contains(all, x) {
			all = append(all, x)
		}
	}
	return strings.Join(all, ", ")
}

// hosts lists the hosts with their ranks.
func hosts(facts []rankFacts) string {
	var all []string
	for lo := 0; lo < len(facts); {
		hi := lo
		for hi < len(facts) && facts[hi].Host == facts[lo].Host {
			hi++
		}
		if hi == lo+1 {
			all = append(all, fmt.Sprintf("%s: rank %d", facts[lo].Host, lo))
		} else {
			all = append(all, fmt.Sprintf("%s: ranks %d to %d", facts[lo].Host, lo, hi-1))
		}
		lo = hi
	}
	return strings.Join(all, "; ")
}
