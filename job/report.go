package job

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"text/tabwriter"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
)

// printMemory prints the plan of this rank's memory. Every rank's is the same but for a row of tokens.
func (s *session) printMemory() error {
	if err := printMemory(s.Stdout, s.trainer.Components(), s.Device.Info(), s.model.Tiles().MLP); err != nil {
		return err
	}
	if err := s.printChoices(); err != nil {
		return err
	}
	if plan := s.model.Linear(); plan != nil {
		fmt.Fprintf(s.Stdout, "linear attention: %v\n\n", plan)
	}
	return nil
}

func printMemory(out io.Writer, plan []model.Component, info device.Info, tile int64) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "memory of a rank\tbytes\tMiB\t")
	for _, c := range plan {
		fmt.Fprintf(w, "%s\t%d\t%.1f\t\n", c.Name, c.Bytes, mib(c.Bytes))
	}
	fmt.Fprintf(w, "planned\t%d\t%.1f\t\n", model.Bytes(plan), mib(model.Bytes(plan)))
	if host := model.HostBytes(plan); host > 0 {
		fmt.Fprintf(w, "planned, of the host\t%d\t%.1f\t\n", host, mib(host))
	}
	if info.Memory > 0 {
		name := "of the device"
		if info.Sharing > 1 {
			name = fmt.Sprintf("of the device, which %d ranks share", info.Sharing)
		}
		fmt.Fprintf(w, "%s\t%d\t%.1f\t\n", name, info.Memory, mib(info.Memory))
	}
	if tile > 0 {
		fmt.Fprintf(w, "MLP in tiles of\t%d tokens\t\t\n", tile)
	}
	fmt.Fprintln(w)
	return w.Flush()
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// report prints the run table: where the time went, the speed, what was sent against the formulas, and where the outputs are; and writes
// trace.json and report.html.
func (s *session) report(p *progress) error {
	facts, err := s.gatherFacts()
	if err != nil {
		return err
	}
	planned, err := s.plannedStep(p.worked)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(s.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "\nphase\tcalls\tmean s\tmax/min\tshare\t\n")
	for _, r := range phaseRows(facts) {
		ratio := "-"
		if r.Min > 1e-4 {
			ratio = fmt.Sprintf("%.2f", r.Max/r.Min)
		}
		fmt.Fprintf(w, "%s\t%d\t%.3f\t%s\t%.1f %%\t\n", r.Name, r.Calls, r.Mean, ratio, 100*r.Share)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	recorded, err := s.writeTrace()
	if err != nil {
		return err
	}
	if err := s.writeReport(p, facts, recorded); err != nil {
		return err
	}
	fmt.Fprintln(s.Stdout)
	if p.last != nil {
		fmt.Fprintf(s.Stdout, "loss             %.4f at step %d, %.4f at step %d\n", float64(p.first.Loss), p.first.Step, float64(p.last.Loss), p.last.Step)
		fmt.Fprintf(s.Stdout, "speed            %s tokens/s, %s causal model FLOP/s a rank\n", short(float64(p.tokens)/p.worked), short(p.last.ModelTFLOPS*1e12))
		if planned > 0 {
			fmt.Fprintf(s.Stdout, "step             %.4f s on average, %.4f s by a plan made now\n", p.worked/float64(p.last.Step-p.done), planned)
		}
		fmt.Fprintf(s.Stdout, "memory           %.1f MiB at most on a rank (planned: see above)\n", mib(p.last.PeakBytes))
	}
	for _, e := range p.evals {
		fmt.Fprintf(s.Stdout, "held-out loss    %.4f nats a token after step %d (%d tokens)\n", float64(e.EvalLoss), e.Step, e.EvalTokens)
	}
	s.printTraffic(facts)
	fmt.Fprintf(s.Stdout, "metrics          %s\n", filepath.Join(s.Job.Output.Dir, "metrics.jsonl"))
	if s.Job.Kind == "train" && s.Job.Output.Model && s.failed == nil {
		fmt.Fprintf(s.Stdout, "model            %s\n", filepath.Join(s.Job.Output.Dir, "model"))
	}
	fmt.Fprintf(s.Stdout, "report           %s\n", s.reportPath())
	recorded.print(s)
	return nil
}

// printTraffic prints what was sent against its formula, but for control: the all-to-alls, and what weights and gradients took.
func (s *session) printTraffic(facts []rankFacts) {
	rows := trafficRows(facts)
	if !slices.ContainsFunc(rows, func(r trafficRow) bool { return r.Op == comm.OpAllToAll }) {
		rows = append([]trafficRow{{Op: comm.OpAllToAll, Equal: true}}, rows...)
	}
	for _, r := range rows {
		if r.Control {
			continue
		}
		verdict := "equal"
		if !r.Equal {
			verdict = "NOT EQUAL"
		}
		fmt.Fprintf(s.Stdout, "%-16s %d bytes sent by all ranks, formula %d: %s\n", r.Op+"s", r.Sent, r.Formula, verdict)
	}
}
