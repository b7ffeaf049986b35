package job

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"ulysses/comm"
	"ulysses/internal/status"
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
		"bytes": groups, "size": size, "seconds": seconds, "percent": func(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) },
		"number": number, "colour": func(i int) int { return i % colours }, "over": over,
		"ratio": func(a, b int64) string { return over(float64(a), float64(b)) },
	}).Parse(pageText))
)

// colours is how many the style has.
const colours = 10

func over(a, b float64) string {
	if !(b > 1e-4) {
		return "–"
	}
	return fmt.Sprintf("%.2f", a/b)
}

// page is what report.html shows. Everything in it is text, which the template escapes, but for our own style and script.
type page struct {
	Style  template.CSS
	Script template.JS

	Title, State, About string
	Failed              string // what ended the run before its time
	Warnings            []string
	Facts               []factRow // the run in a few numbers
	Charts              []chart
	Metrics             *history
	Note                string // on what is missing
	Phases              []phaseRow
	Bars                []bar
	BarsOf              string
	Memory              []memoryRow
	MemoryTotals        []memoryRow
	Choices             []factRow // of what becomes of activations
	Resident            []factRow
	Traffic             []trafficRow
	Job                 string
	JobPath             string
	Sets                []string
	Keys                []keyRow
	Environment         []factRow
}

type factRow struct{ Name, Value, Note string }

type keyRow struct {
	Key, Value string
	Set        bool
}

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
	name := "report.html"
	if s.Job.Kind == "eval" && s.trainer.Metrics.BesideRun() {
		name = "report-eval.html"
	}
	return filepath.Join(s.Job.Output.Dir, name)
}

// writeReport writes the report on rank 0. Collective.
func (s *session) writeReport(p *progress, facts []rankFacts, t *traced) error {
	var err error
	if s.Mesh.World.Rank() == 0 {
		err = tensor.WriteFile(s.reportPath(), func(w io.Writer) error { return pageTemplate.Execute(w, s.page(p, facts, t)) })
		if err != nil && status.Of(err) == status.Internal { // not the folder's fault
			err = status.Errorf(status.Internal, "report: %w", err)
		}
	}
	return comm.Agree(s.Mesh.World, err)
}

func (s *session) page(p *progress, facts []rankFacts, t *traced) *page {
	h, err := readHistory(filepath.Join(s.Job.Output.Dir, "metrics.jsonl"), s.Job.Kind == "eval")
	name := strings.TrimSuffix(filepath.Base(s.Job.Path), filepath.Ext(s.Job.Path))
	x := &page{Style: template.CSS(uplotStyle + pageStyle), Script: template.JS(uplotScript + pageScript), Title: name, State: s.state(p),
		About: s.about(), Metrics: h, Charts: h.charts(), Phases: phaseRows(facts), Traffic: trafficRows(facts), Job: withoutLogins(s.source),
		JobPath: withoutLogins(s.Job.Path), Keys: s.keys()}
	for _, set := range s.sets {
		x.Sets = append(x.Sets, withoutLogins(set))
	}
	for _, warning := range s.warned.list() {
		x.Warnings = append(x.Warnings, s.Job.shown(warning))
	}
	if s.failed != nil {
		x.Failed = s.Job.shown(withoutRanks(s.failed.Error()))
	}
	if err != nil {
		x.Note = s.Job.shown(fmt.Sprintf("metrics.jsonl could not be read whole: %v", err))
	}
	x.Memory, x.MemoryTotals = memoryRows(facts)
	x.Bars, x.BarsOf = bars(facts, x.Phases)
	x.Resident = s.resident(facts)
	x.Facts = s.summary(p, h, x.Traffic, x.MemoryTotals[0])
	if all := s.trainer.Choices(); len(all) > 1 || len(all) == 1 && (all[0].Extra > 0 || all[0].Offloads()) {
		for _, c := range all {
			x.Choices = append(x.Choices, factRow{wayOf(c), fmt.Sprintf("%.1f MiB, %.1f MiB on the host, +%.1f %% time", mib(c.Device), mib(c.Host), 100*c.Extra),
				map[bool]string{true: "taken"}[c.Taken]})
		}
	}
	x.Environment = s.environment(facts, t)
	return x
}

// state is how the run ended.
func (s *session) state(p *progress) string {
	done := s.trainer.Resumed
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
	case s.trainer.Resumed > 0:
		return fmt.Sprintf("finished all %d steps, resumed after step %d", s.steps, s.trainer.Resumed)
	}
	return fmt.Sprintf("finished all %d steps", s.steps)
}

