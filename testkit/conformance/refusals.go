package conformance

import (
	"math"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// testRefusals calls operations with arguments that would make them access memory outside their
// tensors. Each call must return an error, and the device must work afterwards.
func testRefusals(s *suite) {
	b := newBench(s.t, s.one)
	defer b.close()
	f := func(shape ...int64) tensor.Tensor { return b.inout("x", tensor.F32, dense, nil, shape...).Tensor }
	ids := b.in("ids", tensor.I32, dense, []float64{0, 1, 2}, 3).Tensor
	x35, x37, x5, x3, wide := f(3, 5), f(3, 7), f(5), f(3), b.inout("bf16", tensor.BF16, dense, nil, 3, 5).Tensor
	y35 := f(3, 5)
	x325, wide3 := f(3, 2, 5), b.inout("bf16", tensor.BF16, dense, nil, 3, 2, 5).Tensor
	double := b.inout("f64", tensor.F64, dense, nil, 1).Tensor
	strided := b.inout("strided", tensor.F32, layout{inner: 2}, nil, 3, 5).Tensor
	attention := func(change func(a *device.Attention)) error {
		a := &device.Attention{Q: f(3, 2, 4), K: f(3, 1, 4), V: f(3, 1, 6), Out: f(3, 2, 6), LSE: f(3, 2), CuQ: one(3),
			CuK: one(3), Scale: 1}
		a.Workspace = b.inout("workspace", tensor.U8, dense, nil, b.dev.AttentionWorkspace(a, false)).Tensor
		change(a)
		return b.dev.AttentionForward(b.stream, a)
	}
	mask := func(shape ...int64) tensor.Tensor { return b.inout("mask", tensor.U8, dense, nil, shape...).Tensor }
	blocks := func(a *device.Attention) {
		a.BlockMask, a.QuerySeq, a.KeySeq, a.BlockRows, a.BlockColumns = mask(1, 2, 1), 4, 4, 2, 4
	}
	gradient := func(change func(g *device.AttentionGrad)) error {
		g := &device.AttentionGrad{DOut: f(3, 2, 6), DQ: f(3, 2, 4), DK: f(3, 1, 4), DV: f(3, 1, 6)}
		if err := attention(func(a *device.Attention) { g.Attention = *a }); err != nil {
			return err
		}
		g.Workspace = b.inout("workspace", tensor.U8, dense, nil, b.dev.AttentionWorkspace(&g.Attention, true)).Tensor
		change(g)
		return b.dev.AttentionBackward(b.stream, g)
	}
	for name, try := range map[string]func() error{
		"Copy of another shape":    func() error { return b.dev.Copy(b.stream, x35, x37) },
		"Copy of another rank":     func() error { return b.dev.Copy(b.stream, x35, x5) },
		"Add of another shape":     func() error { return b.dev.Add(b.stream, x35, x35, x37) },
		"Add of another type":      func() error { return b.dev.Add(b.stream, x35, x35, wide) },
		"Scale of strides":         func() error { return b.dev.Scale(b.stream, strided, 2) },
		"ColumnSum of another N":   func() error { return b.dev.ColumnSum(b.stream, x3, x35) },
		"ColumnSum of strides":     func() error { return b.dev.ColumnSum(b.stream, x5, strided) },
		"Sum into F32":             func() error { return b.dev.Sum(b.stream, x3, x35) },
		"SumSquares of strides":    func() error { return b.dev.SumSquares(b.stream, f(1), strided) },
		"Gemm of other inner axes": func() error { return b.dev.Gemm(b.stream, &device.Gemm{A: x35, B: x37, C: x37}) },
		"Gemm into another M": func() error {
			return b.dev.Gemm(b.stream, &device.Gemm{A: f(2, 3), B: x35, C: x35})
		},
		"Gemm with another bias": func() error {
			return b.dev.Gemm(b.stream, &device.Gemm{A: f(3, 3), B: x35, C: x35, Bias: x3})
		},
		"RMSNorm of another weight": func() error {
			return b.dev.RMSNormForward(b.stream, &device.RMSNorm{X: x35, W: x3, Y: x35, RStd: x3})
		},
		"RMSNorm without rstd": func() error {
			return b.dev.RMSNormForward(b.stream, &device.RMSNorm{X: x35, W: x5, Y: x35, RStd: f(2)})
		},
		"RMSNorm of another dy": func() error {
			return b.dev.RMSNormBackward(b.stream,
				&device.RMSNormGrad{X: x35, W: x5, RStd: x3, DY: x37, DX: x35, DW: x5})
		},
		"AddRMSNorm of another b": func() error {
			return b.dev.AddRMSNorm(b.stream, &device.AddRMSNorm{A: x35, B: x37, W: x5, Sum: x35, Y: y35, RStd: x3})
		},
		"AddRMSNorm into another sum": func() error {
			return b.dev.AddRMSNorm(b.stream, &device.AddRMSNorm{A: x35, B: x35, W: x5, Sum: x37, Y: y35, RStd: x3})
		},
		"AddRMSNorm into another y": func() error {
			return b.dev.AddRMSNorm(b.stream, &device.AddRMSNorm{A: x35, B: x35, W: x5, Sum: x35, Y: x37, RStd: x3})
		},
		"AddRMSNorm without rstd": func() error {
			return b.dev.AddRMSNorm(b.stream, &device.AddRMSNorm{A: x35, B: x35, W: x5, Sum: x35, Y: y35, RStd: f(2)})
		},
		"AddRMSNorm of two types": func() error {
			return b.dev.AddRMSNorm(b.stream, &device.AddRMSNorm{A: x35, B: wide, W: x5, Sum: x35, Y: y35, RStd: x3})
		},
		"AddRMSNorm, sum and y in one memory": func() error {
			return b.dev.AddRMSNorm(b.stream, &device.AddRMSNorm{A: x35, B: y35, W: x5, Sum: x35, Y: x35, RStd: x3})
		},
		"RopeTable of another length": func() error {
			return b.dev.RopeTable(b.stream, &device.RopeTable{Positions: ids, Freq: x5, Cos: x35, Sin: f(2, 5)})
		},
		"RopeTable with a negative length": func() error {
			return b.dev.RopeTable(b.stream,
				&device.RopeTable{Positions: ids, Freq: x5, Cos: x35, Sin: y35, Length: -1})
		},
		"Rope with too many angles": func() error {
			return b.dev.Rope(b.stream, &device.Rope{X: x325, Y: x325, Cos: x35, Sin: x35})
		},
		"Rope with a norm, back": func() error {
			return b.dev.Rope(b.stream,
				&device.Rope{X: x325, Y: x325, Cos: f(3, 2), Sin: f(3, 2), W: f(5), RStd: f(3, 2), Inverse: true})
		},
		"Rope with a short norm": func() error {
			return b.dev.Rope(b.stream,
				&device.Rope{X: x325, Y: x325, Cos: f(3, 2), Sin: f(3, 2), W: f(4), RStd: f(3, 2)})
		},
		"Rope with few statistics": func() error {
			return b.dev.Rope(b.stream,
				&device.Rope{X: x325, Y: x325, Cos: f(3, 2), Sin: f(3, 2), W: f(5), RStd: f(3, 1)})
		},
		"Rope of two axes": func() error {
			return b.dev.Rope(b.stream, &device.Rope{X: x35, Y: x35, Cos: f(3, 2), Sin: f(3, 2)})
		},
		"SwiGLU of another up": func() error {
			return b.dev.SwiGLUForward(b.stream, &device.SwiGLU{Gate: x35, Up: x37, Y: x35})
		},
		"SwiGLU of another dy": func() error {
			return b.dev.SwiGLUBackward(b.stream, &device.SwiGLUGrad{Gate: x35, Up: x35, DY: x5, DGate: x35, DUp: x35})
		},
		"SwiGLU of two forms": func() error {
			return b.dev.SwiGLUForward(b.stream, &device.SwiGLU{Gate: x35, Up: x35, Y: x35, GELU: true, Clamped: true})
		},
		"SwiGLU backward of two forms": func() error {
			return b.dev.SwiGLUBackward(b.stream,
				&device.SwiGLUGrad{Gate: x35, Up: x35, DY: x35, DGate: x35, DUp: x35, GELU: true, Clamped: true})
		},
		"Embedding of F32 ids": func() error {
			return b.dev.EmbeddingForward(b.stream, &device.Embedding{Table: x35, IDs: x3, Y: x35})
		},
		"Embedding of another width": func() error {
			return b.dev.EmbeddingForward(b.stream, &device.Embedding{Table: x35, IDs: ids, Y: x37})
		},
		"CrossEntropy of another T": func() error {
			return b.dev.CrossEntropy(b.stream, &device.CrossEntropy{Logits: f(2, 5), Targets: ids, NLL: x3})
		},
		"AdamW of another length": func() error {
			return b.dev.AdamW(b.stream, &device.AdamW{W: x3, G: x5, M: x3, V: x3, Step: 1})
		},
		"AdamW at step 0": func() error {
			return b.dev.AdamW(b.stream, &device.AdamW{W: x3, G: x3, M: x3, V: x3})
		},
		"Gemm of two types": func() error {
			return b.dev.Gemm(b.stream, &device.Gemm{A: f(3, 3), B: wide, C: x35})
		},
		"Gemm of F32 into BF16": func() error {
			return b.dev.Gemm(b.stream, &device.Gemm{A: f(3, 3), B: x35, C: wide})
		},
		"Gemm with another type of bias": func() error {
			return b.dev.Gemm(b.stream, &device.Gemm{A: f(3, 3), B: x35, C: x35, Bias: wide.Select(0, 0)})
		},
		"ColumnSum into BF16": func() error { return b.dev.ColumnSum(b.stream, wide.Select(0, 0), x35) },
		"Sum of BF16":         func() error { return b.dev.Sum(b.stream, double, wide) },
		"Add of F32 to BF16":  func() error { return b.dev.Add(b.stream, wide, wide, x35) },
		"RMSNorm of two types": func() error {
			return b.dev.RMSNormForward(b.stream, &device.RMSNorm{X: wide, W: x5, Y: wide, RStd: x3})
		},
		"Rope of two types": func() error {
			return b.dev.Rope(b.stream, &device.Rope{X: wide3, Y: x325, Cos: f(3, 1), Sin: f(3, 1)})
		},
		"SwiGLU of two types": func() error {
			return b.dev.SwiGLUForward(b.stream, &device.SwiGLU{Gate: wide, Up: x35, Y: wide})
		},
		"Embedding into another type": func() error {
			return b.dev.EmbeddingForward(b.stream, &device.Embedding{Table: wide, IDs: ids, Y: x35})
		},
		"CrossEntropy of BF16": func() error {
			a := &device.CrossEntropy{Logits: wide, Targets: ids, NLL: x3}
			if b.dev.Info().LogitsBF16 { // but not with gradients of another type
				a.DLogits = x35
			}
			return b.dev.CrossEntropy(b.stream, a)
		},
		"AdamW of BF16": func() error {
			x := wide.Select(0, 0)
			return b.dev.AdamW(b.stream, &device.AdamW{W: x, G: x5, M: x5, V: x5, Step: 1})
		},
		"AdamW with a low of another length": func() error {
			return b.dev.AdamW(b.stream, &device.AdamW{W: x3, G: x3, M: x3, V: x3, Low: wide.Select(0, 0), Step: 1})
		},
		"SGD with a low in F32":      func() error { return b.dev.SGD(b.stream, &device.SGD{W: x5, G: x5, Low: x5}) },
		"SGD of another length":      func() error { return b.dev.SGD(b.stream, &device.SGD{W: x3, G: x5}) },
		"Attention, other key sizes": func() error { return attention(func(a *device.Attention) { a.K = f(3, 1, 5) }) },
		"Attention, other lengths":   func() error { return attention(func(a *device.Attention) { a.K = f(4, 1, 4) }) },
		"Attention, bounds that do not end": func() error {
			return attention(func(a *device.Attention) { a.CuQ = []int64{0, 4} })
		},
		"Attention, bounds of another count": func() error {
			return attention(func(a *device.Attention) { a.CuK = []int64{0, 1, 3} })
		},
		"Attention, falling bounds": func() error {
			return attention(func(a *device.Attention) { a.CuQ, a.CuK = []int64{0, 4, 3}, []int64{0, 3, 3} })
		},
		"Attention, no such key head": func() error {
			return attention(func(a *device.Attention) { a.KVHead = []int64{0, 1} })
		},
		"Attention, key heads falling": func() error {
			return attention(func(a *device.Attention) { a.K, a.V, a.KVHead = f(3, 2, 4), f(3, 2, 6), []int64{1, 0} })
		},
		"Attention, shifts of another count": func() error {
			return attention(func(a *device.Attention) { a.Shift = []int64{1, 1} })
		},
		"Attention, a shift that overflows": func() error {
			return attention(func(a *device.Attention) { a.Shift = []int64{math.MaxInt64} })
		},
		"Attention, sinks of another count": func() error {
			return attention(func(a *device.Attention) { a.Sinks = x3 })
		},
		"Attention, sinks in BF16": func() error {
			return attention(func(a *device.Attention) { a.Sinks = wide.Select(0, 0).Slice(0, 0, 2) })
		},
		"Attention, slopes of another count": func() error {
			return attention(func(a *device.Attention) { a.Slopes = x3 })
		},
		"Attention, sinks and carry": func() error {
			return attention(func(a *device.Attention) { a.Sinks, a.Carry = f(2), true })
		},
		"Attention, a negative cap": func() error { return attention(func(a *device.Attention) { a.Softcap = -1 }) },
		"Attention, a NaN as cap": func() error {
			return attention(func(a *device.Attention) { a.Softcap = math.NaN() })
		},
		"Attention, dropout of all": func() error { return attention(func(a *device.Attention) { a.Dropout = 1 }) },
		"Attention, negative dropout": func() error {
			return attention(func(a *device.Attention) { a.Dropout = -0.1 })
		},
		"Attention, a NaN as dropout": func() error {
			return attention(func(a *device.Attention) { a.Dropout = math.NaN() })
		},
		"Attention, a block mask without blocks": func() error {
			return attention(func(a *device.Attention) { blocks(a); a.BlockRows = 0 })
		},
		"Attention, a block mask without sequences": func() error {
			return attention(func(a *device.Attention) { blocks(a); a.KeySeq = 0 })
		},
		"Attention, a block mask too small": func() error {
			return attention(func(a *device.Attention) { blocks(a); a.QuerySeq = 5 })
		},
		"Attention, a block mask of other heads": func() error {
			return attention(func(a *device.Attention) { blocks(a); a.BlockMask = mask(3, 2, 1) })
		},
		"Attention, a block mask in F32": func() error {
			return attention(func(a *device.Attention) { blocks(a); a.BlockMask = f(1, 2, 1) })
		},
		"Attention, a document in two sequences": func() error {
			return attention(func(a *device.Attention) { blocks(a); a.QueryAt = 2 })
		},
		"Attention, queries before the batch": func() error {
			return attention(func(a *device.Attention) { blocks(a); a.QueryAt = -4 })
		},
		"Attention, gradients of absent sinks": func() error {
			return gradient(func(g *device.AttentionGrad) { g.DSinks = f(2) })
		},
		"Attention, gradients of absent slopes": func() error {
			return gradient(func(g *device.AttentionGrad) { g.DSlopes = f(2) })
		},
		"Attention, gradients of other slopes": func() error {
			return gradient(func(g *device.AttentionGrad) { g.Slopes, g.DSlopes = f(2), f(3) })
		},
		"Attention, gradients of two types": func() error {
			return gradient(func(g *device.AttentionGrad) {
				g.DK = b.inout("bf16", tensor.BF16, dense, nil, 3, 1, 4).Tensor
			})
		},
		"Attention, without lse": func() error {
			return attention(func(a *device.Attention) { a.LSE = tensor.Tensor{} })
		},
		"Attention, a workspace too small": func() error {
			return attention(func(a *device.Attention) { a.Workspace.Shape[0] /= 2 })
		},
	} {
		s.t.Run(name, func(t *testing.T) {
			if c := status.Of(b.settle(try())); c == status.OK || c == status.Internal {
				t.Errorf("status %v, want an error other than Internal", c)
			}
		})
	}
	b.finish()
}
