package train

import (
	"ulysses/data"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// mostSequences returns the largest number of sequences of a micro-batch in training.
func (s *Setup) mostSequences() int64 {
	if s.Data.Config.Budget > 0 {
		return max(1, s.globalBatch())
	}
	return max(1, s.Data.Config.Batch)
}

// copySequences sets what a batch says about the sequences of this rank's tokens, which are the
// given ranges of the micro-batch: the sequences by which experts are balanced, and the numbers by
// which adapters drop.
func (t *Trainer) copySequences(m *data.MicroBatch, ranges []sp.Range, b *model.Batch) error {
	balances, drops, total := t.Model.Config.Balances(), t.Model.Drops(), int64(len(m.IDs))
	t.sequenceOf, t.sequenceTargets, t.numberOf = t.sequenceOf[:0], t.sequenceTargets[:0], t.numberOf[:0]
	for i, s := range m.Sequences {
		end, targets := total, int64(0)
		if i+1 < len(m.Sequences) {
			end = m.Sequences[i+1].At
		}
		for at := s.At; at < end; at++ {
			number := int32(i)
			if m.Targets[at] == data.Ignore {
				number = -1
			} else {
				targets++
			}
			if balances {
				t.sequenceOf = append(t.sequenceOf, number)
			}
			if drops {
				t.numberOf = append(t.numberOf, tokenNumber(s.Number, at-s.At))
			}
		}
		t.sequenceTargets = append(t.sequenceTargets, targets)
	}
	if balances {
		b.Sequences, b.SequenceTargets = t.sequences.Slice(0, 0, b.SP.Rows()), t.sequenceTargets
		if err := t.copyTokens(b.Sequences, tensor.OfInt32(t.sequenceOf, total), ranges); err != nil {
			return err
		}
	}
	if drops {
		b.Numbers = t.numbers.Slice(0, 0, b.SP.Rows())
		return t.copyTokens(b.Numbers, tensor.OfInt64(t.numberOf, total), ranges)
	}
	return nil
}

// tokenNumber returns the number in the run of a token of a sequence.
func tokenNumber(sequence, index int64) int64 { return sequence<<32 + index }
