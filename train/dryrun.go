package train

import (
	"ulysses/comm"
	"ulysses/data"
)

// DryRun enqueues the operations of an optimizer step with the given number of micro-batches, or of
// that many passes of an evaluation. Each micro-batch has the largest number of tokens, in
// sequences of the largest length. These have documents of equal lengths, as many as the sequences
// of the set have on average. It is for devices that compute nothing. Collective.
func (t *Trainer) DryRun(microBatches int64) error {
	set := t.Data.Train
	if set == nil {
		set = t.Data.Evals[0].Set
	}
	tokens := t.PassTokens()
	m := &data.MicroBatch{IDs: make([]int32, tokens), Targets: make([]int32, tokens), Positions: make([]int32, tokens),
		CuSeqlens: []int64{0}, Valid: tokens}
	documents := max(1, set.Documents()/set.Sequences()) // of a sequence
	for first := int64(0); first < tokens; first += set.Longest() {
		n := min(set.Longest(), tokens-first)
		m.Sequences = append(m.Sequences, data.Sequence{Number: int64(len(m.Sequences)), At: first})
		for d := range min(n, documents) {
			_, end := comm.Shard(n, min(n, documents), d)
			m.CuSeqlens = append(m.CuSeqlens, first+end)
		}
	}
	if t.Data.Train == nil {
		for range microBatches {
			if _, err := t.pass(m, 0, false, false); err != nil {
				return err
			}
		}
		return nil
	}
	t.length = set.Longest()
	if err := t.Weights.Begin(t.stream, microBatches); err != nil {
		return err
	}
	for range microBatches {
		if _, err := t.pass(m, tokens, true, false); err != nil {
			return err
		}
	}
	norm, err := t.Weights.Reduce(t.stream)
	if err != nil {
		return err
	}
	if err := t.update(0, norm); err != nil {
		return err
	}
	return t.agree(true)
}
