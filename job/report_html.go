package job

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"path/filepath"
	"strings"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/job/plan"
	"ulysses/tensor"
)

var (
	//go:embed report/page.html
	pageText string
	//go:embed report/page.css
	pageStyle string
	//go:embed report/page.js
	pageScript string
	//go:embed report/uplot/uPlot.iife.min.js
	uplotScript string
	//go:embed report/uplot/uPlot.min.css
	uplotStyle string

	pageTemplate = template.Must(template.New("report.html").Funcs(template.FuncMap{
		"bytes": units.Grouped, "size": units.Bytes, "seconds": units.Seconds, "percent": func(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) },
		"number": units.Number, "over": over,
		"ratio": func(a, b int64) string { return over(float64(a), float64(b)) },
	}).Parse(pageText))
)

func over(a, b float64) string {
	if !(b > 1e-4) {
		return "–"
	}
	return fmt.Sprintf("%.2f", a/b)
}

// page is what report.html shows. Everything in it is text, which the template escapes, but for our
// own style and script.
type page struct {
	Style  template.CSS
	Script template.JS

	Title, State, About string
	Failed              string // the error that ended the run early
	Warnings            []string
	Facts               []factRow // the run in a few numbers
	Charts              []chart
	Metrics             *history
	Note                string // on what is missing
	Phases              []colouredPhase
	Bars                []bar
	BarsOf              string
	Memory              []memoryRow
	MemoryTotals        []memoryRow
	Choices             []factRow // of what becomes of activations
	Resident            []factRow
	Traffic             []trafficRow
	TrafficVerdict      factRow // for all operations
	Resolved            string  // the job, as it was run
	Job                 string  // the job file's text
	JobPath             string
	Sets                []string
	Keys                []file.KeyValue
	Environment         []factRow
	Program             string
}

type factRow struct{ Name, Value, Note string }

// bar is one rank's time.
type bar struct {
	Rank  int
	Total float64
	Parts []barPart
}

type barPart struct {
	Name    string
	Colour  int     // of the style's
	Seconds float64 // and of the longest bar:
	Percent template.CSS
}

// reportPath keeps the report of a training run apart from that of an evaluation in its folder.
func (s *session) reportPath() string {
	name := file.ReportFile
	if s.Job.Kind == "eval" && s.metrics.BesideRun() {
		name = file.EvalReportFile
	}
	return filepath.Join(s.Job.Output.Dir, name)
}

// writeReport writes the report on rank 0. Collective.
func (s *session) writeReport(p *progress, facts []rankFacts, here *plan.Machine, t *traced) error {
	var err error
	if s.Mesh.World.Rank() == 0 {
		if err = s.mayWrite(filepath.Base(s.reportPath())); err == nil {
			err = tensor.WriteFile(s.reportPath(), func(w io.Writer) error { return pageTemplate.Execute(w, s.page(p, facts, here, t)) })
		}
		if err != nil && status.Of(err) == status.Internal { // not the folder's fault
			err = status.Errorf(status.Internal, "report: %w", err)
		}
	}
	return comm.Agree(s.Mesh.World, err)
}

