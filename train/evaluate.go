package train

import (
	"ulysses/comm"
	"ulysses/data"
	"ulysses/model"
	"ulysses/tensor"
)

// Evaluate is the mean NLL of the evaluation set with the weights as they are. All ranks take part;
// replicas share the rows out.
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

// evaluate is the sum and the count of all ranks. Rows that a rank can take whole are dealt out to
// all of them, and nothing is exchanged; longer ones are shared by the ranks of a sequence. All
// ranks go through the weights as often, for those may be cut over them.
func (t *Trainer) evaluate() (nll float64, targets int64, err error) {
	long, short, err := t.evalNumbers()
	if err != nil {
		return 0, 0, err
	}
	world, replicas := t.Mesh.World, int64(t.Mesh.Replicas)
	var m *data.MicroBatch
	for _, part := range []struct {
		rows        []int64
		each        int64 // rows of a pass
		alone       bool
		who, others int64
	}{{long, t.evalRows(), false, int64(t.Mesh.Replica), replicas}, {short, 1, true, int64(world.Rank()), int64(world.Size())}} {
		for n := int64(len(part.rows)); len(part.rows) > 0; n = int64(len(part.rows)) {
			round := part.rows[:min(n, part.others*part.each)]
			part.rows = part.rows[len(round):]
			n = int64(len(round))
			lo, hi := min(n, part.who*part.each), min(n, (part.who+1)*part.each)
			// the last rows are others', which may need the weights that are kept here
			if lo == hi {
				if err := t.Model.Idle(&model.Ctx{Stream: t.stream, Weights: t.Weights}); err != nil {
					return 0, 0, err
				}
				continue
			}
			t.Clock.Push("data")
			m, err = t.Eval.Gather(round[lo:hi], m)
			t.Clock.Pop()
			if err != nil {
				return 0, 0, err
			}
			l, err := t.pass(m, 0, false, part.alone)
			if err != nil {
				return 0, 0, err
			}
			nll += l.Sum
			targets += l.Tokens
		}
	}
	return t.sumLoss(nll, targets)
}

// evalNumbers are the rows of the evaluation set: those that a rank can take whole, and the others.
func (t *Trainer) evalNumbers() (long, short []int64, err error) {
	for i := range t.Eval.Rows() {
		n := int64(0)
		if t.whole > 0 {
			if n, err = t.Eval.Length(i); err != nil {
				return nil, nil, err
			}
		}
		if n < 1 || n > t.whole {
			long = append(long, i)
		} else {
			short = append(short, i)
		}
	}
	return long, short, nil
}

// planWhole settles how many tokens each rank can evaluate by itself in the memory that there is, 0
// where a sequence has one rank anyway. Collective.
func (t *Trainer) planWhole() error {
	var err error
	n := int64(0)
	if t.Mesh.Seq.Size() > 1 && t.Eval != nil {
		var table []model.Component
		for n = t.ids.Shape[0]; n > 0; n /= 2 {
			if table, err = t.Model.MemoryAlone(n); err != nil || model.Bytes(table) <= t.arena.Bytes() {
				break
			}
		}
	}
	least := []int64{-n}
	if e := t.Mesh.World.AllReduce(nil, tensor.OfInt64(least, 1), comm.Max); err == nil {
		err = e
	}
	t.whole = -least[0]
	return err
}
