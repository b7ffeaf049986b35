package job

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"ulysses/internal/units"
	vers "ulysses/internal/version"
	"ulysses/job/plan"
)

// summary returns the cards of the page: the run in a few numbers.
func (s *session) summary(p *progress, h *history, here *plan.Machine, memory memoryRow) []factRow {
	var rows []factRow
	if p.last != nil {
		rows = append(rows, factRow{"loss", units.Number(float64(p.last.Loss)), fmt.Sprintf("at step %d; %s at step %d", p.last.Step, units.Number(h.loss.first()), int64(h.loss.firstX()))})
	}
	if n := len(h.Evals); n > 0 {
		e := h.Evals[n-1]
		rows = append(rows, factRow{"held-out loss", units.Number(e.Loss), fmt.Sprintf("perplexity %s, %s tokens", units.Number(e.Perplexity), units.Grouped(e.Tokens))})
	}
	took := factRow{"elapsed", units.Elapsed(time.Since(s.began)), ""}
	if p.last != nil {
		steps := p.last.Step - p.done
		of := fmt.Sprintf("in the %d steps of this run", steps)
		if steps == 1 {
			of = "in the one step of this run"
		}
		flops := p.flops / math.Max(p.worked, 1e-9)
		rows = append(rows, factRow{"tokens", units.Grouped(p.tokens), of},
			factRow{"tokens/s", units.Spaced(float64(p.tokens) / math.Max(p.worked, 1e-9)), "all ranks, on average"},
			factRow{"model FLOP/s", units.Spaced(flops), "a rank, causal, on average"})
		if share, of := here.ShareOfPeak(flops); share > 0 {
			rows = append(rows, factRow{"share of peak", fmt.Sprintf("%.1f %%", 100*share), of})
		}
		took.Note = units.Seconds(p.worked) + " s in steps"
	}
	rows = append(rows, took,
		factRow{"memory of a rank", units.Bytes(memory.Peak), "at most; planned " + units.Bytes(memory.Planned)},
		factRow{"commit", cmp.Or(vers.Commit(), "not recorded"), "ulysses-mpi " + vers.String})
	if h.NoNumber > 0 {
		rows = append(rows, factRow{"no number", units.Grouped(h.NoNumber), fmt.Sprintf("steps whose loss or gradient was none; %d skipped", h.Skipped)})
	}
	return rows
}

// trafficVerdict compares the bytes sent by all operations with the formulas.
func (s *session) trafficVerdict(traffic []trafficRow) factRow {
	if s.Mesh.World.Size() == 1 {
		return factRow{"traffic", "none", "one rank sends nothing"}
	}
	for _, t := range traffic {
		if !t.Control && !t.Equal {
			return factRow{"traffic", "NOT EQUAL", t.Op + " on axis " + t.Axis + ": the bytes sent differ from the formula"}
		}
	}
	return factRow{"traffic", "equal", "bytes sent against the formulas"}
}
