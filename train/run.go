package train

import (
	"time"

	"ulysses/model"
)

// Run takes the steps that are left, evaluates and keeps states as asked. An error is this rank's own; peers may be inside a collective and
// must be aborted. A run that was asked to stop ends well, with a checkpoint: Stopped tells.
func (t *Trainer) Run() error {
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
		if t.Eval != nil && (last || t.EvalEvery > 0 && (step+1)%t.EvalEvery == 0) {
			began := time.Now()
			if _, err := t.Evaluate(step + 1); err != nil {
				return err
			}
			t.Trace.span("evaluation", 0, began)
		}
		if err := t.keep(step+1, last); err != nil {
			return err
		}
	}
	return t.Trace.end()
}

// Stopped reports that the run was asked to stop before its end.
func (t *Trainer) Stopped() bool { return t.stopped }

// keep begins and finishes checkpoints after a step, by what all ranks know.
func (t *Trainer) keep(step int64, last bool) error {
	if t.saver == nil {
		return nil
	}
	f := t.flags.Int64s()
	t.stopped = f[1] > 0 && !last
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

// Evaluate is the mean NLL of the evaluation set with the weights as they are. All ranks take part; replicas share the rows out.
func (t *Trainer) Evaluate(step int64) (*EvalRecord, error) {
	nll, n, err := t.evaluate()
	if err != nil {
		return nil, err
	}
	r := &EvalRecord{Step: step, EvalLoss: Float(nll / float64(max(1, n))), EvalTokens: n}
	if notFinite(nll) && t.OnNaN != "skip" {
		return nil, t.evaluationIsNoNumber(step, nll)
	}
	if t.OnEval != nil {
		t.OnEval(r)
	}
	return r, t.Metrics.Write(r)
}

// evaluate is the sum and the count of all ranks.
func (t *Trainer) evaluate() (nll float64, targets int64, err error) {
	rows, replicas := t.Eval.Rows(), int64(t.Mesh.Replicas)
	var m *Micro
	batch := t.evalRows()
	for first := int64(0); first < rows; first += replicas * batch {
		lo := first + int64(t.Mesh.Replica)*batch
		if lo >= rows { // the last rows are other replicas', which may need the weights that are kept here
			if err := t.Model.Idle(&model.Ctx{Stream: t.stream, Weights: t.Weights}); err != nil {
				return 0, 0, err
			}
			continue
		}
		t.Clock.Push("data")
		var err error
		m, err = t.Eval.Range(lo, min(rows, lo+batch), m)
		t.Clock.Pop()
		if err != nil {
			return 0, 0, err
		}
		l, err := t.pass(m, 0, false)
		if err != nil {
			return 0, 0, err
		}
		nll += l.Sum
		targets += l.Tokens
	}
	return t.sumLoss(nll, targets)
}
