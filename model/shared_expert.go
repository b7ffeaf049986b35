package model

import "ulysses/tensor"

// sharedExpert is an expert of all tokens. Its output, sigmoid(gate·x)·down(silu(gate(x))·up(x)),
// is added to the outputs of the experts that the router chooses (Qwen3.5-MoE). In other families
// it has no gate (DeepSeek-V3), as if the sigmoid were 1.
type sharedExpert struct {
	gateUp, down linear
	gate         linear // [1, hidden]; empty without a gate
	width        int64  // F

	// saved between the halves, or of the current tile
	hidden tensor.Tensor // [T, 2F], gate and up, then their gradients
	logit  tensor.Tensor // [T, 1] F32, of the sigmoid, then its gradient; nil without a gate

	ones, weight, dweight tensor.Tensor // [T, 1] F32
	act                   tensor.Tensor // [T, F], the input of down, then its gradient
	out                   tensor.Tensor // [T, hidden], the output, or the gradient of the input
	dlogit                tensor.Tensor // [T, 1] of the compute type
}

// newSharedExpert returns the shared expert of a layer. name returns the name of a parameter.
func newSharedExpert(cfg *Config, name func(suffix string) string) *sharedExpert {
	names, f, h := cfg.family.experts, cfg.Experts.Shared, cfg.HiddenSize
	module, size := names.sharedName(), "shared_expert_intermediate_size"
	if names.sharedCount != "" {
		size = names.sharedCount + " · " + names.size
	}
	up := func(part string) *Param {
		return newParam(name(module+"."+part+".weight"), cfg.DType, normal, []string{size, "hidden_size"}, f, h)
	}
	down := newParam(name(module+".down_proj.weight"), cfg.DType, normal, []string{"hidden_size", size}, h, f)
	s := &sharedExpert{gateUp: newLinear([]*Param{up("gate_proj"), up("up_proj")}, nil),
		down: newLinear([]*Param{down}, nil), width: f}
	if names.shared {
		gate := newParam(name(module+"_gate.weight"), cfg.DType, normal, []string{"1", "hidden_size"}, 1, h)
		s.gate = newLinear([]*Param{gate}, nil)
	}
	return s
}

func (s *sharedExpert) gated() bool { return len(s.gate.w) > 0 }

func (s *sharedExpert) params() []*Param {
	return append(append(append([]*Param(nil), s.gateUp.w...), s.down.w...), s.gate.w...)
}

// allocate allocates what is otherwise saved in temporary memory.
func (s *sharedExpert) allocate(p *pass, tokens int64) {
	s.hidden = p.temp(tokens, 2*s.width)
	if s.gated() {
		s.logit = p.tempF32(tokens, 1)
	}
}

// visitSaved visits gate and up, and the logit.
func (s *sharedExpert) visitSaved(p *pass) {
	p.visit(&s.hidden, mlpSaved, p.tokens, 2*s.width)
	if s.gated() {
		p.visitF32(&s.logit, mlpSaved, p.tokens, 1)
	}
}

// working allocates the memory that a half needs beyond what is saved.
func (s *sharedExpert) working(p *pass, tokens int64, backward bool) {
	s.act, s.out = p.temp(tokens, s.width), p.temp(tokens, s.gateUp.in)
	if !s.gated() {
		return
	}
	s.ones, s.weight = p.tempF32(tokens, 1), p.tempF32(tokens, 1)
	if backward {
		s.dweight, s.dlogit = p.tempF32(tokens, 1), p.temp(tokens, 1)
	}
}

// sketch allocates, in a dry run, what adapters allocate for a tile.
func (s *sharedExpert) sketch(p *pass, tokens int64) {
	s.gateUp.sketch(p, tokens)
	s.down.sketch(p, tokens)
	if s.gated() {
		s.gate.sketch(p, tokens)
	}
}

// firstRows returns a view of the first n rows.
func firstRows(t tensor.Tensor, n int64) tensor.Tensor { return t.Slice(0, 0, n) }

// project computes gate and up, and the logit, of tokens x.
func (s *sharedExpert) project(p *pass, x tensor.Tensor) {
	n := x.Shape[0]
	s.gateUp.forward(p, firstRows(s.hidden, n), x)
	if s.gated() {
		s.gate.forward(p, firstRows(s.logit, n), x)
	}
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

// forward returns the output of down, and its weights [T], nil without a gate.
func (s *sharedExpert) forward(p *pass, x tensor.Tensor) (out, weights tensor.Tensor) {
	n := x.Shape[0]
	s.project(p, x)
	gate, up := s.split(n)
	act := firstRows(s.act, n)
	if s.gated() {
		weight, _ := s.weights(p, n)
		weights = weight.Select(1, 0)
	}
	p.SwiGLU(act, gate, up, formSiLU)
	out = firstRows(s.out, n)
	s.down.forward(p, out, act)
	return out, weights
}

// backward adds to the gradients of the weights and returns the gradient of x. See
// experts.backwardRows.
func (s *sharedExpert) backward(p *pass, x, dy tensor.Tensor) tensor.Tensor {
	n := x.Shape[0]
	gate, up := s.split(n)
	act, out, hidden := firstRows(s.act, n), firstRows(s.out, n), firstRows(s.hidden, n)
	s.down.backwardInput(p, act, dy)
	if s.gated() {
		weight, _ := s.weights(p, n)
		p.WeightedSwiGLUBack(act, gate, up, weight.Select(1, 0), firstRows(s.dweight, n).Select(1, 0), formSiLU)
	} else {
		p.SwiGLUBack(act, gate, up, formSiLU)
	}
	s.down.addWeights(p, dy, act)
	s.gateUp.addWeights(p, hidden, x)
	s.gateUp.backwardInput(p, out, hidden)
	if s.gated() {
		s.backwardGate(p, out, x)
	}
	return out
}

// backwardGate adds the gradient of x by the gate to dx.
func (s *sharedExpert) backwardGate(p *pass, dx, x tensor.Tensor) {
	n := x.Shape[0]
	logit, dlogit := firstRows(s.logit, n), firstRows(s.dlogit, n)
	p.SigmoidGateBack(firstRows(s.dweight, n), logit, firstRows(s.ones, n), logit)
	p.Copy(dlogit, logit)
	s.gate.addWeights(p, dlogit, x)
	s.gate.inputGrad(p, dx, dlogit, true)
}

func (s *sharedExpert) gradReady(p *pass) {
	s.down.gradReady(p)
	s.gateUp.gradReady(p)
	if s.gated() {
		s.gate.gradReady(p)
	}
}
