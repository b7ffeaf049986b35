package job

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"ulysses/comm"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/model"
)

// printPlan prints the memory and time that the plan expects, before the first step: in one or two
// lines, with --verbose in tables.
func (s *session) printPlan() error {
	plan, info := s.trainer.Components(), s.Device.Info()
	text := units.Bytes(model.Bytes(plan)) + " planned for a rank"
	if info.Memory > 0 {
		text += ", of " + units.Bytes(info.Memory)
	}
	if info.Sharing > 1 {
		text += fmt.Sprintf(" that %d ranks share", info.Sharing)
	}
	if host := model.HostBytes(plan); host > 0 {
		text += ", and " + units.Bytes(host) + " of the host's"
	}
	if tile := s.parts.Model.Tiles().MLP; tile > 0 {
		text += fmt.Sprintf("; MLP in tiles of %d tokens", tile)
	}
	fmt.Fprintf(s.Stdout, "memory           %s\n", text)
	for _, c := range s.trainer.Choices() {
		if c.Taken && (c.Extra > 0 || c.Offloads()) {
			fmt.Fprintf(s.Stdout, "activations      %s: +%.1f %% expected time\n", assembly.DescribeChoice(c), 100*c.Extra)
		}
	}
	return s.parts.PrintMemory(s.Details, s.trainer)
}

// report prints the time by phase, the speed, the bytes sent with their formulas and the paths of
// the outputs, and writes trace.json and report.html. Without --verbose it prints only the longest
// phases, and one line on the bytes sent if they equal the formulas.
func (s *session) report(p *progress) error {
	facts, err := s.gatherFacts()
	if err != nil {
		return err
	}
	here, err := s.rank().Measure(p.worked)
	if err != nil {
		return err
	}
	planned := s.rank().PlanStep(here)
	var step float64
	if planned != nil {
		steps := float64(p.last.Step - p.done)
		step = p.worked / steps
		if why := (&slowStep{facts, steps, step, planned}).because(); why != "" {
			s.Log.Warn().Msg(why)
		}
	}
	if err := s.printPhases(phaseRows(facts)); err != nil {
		return err
	}
	recorded, err := s.writeTrace()
	if err != nil {
		return err
	}
	if err := s.writeReport(p, facts, here, recorded); err != nil {
		return err
	}
	fmt.Fprintln(s.Stdout)
	if p.last != nil {
		fmt.Fprintf(s.Stdout, "loss             %.4f at step %d, %.4f at step %d\n", float64(p.first.Loss), p.first.Step, float64(p.last.Loss), p.last.Step)
	}
	for i, e := range p.evals {
		out := s.Stdout
		if i < len(p.evals)-1 {
			out = s.Details
		}
		fmt.Fprintf(out, "held-out loss    %.4f nats a token after step %d (%d tokens)\n", float64(e.EvalLoss), e.Step, e.EvalTokens)
	}
	if p.last != nil {
		fmt.Fprintf(s.Stdout, "speed            %s tokens/s, %s causal model FLOP/s a rank\n", units.Short(float64(p.tokens)/p.worked), units.Short(p.last.ModelTFLOPS*1e12))
		if planned != nil {
			fmt.Fprintf(s.Stdout, "step             %.4f s on average, %.4f s by a plan made now\n", step, planned.Seconds)
		}
		fmt.Fprintf(s.Details, "memory           %.1f MiB at most on a rank (planned: see above)\n", units.MiB(p.last.PeakBytes))
	}
	s.printTraffic(facts)
	s.printOutputs()
	recorded.print(s)
	if s.quiet {
		fmt.Fprintln(s.Result, s.result(p))
	}
	return nil
}

// mostPhases is the number of phases that are printed without --verbose.
const mostPhases = 5

// printPhases prints the phases, the longest first, and one row with the sum of the others.
func (s *session) printPhases(rows []phaseRow) error {
	w := tabwriter.NewWriter(s.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "\nphase\tcalls\tmean s\tmax/min\tshare\t\n")
	rest, others := phaseRow{}, 0
	for i, r := range rows {
		if i >= mostPhases && len(rows) > mostPhases+1 && s.Details == io.Discard {
			rest.Mean, rest.Share, others = rest.Mean+r.Mean, rest.Share+r.Share, others+1
			continue
		}
		ratio := "-"
		if r.Min > 1e-4 {
			ratio = fmt.Sprintf("%.2f", r.Max/r.Min)
		}
		fmt.Fprintf(w, "%s\t%d\t%.3f\t%s\t%.1f %%\t\n", r.Name, r.Calls, r.Mean, ratio, 100*r.Share)
	}
	if others > 0 {
		fmt.Fprintf(w, "%d others\t\t%.3f\t\t%.1f %%\t\n", others, rest.Mean, 100*rest.Share)
	}
	return w.Flush()
}

// printOutputs prints the paths of the files that the run has written.
func (s *session) printOutputs() {
	fmt.Fprintf(s.Stdout, "metrics          %s\n", filepath.Join(s.Job.Output.Dir, "metrics.jsonl"))
	if s.savesModel() {
		fmt.Fprintf(s.Stdout, "model            %s\n", s.Job.ModelDir())
	}
	fmt.Fprintf(s.Stdout, "report           %s\n", s.reportPath())
}

// savesModel reports whether this run writes output.dir/model: only at the end of training, not
// when the run stops early.
func (s *session) savesModel() bool {
	return s.Job.Kind == "train" && s.Job.Output.Model && s.failed == nil && !s.trainer.Stopped()
}

// result returns one line that summarises the run.
func (s *session) result(p *progress) string {
	var parts []string
	if p.last != nil {
		parts = append(parts, fmt.Sprintf("loss %.4f", float64(p.last.Loss)))
	}
	if n := len(p.evals); n > 0 {
		parts = append(parts, fmt.Sprintf("held-out loss %.4f", float64(p.evals[n-1].EvalLoss)))
	}
	if s.savesModel() {
		parts = append(parts, "model "+s.Job.ModelDir())
	}
	return s.state(p) + ": " + strings.Join(append(parts, "report "+s.reportPath()), ", ")
}

// printTraffic prints the bytes sent beside their formulas, except control messages: one line if
// all are equal, otherwise and with --verbose a line for each operation.
func (s *session) printTraffic(facts []rankFacts) {
	rows := trafficRows(facts)
	if !slices.ContainsFunc(rows, func(r trafficRow) bool { return r.Op == comm.OpAllToAll }) {
		rows = append([]trafficRow{{Op: comm.OpAllToAll, Equal: true}}, rows...)
	}
	rows = slices.DeleteFunc(rows, func(r trafficRow) bool { return r.Control })
	sent, out := int64(0), s.Details
	for _, r := range rows {
		if sent += r.Sent; !r.Equal {
			out = s.Stdout
		}
	}
	if out == io.Discard {
		fmt.Fprintf(s.Stdout, "traffic          %d bytes sent by all ranks, equal to the formulas\n", sent)
	}
	for _, r := range rows {
		verdict := "equal"
		if !r.Equal {
			verdict = "NOT EQUAL"
		}
		fmt.Fprintf(out, "%-16s %d bytes sent by all ranks, formula %d: %s\n", r.Op+"s", r.Sent, r.Formula, verdict)
	}
}
