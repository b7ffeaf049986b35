package report

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/model"
	"ulysses/train"
)

// PrintPlan prints the planned memory before the first step: in one or two lines, with --verbose in
// tables. Collective.
func (r *Run) PrintPlan() error {
	rank, plan, err := r.largestPlan()
	if err != nil {
		return err
	}
	info, name := r.Parts.Device.Info(), "a rank"
	if rank > 0 {
		name = fmt.Sprintf("rank %d, which needs the most", rank)
	}
	text := units.Bytes(model.Bytes(plan)) + " planned for " + name
	if info.Memory > 0 {
		text += ", of " + units.Bytes(info.Memory)
	}
	if info.Sharing > 1 {
		text += fmt.Sprintf(" that %d ranks share", info.Sharing)
	}
	if info.Free > 0 {
		text += ", " + units.Bytes(info.Free) + " free"
	}
	if host := model.HostBytes(plan); host > 0 {
		text += ", and " + units.Bytes(host) + " of host memory"
	}
	for _, x := range assembly.TilesUsed(r.Parts.Model.Tiles(), info) {
		text += fmt.Sprintf("; %s %d tokens", x.Name, x.Tokens)
	}
	fmt.Fprintf(r.Stdout, "memory           %s\n", text)
	for _, c := range r.Trainer.Choices() {
		if c.Chosen && (c.Extra > 0 || c.Offloads()) {
			fmt.Fprintf(r.Stdout, "activations      %s: +%.1f %% expected time\n", assembly.DescribeChoice(c),
				100*c.Extra)
		}
	}
	return r.Parts.PrintMemory(r.Details, r.Trainer,
		assembly.RankPlan{Rank: fmt.Sprint("rank ", rank), Components: plan})
}

// Write prints the time by phase, the speed, the bytes sent with their formulas and the paths of
// the outputs, and writes trace.json and report.html. Without --verbose it prints only the longest
// phases, and one line on the bytes sent if they equal the formulas. Collective.
func (r *Run) Write() error {
	facts, err := r.gatherFacts()
	if err != nil {
		return err
	}
	machine, err := r.Rank.Measure(r.Totals.Seconds)
	if err != nil {
		return err
	}
	planned := r.Rank.PlanStep(machine)
	if planned != nil {
		slow := slowStep{facts, float64(r.Totals.steps()), r.secondsPerStep(), planned}
		if why := slow.because(); why != "" {
			r.Warn(why)
		}
	}
	if err := r.printPhases(phaseRows(facts)); err != nil {
		return err
	}
	recorded, err := r.writeTrace()
	if err != nil {
		return err
	}
	if err := r.writePage(facts, machine, recorded); err != nil {
		return err
	}
	fmt.Fprintln(r.Stdout)
	r.printLosses()
	if t := r.Totals; t.Last != nil {
		fmt.Fprintf(r.Stdout, "speed            %s tokens/s, %s causal model FLOP/s a rank\n",
			units.Short(t.perSecond(float64(t.Tokens))), units.Short(t.perSecond(t.FLOPs)))
		if planned != nil {
			fmt.Fprintf(r.Stdout, "step             %.4f s on average, %.4f s by a plan made now\n", r.secondsPerStep(),
				planned.Seconds)
		}
		fmt.Fprintf(r.Details, "memory           %.1f MiB at most on a rank (planned: see above)\n",
			units.MiB(t.Last.PeakBytes))
	}
	r.printTraffic(facts)
	r.printOutputs()
	r.printTrace(recorded)
	if r.Result != nil {
		fmt.Fprintln(r.Result, r.summaryLine())
	}
	return nil
}

func (r *Run) secondsPerStep() float64 { return r.Totals.Seconds / float64(r.Totals.steps()) }

// mostPhases is the number of phases that are printed without --verbose.
const mostPhases = 5

// printPhases prints the phases, the longest first, and one row with the sum of the others.
func (r *Run) printPhases(rows []phaseRow) error {
	w := tabwriter.NewWriter(r.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "\nphase\tcalls\tmean s\tmax/min\tshare\t\n")
	rest, others := phaseRow{}, 0
	for i, p := range rows {
		if i >= mostPhases && len(rows) > mostPhases+1 && r.Details == io.Discard {
			rest.Mean, rest.Share, others = rest.Mean+p.Mean, rest.Share+p.Share, others+1
			continue
		}
		ratio := "-"
		if p.Min > 1e-4 {
			ratio = fmt.Sprintf("%.2f", p.Max/p.Min)
		}
		fmt.Fprintf(w, "%s\t%d\t%.3f\t%s\t%.1f %%\t\n", clock.Label(p.Name), p.Calls, p.Mean, ratio, 100*p.Share)
		if p.Waiting > 0 {
			fmt.Fprintf(w, "of it, waiting for ranks\t\t%.3f\t\t%.1f %%\t\n", p.Waiting, 100*p.Share*p.Waiting/p.Mean)
		}
	}
	if others > 0 {
		fmt.Fprintf(w, "%d others\t\t%.3f\t\t%.1f %%\t\n", others, rest.Mean, 100*rest.Share)
	}
	return w.Flush()
}

