package job

import (
	"fmt"
	"math"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"

	"ulysses/train"
)

// progress shows how a run goes: a bar where rank 0's stderr is a terminal, else a line now and then.
type progress struct {
	env    *Env
	bar    *progressbar.ProgressBar // nil = lines
	steps  int64
	done   int64 // by earlier runs
	begin  time.Time
	next   time.Time // when the next line is due
	tokens int64
	first  *train.Record
	last   *train.Record
	evals  []*train.EvalRecord
	worked float64 // seconds inside steps
}

func newProgress(e *Env, steps, done int64) *progress {
	p := &progress{env: e, steps: steps, done: done, begin: time.Now()}
	if f, ok := e.Stderr.(*os.File); ok && e.Mesh.World.Rank() == 0 && steps > 0 && isTerminal(f) {
		p.bar = progressbar.NewOptions64(steps, progressbar.OptionSetWriter(f), progressbar.OptionSetWidth(24), progressbar.OptionShowCount(),
			progressbar.OptionSetPredictTime(true), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
		_ = p.bar.Set64(done)
	}
	return p
}

func (p *progress) step(r *train.Record) error {
	if p.first == nil {
		p.first = r
	}
	p.last = r
	p.tokens += r.Tokens
	p.worked += r.Seconds
	now := time.Now()
	switch {
	case p.bar != nil:
		p.bar.Describe(fmt.Sprintf("loss %.3f  %s tokens/s", float64(r.Loss), short(r.TokensPerSecond)))
		_ = p.bar.Add(1) // a bar that cannot be drawn is no reason to stop
	case r.Step == p.done+1 || r.Step == p.steps || now.After(p.next):
		p.next = now.Add(5 * time.Second)
		left := time.Duration(p.worked / float64(r.Step-p.done) * float64(p.steps-r.Step) * float64(time.Second))
		p.env.Log.Info().Int64("step", r.Step).Int64("of", p.steps).Str("loss", fmt.Sprintf("%.4f", float64(r.Loss))).
			Str("grad_norm", fmt.Sprintf("%.3f", float64(r.GradNorm))).Str("lr", fmt.Sprintf("%.3g", r.LR)).
			Str("tokens_per_second", short(r.TokensPerSecond)).Str("left", left.Round(time.Second).String()).Msg("train")
	}
	return nil
}

func (p *progress) eval(r *train.EvalRecord) {
	p.evals = append(p.evals, r)
	if p.bar != nil {
		_ = p.bar.Clear()
	}
	if r.EvalTokens == 0 {
		p.env.Log.Warn().Int64("step", r.Step).Msg("eval: not one token of the evaluation's files is a target (the first of a row or a document is none, nor is a label of -100): " +
			"its loss is 0 by definition and says nothing; give longer documents or rows, or other labels")
		return
	}
	p.env.Log.Info().Int64("step", r.Step).Str("eval_loss", fmt.Sprintf("%.4f", float64(r.EvalLoss))).
		Str("perplexity", fmt.Sprintf("%.2f", math.Exp(float64(r.EvalLoss)))).Int64("eval_tokens", r.EvalTokens).Msg("eval")
}

func (p *progress) finish() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// short writes a number with three significant digits and a unit prefix.
func short(x float64) string {
	for _, u := range []string{"", "k", "M", "G", "T"} {
		if math.Abs(x) < 999.5 {
			return fmt.Sprintf("%.3g%s", x, u)
		}
		x /= 1000
	}
	return fmt.Sprintf("%.3gP", x)
}
