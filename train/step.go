package train

import (
	"fmt"
	"math"
	"time"

	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/model"
)

// Step runs optimizer step s, counted from 0. The loss is Σ NLL / (valid targets of the global
// batch), on every mesh. Collective.
func (t *Trainer) Step(s int64) (*Record, error) {
	begin, before := time.Now(), t.Clock.Phases()
	valid, tokens, pairs, err := t.read(s)
	if err != nil {
		return nil, err
	}
	if err := t.Weights.Begin(t.stream, int64(len(t.microBatches))); err != nil {
		return nil, err
	}
	t.Model.ForgetChoices() // of a step that was skipped
	var loss model.Loss
	for i, m := range t.microBatches {
		began := time.Now()
		l, err := t.pass(m, valid, true, false)
		if err != nil {
			return nil, err
		}
		loss.Sum += l.Sum
		loss.Balance += l.Balance
		t.Trace.span("pass", int64(i)+1, began)
	}
	if t.Hooks.Probe != nil {
		t.Clock.Push("data")
		err := t.Hooks.Probe(s + 1)
		t.Clock.Pop()
		if err != nil {
			return nil, err
		}
	}
	r := &Record{Step: s + 1, LR: t.Optimizer.Rate(s, t.Loop.Steps), Tokens: tokens, TargetTokens: valid}
	if loss, err = t.sumLoss(loss); err != nil {
		return nil, err
	}
	r.Loss = Float(loss.Sum / float64(max(1, valid)))
	if t.Model.Config.Balances() {
		balance := Float(loss.Balance / float64(max(1, valid)))
		r.AuxLoss = &balance
	}
	if err := t.sumChoices(r); err != nil {
		return nil, err
	}
	norm, err := t.Weights.Reduce(t.stream)
	if err != nil {
		return nil, err
	}
	r.GradNorm = Float(norm)
	finite := !notFinite(float64(r.Loss)) && !notFinite(norm)
	if finite {
		if err := t.update(r.LR, norm); err != nil {
			return nil, err
		}
		t.Model.MoveBiases(t.Optimizer.ExpertBiasRate)
	}
	if err := t.agree(finite); err != nil {
		return nil, err
	}
	r.PeakBytes = t.agreed.peakBytes
	if t.agreed.notFinite > 0 {
		if err := t.skipOrFail(r); err != nil {
			return nil, err
		}
	}
	r.Seconds = time.Since(begin).Seconds()
	r.TokensPerSecond = float64(tokens) / r.Seconds
	r.ModelTFLOPS = t.Model.Flops(tokens, pairs) / r.Seconds / 1e12 / float64(t.Mesh.World.Size())
	r.PhaseSeconds, r.WaitingSeconds = since(before, t.Clock.Phases())
	return r, nil
}

// agree sets t.agreed to the values that ranks compare after a step. finite reports whether the
// loss and the gradient norm of this rank are finite. Collective.
func (t *Trainer) agree(finite bool) error {
	t.agreed = agreed{peakBytes: t.PeakBytes()}
	me := int64(t.Mesh.World.Rank()) + 1
	if finite {
		t.agreed.finite = me
	} else {
		t.agreed.notFinite = me
	}
	if t.Hooks.Stop != nil && t.Hooks.Stop() {
		t.agreed.stop = 1
	}
	if t.saver != nil && t.saver.writing() {
		t.agreed.writing = 1
	}
	return t.agreed.reduce(t.Mesh.World)
}

// skipOrFail handles a step whose loss or gradient norm is NaN or Inf on a rank. It returns nil if
// the step is skipped, otherwise the error that ends the run. All ranks have the same sums. So if
// the values are finite on some ranks, another rank has computed wrongly, and the run ends because
// the ranks with finite values have updated their weights. Collective.
func (t *Trainer) skipOrFail(r *Record) error {
	if t.agreed.finite > 0 {
		rank := t.agreed.notFinite - 1
		return shared{status.Errorf(status.Numeric,
			"train: step %d: the loss or gradient norm is NaN or Inf on rank %d and finite on other ranks, but all ranks have the same sums; check the hardware of rank %d, and resume from a checkpoint",
			r.Step, rank, rank)}
	}
	skip := t.Loop.OnNaN == "skip"
	r.Skipped = skip
	if skip && t.diagnosed { // a diagnosis takes the time of a step, and a run may skip many
		return nil
	}
	t.diagnosed = true
	seen, fix, err := t.diagnose(func(x *diagnosis) error {
		if err := t.Weights.Begin(t.stream, int64(len(t.microBatches))); err != nil {
			return err
		}
		for i, m := range t.microBatches {
			if len(t.microBatches) > 1 {
				x.within = fmt.Sprintf("micro-batch %d of %d, ", i+1, len(t.microBatches))
			}
			if _, err := t.pass(m, r.TargetTokens, true, false); err != nil {
				return err
			}
		}
		return nil
	}, true)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("step %d: loss %g, gradient norm %g: %s", r.Step, float64(r.Loss), float64(r.GradNorm), seen)
	if !skip {
		return shared{status.Errorf(status.Numeric, "train: %s; %s", what, fix)}
	}
	if t.Hooks.Skipped != nil {
		t.Hooks.Skipped(what)
	}
	return nil
}

func notFinite(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) }

// since returns the seconds of each phase between two readings of the clock, and the seconds of
// waiting for other ranks of each phase that has waited.
func since(before, after []clock.Phase) (seconds, waiting map[string]float64) {
	seconds, waiting = make(map[string]float64, len(after)), map[string]float64{}
	for i, p := range after {
		if i < len(before) {
			p.Seconds -= before[i].Seconds
			p.Waiting -= before[i].Waiting
		}
		seconds[p.Name] = p.Seconds
		if p.Waiting > 0 {
			waiting[p.Name] = p.Waiting
		}
	}
	return seconds, waiting
}
