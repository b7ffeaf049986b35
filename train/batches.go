package train

import (
	"slices"

	"ulysses/comm"
	"ulysses/data"
)

// read reads this replica's micro-batches of step s. It returns the valid targets and the tokens of
// the global batch. pairs is the sum of Config.Pairs over the documents of the global batch. It is
// estimated from this replica's micro-batches. Collective.
func (t *Trainer) read(s int64) (valid, tokens int64, pairs float64, err error) {
	t.Clock.Push("data")
	defer t.Clock.Pop()
	if t.Data.Config.Budget > 0 {
		err = t.readBalanced(s)
	} else {
		for a := range t.microBatches {
			at := t.Loop.first(s, t.globalBatch()) +
				(int64(a)*int64(t.Mesh.Replicas)+int64(t.Mesh.Replica))*t.Data.Config.Batch
			t.microBatches[a], err = t.Data.Train.Ordered(at, t.Data.Config.Batch, t.microBatches[a])
			if err != nil {
				break
			}
		}
	}
	if err != nil {
		return 0, 0, 0, err
	}
	for _, m := range t.microBatches {
		valid += m.Valid
		tokens += int64(len(m.IDs))
		for i := 1; i < len(m.CuSeqlens); i++ {
			pairs += t.Model.Config.Pairs(m.CuSeqlens[i] - m.CuSeqlens[i-1])
		}
	}
	if t.length, err = t.longest(); err != nil {
		return 0, 0, 0, err
	}
	own := tokens
	c := t.counts.Int64s()
	c[0], c[1] = valid, tokens
	if err := t.Mesh.Data.AllReduce(nil, t.counts, comm.Sum); err != nil {
		return 0, 0, 0, err
	}
	return c[0], c[1], pairs * float64(c[1]) / float64(max(1, own)), nil
}

// longest returns the largest position of the global batch plus 1, or 0 if the model does not need
// it. All replicas must have the same number, so that the result of a step does not depend on the
// mesh. Collective.
func (t *Trainer) longest() (int64, error) {
	if !t.Model.Config.Switches() {
		return 0, nil
	}
	n := int64(0)
	for _, m := range t.microBatches {
		n = max(n, lengthOf(m))
	}
	t.lengthMax.Int64s()[0] = n
	err := t.Mesh.Data.AllReduce(nil, t.lengthMax, comm.Max)
	return t.lengthMax.Int64s()[0], err
}

// lengthOf returns the largest position of a micro-batch plus 1.
func lengthOf(m *data.MicroBatch) int64 {
	n := int32(0)
	for _, position := range m.Positions {
		n = max(n, position)
	}
	return int64(n) + 1
}

// readBalanced reads this replica's micro-batches of step s if data.budget is set. Each replica
// determines the lengths of some of the sequences, which may require reading them. The replicas sum
// the lengths, and data.Balance assigns the sequences to micro-batches. Collective.
func (t *Trainer) readBalanced(s int64) (err error) {
	lengths, first := t.lengths.Int64s(), t.Loop.first(s, t.globalBatch())
	clear(lengths)
	for i := t.Mesh.Replica; i < len(lengths); i += t.Mesh.Replicas {
		if lengths[i], err = t.Data.Train.Length(first + int64(i)); err != nil {
			return err
		}
	}
	if err := t.Mesh.Data.AllReduce(nil, t.lengths, comm.Sum); err != nil {
		return err
	}
	cost := func(n int64) float64 { return t.Model.Config.Flops(n, t.Model.Config.Pairs(n)) }
	assigned := data.Balance(lengths, t.Mesh.Replicas, t.Data.Config.Budget, cost)
	t.microBatches = slices.Grow(t.microBatches[:0], len(assigned))[:len(assigned)]
	for a, replicas := range assigned {
		numbers := replicas[t.Mesh.Replica]
		for i := range numbers {
			numbers[i] += first
		}
		if t.microBatches[a], err = t.Data.Train.Gather(numbers, t.microBatches[a]); err != nil {
			return err
		}
	}
	return nil
}
