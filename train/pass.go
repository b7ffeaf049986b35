package train

import (
	"ulysses/comm"
	"ulysses/data"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// pass runs the model on this rank's shard of a micro-batch, or with alone on all tokens. valid is
// the number of targets by which the gradient is divided. The model waits for the stream before it
// returns the loss, so the caller may then change the micro-batch. Collective over the ranks of the
// sequence unless alone is set.
func (t *Trainer) pass(m *data.MicroBatch, valid int64, backward, alone bool) (model.Loss, error) {
	total := int64(len(m.IDs))
	group, spec := comm.Comm(t.Mesh.Seq), t.Model.BatchSpec(total, m.CuSeqlens)
	if t.alone = alone; alone {
		defer func() { t.alone = false }()
		group, spec = comm.Local(1)[0], sp.BatchSpec{Batch: 1, Seq: total, CuSeqlens: m.CuSeqlens}
	}
	batch, err := sp.NewBatch(group, spec)
	if err != nil {
		return model.Loss{}, err
	}
	n := batch.Rows()
	b := model.Batch{SP: batch, IDs: t.ids.Slice(0, 0, n), Targets: t.targets.Slice(0, 0, n),
		Positions: t.positions.Slice(0, 0, n), Length: t.length, Seed: int64(t.Seed), Number: m.First}
	if !backward { // evaluation, in which a sequence is a batch
		b.Length = lengthOf(m)
	}
	ranges := batch.Ranges(group.Rank())
	for _, x := range []struct {
		dst tensor.Tensor
		src []int32
	}{{b.IDs, m.IDs}, {b.Targets, m.Targets}, {b.Positions, m.Positions}} {
		if err := t.copyTokens(x.dst, tensor.OfInt32(x.src, total), ranges); err != nil {
			return model.Loss{}, err
		}
	}
	if backward && t.Model.CountsExperts() {
		if err := t.copySequences(m, ranges, &b); err != nil {
			return model.Loss{}, err
		}
	}
	if backward && t.Model.Drops() {
		if err := t.copyNumbers(m, ranges, &b); err != nil {
			return model.Loss{}, err
		}
	}
	forward, back := t.Model.BytesSent(batch)
	t.sent += forward
	c := &model.Ctx{Stream: t.stream, Weights: t.Trace.weights(t.Weights), Arena: t.arena, Host: t.host, Clock: t.Clock,
		Inspect: t.inspect}
	if backward {
		t.sent += back
		t.balanceSent += t.Model.BalanceBytesSent()
		if valid > 0 {
			b.GradScale = 1 / float64(valid)
		}
	}
	defer func() { t.expertSent += t.Model.ExpertBytesSent() }()
	switch {
	case t.Hooks.Tokens != nil && c.Inspect == nil:
		return t.passWithTokens(m, ranges, c, &b, backward)
	case backward:
		return t.Model.ForwardBackward(c, &b)
	}
	return t.Model.Forward(c, &b)
}

// copyTokens copies this rank's tokens, which are the given ranges of the micro-batch, from all
// tokens.
func (t *Trainer) copyTokens(dst, all tensor.Tensor, ranges []sp.Range) error {
	at := int64(0)
	for _, r := range ranges {
		n := r.Hi - r.Lo
		if err := t.Device.Copy(t.stream, dst.Slice(0, at, at+n), all.Slice(0, r.Lo, r.Hi)); err != nil {
			return err
		}
		at += n
	}
	return nil
}

// update clips the gradient and runs the optimizer.
func (t *Trainer) update(lr, norm float64) error {
	scale := 1.0
	if t.Optimizer.Clip > 0 {
		scale = min(1, t.Optimizer.Clip/(norm+1e-6))
	}
	t.Clock.Push("optimizer")
	defer t.Clock.Pop()
	t.updates++
	if err := t.Weights.Update(t.stream, lr, scale, t.updates); err != nil {
		return err
	}
	// Readers of the weights use other streams, and the measured time must include the update.
	return t.stream.Sync()
}

// sumChoices adds the choices of experts of all sequences, if they move biases, and records the
// largest load. Collective.
func (t *Trainer) sumChoices(r *Record) error {
	if !t.Model.MovesBiases() {
		return nil
	}
	choices := t.Model.Choices()
	if t.Mesh.Seq.Rank() > 0 { // every rank of a sequence has the choices of the whole sequence
		clear(choices)
	}
	err := t.Mesh.World.AllReduce(nil, tensor.OfFloat64(choices, int64(len(choices))), comm.Sum)
	load := Float(t.Model.ExpertLoad())
	r.ExpertLoad = &load
	return err
}

// sumLoss returns the sum of the losses of all ranks. Collective.
func (t *Trainer) sumLoss(l model.Loss) (model.Loss, error) {
	s := t.sums.Float64s()
	s[0], s[1], s[2] = l.Sum, l.Balance, float64(l.Tokens)
	err := t.Mesh.World.AllReduce(nil, t.sums, comm.Sum)
	return model.Loss{Sum: s[0], Balance: s[1], Tokens: int64(s[2])}, err
}
