package report

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"math"
	"slices"
	"strings"

	"ulysses/internal/input"
	"ulysses/train"
)

// historyLine holds the keys of metrics.jsonl that the report reads. A line is a step or an
// evaluation; only an evaluation has eval_tokens. NaN and Inf are null in the file.
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
	Best            bool     `json:"best"`
}

// setLosses returns the losses of the evaluation sets in a line, by name.
func setLosses(line []byte) map[string]*float64 {
	var fields map[string]json.RawMessage
	if input.JSON(line, &fields) != nil {
		return nil
	}
	sets := map[string]*float64{}
	for key, value := range fields {
		name, ok := strings.CutSuffix(key, "_loss") // eval_NAME_loss
		if ok {
			name, ok = strings.CutPrefix(name, "eval_")
		}
		var loss *float64
		if ok && json.Unmarshal(value, &loss) == nil {
			sets[name] = loss
		}
	}
	return sets
}

// points are the points of a curve. A value that was NaN or Inf is NaN.
type points struct{ X, Y []float64 }

func (p *points) add(x int64, y *float64) {
	value := math.NaN()
	if y != nil {
		value = *y
	}
	p.X, p.Y = append(p.X, float64(x)), append(p.Y, value)
}

// first returns the first point; its value is NaN if there is no point.
func (p *points) first() (x, y float64) {
	if len(p.X) == 0 {
		return 0, math.NaN()
	}
	return p.X[0], p.Y[0]
}

// history is the content of metrics.jsonl: the steps of this run and of the runs that it resumes,
// or the evaluations of an evaluation job.
type history struct {
	loss, gradNorm, rate, speed, flops, eval points
	Steps, Skipped, NotFinite                int64
	Evals                                    []evalRow
	Sets                                     []string // names of evaluation sets, sorted
	ofSet                                    map[string]*points
}

type evalRow struct {
	Step, Tokens     int64
	Loss, Perplexity float64
	Best             bool
	sets             map[string]*float64
}

// Of returns the loss of an evaluation set; NaN if the line has none.
func (e evalRow) Of(set string) float64 {
	if x := e.sets[set]; x != nil {
		return *x
	}
	return math.NaN()
}

// readHistory reads metrics.jsonl: the lines of evaluation jobs, or all other lines. An incomplete
// line, which a killed process leaves, is skipped.
func readHistory(path string, evaluation bool) (*history, error) {
	h := &history{ofSet: map[string]*points{}}
	f, _, err := input.Open(path)
	if err != nil {
		return h, err
	}
	defer f.Close()
	for r := bufio.NewReaderSize(f, 1<<20); ; {
		line, err := r.ReadBytes('\n')
		var m historyLine
		if len(line) > 0 && input.JSON(line, &m) == nil &&
			evaluation == (m.EvalTokens != nil && m.Step == train.EvaluationStep) {
			var sets map[string]*float64
			if m.EvalTokens != nil {
				sets = setLosses(line)
			}
			h.add(&m, sets)
		}
		if errors.Is(err, io.EOF) {
			return h, nil
		} else if err != nil {
			return h, err
		}
	}
}

// add adds a line, with the losses of evaluation sets.
func (h *history) add(m *historyLine, sets map[string]*float64) {
	if m.EvalTokens != nil {
		h.eval.add(m.Step, m.EvalLoss)
		for name, loss := range sets {
			if h.ofSet[name] == nil {
				h.ofSet[name] = &points{}
				h.Sets = append(h.Sets, name)
				slices.Sort(h.Sets)
			}
			h.ofSet[name].add(m.Step, loss)
		}
		row := evalRow{Step: m.Step, Tokens: *m.EvalTokens, Loss: math.NaN(), Perplexity: math.NaN(), Best: m.Best,
			sets: sets}
		if m.EvalLoss != nil {
			row.Loss = *m.EvalLoss
			if row.Tokens > 0 { // without targets the loss is 0 and has no perplexity
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
		h.NotFinite++
	}
	h.loss.add(m.Step, m.Loss)
	h.gradNorm.add(m.Step, m.GradNorm)
	h.rate.add(m.Step, m.LR)
	h.speed.add(m.Step, m.TokensPerSecond)
	h.flops.add(m.Step, m.ModelTFLOPS)
}

// mostPoints is the largest number of points of a curve in a chart.
const mostPoints = 2000

// thin returns at most about most points. It divides the points into buckets of neighbours and
// keeps of each bucket the lowest, the highest and one NaN, in their order, so no peak and no gap
// is lost. The first and the last point are always kept.
func (p points) thin(most int) points {
	n := len(p.X)
	if n <= most {
		return p
	}
	buckets := most / 2
	var t points
	last := -1
	keep := func(i int) {
		if i > last {
			t.X, t.Y = append(t.X, p.X[i]), append(t.Y, p.Y[i])
			last = i
		}
	}
	keep(0)
	for b := range buckets {
		for _, i := range p.extremes(b*n/buckets, (b+1)*n/buckets) {
			keep(i)
		}
	}
	keep(n - 1)
	return t
}

// extremes returns the indices of the lowest point, the highest and the last NaN of [lo, hi), in
// ascending order; -1 stands for one that does not exist.
func (p points) extremes(lo, hi int) []int {
	low, high, gap := -1, -1, -1
	for i := lo; i < hi; i++ {
		y := p.Y[i]
		if math.IsNaN(y) {
			gap = i
			continue
		}
		if low < 0 || y < p.Y[low] {
			low = i
		}
		if high < 0 || y > p.Y[high] {
			high = i
		}
	}
	found := []int{low, high, gap}
	slices.Sort(found)
	return found
}