// about is model, data and mesh in a line.
func (s *session) about() string {
	c, m := s.config, &s.Job.Mesh
	mixers := ""
	if n := c.LinearLayers(); n > 0 {
		mixers = fmt.Sprintf(" (%d of them linear attention)", n)
	}
	return fmt.Sprintf("%s: %s parameters in %d layers%s, width %d, vocabulary %d · sequences of %s tokens, %d in a step · %d %s: %d × data, %d × sequence, ZeRO stage %d",
		c.ModelType, short(float64(s.model.Numel())), c.NumHiddenLayers, mixers, c.HiddenSize, c.VocabSize, groups(s.Job.Data.Sequence), m.GlobalBatch,
		m.World, map[bool]string{true: "rank", false: "ranks"}[m.World == 1], m.Replicas, m.Ulysses, s.Job.Parallel.Zero)
}

func (s *session) summary(p *progress, h *history, traffic []trafficRow, memory memoryRow) []factRow {
	var rows []factRow
	if p.last != nil {
		rows = append(rows, factRow{"loss", number(float64(p.last.Loss)), fmt.Sprintf("at step %d; %s at step %d", p.last.Step, number(h.loss.first()), int64(h.loss.firstX()))},
			factRow{"tokens/s", short(float64(p.tokens) / math.Max(p.worked, 1e-9)), fmt.Sprintf("over the %d steps of this run", p.last.Step-p.done)},
			factRow{"model FLOP/s a rank", short(p.last.ModelTFLOPS * 1e12), "causal, in the last step"})
	}
	if n := len(h.Evals); n > 0 {
		e := h.Evals[n-1]
		rows = append(rows, factRow{"held-out loss", number(e.Loss), fmt.Sprintf("perplexity %s, %s tokens", number(e.Perplexity), groups(e.Tokens))})
	}
	rows = append(rows, factRow{"memory of a rank", size(memory.Peak), "at most; planned " + size(memory.Planned)})
	verdict, note := "equal", "bytes sent against the formulas"
	for _, t := range traffic {
		if !t.Control && !t.Equal {
			verdict, note = "NOT EQUAL", t.Op+" on axis "+t.Axis+": see below"
		}
	}
	if s.Mesh.World.Size() == 1 {
		verdict, note = "none", "one rank has nobody to send to"
	}
	rows = append(rows, factRow{"traffic", verdict, note})
	if h.NoNumber > 0 {
		rows = append(rows, factRow{"no number", groups(h.NoNumber), fmt.Sprintf("steps whose loss or gradient was none; %d skipped", h.Skipped)})
	}
	return rows
}

func (p points) first() float64 {
	if len(p.Y) == 0 {
		return math.NaN()
	}
	return p.Y[0]
}

func (p points) firstX() float64 {
	if len(p.X) == 0 {
		return 0
	}
	return p.X[0]
}

// mostBars is how many ranks have a bar of their own.
const mostBars = 64

// bars are the ranks' times, a bar each. Of many ranks some are shown, evenly spread; the table has them all.
func bars(facts []rankFacts, phases []phaseRow) (all []bar, of string) {
	colour, longest := map[string]int{}, 0.0
	for i, p := range phases {
		colour[p.Name] = i % colours
	}
	n := min(len(facts), mostBars)
	for i := range n {
		rank := i * len(facts) / n
		b := bar{Rank: rank}
		seconds := map[string]float64{}
		for _, p := range facts[rank].Phases {
			seconds[p.Name] = p.Seconds
			b.Total += p.Seconds
		}
		for _, p := range phases {
			if x := seconds[p.Name]; x > 0 {
				b.Parts = append(b.Parts, barPart{Name: p.Name, Colour: colour[p.Name], Seconds: x})
			}
		}
		longest = math.Max(longest, b.Total)
		all = append(all, b)
	}
	for i := range all {
		for j := range all[i].Parts {
			x := &all[i].Parts[j]
			x.Percent = template.CSS(strconv.FormatFloat(100*x.Seconds/longest, 'f', 3, 64))
		}
	}
	if n < len(facts) {
		of = fmt.Sprintf("%d of %d ranks", n, len(facts))
	}
	return all, of
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
	rows := []factRow{{"resident at most", size(most), whose}}
	if s.Device.Info().Place == tensor.Host {
		rows = append(rows, factRow{"of it planned", size(planned), fmt.Sprintf("for %d %s", inside, map[bool]string{true: "rank", false: "ranks"}[inside == 1])},
			factRow{"the rest", size(most - planned), "program, data, communicator, copies for checkpoints"})
	}
	return rows
}
