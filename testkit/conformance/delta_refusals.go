package conformance

import (
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// testDeltaRefusals is testRefusals for the operations of linear attention.
func testDeltaRefusals(s *suite) {
	b := newBench(s.t, s.one)
	defer b.close()
	as := func(d tensor.DType, shape ...int64) tensor.Tensor {
		return b.inout("x", d, dense, nil, shape...).Tensor
	}
	f := func(shape ...int64) tensor.Tensor { return as(tensor.F32, shape...) }
	strided := func(shape ...int64) tensor.Tensor {
		return b.inout("strided", tensor.F32, layout{inner: 2}, nil, shape...).Tensor
	}
	short := func(t *tensor.Tensor) { t.Shape[0]-- }
	const tokens, keys, heads, dk, dv = 5, 1, 2, 4, 6
	rule := func() *device.GatedDeltaGrad {
		y := &device.GatedDeltaGrad{GatedDelta: device.GatedDelta{Q: f(tokens, keys, dk), K: f(tokens, keys, dk),
			V: f(tokens, heads, dv), Out: f(tokens, heads, dv), G: f(tokens, heads), Beta: f(tokens, heads),
			Cu: bounds(2, 3), Scale: 1, StateIn: f(1, heads, dk, dv),
			StateOut: f(2, heads, dk, dv)},
			DOut: f(tokens, heads, dv), DStateOut: f(2, heads, dk, dv), DQ: f(tokens, keys, dk),
			DK: f(tokens, keys, dk), DV: f(tokens, heads, dv), DG: f(tokens, heads), DBeta: f(tokens, heads),
			DStateIn: f(1, heads, dk, dv)}
		sizes := b.dev.GatedDeltaSizes(&y.GatedDelta)
		y.Saved, y.Workspace = as(tensor.U8, sizes.Saved), as(tensor.U8, max(sizes.Forward, sizes.Backward))
		return y
	}
	type change func(y *device.GatedDeltaGrad)
	shared := map[string]change{
		"q in BF16 alone":            func(y *device.GatedDeltaGrad) { y.Q = as(tensor.BF16, tokens, keys, dk) },
		"g in BF16":                  func(y *device.GatedDeltaGrad) { y.G = as(tensor.BF16, tokens, heads) },
		"beta of other heads":        func(y *device.GatedDeltaGrad) { y.Beta = f(tokens, 1) },
		"g of fewer tokens":          func(y *device.GatedDeltaGrad) { short(&y.G) },
		"k of fewer tokens":          func(y *device.GatedDeltaGrad) { short(&y.K) },
		"q of another size":          func(y *device.GatedDeltaGrad) { y.Q = f(tokens, keys, dk+1) },
		"q of other heads":           func(y *device.GatedDeltaGrad) { y.Q = f(tokens, keys+1, dk) },
		"v of two axes":              func(y *device.GatedDeltaGrad) { y.V = f(tokens, heads) },
		"v whose last axis has gaps": func(y *device.GatedDeltaGrad) { y.V = strided(tokens, heads, dv) },
		"k whose last axis has gaps": func(y *device.GatedDeltaGrad) { y.K = strided(tokens, keys, dk) },
		"keys of size 0": func(y *device.GatedDeltaGrad) {
			y.Q, y.K = f(tokens, keys, 0), f(tokens, keys, 0)
		},
		"value heads no multiple":    func(y *device.GatedDeltaGrad) { y.Q, y.K = f(tokens, 3, dk), f(tokens, 3, dk) },
		"no key heads":               func(y *device.GatedDeltaGrad) { y.Q, y.K = f(tokens, 0, dk), f(tokens, 0, dk) },
		"no such key head":           func(y *device.GatedDeltaGrad) { y.KeyHead = []int64{0, 1} },
		"a negative key head":        func(y *device.GatedDeltaGrad) { y.KeyHead = []int64{-1, 0} },
		"key heads of another count": func(y *device.GatedDeltaGrad) { y.KeyHead = []int64{0} },
		"key heads falling": func(y *device.GatedDeltaGrad) {
			y.Q, y.K, y.KeyHead = f(tokens, 2, dk), f(tokens, 2, dk), []int64{1, 0}
		},
		"documents that do not begin":  func(y *device.GatedDeltaGrad) { y.Cu = []int64{1, 2, 5} },
		"documents that do not end":    func(y *device.GatedDeltaGrad) { y.Cu = []int64{0, 2, 4} },
		"documents beyond the end":     func(y *device.GatedDeltaGrad) { y.Cu = []int64{0, 2, 6} },
		"documents falling":            func(y *device.GatedDeltaGrad) { y.Cu = []int64{0, 7, 5} },
		"documents missing":            func(y *device.GatedDeltaGrad) { y.Cu = []int64{} },
		"states of too many documents": func(y *device.GatedDeltaGrad) { y.StateIn = f(3, heads, dk, dv) },
		"states of other heads":        func(y *device.GatedDeltaGrad) { y.StateIn = f(1, 1, dk, dv) },
		"states in BF16": func(y *device.GatedDeltaGrad) {
			y.StateIn = as(tensor.BF16, 1, heads, dk, dv)
		},
		"states with gaps":            func(y *device.GatedDeltaGrad) { y.StateIn = strided(1, heads, dk, dv) },
		"a workspace too small":       func(y *device.GatedDeltaGrad) { y.Workspace.Shape[0] = 8 },
		"no workspace":                func(y *device.GatedDeltaGrad) { y.Workspace = tensor.Tensor{} },
		"saved memory too small":      func(y *device.GatedDeltaGrad) { y.Saved.Shape[0] = 8 },
		"a workspace of another type": func(y *device.GatedDeltaGrad) { y.Workspace = f(y.Workspace.Shape[0]) },
		"a workspace beside its places": func(y *device.GatedDeltaGrad) {
			y.Workspace = as(tensor.U8, y.Workspace.Shape[0]+8).Slice(0, 4, y.Workspace.Shape[0]+4)
		},
	}
	forward := map[string]change{
		"out of another size":       func(y *device.GatedDeltaGrad) { y.Out = f(tokens, heads, dv+1) },
		"states out of other heads": func(y *device.GatedDeltaGrad) { y.StateOut = f(2, heads, dv, dk) },
		"states out of too many":    func(y *device.GatedDeltaGrad) { y.StateOut = f(3, heads, dk, dv) },
	}
	backward := map[string]change{
		"nothing saved":        func(y *device.GatedDeltaGrad) { y.Saved = tensor.Tensor{} },
		"dout of fewer tokens": func(y *device.GatedDeltaGrad) { short(&y.DOut) },
		"dq of value heads":    func(y *device.GatedDeltaGrad) { y.DQ = f(tokens, heads, dk) },
		"dk of key heads, for each head": func(y *device.GatedDeltaGrad) {
			y.PerHead, y.DQ = true, f(tokens, heads, dk)
		},
		"dv in BF16":                   func(y *device.GatedDeltaGrad) { y.DV = as(tensor.BF16, tokens, heads, dv) },
		"dg of fewer tokens":           func(y *device.GatedDeltaGrad) { short(&y.DG) },
		"dbeta in BF16":                func(y *device.GatedDeltaGrad) { y.DBeta = as(tensor.BF16, tokens, heads) },
		"dstate out of other heads":    func(y *device.GatedDeltaGrad) { y.DStateOut = f(2, 1, dk, dv) },
		"dstate out of too many":       func(y *device.GatedDeltaGrad) { y.DStateOut = f(3, heads, dk, dv) },
		"dstate in of other documents": func(y *device.GatedDeltaGrad) { y.DStateIn = f(2, heads, dk, dv) },
		"dstate in with gaps":          func(y *device.GatedDeltaGrad) { y.DStateIn = strided(1, heads, dk, dv) },
	}
	tries := map[string]func() error{}
	for _, m := range []map[string]change{shared, forward} {
		for name, c := range m {
			tries["GatedDelta, "+name] = func() error {
				y := rule()
				c(y)
				return b.dev.GatedDeltaForward(b.stream, &y.GatedDelta)
			}
		}
	}
	for _, m := range []map[string]change{shared, backward} {
		for name, c := range m {
			tries["GatedDelta backward, "+name] = func() error {
				y := rule()
				c(y)
				return b.dev.GatedDeltaBackward(b.stream, y)
			}
		}
	}
	b.stateRefusals(tries, f, as, strided)
	b.convRefusals(tries, f, as, strided)
	b.gateRefusals(tries, f, as, strided)
	for name, try := range tries {
		s.t.Run(name, func(t *testing.T) {
			if c := status.Of(b.settle(try())); c == status.OK || c == status.Internal {
				t.Errorf("status %v, want an error other than Internal", c)
			}
		})
	}
	// Valid arguments succeed: the errors above are not about something else.
	s.t.Run("none of these", func(t *testing.T) {
		y := rule()
		try(t, b.dev.GatedDeltaForward(b.stream, &y.GatedDelta), b.dev.GatedDeltaBackward(b.stream, y))
	})
	b.finish()
}

type (
	maker   func(shape ...int64) tensor.Tensor
	makerAs func(d tensor.DType, shape ...int64) tensor.Tensor
)

func (b *bench) stateRefusals(tries map[string]func() error, f maker, as makerAs, strided maker) {
	const tokens, heads, dk, dv = 5, 2, 4, 6
	args := func() (*device.DeltaState, *device.DeltaStateGrad) {
		q, k, v, g, beta := f(tokens, 1, dk), f(tokens, 1, dk), f(tokens, heads, dv), f(tokens, heads), f(tokens, heads)
		w := as(tensor.U8,
			b.dev.GatedDeltaSizes(&device.GatedDelta{Q: q, K: k, V: v, Out: v, G: g, Beta: beta,
				Cu: one(tokens)}).State)
		return &device.DeltaState{K: k, V: v, G: g, Beta: beta, State: f(heads, dk, dv), Transition: f(heads, dk, dk),
				Workspace: w},
			&device.DeltaStateGrad{Q: q, K: k, G: g, Beta: beta, DOut: v, Scale: 1, DState: f(heads, dk, dv),
				Workspace: w}
	}
	for name, c := range map[string]func(y *device.DeltaState){
		"another state":              func(y *device.DeltaState) { y.State = f(heads, dv, dk) },
		"a state with gaps":          func(y *device.DeltaState) { y.State = strided(heads, dk, dv) },
		"another transition":         func(y *device.DeltaState) { y.Transition = f(heads, dk, dv) },
		"a transition in BF16":       func(y *device.DeltaState) { y.Transition = as(tensor.BF16, heads, dk, dk) },
		"g of fewer tokens":          func(y *device.DeltaState) { y.G = f(tokens-1, heads) },
		"v of fewer tokens":          func(y *device.DeltaState) { y.V = f(tokens-1, heads, dv) },
		"v in BF16 alone":            func(y *device.DeltaState) { y.V = as(tensor.BF16, tokens, heads, dv) },
		"no such key head":           func(y *device.DeltaState) { y.KeyHead = []int64{0, 1} },
		"a workspace too small":      func(y *device.DeltaState) { y.Workspace.Shape[0] = 8 },
		"k whose last axis has gaps": func(y *device.DeltaState) { y.K = strided(tokens, 1, dk) },
	} {
		tries["DeltaState, "+name] = func() error { y, _ := args(); c(y); return b.dev.DeltaState(b.stream, y) }
	}
	for name, c := range map[string]func(y *device.DeltaStateGrad){
		"another dstate":          func(y *device.DeltaStateGrad) { y.DState = f(heads, dv, dk) },
		"dout of fewer tokens":    func(y *device.DeltaStateGrad) { y.DOut = f(tokens-1, heads, dv) },
		"q of another size":       func(y *device.DeltaStateGrad) { y.Q = f(tokens, 1, dk+1) },
		"q in BF16 alone":         func(y *device.DeltaStateGrad) { y.Q = as(tensor.BF16, tokens, 1, dk) },
		"value heads no multiple": func(y *device.DeltaStateGrad) { y.Q, y.K = f(tokens, 3, dk), f(tokens, 3, dk) },
		"no workspace":            func(y *device.DeltaStateGrad) { y.Workspace = tensor.Tensor{} },
	} {
		tries["DeltaStateGrad, "+name] = func() error { _, y := args(); c(y); return b.dev.DeltaStateGrad(b.stream, y) }
	}
	fold := func() *device.DeltaFold {
		return &device.DeltaFold{M: f(heads, dk, dk), X: f(heads, dk, dv), E: f(heads, dk, dv), Y: f(heads, dk, dv)}
	}
	for name, c := range map[string]func(y *device.DeltaFold){
		"m not square":      func(y *device.DeltaFold) { y.M = f(heads, dk, dv) },
		"x of other heads":  func(y *device.DeltaFold) { y.X = f(1, dk, dv) },
		"e of another size": func(y *device.DeltaFold) { y.E = f(heads, dv, dk) },
		"y of another size": func(y *device.DeltaFold) { y.Y = f(heads, dk, dv+1) },
		"y with gaps":       func(y *device.DeltaFold) { y.Y = strided(heads, dk, dv) },
		"m in BF16":         func(y *device.DeltaFold) { y.M = as(tensor.BF16, heads, dk, dk) },
	} {
		tries["DeltaFold, "+name] = func() error { y := fold(); c(y); return b.dev.DeltaFold(b.stream, y) }
	}
}

func (b *bench) convRefusals(tries map[string]func() error, f maker, as makerAs, strided maker) {
	const tokens, channels, width = 5, 6, 4
	for name, c := range map[string]func(y *device.Conv1dGrad){
		"documents that do not end":  func(y *device.Conv1dGrad) { y.Cu = []int64{0, 4} },
		"documents falling":          func(y *device.Conv1dGrad) { y.Cu = []int64{0, 6, 5} },
		"documents missing":          func(y *device.Conv1dGrad) { y.Cu = nil },
		"weights of other channels":  func(y *device.Conv1dGrad) { y.W = f(channels+1, width) },
		"weights with gaps":          func(y *device.Conv1dGrad) { y.W = strided(channels, width) },
		"weights of width 0":         func(y *device.Conv1dGrad) { y.W, y.Before = f(channels, 0), tensor.Tensor{} },
		"weights in BF16 alone":      func(y *device.Conv1dGrad) { y.W = as(tensor.BF16, channels, width) },
		"x whose last axis has gaps": func(y *device.Conv1dGrad) { y.X = strided(tokens, channels) },
		"too few rows before":        func(y *device.Conv1dGrad) { y.Before = f(width-2, channels) },
		"y or dy of another size": func(y *device.Conv1dGrad) {
			y.Y, y.DY = f(tokens, channels+1), f(tokens, channels+1)
		},
		"y or dx of fewer tokens": func(y *device.Conv1dGrad) {
			y.Y, y.DX = f(tokens-1, channels), f(tokens-1, channels)
		},
		"before in BF16 alone":        func(y *device.Conv1dGrad) { y.Before = as(tensor.BF16, width-1, channels) },
		"backward dw of another size": func(y *device.Conv1dGrad) { y.DW = f(channels, width+1) },
		"backward dw in BF16":         func(y *device.Conv1dGrad) { y.DW = as(tensor.BF16, channels, width) },
		"backward dbefore too short":  func(y *device.Conv1dGrad) { y.DBefore = f(width-2, channels) },
	} {
		y := func() *device.Conv1dGrad {
			return &device.Conv1dGrad{Conv1d: device.Conv1d{X: f(tokens, channels), Y: f(tokens, channels),
				W: f(channels, width), Before: f(width-1, channels), Cu: bounds(2, 3)},
				DY: f(tokens, channels), DX: f(tokens, channels), DW: f(channels, width), DBefore: f(width-1, channels)}
		}
		if name[:8] != "backward" {
			tries["Conv1d, "+name] = func() error { y := y(); c(y); return b.dev.Conv1dForward(b.stream, &y.Conv1d) }
		}
		tries["Conv1d backward, "+name] = func() error { y := y(); c(y); return b.dev.Conv1dBackward(b.stream, y) }
	}
}

func (b *bench) gateRefusals(tries map[string]func() error, f maker, as makerAs, strided maker) {
	x, wide, other, n5, n3, n7 := f(3, 5), as(tensor.BF16, 3, 5), f(3, 7), f(5), f(3), f(7)
	for name, try := range map[string]func() error{
		"GatedRMSNorm of another gate": func() error {
			return b.dev.GatedRMSNormForward(b.stream, &device.GatedRMSNorm{X: x, Gate: other, W: n5, Y: x, RStd: n3})
		},
		"GatedRMSNorm of another weight": func() error {
			return b.dev.GatedRMSNormForward(b.stream, &device.GatedRMSNorm{X: x, Gate: x, W: n7, Y: x, RStd: n3})
		},
		"GatedRMSNorm without rstd": func() error {
			return b.dev.GatedRMSNormForward(b.stream, &device.GatedRMSNorm{X: x, Gate: x, W: n5, Y: x, RStd: f(2)})
		},
		"GatedRMSNorm of two types": func() error {
			return b.dev.GatedRMSNormForward(b.stream, &device.GatedRMSNorm{X: x, Gate: wide, W: n5, Y: x, RStd: n3})
		},
		"GatedRMSNorm of another dgate": func() error {
			return b.dev.GatedRMSNormBackward(b.stream,
				&device.GatedRMSNormGrad{X: x, Gate: x, W: n5, RStd: n3, DY: x, DX: x, DGate: other, DW: n5})
		},
		"GatedRMSNorm of strides": func() error {
			return b.dev.GatedRMSNormBackward(b.stream,
				&device.GatedRMSNormGrad{X: x, Gate: x, W: n5, RStd: n3, DY: strided(3, 5), DX: x, DGate: x, DW: n5})
		},
		"SigmoidGate of another gate": func() error {
			return b.dev.SigmoidGateForward(b.stream, &device.SigmoidGate{X: x, Gate: other, Y: x})
		},
		"SigmoidGate of one axis": func() error {
			return b.dev.SigmoidGateForward(b.stream, &device.SigmoidGate{X: n5, Gate: n5, Y: n5})
		},
		"SigmoidGate of two types": func() error {
			return b.dev.SigmoidGateForward(b.stream, &device.SigmoidGate{X: x, Gate: x, Y: wide})
		},
		"SigmoidGate of strides": func() error {
			return b.dev.SigmoidGateBackward(b.stream,
				&device.SigmoidGateGrad{X: x, Gate: x, DY: x, DX: x, DGate: strided(3, 5)})
		},
		"SigmoidGate of another dx": func() error {
			return b.dev.SigmoidGateBackward(b.stream,
				&device.SigmoidGateGrad{X: x, Gate: x, DY: x, DX: other, DGate: x})
		},
		"DeltaGates of another b": func() error {
			return b.dev.DeltaGatesForward(b.stream,
				&device.DeltaGates{A: x, B: other, ALog: n5, DtBias: n5, G: x, Beta: x})
		},
		"DeltaGates of other parameters": func() error {
			return b.dev.DeltaGatesForward(b.stream,
				&device.DeltaGates{A: x, B: x, ALog: n7, DtBias: n5, G: x, Beta: x})
		},
		"DeltaGates into BF16": func() error {
			return b.dev.DeltaGatesForward(b.stream,
				&device.DeltaGates{A: x, B: x, ALog: n5, DtBias: n5, G: wide, Beta: x})
		},
		"DeltaGates of strides": func() error {
			return b.dev.DeltaGatesForward(b.stream,
				&device.DeltaGates{A: x, B: x, ALog: n5, DtBias: n5, G: x, Beta: strided(3, 5)})
		},
		"DeltaGates of another da": func() error {
			return b.dev.DeltaGatesBackward(b.stream,
				&device.DeltaGatesGrad{A: x, B: x, ALog: n5, DtBias: n5, DG: x, DBeta: x, DA: other, DB: x, DALog: n5,
					DDtBias: n5})
		},
		"DeltaGates of another ddtbias": func() error {
			return b.dev.DeltaGatesBackward(b.stream,
				&device.DeltaGatesGrad{A: x, B: x, ALog: n5, DtBias: n5, DG: x, DBeta: x, DA: x, DB: x, DALog: n5,
					DDtBias: n3})
		},
	} {
		tries[name] = try
	}
}
