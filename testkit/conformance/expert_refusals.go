package conformance

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// expertCalls are a valid call of each operation, for 3 tokens with 2 of 4 experts.
func expertCalls(b *bench) map[string]func() error {
	f := func(shape ...int64) tensor.Tensor {
		n := int64(1)
		for _, x := range shape {
			n *= x
		}
		return b.inout("x", tensor.F32, dense, make([]float64, n), shape...).Tensor
	}
	chosen, rows := b.inout("experts", tensor.I32, dense, []float64{0, 1, 0, 1, 0, 1}, 3, 2).Tensor,
		b.inout("rows", tensor.I32, dense, []float64{0, 3, 1, 4, 2, 5}, 3, 2).Tensor
	offsets := b.inout("offsets", tensor.I32, dense, []float64{0, 3, 6, 6, 6}, 5).Tensor
	return map[string]func() error{
		"RouteForward": func() error {
			return b.dev.RouteForward(b.stream,
				&device.Route{Logits: f(3, 4), Experts: chosen, Rows: rows, Weights: f(6), Offsets: offsets})
		},
		"RouteBackward": func() error {
			return b.dev.RouteBackward(b.stream,
				&device.RouteGrad{Probs: f(3, 4), Experts: chosen, Rows: rows, Weights: f(6), DWeights: f(6),
					DLogits: f(3, 4)})
		},
		"SpreadRows": func() error {
			return b.dev.SpreadRows(b.stream, &device.SpreadRows{X: f(3, 5), Rows: rows, Y: f(6, 5)})
		},
		"CombineRows": func() error {
			return b.dev.CombineRows(b.stream, &device.CombineRows{X: f(6, 5), Rows: rows, Y: f(3, 5)})
		},
		"GroupedGemm": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(6, 5), B: f(4, 5, 2), C: f(6, 2), Offsets: offsets})
		},
		"GroupedGemmWeights": func() error {
			return b.dev.GroupedGemmWeights(b.stream,
				&device.GroupedGemmWeights{A: f(6, 5), B: f(6, 2), C: f(4, 5, 2), Offsets: offsets})
		},
		"WeightedSwiGLUBackward": func() error {
			return b.dev.WeightedSwiGLUBackward(b.stream,
				&device.WeightedSwiGLUGrad{Gate: f(6, 5), Up: f(6, 5), Weights: f(6), DY: f(6, 5), DGate: f(6, 5),
					DUp: f(6, 5), DWeights: f(6)})
		},
	}
}