func (s *session) page(p *progress, facts []rankFacts, here *plan.Machine, t *traced) *page {
	h, err := readHistory(filepath.Join(s.Job.Output.Dir, "metrics.jsonl"), s.Job.Kind == "eval")
	name := strings.TrimSuffix(filepath.Base(s.Job.Path), filepath.Ext(s.Job.Path))
	x := &page{Style: template.CSS(uplotStyle + pageStyle), Script: template.JS(uplotScript + pageScript), Title: name, State: s.state(p),
		About: s.about(), Metrics: h, Charts: h.charts(), Phases: coloured(phaseRows(facts)), Traffic: trafficRows(facts), Job: file.WithoutLogins(s.source),
		JobPath: file.WithoutLogins(s.Job.Path), Keys: s.Job.Keys(), Resolved: s.Job.Resolved(s.steps), Program: programVersion()}
	x.TrafficVerdict = s.trafficVerdict(x.Traffic)
	for _, set := range s.sets {
		x.Sets = append(x.Sets, file.WithoutLogins(set))
	}
	for _, warning := range s.warned.list() {
		x.Warnings = append(x.Warnings, s.Job.Shown(warning))
	}
	if s.failed != nil {
		x.Failed = s.Job.Shown(withoutRanks(s.failed.Error()))
	}
	if err != nil {
		x.Note = s.Job.Shown(fmt.Sprintf("metrics.jsonl could not be read whole: %v", err))
	}
	x.Memory, x.MemoryTotals = memoryRows(facts)
	x.Bars, x.BarsOf = bars(facts, x.Phases)
	x.Resident = s.resident(facts)
	x.Facts = s.summary(p, h, here, x.MemoryTotals[0])
	if all := s.trainer.Choices(); len(all) > 1 || len(all) == 1 && (all[0].Extra > 0 || all[0].Offloads()) {
		for _, c := range all {
			x.Choices = append(x.Choices, factRow{assembly.DescribeChoice(c), fmt.Sprintf("%.1f MiB, %.1f MiB on the host, +%.1f %% time", units.MiB(c.Device), units.MiB(c.Host), 100*c.Extra),
				map[bool]string{true: "taken"}[c.Taken]})
		}
	}
	x.Environment = s.environment(facts, t)
	return x
}

// state is how the run ended.
func (s *session) state(p *progress) string {
	done := s.trainer.Loop.Resumed
	if p.last != nil {
		done = p.last.Step
	}
	switch {
	case s.Job.Kind == "eval" && s.failed != nil:
		return "failed"
	case s.Job.Kind == "eval":
		return "evaluated"
	case s.failed != nil:
		return fmt.Sprintf("failed after step %d of %d", done, s.steps)
	case s.trainer.Stopped():
		return fmt.Sprintf("stopped in time after step %d of %d, with a checkpoint", done, s.steps)
	case s.trainer.Loop.Resumed > 0:
		return fmt.Sprintf("finished %s, resumed after step %d", allSteps(s.steps), s.trainer.Loop.Resumed)
	}
	return "finished " + allSteps(s.steps)
}

// allSteps describes the steps that the run was to take.
func allSteps(n int64) string {
	if n == 1 {
		return "its one step"
	}
	return fmt.Sprintf("all %d steps", n)
}

// about is model, data and mesh in a line.
func (s *session) about() string {
	c, m := s.parts.Config, &s.Job.Mesh
	mixers := ""
	if n := c.LinearLayers(); n > 0 {
		mixers = fmt.Sprintf(" (%d of them linear attention)", n)
	}
	return fmt.Sprintf("%s: %s parameters in %d layers%s, width %d, vocabulary %d · sequences of %s tokens, %d in a step · %s: %d × data, %d × sequence, ZeRO stage %d",
		c.ModelType, units.Short(float64(s.parts.Model.Numel())), c.NumHiddenLayers, mixers, c.HiddenSize, c.VocabSize, units.Grouped(s.Job.Data.Sequence), m.GlobalBatch,
		units.Count(m.World, "rank"), m.Replicas, m.Ulysses, s.Job.Parallel.Zero)
}

// resident is the host's memory, which the plan is a part of where the device is the CPU.
func (s *session) resident(facts []rankFacts) []factRow {
	local, most, rank := s.world.Kind() == "local", int64(0), 0
	planned := int64(0)
	for r, f := range facts {
		if f.Resident > most {
			most, rank = f.Resident, r
		}
		for _, m := range f.Memory {
			planned += m.Planned
		}
	}
	if most == 0 {
		return nil
	}
	whose, inside := fmt.Sprintf("the process of rank %d", rank), 1
	if local {
		whose, inside = "the process of all ranks", len(facts)
	} else {
		planned /= int64(len(facts))
	}
	rows := []factRow{{"resident at most", units.Bytes(most), whose}}
	if s.Device.Info().Place == tensor.Host {
		rows = append(rows, factRow{"of it planned", units.Bytes(planned), "for " + units.Count(inside, "rank")},
			factRow{"the rest", units.Bytes(most - planned), "program, data, communicator, copies for checkpoints"})
	}
	return rows
}
