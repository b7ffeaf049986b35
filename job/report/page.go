package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/job/plan"
	"ulysses/tensor"
)

var (
	//go:embed page.html
	pageText string
	//go:embed page.css
	pageStyle string
	//go:embed page.js
	pageScript string
	//go:embed uplot/uPlot.iife.min.js
	uplotScript string
	//go:embed uplot/uPlot.min.css
	uplotStyle string

	pageTemplate = template.Must(template.New("report.html").Funcs(template.FuncMap{
		"bytes": units.Grouped, "size": units.Bytes, "seconds": units.Seconds, "number": units.Number, "over": over,
		"label":   clock.Label,
		"percent": func(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) },
		"ratio":   func(a, b int64) string { return over(float64(a), float64(b)) },
	}).Parse(pageText))
)

// over returns the quotient of two numbers as text; a dash if the divisor is almost 0.
func over(a, b float64) string {
	if !(b > 1e-4) {
		return "–"
	}
	return fmt.Sprintf("%.2f", a/b)
}

// page is the content of report.html. The template escapes all of it except Style and Script, which
// are parts of this program.
type page struct {
	Style  template.CSS
	Script template.JS

	Title, State, About string
	Failed              string // the error that ended the run early
	Warnings            []string
	Facts               []factRow // the cards at the top
	Charts              []chart
	Metrics             *history
	Samples             []Sample // the last step first
	Note                string   // an error of reading metrics.jsonl
	Phases              []colouredPhase
	Bars                []bar
	BarsOf              string // the selection of ranks that have a bar; "" = all
	Memory              []memoryRow
	MemoryTotals        []memoryRow
	Choices             []factRow // policies for saved activations
	Resident            []factRow
	Traffic             []trafficRow
	TrafficVerdict      factRow
	Resolved            string // the job with all values that were used
	Job                 string // the text of the job file
	JobPath             string
	Sets                []string
	Keys                []file.KeyValue
	Environment         []factRow
	Program             string
}

type factRow struct{ Name, Value, Note string }

// writePage writes the report on rank 0. Collective.
func (r *Run) writePage(facts []rankFacts, machine *plan.Machine, t *traceFile) error {
	var err error
	if r.world().Rank() == 0 {
		if err = r.Check(filepath.Base(r.path())); err == nil {
			err = tensor.WriteFile(r.path(), func(w io.Writer) error {
				return pageTemplate.Execute(w, r.page(facts, machine, t))
			})
		}
		// a fault of the template, not of the folder
		if err != nil && status.Of(err) == status.Internal {
			err = status.Errorf(status.Internal, "report: %w", err)
		}
	}
	return comm.Agree(r.world(), err)
}

func (r *Run) page(facts []rankFacts, machine *plan.Machine, t *traceFile) *page {
	j := r.job()
	h, err := readHistory(filepath.Join(j.Output.Dir, file.MetricsFile), j.Kind == "eval")
	name := strings.TrimSuffix(filepath.Base(j.Path), filepath.Ext(j.Path))
	x := &page{Style: template.CSS(uplotStyle + pageStyle), Script: template.JS(uplotScript + pageScript), Title: name,
		State: r.state(), About: r.about(), Metrics: h, Charts: h.charts(), Phases: coloured(phaseRows(facts)),
		Traffic: trafficRows(facts), Job: file.WithoutLogins(r.Source), JobPath: file.WithoutLogins(j.Path),
		Keys: j.Keys(), Resolved: j.Resolved(r.Steps), Program: r.Program,
		Failed: j.Shown(r.Failed)}
	x.TrafficVerdict = trafficVerdict(r.world().Size(), x.Traffic)
	for _, set := range r.Sets {
		x.Sets = append(x.Sets, file.WithoutLogins(set))
	}
	for _, warning := range r.Warnings() {
		x.Warnings = append(x.Warnings, j.Shown(warning))
	}
	if err != nil {
		x.Note = j.Shown(fmt.Sprintf("metrics.jsonl was not read to its end: %v", err))
	}
	for _, sample := range slices.Backward(r.Totals.Samples) {
		x.Samples = append(x.Samples, sample)
	}
	x.Memory, x.MemoryTotals = memoryRows(facts)
	x.Bars, x.BarsOf = bars(facts, x.Phases)
	x.Resident = r.resident(facts)
	x.Facts = r.summary(h, machine, x.MemoryTotals[0])
	x.Choices = r.choices()
	x.Environment = r.environment(facts, t)
	return x
}

// choices returns the policies for saved activations that were considered; none if there was
// nothing to choose.
func (r *Run) choices() (rows []factRow) {
	all := r.Trainer.Choices()
	if len(all) == 1 && all[0].Extra == 0 && !all[0].Offloads() {
		return nil
	}
	for _, c := range all {
		rows = append(rows, factRow{assembly.DescribeChoice(c),
			fmt.Sprintf("%.1f MiB, %.1f MiB on the host, +%.1f %% time", units.MiB(c.Device), units.MiB(c.Host),
				100*c.Extra),
			map[bool]string{true: "chosen"}[c.Chosen]})
	}
	return rows
}

// about describes model, data and mesh in one line.
func (r *Run) about() string {
	j, c := r.job(), r.Parts.Config
	m := &j.Mesh
	mixers := ""
	if n := c.LinearLayers(); n > 0 {
		mixers = fmt.Sprintf(" (%d of them linear attention)", n)
	}
	ring := ""
	if m.Ring > 1 {
		ring = fmt.Sprintf(" (ulysses %d x ring %d)", m.Ulysses, m.Ring)
	}
	experts := ""
	if m.Experts > 1 {
		experts = fmt.Sprintf(", experts over %d", m.Experts)
	}
	return fmt.Sprintf("%s: %s parameters in %d layers%s, width %d, vocabulary %d · sequences of %s tokens, %d in a step · %s: %d × data, %d × sequence%s%s, ZeRO stage %d",
		c.ModelType, units.Short(float64(r.Parts.Model.Numel())), c.NumHiddenLayers, mixers, c.HiddenSize, c.VocabSize,
		units.Grouped(j.Data.Sequence), m.GlobalBatch, units.Count(m.World, "rank"), m.Replicas, m.Ulysses*m.Ring, ring,
		experts, j.Parallel.Zero)
}