// expertRefusals checks that arguments that would make the device access memory outside of the
// tensors are refused. The valid calls are accepted.
func (s *suite) expertRefusals() {
	b := newBench(s.t, s.one)
	defer b.close()
	for name, call := range expertCalls(b) {
		if err := b.settle(call()); err != nil {
			s.t.Errorf("%s: %v", name, err)
		}
	}
	f := func(shape ...int64) tensor.Tensor { return b.inout("x", tensor.F32, dense, nil, shape...).Tensor }
	i := func(values []float64, shape ...int64) tensor.Tensor {
		return b.inout("i", tensor.I32, dense, values, shape...).Tensor
	}
	grouped := func(groups, kept int64, sigmoid bool, scale float64) *device.Route { // 3 of 8 experts
		return &device.Route{Logits: f(1, 8), Experts: i(nil, 1, 3), Rows: i(nil, 1, 3), Weights: f(3),
			Offsets: i(nil, 9), Groups: groups, KeptGroups: kept, Sigmoid: sigmoid, WeightScale: scale}
	}
	for name, try := range map[string]func() error{
		"more choices than experts": func() error {
			return b.dev.RouteForward(b.stream,
				&device.Route{Logits: f(1, 2), Experts: i(nil, 1, 3), Rows: i(nil, 1, 3), Weights: f(3),
					Offsets: i(nil, 3)})
		},
		"few offsets": func() error {
			return b.dev.RouteForward(b.stream,
				&device.Route{Logits: f(1, 2), Experts: i(nil, 1, 1), Rows: i(nil, 1, 1), Weights: f(1),
					Offsets: i(nil, 2)})
		},
		"few weights": func() error {
			return b.dev.RouteForward(b.stream,
				&device.Route{Logits: f(2, 2), Experts: i(nil, 2, 1), Rows: i(nil, 2, 1), Weights: f(1),
					Offsets: i(nil, 3)})
		},
		"a bias of few of the experts": func() error {
			return b.dev.RouteForward(b.stream,
				&device.Route{Logits: f(1, 2), Bias: f(1), Experts: i(nil, 1, 1), Rows: i(nil, 1, 1), Weights: f(1),
					Offsets: i(nil, 3)})
		},
		"groups with a bias and without a sigmoid": func() error {
			a := grouped(4, 2, false, 1)
			a.Bias = f(8)
			return b.dev.RouteForward(b.stream, a)
		},
		"groups that are not equal": func() error { return b.dev.RouteForward(b.stream, grouped(3, 2, true, 1)) },
		"groups of one expert":      func() error { return b.dev.RouteForward(b.stream, grouped(8, 4, true, 1)) },
		"more groups than there are": func() error {
			return b.dev.RouteForward(b.stream, grouped(2, 3, true, 1))
		},
		"few experts in the kept groups": func() error {
			return b.dev.RouteForward(b.stream, grouped(4, 1, true, 1))
		},
		"a balance of sigmoids": func() error {
			return b.dev.RouteBackward(b.stream,
				&device.RouteGrad{Probs: f(2, 2), Experts: i(nil, 2, 1), Rows: i([]float64{0, 1}, 2, 1), Weights: f(2),
					DWeights: f(2), DLogits: f(2, 2), Sequence: i(nil, 2), Sigmoid: true, Scale: f(1),
					Counts: b.inout("x", tensor.F64, dense, nil, 1, 2).Tensor})
		},
		"rows of another length": func() error {
			return b.dev.SpreadRows(b.stream,
				&device.SpreadRows{X: f(3, 5), Rows: i([]float64{0, 1, 2, 3}, 2, 2), Y: f(6, 5)})
		},
		"a short y": func() error {
			return b.dev.SpreadRows(b.stream,
				&device.SpreadRows{X: f(2, 5), Rows: i([]float64{0, 1, 2, 3}, 2, 2), Y: f(3, 5)})
		},
		"few weights of rows": func() error {
			return b.dev.CombineRows(b.stream,
				&device.CombineRows{X: f(4, 5), Rows: i([]float64{0, 1, 2, 3}, 2, 2), Y: f(2, 5), Weights: f(3)})
		},
		"matrices of another K": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(2, 5), B: f(1, 4, 2), C: f(2, 2), Offsets: i([]float64{0, 2}, 2)})
		},
		"a bias of another N": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(2, 5), B: f(1, 5, 2), Bias: f(1, 3), C: f(2, 2),
					Offsets: i([]float64{0, 2}, 2)})
		},
		"a bias of few experts": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(2, 5), B: f(2, 5, 2), Bias: f(1, 2), C: f(2, 2),
					Offsets: i([]float64{0, 1, 2}, 3)})
		},
		"a bias of another type": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(2, 5), B: f(1, 5, 2),
					Bias: b.inout("bias", tensor.BF16, dense, nil, 1, 2).Tensor, C: f(2, 2),
					Offsets: i([]float64{0, 2}, 2)})
		},
		"a bias that is not dense": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(2, 5), B: f(2, 5, 2), Bias: f(2, 2).Permute(1, 0), C: f(2, 2),
					Offsets: i([]float64{0, 1, 2}, 3)})
		},
		"two forms": func() error {
			return b.dev.WeightedSwiGLUBackward(b.stream,
				&device.WeightedSwiGLUGrad{Gate: f(2, 5), Up: f(2, 5), Weights: f(2), DY: f(2, 5), DGate: f(2, 5),
					DUp: f(2, 5), DWeights: f(2), GELU: true, Clamped: true})
		},
		"offsets of other matrices": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(2, 5), B: f(1, 5, 2), C: f(2, 2), Offsets: i([]float64{0, 2, 2}, 3)})
		},
		"few own rows": func() error {
			return b.dev.CombineRows(b.stream,
				&device.CombineRows{X: f(4, 5), Rows: i([]float64{0, 1, 2, 3}, 2, 2), Y: f(2, 5), Own: f(1, 5)})
		},
		"few weights of own rows": func() error {
			return b.dev.CombineRows(b.stream,
				&device.CombineRows{X: f(4, 5), Rows: i([]float64{0, 1, 2, 3}, 2, 2), Y: f(2, 5), Own: f(2, 5),
					OwnWeights: f(1)})
		},
		"few gradients of weights": func() error {
			return b.dev.WeightedSwiGLUBackward(b.stream,
				&device.WeightedSwiGLUGrad{Gate: f(2, 5), Up: f(2, 5), Weights: f(2), DY: f(2, 5), DGate: f(2, 5),
					DUp: f(2, 5), DWeights: f(1)})
		},
	} {
		if err := try(); status.Of(err) != status.InvalidArgument {
			s.t.Errorf("%s: %v, want status InvalidArgument", name, err)
		}
	}
}