// printLosses prints the first and the last loss, and the last loss on held-out data; with
// --verbose all of these.
func (r *Run) printLosses() {
	t := r.Totals
	if t.Last != nil {
		fmt.Fprintf(r.Stdout, "loss             %.4f at step %d, %.4f at step %d\n", float64(t.First.Loss),
			t.First.Step, float64(t.Last.Loss), t.Last.Step)
	}
	for i, e := range t.Evals {
		out := r.Stdout
		if i < len(t.Evals)-1 {
			out = r.Details
		}
		after := fmt.Sprintf(" after step %d", e.Step)
		if e.Step == train.EvaluationStep { // of a job that has no steps
			after = ""
		}
		fmt.Fprintf(out, "held-out loss    %.4f nats a token%s (%d tokens)\n", float64(e.EvalLoss), after, e.EvalTokens)
		for _, set := range e.Sets {
			fmt.Fprintf(out, "                 %.4f of %s (%d tokens)\n", float64(set.Loss), set.Name, set.Tokens)
		}
	}
	if b := r.Trainer.Best(); b != nil {
		fmt.Fprintf(r.Stdout, "best             %v\n", b)
	}
	if r.Failed == "" && r.Trainer.EndedEarly() {
		fmt.Fprintf(r.Stdout, "ended early      because %s\n", WhyEarly(r.job()))
	}
}

// printTraffic prints the bytes sent beside their formulas, except control messages: one line if
// all are equal, otherwise and with --verbose a line for each operation.
func (r *Run) printTraffic(facts []rankFacts) {
	rows := trafficRows(facts)
	if !slices.ContainsFunc(rows, func(t trafficRow) bool { return t.Op == comm.OpAllToAll }) {
		rows = append([]trafficRow{{Op: comm.OpAllToAll, Equal: true}}, rows...)
	}
	rows = slices.DeleteFunc(rows, func(t trafficRow) bool { return t.Control })
	sent, out := int64(0), r.Details
	for _, t := range rows {
		if sent += t.Sent; !t.Equal {
			out = r.Stdout
		}
	}
	if out == io.Discard {
		fmt.Fprintf(r.Stdout, "traffic          %d bytes sent by all ranks, equal to the formulas\n", sent)
	}
	var levels comm.Traffic
	for _, f := range facts {
		if f.Levels != nil {
			levels.InsideBytes += f.Levels.InsideBytes
			levels.BetweenBytes += f.Levels.BetweenBytes
		}
	}
	if levels != (comm.Traffic{}) {
		fmt.Fprintf(r.Stdout, "two levels       %d bytes sent inside nodes, %d between nodes\n", levels.InsideBytes,
			levels.BetweenBytes)
	}
	for _, t := range rows {
		verdict := "equal"
		if !t.Equal {
			verdict = "NOT EQUAL"
		}
		fmt.Fprintf(out, "%-16s %d bytes sent by all ranks, formula %d: %s\n", t.Op+"s", t.Sent, t.Formula, verdict)
	}
}

// printOutputs prints the paths of the files that the run has written.
func (r *Run) printOutputs() {
	fmt.Fprintf(r.Stdout, "metrics          %s\n", filepath.Join(r.job().Output.Dir, file.MetricsFile))
	if r.savesModel() {
		fmt.Fprintf(r.Stdout, "model            %s\n", r.job().ModelDir())
	}
	fmt.Fprintf(r.Stdout, "report           %s\n", r.path())
}

// summaryLine returns one line that summarises the run, for --quiet.
func (r *Run) summaryLine() string {
	var results []string
	if t := r.Totals; t.Last != nil {
		results = append(results, fmt.Sprintf("loss %.4f", float64(t.Last.Loss)))
	}
	if n := len(r.Totals.Evals); n > 0 {
		results = append(results, fmt.Sprintf("held-out loss %.4f", float64(r.Totals.Evals[n-1].EvalLoss)))
	}
	if b := r.Trainer.Best(); b != nil {
		results = append(results, "best "+b.String())
	}
	if r.savesModel() {
		results = append(results, "model "+r.job().ModelDir())
	}
	return r.state() + ": " + strings.Join(append(results, "report "+r.path()), ", ")
}
