package train

import (
	"ulysses/data"
	"ulysses/internal/status"
	"ulysses/model"
)

// Evaluate returns the mean NLL of the evaluation sets with the current weights, and compares it
// with earlier evaluations (Setup.Track). step is the number of the record. Collective.
func (t *Trainer) Evaluate(step int64) (*EvalRecord, error) {
	r, total := &EvalRecord{Step: step}, 0.0
	for i, set := range t.Data.Evals {
		t.evalSet = i
		nll, n, err := t.evaluate(set.Set)
		if err != nil {
			return nil, err
		}
		if notFinite(nll) && t.Loop.OnNaN != "skip" {
			seen, fix, err := t.diagnose(func(*diagnosis) error { _, _, err := t.evaluate(set.Set); return err }, false)
			if err != nil {
				return nil, err
			}
			of := ""
			if set.Name != "" {
				of = " of " + set.Name
			}
			return nil, shared{status.Errorf(status.Numeric, "train: evaluation%s after step %d: loss %g: %s; %s", of,
				step, nll, seen, fix)}
		}
		total, r.EvalTokens = total+nll, r.EvalTokens+n
		if set.Name != "" {
			r.Sets = append(r.Sets, SetLoss{set.Name, Float(nll / float64(max(1, n))), n})
		}
	}
	r.EvalLoss = Float(total / float64(max(1, r.EvalTokens)))
	err := t.compare(r)
	if err == nil && t.Hooks.Eval != nil {
		err = t.Hooks.Eval(r)
	}
	return r, err
}

// evaluate returns the sum of NLL and the number of targets of a set over all ranks. Short
// sequences are distributed over all ranks, and each rank evaluates its sequences alone, without
// all-to-all. Long sequences are distributed over the replicas and sharded over the ranks of a
// replica. All ranks run the same number of passes, because the weights may be sharded.
func (t *Trainer) evaluate(set *data.Set) (nll float64, targets int64, err error) {
	long, short, err := t.evalNumbers(set)
	if err != nil {
		return 0, 0, err
	}
	world, replicas := t.Mesh.World, int64(t.Mesh.Replicas)
	var m *data.MicroBatch
	for _, x := range []struct {
		numbers []int64
		each    int64 // sequences in a pass
		alone   bool
		me, of  int64 // of each round, this rank evaluates share me of the sequences
	}{{long, t.evalBatch(set), false, int64(t.Mesh.Replica), replicas},
		{short, 1, true, int64(world.Rank()), int64(world.Size())}} {
		for len(x.numbers) > 0 {
			round := x.numbers[:min(int64(len(x.numbers)), x.of*x.each)]
			x.numbers = x.numbers[len(round):]
			n := int64(len(round))
			lo, hi := min(n, x.me*x.each), min(n, (x.me+1)*x.each)
			// The last round may have no sequence for this rank. Other ranks still need its shards
			// of the weights.
			if lo == hi {
				if err := t.Model.Idle(&model.Ctx{Stream: t.stream, Weights: t.Weights, Arena: t.arena,
					Clock: t.Clock}); err != nil {
					return 0, 0, err
				}
				t.expertSent += t.Model.ExpertBytesSent()
				continue
			}
			t.Clock.Push("data")
			m, err = set.Gather(round[lo:hi], m)
			t.Clock.Pop()
			if err != nil {
				return 0, 0, err
			}
			l, err := t.pass(m, 0, false, x.alone)
			if err != nil {
				return 0, 0, err
			}
			nll += l.Sum
			targets += l.Tokens
		}
	}
	sum, err := t.sumLoss(model.Loss{Sum: nll, Tokens: targets})
	return sum.Sum, sum.Tokens, err
}

// evalNumbers returns the numbers of the sequences that a rank can evaluate alone (short), and of
// the others (long).
func (t *Trainer) evalNumbers(set *data.Set) (long, short []int64, err error) {
	for i := range set.Sequences() {
		n := int64(0)
		if t.maxAlone > 0 && t.Hooks.Tokens == nil { // tokens are copied by all ranks of a sequence together
			if n, err = set.Length(i); err != nil {
				return nil, nil, err
			}
		}
		if n < 1 || n > t.maxAlone { // also if no length was needed
			long = append(long, i)
		} else {
			short = append(short, i)
		}
	}
	return long, short, nil
}