// expertFaults checks that rows, experts, sequences and offsets that do not exist are errors. They
// are in the device's memory, so a device may find them when it computes.
func (s *suite) expertFaults() {
	b := newBench(s.t, s.one)
	defer b.close()
	f := func(shape ...int64) tensor.Tensor { return b.inout("x", tensor.F32, dense, nil, shape...).Tensor }
	doubles := func(shape ...int64) tensor.Tensor {
		return b.inout("x", tensor.F64, dense, nil, shape...).Tensor
	}
	i := func(values []float64, shape ...int64) tensor.Tensor {
		return b.inout("i", tensor.I32, dense, values, shape...).Tensor
	}
	for name, try := range map[string]func() error{
		"a sequence behind the last": func() error {
			return b.dev.RouteForward(b.stream,
				&device.Route{Logits: f(2, 2), Experts: i(nil, 2, 1), Rows: i(nil, 2, 1), Weights: f(2),
					Offsets: i(nil, 3), Sequence: i([]float64{0, 1}, 2), Counts: doubles(1, 2), Sums: doubles(1, 2)})
		},
		"an expert behind the last": func() error {
			return b.dev.RouteBackward(b.stream,
				&device.RouteGrad{Probs: f(2, 2), Experts: i([]float64{0, 2}, 2, 1), Rows: i([]float64{0, 1}, 2, 1),
					Weights: f(2), DWeights: f(2), DLogits: f(2, 2)})
		},
		"a gradient of a row behind the last": func() error {
			return b.dev.RouteBackward(b.stream,
				&device.RouteGrad{Probs: f(2, 2), Experts: i([]float64{0, 1}, 2, 1), Rows: i([]float64{0, 2}, 2, 1),
					Weights: f(2), DWeights: f(2), DLogits: f(2, 2)})
		},
		"a row behind the last": func() error {
			return b.dev.SpreadRows(b.stream,
				&device.SpreadRows{X: f(2, 3), Rows: i([]float64{0, 2}, 2, 1), Y: f(2, 3)})
		},
		"a negative row": func() error {
			return b.dev.CombineRows(b.stream,
				&device.CombineRows{X: f(2, 3), Rows: i([]float64{0, -1}, 2, 1), Y: f(2, 3)})
		},
		"offsets that fall": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(4, 5), B: f(3, 5, 2), C: f(4, 2), Offsets: i([]float64{0, 3, 2, 4}, 4)})
		},
		"offsets that end early": func() error {
			return b.dev.GroupedGemmWeights(b.stream,
				&device.GroupedGemmWeights{A: f(4, 5), B: f(4, 2), C: f(2, 5, 2), Offsets: i([]float64{0, 2, 3}, 3)})
		},
		"offsets behind the rows": func() error {
			return b.dev.GroupedGemm(b.stream,
				&device.GroupedGemm{A: f(4, 5), B: f(2, 5, 2), C: f(4, 2), Offsets: i([]float64{0, 2, 400}, 3)})
		},
	} {
		if err := b.settle(try()); status.Of(err) != status.Internal {
			s.t.Errorf("%s: %v, want status Internal", name, err)
		}
	}
}
