package model

import (
	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// balance is the loss of a pass that balances the load of experts (Fedus et al. 2022,
// arXiv:2101.03961). For one sequence and one layer it is E·Σ f·P over the experts: f is the number
// of choices of an expert, and P the sum of its probabilities, over the tokens with a target, both
// divided by the number of these tokens. It is k if all experts are chosen equally. The loss of a
// step is the mean over the layers with experts, and over the sequences, weighted by their targets.
//
// A token's term needs the choices of its whole sequence alone. Therefore the loss is the same for
// every number of ranks, replicas and micro-batches. Of the ranks of a sequence only the counts are
// added, once in a pass, between the forward and the backward half. f is constant in the gradient.
type balance struct {
	on       bool // choices are counted: for the loss, or to move biases (expertBias)
	loss     bool // the pass has the loss
	counting bool // Route counts: this is the forward half, not its repetition
	// [layers with experts, sequences, E] F64: choices, of all ranks from the backward half on, and
	// sums of the probabilities of this rank's tokens
	counts, sums tensor.Tensor
	scale        tensor.Tensor // [sequences] F32: factors of the gradient of f·P
}

// balancing is the memory on the host.
type balancing struct {
	sequences    int64 // most of a batch
	scale        []float32
	counts, sums []float64
	factors      []float64 // E / (layers · targets) of each sequence
}

// SetSequences sets the largest number of sequences of a batch, for Batch.Sequences. The default is
// 1.
func (m *Model) SetSequences(n int64) {
	layers, e := m.Config.SparseLayers(), m.Config.Experts.Count
	m.balancing = balancing{sequences: n, scale: make([]float32, n), factors: make([]float64, n)}
	if m.CountsExperts() {
		m.balancing.counts, m.balancing.sums = make([]float64, layers*n*e), make([]float64, layers*n*e)
	}
}

// begin allocates and clears the memory of a pass.
func (b *balance) begin(p *pass, m *Model) {
	*b = balance{on: p.backward && m.CountsExperts(), loss: p.backward && m.Config.Balances()}
	if !b.on {
		return
	}
	x, layers, e := &m.balancing, m.Config.SparseLayers(), m.Config.Experts.Count
	b.counts, b.sums = p.alloc(tensor.F64, layers, x.sequences, e), p.alloc(tensor.F64, layers, x.sequences, e)
	b.scale = p.tempF32(x.sequences)
	if p.skip() {
		return
	}
	clear(x.scale)
	clear(x.factors)
	for i, targets := range p.batch.SequenceTargets {
		if targets > 0 {
			x.factors[i] = float64(e) / (float64(layers) * float64(targets))
			x.scale[i] = float32(m.Config.Experts.Balance * p.batch.GradScale * x.factors[i])
		}
	}
	p.fill(b.counts, 0)
	p.fill(b.sums, 0)
	p.Copy(b.scale, tensor.OfFloat32(x.scale, x.sequences))
	b.counting = true
}

// share ends the forward half: it adds the counts of the ranks. Collective.
func (b *balance) share(p *pass) {
	b.counting = false
	if !b.on || p.skip() || p.comm.Size() == 1 {
		return
	}
	p.phase("mlp")
	p.err = p.comm.AllReduce(p.ctx.Stream, b.counts, comm.Sum)
	p.end()
}

// CountsExperts reports whether passes with a backward half count the choices of experts.
func (m *Model) CountsExperts() bool { return m.Config.Balances() || m.bias.moves }

// BalanceBytesSent returns the bytes that this rank sends in a ForwardBackward to count the choices
// of experts.
func (m *Model) BalanceBytesSent() int64 {
	return comm.AllReduceBytes(m.comm.Rank(), m.comm.Size(), int64(len(m.balancing.counts)), tensor.F64.Size())
}

// read enqueues the copies to the host for loss.
func (b *balance) read(p *pass, m *Model) {
	if x := &m.balancing; b.on {
		n := int64(len(x.counts))
		p.Copy(tensor.OfFloat64(x.counts, n), b.counts.View(n))
		p.Copy(tensor.OfFloat64(x.sums, n), b.sums.View(n))
	}
}

// total returns this rank's share of the loss times the targets, and adds the choices to the ones
// of earlier passes, once the stream has run.
func (b *balance) total(m *Model) (loss float64) {
	if !b.on {
		return 0
	}
	x, e := &m.balancing, m.Config.Experts.Count
	for i, n := range x.counts {
		i := int64(i)
		if m.bias.moves {
			m.bias.choices[i/(e*x.sequences)*e+i%e] += n
		}
		if b.loss {
			loss += x.factors[i/e%x.sequences] * n * x.sums[i]
		}
	}
	return loss
}

// sequencesAt returns the sequences of tokens [lo, lo+n), nil if the pass counts no choices.
func (p *pass) sequencesAt(lo, n int64) tensor.Tensor {
	if !p.balance.on || p.skip() {
		return tensor.Tensor{}
	}
	return p.batch.Sequences.Slice(0, lo, lo+n)
}

// checkSequences checks the fields of a batch that the balance of experts needs.
func (m *Model) checkSequences(op string, b *Batch, tokens int64) error {
	t, n := &b.Sequences, int64(len(b.SequenceTargets))
	if t.DType != tensor.I32 || t.NDim != 1 || t.Shape[0] != tokens || !t.Contiguous() || n > m.balancing.sequences {
		return status.Errorf(status.InvalidArgument,
			"model.%s: the sequences are %v with the targets of %d; the balance of experts needs I32[%d], and at most the %d sequences of SetSequences",
			op, *t, n, tokens, m.balancing.sequences)
	}
	return nil
}
