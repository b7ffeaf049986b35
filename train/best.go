package train

import (
	"fmt"
	"strings"

	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Track says how a run compares the losses of its evaluations, to find the best checkpoint
// (Checkpoints.Best) and to end early.
type Track struct {
	Metric    string  // name of an evaluation set; "" = all sets together
	Patience  int64   // evaluations without an improvement after which the run ends; 0 = never
	Threshold float64 // for Patience, only a larger decrease is an improvement
	// Of describes the sets and the metric. Losses with another description are not compared.
	Of string
}

// of returns the loss that the run compares, and the number of its targets.
func (k *Track) of(r *EvalRecord) (loss float64, targets int64) {
	for _, s := range r.Sets {
		if k.Metric != "" && s.Name == k.Metric {
			return float64(s.Loss), s.Tokens
		}
	}
	return float64(r.EvalLoss), r.EvalTokens
}

// compare updates t.best by an evaluation after a step. As in transformers, the best loss is
// replaced by any smaller one, and Patience counts evaluations that are not smaller than the best
// so far by more than Threshold; a loss that is not finite is no improvement. An evaluation without
// targets is not compared: its loss of 0 would be the smallest, and no later one could improve. All
// ranks use the loss of rank 0. Collective.
func (t *Trainer) compare(r *EvalRecord) error {
	k := t.Track
	if k == nil {
		return nil
	}
	b := &t.best
	b.Due, t.improved = false, false
	x, targets := k.of(r)
	if targets == 0 {
		return nil
	}
	loss := []float64{x}
	if err := t.Mesh.World.Broadcast(nil, tensor.OfFloat64(loss, 1), 0); err != nil {
		return err
	}
	x = loss[0]
	first, finite := b.Step == 0, !notFinite(x)
	if finite && (first || x < b.Loss-k.Threshold) {
		b.Without = 0
	} else {
		b.Without++
	}
	r.Best = finite && (first || x < b.Loss)
	if t.improved = r.Best; r.Best {
		b.Loss, b.Step = x, r.Step
	}
	return nil
}

// track begins the comparison of evaluations, or continues that of the run that is resumed.
func (t *Trainer) track() error {
	if t.Track == nil {
		return nil
	}
	t.best = checkpoint.Best{Of: t.Track.Of}
	if was := t.Loop.Best; was != nil {
		t.best = *was
	}
	if t.saver != nil {
		t.saver.kept = t.best.Saved
	}
	return t.Track.check(&t.Setup)
}

// CatchesUp reports whether Run begins with the evaluation that the resumed run has left out,
// because it had to stop.
func (t *Trainer) CatchesUp() bool {
	step := t.Loop.Resumed
	return t.Track != nil && t.best.Due && step < t.Loop.Steps && t.evaluationDue(step, false)
}

// catchUp runs the evaluation that the resumed run has left out. Collective.
func (t *Trainer) catchUp() error {
	if !t.CatchesUp() {
		return nil
	}
	step := t.Loop.Resumed
	if err := t.evaluateAfter(step, false); err != nil {
		return err
	}
	if t.improved && t.saver != nil { // the checkpoint of the step is on disk: the run resumes from it
		t.saver.kept = step
	}
	t.improved = false
	return nil
}

// EndedEarly reports whether evaluations have not improved for so long that the run ends, or has
// ended before it was resumed.
func (t *Trainer) EndedEarly() bool {
	return t.Track != nil && t.Track.Patience > 0 && t.best.Without >= t.Track.Patience
}

// Best describes the best evaluation so far; nil if the run does not compare evaluations, or none
// had a finite loss.
func (t *Trainer) Best() *Best {
	if t.Track == nil || t.best.Step == 0 {
		return nil
	}
	b := &Best{Loss: t.best.Loss, Step: t.best.Step, Set: t.Track.Metric}
	if t.saver != nil && t.saver.Best && t.saver.kept == b.Step {
		b.Path = checkpoint.Dir(t.saver.Dir).Path(b.Step)
	}
	return b
}

// Best is the best evaluation of a run.
type Best struct {
	Loss float64
	Step int64
	Set  string // name of the evaluation set; "" = all together
	Path string // of its checkpoint; "" = it was not kept
}

// String describes the evaluation and its checkpoint.
func (b *Best) String() string {
	text := fmt.Sprintf("held-out loss %.4f after step %d", b.Loss, b.Step)
	if b.Set != "" {
		text = fmt.Sprintf("held-out loss %.4f of %s after step %d", b.Loss, b.Set, b.Step)
	}
	if b.Path != "" {
		text += ": " + b.Path
	}
	return text
}

// ContinueBest returns the state of the comparison with which a run resumes, or nil to begin a new
// one, with the reason if it is worth a message. here says on rank 0 whether the checkpoint is in
// c.Dir. Collective.
func (c *Checkpoints) ContinueBest(world comm.Comm, from *Resumed, k *Track, here bool) (b *checkpoint.Best,
	note string, err error) {
	goesOn := []int64{0}
	if world.Rank() == 0 && here {
		b, note, err = c.continueBest(from.Best, k)
		if b != nil {
			goesOn[0] = 1
		}
	}
	if err = comm.Agree(world, err); err == nil {
		err = world.Broadcast(nil, tensor.OfInt64(goesOn, 1), 0)
	}
	if err != nil || goesOn[0] == 0 {
		return nil, note, err
	}
	return from.Best, note, nil
}

func (c *Checkpoints) continueBest(was *checkpoint.Best, k *Track) (*checkpoint.Best, string, error) {
	if was.Of != k.Of {
		of := "" // of the metric; what follows is a digest of the data
		if i := strings.LastIndex(was.Of, ", "); i >= 0 {
			of = " (" + was.Of[:i] + ")"
		}
		return nil, fmt.Sprintf(
			"the evaluation data, the length of their sequences or eval.metric have changed since the checkpoint, so losses are not compared: the best was %.4f after step %d%s, and the comparison begins anew",
			was.Loss, was.Step, of), nil
	}
	if !c.Best || was.Step == 0 {
		return was, "", nil
	}
	there, err := checkpoint.Dir(c.Dir).Has(was.Saved)
	if err != nil || there {
		return was, "", err
	}
	return nil, fmt.Sprintf(
		"checkpoint.best: there is no checkpoint of the best evaluation, after step %d; the comparison begins anew",
		was.Step), nil
}

// check returns an error if no set has the name of the metric. The checks of a job file rule it
// out.
func (k *Track) check(s *Setup) error {
	for _, set := range s.Data.Evals {
		if k.Metric == "" || set.Name == k.Metric {
			return nil
		}
	}
	return status.Errorf(status.Internal, "train: no evaluation set is named %q", k.Metric)
}
