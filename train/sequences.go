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

// tokenInputs are the numbers that this rank's tokens have in a batch, each [shard].
type tokenInputs struct {
	ids, targets, positions tensor.Tensor // I32
	sequences               tensor.Tensor // I32; nil unless the model's experts are balanced
	numbers                 tensor.Tensor // I64; nil unless adapters drop
}

// tokenInput is one of the tensors of tokenInputs, with its type.
type tokenInput struct {
	tensor *tensor.Tensor
	dtype  tensor.DType
}

// of returns the inputs that a model needs.
func (x *tokenInputs) of(m *model.Model) []tokenInput {
	all := []tokenInput{{&x.ids, tensor.I32}, {&x.targets, tensor.I32}, {&x.positions, tensor.I32}}
	if m.CountsExperts() {
		all = append(all, tokenInput{&x.sequences, tensor.I32})
	}
	if m.Drops() {
		all = append(all, tokenInput{&x.numbers, tensor.I64})
	}
	return all
}

// copySequences sets the sequences of a batch, by which experts are balanced, for this rank's
// tokens, which are the given ranges of the micro-batch.
func (t *Trainer) copySequences(m *data.MicroBatch, ranges []sp.Range, b *model.Batch) error {
	t.sequenceOf, t.sequenceTargets = t.sequenceOf[:0], t.sequenceTargets[:0]
	for i, s := range m.Sequences {
		targets := int64(0)
		for at := s.At; at < sequenceEnd(m, i); at++ {
			number := int32(i)
			if m.Targets[at] == data.Ignore {
				number = -1
			} else {
				targets++
			}
			t.sequenceOf = append(t.sequenceOf, number)
		}
		t.sequenceTargets = append(t.sequenceTargets, targets)
	}
	b.Sequences, b.SequenceTargets = t.sequences.Slice(0, 0, b.SP.Rows()), t.sequenceTargets
	return t.copyTokens(b.Sequences, tensor.OfInt32(t.sequenceOf, int64(len(t.sequenceOf))), ranges)
}

// copyNumbers sets the numbers of this rank's tokens in the run, by which adapters drop: of token i
// of sequence s, s·2^32 + i.
func (t *Trainer) copyNumbers(m *data.MicroBatch, ranges []sp.Range, b *model.Batch) error {
	t.numberOf = t.numberOf[:0]
	for i, s := range m.Sequences {
		for at := s.At; at < sequenceEnd(m, i); at++ {
			t.numberOf = append(t.numberOf, s.Number<<32+at-s.At)
		}
	}
	b.Numbers = t.numbers.Slice(0, 0, b.SP.Rows())
	return t.copyTokens(b.Numbers, tensor.OfInt64(t.numberOf, int64(len(t.numberOf))), ranges)
}

// sequenceEnd returns the token of a micro-batch behind the last one of sequence i.
func sequenceEnd(m *data.MicroBatch, i int) int64 {
	if i+1 < len(m.Sequences) {
		return m.Sequences[i+1].At
	}
	return int64(len(m.IDs))
}
