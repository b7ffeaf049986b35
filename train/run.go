package train

import (
	"errors"
	"slices"
	"time"

	"ulysses/checkpoint"
	"ulysses/internal/status"
)

// Run runs the remaining steps, with their evaluations and checkpoints. If Shared is false for its
// error, only this rank has it: other ranks may be inside a collective and must be aborted. If
// Hooks.Stop returns true on a rank, Run writes a checkpoint and returns nil, and Stopped returns
// true. Collective.
func (t *Trainer) Run() error {
	err := t.run()
	if !Shared(err) {
		return err
	}
	// All ranks return this error, so the trace and the checkpoint of an earlier step can be
	// completed.
	if lost := t.Trace.end(); lost != nil {
		return lost
	}
	if t.saver == nil {
		return err
	}
	lost := t.saver.finish()
	if lost != nil && !Shared(lost) {
		return lost
	}
	return errors.Join(err, lost)
}

func (t *Trainer) run() error {
	if err := t.catchUp(); err != nil {
		return err
	}
	for step := t.Loop.Resumed; step < t.Loop.Steps && !t.stopped && !t.EndedEarly(); step++ {
		if err := t.Trace.before(step + 1); err != nil {
			return err
		}
		began := time.Now()
		r, err := t.Step(step)
		if err != nil {
			return err
		}
		if err := t.Trace.after(step+1, began); err != nil {
			return err
		}
		if t.Hooks.Step != nil {
			if err := t.Hooks.Step(r); err != nil {
				return err
			}
		}
		last := step == t.Loop.Steps-1
		t.improved = false
		evaluate := func() error { return t.evaluateAfter(step+1, last) }
		save := func() error { return t.saveAfter(step+1, last || t.EndedEarly()) }
		actions := []func() error{evaluate, save}
		switch stop := t.agreed.stop > 0; { // the job may be killed soon, so the checkpoint comes first
		case stop && t.Track == nil:
			slices.Reverse(actions)
		case stop && !last && t.saver != nil:
			// a checkpoint has the results of its evaluation, so the resumed run evaluates
			t.best.Due = t.evaluationDue(step+1, last)
			actions = actions[1:]
		}
		for _, do := range actions {
			if err := do(); err != nil {
				return err
			}
		}
	}
	return t.Trace.end()
}

// evaluateAfter runs an evaluation if one is due after this step. Collective.
func (t *Trainer) evaluateAfter(step int64, last bool) error {
	if !t.evaluationDue(step, last) {
		return nil
	}
	began := time.Now()
	if _, err := t.Evaluate(step); err != nil {
		return err
	}
	t.Trace.span("evaluation", 0, began)
	return nil
}

// evaluationDue reports whether an evaluation is due after a step.
func (t *Trainer) evaluationDue(step int64, last bool) bool {
	every := t.Loop.EvalEvery
	return len(t.Data.Evals) > 0 && (last || every > 0 && step%every == 0)
}

// Stopped reports whether Run ended before the last step because Hooks.Stop returned true.
func (t *Trainer) Stopped() bool { return t.stopped }

// Complete reports whether all steps and evaluations are done, so that after an error of Run only
// the last checkpoint is missing.
func (t *Trainer) Complete() bool { return t.complete }

// saveAfter starts a checkpoint if one is due after this step, and completes the previous one once
// no rank is writing its file. All ranks decide by t.agreed, so they decide the same. If a file
// cannot be written, the run continues and the next checkpoint is the next attempt; the last
// checkpoint, or that of a run that stops, must be written. Collective.
func (t *Trainer) saveAfter(step int64, last bool) error {
	if t.saver == nil {
		return nil
	}
	t.stopped = t.agreed.stop > 0 && !last
	best := t.saver.Best && t.improved
	due := t.stopped || best || t.saver.Every > 0 && (last || step%t.saver.Every == 0)
	if due || last || t.agreed.writing == 0 { // the last step waits for the one that is under way
		t.Clock.Push("checkpoint")
		defer t.Clock.Pop()
		if err := t.warnUnsaved(t.saver.finish()); err != nil {
			return err
		}
	}
	if !due {
		return nil
	}
	if err := t.saver.ready(); err != nil {
		return err
	}
	t.complete = last
	err := t.saver.begin(step, t.updates, t.bestFor(step, best))
	if !last && !t.stopped {
		return t.warnUnsaved(err)
	}
	if err == nil {
		err = t.saver.finish()
	}
	if status.Of(err) == status.IO {
		err = status.Errorf(status.IO,
			"%w; run the job again to resume from the last complete checkpoint, if there is one", err)
	}
	return err
}

// bestFor returns the comparison of evaluations for the manifest of a checkpoint; nil = there is
// none. isBest says that the checkpoint is the one of the best evaluation.
func (t *Trainer) bestFor(step int64, isBest bool) *checkpoint.Best {
	if t.Track == nil {
		return nil
	}
	b := t.best
	switch {
	case !t.saver.Best:
		b.Saved = 0
	case isBest:
		b.Saved = step
	default:
		b.Saved = t.saver.kept
	}
	return &b
}

// warnUnsaved calls Hooks.Unsaved for a checkpoint that could not be written on all ranks, and
// returns any other error.
func (t *Trainer) warnUnsaved(err error) error {
	if !Shared(err) || status.Of(err) != status.IO || t.Hooks.Unsaved == nil {
		return err
	}
	t.Hooks.Unsaved(err)
	return nil
}
