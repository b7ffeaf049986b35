package model

import "ulysses/tensor"

// sharedExpert is an expert of all tokens. Its output, sigmoid(gate·x)·down(silu(gate(x))·up(x)),
// is added to the outputs of the experts that the router chooses (Qwen3.5-MoE).
type sharedExpert struct {
	gateUp, down linear
	gate         linear // [1, hidden]
	width        int64  // F

	// saved between the halves, or of the current tile
	hidden tensor.Tensor // [T, 2F], gate and up, then their gradients
	logit  tensor.Tensor // [T, 1] F32, of the sigmoid, then its gradient

	ones, weight, dweight tensor.Tensor // [T, 1] F32
	act                   tensor.Tensor // [T, F], the input of down, then its gradient
	out                   tensor.Tensor // [T, hidden], the output, or the gradient of the input
	dlogit                tensor.Tensor // [T, 1] of the compute type
}

// newSharedExpert returns the shared expert of a layer. name returns the name of a parameter.
func newSharedExpert(cfg *Config, name func(suffix string) string) *sharedExpert {
	const size = "shared_expert_intermediate_size"
	f, h := cfg.Experts.Shared, cfg.HiddenSize
	up := func(part string) *Param {
		return newParam(name("shared_expert."+part+".weight"), cfg.DType, normal, []string{size, "hidden_size"}, f, h)
	}
	down := newParam(name("shared_expert.down_proj.weight"), cfg.DType, normal, []string{"hidden_size", size}, h, f)
	gate := newParam(name("shared_expert_gate.weight"), cfg.DType, normal, []string{"1", "hidden_size"}, 1, h)
	return &sharedExpert{gateUp: newLinear([]*Param{up("gate_proj"), up("up_proj")}, nil),
		down: newLinear([]*Param{down}, nil), gate: newLinear([]*Param{gate}, nil), width: f}
}

func (s *sharedExpert) params() []*Param {
	return append(append(append([]*Param(nil), s.gateUp.w...), s.down.w...), s.gate.w...)
}

// allocate allocates what is otherwise saved in temporary memory.
func (s *sharedExpert) allocate(p *pass, tokens int64) {
	s.hidden, s.logit = p.temp(tokens, 2*s.width), p.tempF32(tokens, 1)
}

// working allocates the memory that a half needs beyond what is saved.
func (s *sharedExpert) working(p *pass, tokens int64, backward bool) {
	s.ones, s.weight = p.tempF32(tokens, 1), p.tempF32(tokens, 1)
	s.act, s.out = p.temp(tokens, s.width), p.temp(tokens, s.gateUp.in)
	if backward {
		s.dweight, s.dlogit = p.tempF32(tokens, 1), p.temp(tokens, 1)
	}
}

// sketch allocates, in a dry run, what adapters allocate for a tile.
func (s *sharedExpert) sketch(p *pass, tokens int64) {
	s.gateUp.sketch(p, tokens)
	s.down.sketch(p, tokens)
	s.gate.sketch(p, tokens)
}

// firstRows returns a view of the first n rows.
func firstRows(t tensor.Tensor, n int64) tensor.Tensor { return t.Slice(0, 0, n) }

// project computes gate and up, and the logit, of tokens x.
func (s *sharedExpert) project(p *pass, x tensor.Tensor) {
	n := x.Shape[0]
	s.gateUp.forward(p, firstRows(s.hidden, n), x)
	s.gate.forward(p, firstRows(s.logit, n), x)
}

// weights computes the sigmoid of the logits of n tokens.
func (s *sharedExpert) weights(p *pass, n int64) (weight, ones tensor.Tensor) {
	weight, ones = firstRows(s.weight, n), firstRows(s.ones, n)
	p.fill(ones, 1)
	p.SigmoidGate(weight, ones, firstRows(s.logit, n))
	return weight, ones
}

// split returns views of gate and up of n tokens.
func (s *sharedExpert) split(n int64) (gate, up tensor.Tensor) {
	return firstRows(s.hidden, n).Slice(1, 0, s.width), firstRows(s.hidden, n).Slice(1, s.width, 2*s.width)
}

// forward returns the output of down, and its weights [T].
func (s *sharedExpert) forward(p *pass, x tensor.Tensor) (out, weights tensor.Tensor) {
	n := x.Shape[0]
	s.project(p, x)
	weight, _ := s.weights(p, n)
	gate, up := s.split(n)
	act := firstRows(s.act, n)
	p.SwiGLU(act, gate, up, formSiLU)
	out = firstRows(s.out, n)
	s.down.forward(p, out, act)
	return out, weight.Select(1, 0)
}

// backward adds to the gradients of the weights and returns the gradient of x. See
// experts.backwardRows.
func (s *sharedExpert) backward(p *pass, x, dy tensor.Tensor) tensor.Tensor {
	n := x.Shape[0]
	weight, ones := s.weights(p, n)
	gate, up := s.split(n)
	act, dweight, out := firstRows(s.act, n), firstRows(s.dweight, n), firstRows(s.out, n)
	logit, dlogit, hidden := firstRows(s.logit, n), firstRows(s.dlogit, n), firstRows(s.hidden, n)
	s.down.backwardInput(p, act, dy)
	p.WeightedSwiGLUBack(act, gate, up, weight.Select(1, 0), dweight.Select(1, 0), formSiLU)
	s.down.addWeights(p, dy, act)
	s.gateUp.addWeights(p, hidden, x)
	s.gateUp.backwardInput(p, out, hidden)
	p.SigmoidGateBack(dweight, logit, ones, logit)
	p.Copy(dlogit, logit)
	s.gate.addWeights(p, dlogit, x)
	s.gate.inputGrad(p, out, dlogit, true)
	return out
}

func (s *sharedExpert) gradReady(p *pass) {
	s.down.gradReady(p)
	s.gateUp.gradReady(p)
	s.gate.gradReady(p)
}
