package job

import (
	"fmt"
	"math"
	"time"

	"github.com/schollz/progressbar/v3"

	"ulysses/internal/units"
	"ulysses/job/report"
	"ulysses/train"
)

// progress shows the progress of a run: a bar if the standard error of rank 0 is a terminal,
// otherwise a log line every five seconds.
type progress struct {
	env    *Env
	bar    *progressbar.ProgressBar // nil = lines
	steps  int64
	next   time.Time // of the next line
	totals *report.Totals

	untargeted bool // a step without targets was logged
}

const (
	notTargets = "a target is neither the first token of a sequence or a document nor a label of -100"
	noTargets  = "no token of the evaluation's files is a target (" + notTargets +
		"), so the loss is 0 and has no meaning; evaluate longer documents"
)

func newProgress(e *Env, steps, done int64) *progress {
	p := &progress{env: e, steps: steps, totals: &report.Totals{Resumed: done}}
	if e.bar && steps > 0 {
		p.bar = progressbar.NewOptions64(steps, progressbar.OptionSetWriter(e.Stderr.to),
			progressbar.OptionSetWidth(24), progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionClearOnFinish())
		_ = p.bar.Set64(done)
		e.Stderr.underBar(func() { _ = p.bar.Clear() })
	}
	return p
}

func (p *progress) step(r *train.Record) error {
	p.totals.AddStep(r)
	if r.TargetTokens == 0 && !p.untargeted {
		p.untargeted = true
		p.env.Log.Warn().Int64("step", r.Step).Msg("train: no token of the step is a target (" + notTargets +
			"), so the loss is 0 and only weight decay changes weights; " +
			"use longer documents, or labels; later steps of this kind have no warning")
	}
	now, done := time.Now(), p.totals.Resumed
	switch {
	case p.bar != nil:
		p.env.signals.Locked(func() {
			p.bar.Describe(fmt.Sprintf("loss %.3f  %s tokens/s", float64(r.Loss), units.Short(r.TokensPerSecond)))
			_ = p.bar.Add(1) // errors of the bar do not end the run
		})
	case r.Step == done+1 || r.Step == p.steps || now.After(p.next):
		p.next = now.Add(5 * time.Second)
		left := p.totals.Seconds / float64(r.Step-done) * float64(p.steps-r.Step)
		p.env.Log.Info().Int64("step", r.Step).Int64("of", p.steps).Float64("loss",
			float64(r.Loss)).Float64("grad_norm", float64(r.GradNorm)).
			Float64("lr", r.LR).Float64("tokens_per_second", r.TokensPerSecond).Float64("seconds_left",
			math.Round(left)).Msg("train")
	}
	return nil
}

func (p *progress) eval(r *train.EvalRecord) {
	p.totals.Evals = append(p.totals.Evals, r)
	if r.EvalTokens == 0 {
		p.env.Log.Warn().Int64("step", r.Step).Msg("eval: " + noTargets)
		return
	}
	for _, set := range r.Sets {
		if set.Tokens == 0 {
			p.env.Log.Warn().Int64("step",
				r.Step).Msgf(
				"eval: no token of the set %s is a target (%s), so its loss is 0 and has no meaning; evaluate longer documents",
				set.Name, notTargets)
		}
	}
	line := p.env.Log.Info().Int64("step", r.Step).Float64("eval_loss", float64(r.EvalLoss)).Float64("perplexity",
		math.Exp(float64(r.EvalLoss))).
		Int64("eval_tokens", r.EvalTokens)
	for _, set := range r.Sets {
		line.Float64("eval_"+set.Name+"_loss", float64(set.Loss))
	}
	if r.Best {
		line.Bool("best", true)
	}
	line.Msg("eval")
}

func (p *progress) finish() {
	if p.bar != nil {
		p.env.Stderr.underBar(nil)
		_ = p.bar.Finish()
	}
}
