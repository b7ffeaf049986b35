package job

import (
	"fmt"
	"runtime"
	"strings"
	"time"

	"ulysses/comm"
)

// keys is every key of the job with its value.
func (s *session) keys() []keyRow {
	var rows []keyRow
	for _, f := range schema {
		rows = append(rows, keyRow{f.key, withoutLogins(tomlValue(s.Job.valueShown(&f))), s.Job.IsSet(f.key)})
	}
	return rows
}

func (s *session) environment(facts []rankFacts, t *traced) []factRow {
	end := time.Now()
	info := s.Device.Info()
	rows := []factRow{
		{"program", programVersion(), ""},
		{"began", s.began.Format("2006-01-02 15:04:05 MST"), ""},
		{"ended", end.Format("2006-01-02 15:04:05 MST"), "after " + end.Sub(s.began).Round(time.Second).String()},
		{"hosts", hosts(facts), ""},
		{"processors", distinct(facts, func(f rankFacts) string { return f.CPU }), runtime.GOOS + "/" + runtime.GOARCH},
		{"ranks", fmt.Sprintf("%d × %s", len(facts), distinct(facts, func(f rankFacts) string { return plural(f.Threads, "thread") })), ""},
		{"device", info.Kind + ": " + distinct(facts, func(f rankFacts) string { return f.Device }), ""},
		{"kernels", info.Kernels, "computing in " + dtypeName(s.Compute)},
		{"communicator", s.Mesh.World.Kind(), ""},
	}
	if lib := strings.Join(strings.Fields(comm.Library()), " "); lib != "" {
		rows = append(rows, factRow{"MPI", lib, ""})
	}
	if plan := s.model.Linear(); plan != nil {
		rows = append(rows, factRow{"linear attention", plan.String(), ""})
	}
	if t != nil {
		rows = append(rows, factRow{"trace.json", fmt.Sprintf("steps %d to %d, %s spans, %s", t.First, t.Last, groups(t.Spans), t.clocks()), fmt.Sprintf("%d did not fit", t.Lost)})
	}
	rows = append(rows, variables()...)
	for i := range rows {
		rows[i].Value = s.Job.shown(rows[i].Value)
	}
	return rows
}
