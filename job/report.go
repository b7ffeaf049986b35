package job

import (
	"fmt"
	"path/filepath"
	"sort"
	"strings"
	"text/tabwriter"

	"ulysses/comm"
	"ulysses/model"
	"ulysses/tensor"
)

// printMemory prints the plan of this rank's memory. Every rank's is the same but for a row of tokens.
func (s *session) printMemory() error {
	w := tabwriter.NewWriter(s.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	plan := s.trainer.Components()
	fmt.Fprintln(w, "memory of a rank\tbytes\tMiB\t")
	for _, c := range plan {
		fmt.Fprintf(w, "%s\t%d\t%.1f\t\n", c.Name, c.Bytes, mib(c.Bytes))
	}
	fmt.Fprintf(w, "planned\t%d\t%.1f\t\n", model.Bytes(plan), mib(model.Bytes(plan)))
	if host := model.HostBytes(plan); host > 0 {
		fmt.Fprintf(w, "planned, of the host\t%d\t%.1f\t\n", host, mib(host))
	}
	if all := s.Device.Info().Memory; all > 0 {
		fmt.Fprintf(w, "of the device\t%d\t%.1f\t\n", all, mib(all))
	}
	if rows := s.model.Tiles().MLP; rows > 0 {
		fmt.Fprintf(w, "MLP in tiles of\t%d tokens\t\t\n", rows)
	}
	fmt.Fprintln(w)
	if err := w.Flush(); err != nil {
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

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// report prints the run table: where the time went, the speed, what the all-to-alls sent against the formula, and where the outputs are.
func (s *session) report(p *progress) error {
	phases, err := s.gatherPhases()
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(s.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	all := 0.0
	for _, r := range phases {
		all += r.mean
	}
	fmt.Fprintf(w, "\nphase\tcalls\tmean s\tmax/min\tshare\t\n")
	for _, r := range phases {
		ratio := "-"
		if r.min > 1e-4 {
			ratio = fmt.Sprintf("%.2f", r.max/r.min)
		}
		fmt.Fprintf(w, "%s\t%d\t%.3f\t%s\t%.1f %%\t\n", r.name, r.calls, r.mean, ratio, 100*r.mean/max(all, 1e-9))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	recorded, err := s.writeTrace()
	if err != nil {
		return err
	}
	sent, expected, err := s.exchanged()
	if err != nil {
		return err
	}
	fmt.Fprintln(s.Stdout)
	if p.last != nil {
		fmt.Fprintf(s.Stdout, "loss             %.4f at step %d, %.4f at step %d\n", float64(p.first.Loss), p.first.Step, float64(p.last.Loss), p.last.Step)
		fmt.Fprintf(s.Stdout, "speed            %s tokens/s, %s causal model FLOP/s a rank\n", short(float64(p.tokens)/p.worked), short(p.last.ModelTFLOPS*1e12))
		fmt.Fprintf(s.Stdout, "memory           %.1f MiB at most on a rank (planned: see above)\n", mib(p.last.PeakBytes))
	}
	for _, e := range p.evals {
		fmt.Fprintf(s.Stdout, "held-out loss    %.4f nats a token after step %d (%d tokens)\n", float64(e.EvalLoss), e.Step, e.EvalTokens)
	}
	verdict := "equal"
	if sent != expected {
		verdict = "NOT EQUAL"
	}
	fmt.Fprintf(s.Stdout, "all-to-alls      %d bytes sent by all ranks, formula %d: %s\n", sent, expected, verdict)
	fmt.Fprintf(s.Stdout, "metrics          %s\n", filepath.Join(s.Job.Output.Dir, "metrics.jsonl"))
	if s.Job.Kind == "train" && s.Job.Output.Model {
		fmt.Fprintf(s.Stdout, "model            %s\n", filepath.Join(s.Job.Output.Dir, "model"))
	}
	recorded.print(s)
	return nil
}

type phaseRow struct {
	name           string
	calls          int64
	mean, min, max float64
}

// gatherPhases brings every rank's clock together. Ranks run the same phases; a name that one of them lacks counts as 0 there.
func (s *session) gatherPhases() ([]phaseRow, error) {
	own := ""
	for _, p := range s.Clock.Phases() {
		own += fmt.Sprintf("%s\t%d\t%g\n", p.Name, p.Calls, p.Seconds)
	}
	parts, err := comm.GatherBytes(s.Mesh.World, []byte(own))
	if err != nil {
		return nil, err
	}
	size := float64(len(parts))
	rows, index, seen := []phaseRow{}, map[string]int{}, map[string]int{}
	for _, part := range parts {
		for _, line := range strings.Split(string(part), "\n") {
			var name string
			var calls int64
			var seconds float64
			if _, err := fmt.Sscanf(line, "%s\t%d\t%g", &name, &calls, &seconds); err != nil {
				continue
			}
			i, ok := index[name]
			if !ok {
				i = len(rows)
				index[name] = i
				rows = append(rows, phaseRow{name: name, calls: calls, min: seconds})
			}
			r := &rows[i]
			seen[name]++
			r.mean += seconds / size
			r.min, r.max = min(r.min, seconds), max(r.max, seconds)
		}
	}
	sort.SliceStable(rows, func(i, j int) bool { return rows[i].mean > rows[j].mean })
	return rows, nil
}

// exchanged is what all ranks sent by all-to-all, counted around the communicator, and what the formula says they should have.
func (s *session) exchanged() (sent, expected int64, err error) {
	pair := []int64{s.Ledger.Get("sequence", comm.OpAllToAll).Bytes, s.trainer.ExchangeBytes()}
	t := tensor.OfInt64(pair, 2)
	err = s.Mesh.World.AllReduce(nil, t, comm.Sum)
	return pair[0], pair[1], err
}
