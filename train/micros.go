package train

import (
	"slices"

	"ulysses/comm"
	"ulysses/data"
)

// MaxRows is the most tokens of a micro step and of one rank's shard of it.
func (s *Setup) MaxRows() (tokens, rows int64) {
	if s.Train != nil {
		tokens = s.Data.Batch * s.Train.Longest()
		if s.Data.Budget > 0 {
			tokens = min(s.Data.Budget, s.globalBatch()*s.Train.Longest())
		}
	}
	if s.Eval != nil {
		tokens = max(tokens, s.evalRows()*s.Eval.Longest())
	}
	lo, hi := comm.Shard(tokens, s.Mesh.Seq.Size(), 0)
	return tokens, hi - lo
}

// globalBatch is the rows of an optimizer step.
func (s *Setup) globalBatch() int64 {
	return int64(s.Mesh.Replicas) * s.Data.Batch * s.Data.Accumulate
}

// evalRows is the rows a replica evaluates at a time: as many as a micro step of training has, or
// has room for whatever their lengths.
func (s *Setup) evalRows() int64 {
	if s.Data.Budget > 0 {
		return min(max(1, s.Data.Budget/s.Eval.Longest()), s.Eval.Rows())
	}
	return s.Data.Batch
}

// read fetches the micro steps and counts valid targets and tokens of the global batch; pairs is
// its sum over documents of length²/2, estimated from this replica's share.
func (t *Trainer) read(s int64) (valid, tokens int64, pairs float64, err error) {
	t.Clock.Push("data")
	defer t.Clock.Pop()
	if t.Data.Budget > 0 {
		err = t.readDealt(s)
	} else {
		for a := range t.micros {
			t.micros[a], err = t.Train.MicroBatch(s, int64(a), int64(t.Mesh.Replica), int64(t.Mesh.Replicas), t.Data.Batch, int64(len(t.micros)), t.micros[a])
			if err != nil {
				break
			}
		}
	}
	if err != nil {
		return 0, 0, 0, err
	}
	for _, m := range t.micros {
		valid += m.Valid
		tokens += int64(len(m.IDs))
		for i := 1; i < len(m.CuSeqlens); i++ {
			n := float64(m.CuSeqlens[i] - m.CuSeqlens[i-1])
			pairs += n * n / 2
		}
	}
	own := tokens
	c := t.counts.Int64s()
	c[0], c[1] = valid, tokens
	if err := t.Mesh.Data.AllReduce(nil, t.counts, comm.Sum); err != nil {
		return 0, 0, 0, err
	}
	return c[0], c[1], pairs * float64(c[1]) / float64(max(1, own)), nil
}

// readDealt fetches this replica's share of a step whose rows are dealt by their lengths. Each
// replica measures a part of the rows, which it may have to read for that, and tells the others.
func (t *Trainer) readDealt(s int64) (err error) {
	lengths, first := t.lengths.Int64s(), s*t.globalBatch()
	clear(lengths)
	for i := t.Mesh.Replica; i < len(lengths); i += t.Mesh.Replicas {
		if lengths[i], err = t.Train.Length(first + int64(i)); err != nil {
			return err
		}
	}
	if err := t.Mesh.Data.AllReduce(nil, t.lengths, comm.Sum); err != nil {
		return err
	}
	dealt := data.Deal(lengths, t.Mesh.Replicas, t.Data.Budget, func(n int64) float64 { return t.Model.Config.Flops(n, float64(n)*float64(n)/2) })
	t.micros = slices.Grow(t.micros[:0], len(dealt))[:len(dealt)]
	for a, micro := range dealt {
		rows := micro[t.Mesh.Replica]
		for i := range rows {
			rows[i] += first
		}
		if t.micros[a], err = t.Train.Gather(rows, t.micros[a]); err != nil {
			return err
		}
	}
	return nil
}
