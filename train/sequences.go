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

// copySequences sets the sequences of a batch, by which experts are balanced, for this rank's
// tokens, which are the given ranges of the micro-batch.
func (t *Trainer) copySequences(m *data.MicroBatch, ranges []sp.Range, b *model.Batch) error {
	t.sequenceOf, t.sequenceTargets = t.sequenceOf[:0], t.sequenceTargets[:0]
	for i, s := range m.Sequences {
		end, targets := int64(len(m.IDs)), int64(0)
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
			t.sequenceOf = append(t.sequenceOf, number)
		}
		t.sequenceTargets = append(t.sequenceTargets, targets)
	}
	b.Sequences, b.SequenceTargets = t.sequences.Slice(0, 0, b.SP.Rows()), t.sequenceTargets
	at := int64(0)
	for _, r := range ranges {
		n := r.Hi - r.Lo
		if err := t.Device.Copy(t.stream, b.Sequences.Slice(0, at, at+n), tensor.OfInt32(t.sequenceOf[r.Lo:r.Hi], n)); err != nil {
			return err
		}
		at += n
	}
	return nil
}
