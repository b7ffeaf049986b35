package report

import (
	"cmp"
	"fmt"
	"path/filepath"
	"time"

	"ulysses/internal/units"
	vers "ulysses/internal/version"
	"ulysses/job/plan"
)

// summary returns the cards of the page: the run in a few numbers.
func (r *Run) summary(h *history, machine *plan.Machine, memory memoryRow) []factRow {
	var rows []factRow
	t := r.Totals
	if t.Last != nil {
		step, loss := h.loss.first()
		rows = append(rows,
			factRow{"loss", units.Number(float64(t.Last.Loss)),
				fmt.Sprintf("at step %d; %s at step %d", t.Last.Step, units.Number(loss), int64(step))})
	}
	if n := len(h.Evals); n > 0 {
		e := h.Evals[n-1]
		rows = append(rows,
			factRow{"held-out loss", units.Number(e.Loss),
				fmt.Sprintf("perplexity %s, %s tokens", units.Number(e.Perplexity), units.Grouped(e.Tokens))})
	}
	if b := r.Trainer.Best(); b != nil {
		note := fmt.Sprintf("after step %d", b.Step)
		if b.Set != "" {
			note += ", of " + b.Set
		}
		if b.Path != "" {
			note += "; checkpoint " + filepath.Base(b.Path)
		}
		rows = append(rows, factRow{"best held-out loss", units.Number(b.Loss), note})
	}
	elapsed := factRow{"elapsed", units.Elapsed(time.Since(r.Began)), ""}
	if t.Last != nil {
		rows = append(rows, r.speed(machine)...)
		elapsed.Note = units.Seconds(t.Seconds) + " s in steps"
	}
	rows = append(rows, elapsed,
		factRow{"memory of a rank", units.Bytes(memory.Peak), "at most; planned " + units.Bytes(memory.Planned)},
		factRow{"commit", cmp.Or(vers.Commit(), "not recorded"), "ulysses-mpi " + vers.String})
	if h.NotFinite > 0 {
		rows = append(rows,
			factRow{"NaN or Inf", units.Grouped(h.NotFinite),
				fmt.Sprintf("steps whose loss or gradient norm was NaN or Inf; %d skipped", h.Skipped)})
	}
	return rows
}

// speed returns the cards on tokens and FLOPs.
func (r *Run) speed(machine *plan.Machine) []factRow {
	t := r.Totals
	flops := t.perSecond(t.FLOPs)
	of := fmt.Sprintf("in the %d steps of this run", t.steps())
	if t.steps() == 1 {
		of = "in the one step of this run"
	}
	rows := []factRow{{"tokens", units.Grouped(t.Tokens), of},
		{"tokens/s", units.Spaced(t.perSecond(float64(t.Tokens))), "all ranks, on average"},
		{"model FLOP/s", units.Spaced(flops), "a rank, causal, on average"}}
	if share, of := machine.ShareOfPeak(flops); share > 0 {
		rows = append(rows, factRow{"share of peak", fmt.Sprintf("%.1f %%", 100*share), of})
	}
	return rows
}
