package train

import (
	"errors"
	"slices"
	"time"
)

// Run takes the steps that are left, evaluates and keeps states as asked. An error is this rank's
// own; peers may be inside a collective and must be aborted. A run that was asked to stop ends
// well, with a checkpoint: Stopped tells.
func (t *Trainer) Run() error {
	err := t.run()
	if !Shared(err) {
		return err
	}
	// All ranks are here: neither what was recorded nor the state that was begun behind an earlier
	// step is to be lost with this one.
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
	for step := t.Resumed; step < t.Steps && !t.stopped; step++ {
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
		if err := t.Metrics.Write(r); err != nil {
			return err
		}
		if t.OnStep != nil {
			if err := t.OnStep(r); err != nil {
				return err
			}
		}
		last := step == t.Steps-1
		evaluate := func() error { return t.evaluateAfter(step+1, last) }
		keep := func() error { return t.keep(step+1, last) }
		work := []func() error{evaluate, keep}
		if t.asked() { // the time left may be short: the checkpoint comes first
			slices.Reverse(work)
		}
		for _, do := range work {
			if err := do(); err != nil {
				return err
			}
		}
	}
	return t.Trace.end()
}

// asked reports whether any rank must stop. All ranks get the same answer after a step.
func (t *Trainer) asked() bool { return t.flags.Int64s()[1] > 0 }

// evaluateAfter evaluates if the job asks for it after this step.
func (t *Trainer) evaluateAfter(step int64, last bool) error {
	if t.Eval == nil || !last && (t.EvalEvery == 0 || step%t.EvalEvery > 0) {
		return nil
	}
	began := time.Now()
	if _, err := t.Evaluate(step); err != nil {
		return err
	}
	t.Trace.span("evaluation", 0, began)
	return nil
}

// Stopped reports that the run was asked to stop before its end.
func (t *Trainer) Stopped() bool { return t.stopped }

// keep begins and finishes checkpoints after a step, by what all ranks know.
func (t *Trainer) keep(step int64, last bool) error {
	if t.saver == nil {
		return nil
	}
	f := t.flags.Int64s()
	t.stopped = t.asked() && !last
	due := t.stopped || t.saver.Every > 0 && (last || step%t.saver.Every == 0)
	if due || f[2] == 0 {
		t.Clock.Push("checkpoint")
		defer t.Clock.Pop()
		if err := t.saver.finish(); err != nil {
			return err
		}
	}
	if !due {
		return nil
	}
	if err := t.saver.begin(step, t.updates); err != nil {
		return err
	}
	if last || t.stopped {
		return t.saver.finish()
	}
	return nil
}
