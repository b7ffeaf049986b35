package job

import (
	"bufio"
	"errors"
	"io"
	"math"

	"ulysses/internal/input"
	"ulysses/train"
)

// historyLine is what the report reads of a line of metrics.jsonl: a step, or an evaluation, which
// alone has eval_tokens. A number that was none is null there.
type historyLine struct {
	Step            int64    `json:"step"`
	Loss            *float64 `json:"loss"`
	GradNorm        *float64 `json:"grad_norm"`
	LR              *float64 `json:"lr"`
	TokensPerSecond *float64 `json:"tokens_per_second"`
	ModelTFLOPS     *float64 `json:"model_tflops"`
	Skipped         bool     `json:"skipped"`
	EvalLoss        *float64 `json:"eval_loss"`
	EvalTokens      *int64   `json:"eval_tokens"`
}

// points are a curve: NaN where there was no number.
type points struct{ X, Y []float64 }

func (p *points) add(x int64, y *float64) {
	p.X = append(p.X, float64(x))
	if y == nil {
		p.Y = append(p.Y, math.NaN())
		return
	}
	p.Y = append(p.Y, *y)
}

// history is metrics.jsonl, of this run and of those that it went on from, or of an evaluation job.
type history struct {
	loss, gradNorm, rate, speed, flops, eval points
	Steps, Skipped, NoNumber                 int64
	Evals                                    []evalRow
}

type evalRow struct {
	Step, Tokens     int64
	Loss, Perplexity float64
}

// readHistory reads metrics.jsonl a line at a time: that of an evaluation job, or all others. A
// line that was cut short by a kill is left out.
func readHistory(path string, evaluation bool) (*history, error) {
	h := &history{}
	f, _, err := input.Open(path)
	if err != nil {
		return h, err
	}
	defer f.Close()
	for r := bufio.NewReaderSize(f, 1<<20); ; {
		line, err := r.ReadBytes('\n')
		var m historyLine
		if len(line) > 0 && input.JSON(line, &m) == nil && evaluation == (m.EvalTokens != nil && m.Step == train.EvaluationStep) {
			h.add(&m)
		}
		if errors.Is(err, io.EOF) {
			return h, nil
		} else if err != nil {
			return h, err
		}
	}
}

func (h *history) add(m *historyLine) {
	if m.EvalTokens != nil {
		h.eval.add(m.Step, m.EvalLoss)
		row := evalRow{Step: m.Step, Tokens: *m.EvalTokens, Loss: math.NaN(), Perplexity: math.NaN()}
		if m.EvalLoss != nil {
			row.Loss = *m.EvalLoss
			if row.Tokens > 0 { // the loss of no target is 0, and no model's doing
				row.Perplexity = math.Exp(*m.EvalLoss)
			}
		}
		h.Evals = append(h.Evals, row)
		return
	}
	h.Steps++
	if m.Skipped {
		h.Skipped++
	}
	if m.Loss == nil || m.GradNorm == nil {
		h.NoNumber++
	}
	h.loss.add(m.Step, m.Loss)
	h.gradNorm.add(m.Step, m.GradNorm)
	h.rate.add(m.Step, m.LR)
	h.speed.add(m.Step, m.TokensPerSecond)
	h.flops.add(m.Step, m.ModelTFLOPS)
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

// mostPoints is how many a chart draws; above them a curve is thinned.
const mostPoints = 2000

// thin leaves at most so many points and one gap a bucket: of each bucket of neighbours the lowest
// and the highest, in their order, so that no peak is lost, and a NaN, if there is one.
func (p points) thin(most int) points {
	n := len(p.X)
	if n <= most {
		return p
	}
	buckets := most / 2
	var t points
	for b := range buckets {
		lo, hi := b*n/buckets, (b+1)*n/buckets
		low, high, gap := -1, -1, -1
		for i := lo; i < hi; i++ {
			switch y := p.Y[i]; {
			case math.IsNaN(y):
				gap = i
			default:
				if low < 0 || y < p.Y[low] {
					low = i
				}
				if high < 0 || y > p.Y[high] {
					high = i
				}
			}
		}
		if b == 0 && low >= 0 && low != 0 && high != 0 && gap != 0 { // the first point stays
			t.X, t.Y = append(t.X, p.X[0]), append(t.Y, p.Y[0])
		}
		last := -1
		for range 3 { // the chosen ones in order
			next := -1
			for _, i := range []int{low, high, gap} {
				if i > last && (next < 0 || i < next) {
					next = i
				}
			}
			if next < 0 {
				break
			}
			t.X, t.Y = append(t.X, p.X[next]), append(t.Y, p.Y[next])
			last = next
		}
		if b == buckets-1 && last != n-1 {
			t.X, t.Y = append(t.X, p.X[n-1]), append(t.Y, p.Y[n-1])
		}
	}
	return t
}
