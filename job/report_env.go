package job

import (
	"fmt"
	"runtime"
	"strings"
	"time"

	"ulysses/comm"
	"ulysses/internal/units"
	"ulysses/job/file"
)

func (s *session) environment(facts []rankFacts, t *traced) []factRow {
	end := time.Now()
	info := s.Device.Info()
	rows := []factRow{
		{"program", programVersion(), ""},
		{"began", s.began.Format("2006-01-02 15:04:05 MST"), ""},
		{"ended", end.Format("2006-01-02 15:04:05 MST"), "after " + end.Sub(s.began).Round(time.Second).String()},
		{"hosts", hosts(facts), ""},
		{"processors", distinct(facts, func(f rankFacts) string { return f.CPU }), runtime.GOOS + "/" + runtime.GOARCH},
		{"ranks", fmt.Sprintf("%d × %s", len(facts), distinct(facts, func(f rankFacts) string { return units.Count(f.Threads, "thread") })), ""},
		{"device", info.Kind + ": " + distinct(facts, func(f rankFacts) string { return f.Device }), ""},
		{"kernels", info.Kernels, "computing in " + file.DTypeName(s.Compute)},
		{"communicator", s.Mesh.World.Kind(), ""},
	}
	if lib := strings.Join(strings.Fields(comm.Library()), " "); lib != "" {
		rows = append(rows, factRow{"MPI", lib, ""})
	}
	if plan := s.parts.Model.Linear(); plan != nil {
		rows = append(rows, factRow{"linear attention", plan.String(), ""})
	}
	if t != nil {
		rows = append(rows, factRow{"trace.json", fmt.Sprintf("steps %d to %d, %s spans, %s", t.First, t.Last, units.Grouped(t.Spans), t.clocks()), fmt.Sprintf("%d did not fit", t.Lost)})
	}
	rows = append(rows, variables()...)
	for i := range rows {
		rows[i].Value = s.Job.Shown(rows[i].Value)
	}
	return rows
}
