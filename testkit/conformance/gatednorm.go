package conformance

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testGatedRMSNorm(s *suite) {
	for i, shape := range [][]int64{{1, 5}, {3, 2}, {17, 7}, {65, 64}, {7, 65}, {0, 16}, {2, 4097}, {300, 128},
		{30, 256}, {9, 250}, {3, 1024},
		{7, 3, 16}, {65, 2, 33}, {40, 3, 128}, {2, 0, 8}, {1500, 17}} {
		layouts := []layout{dense, padded}
		if len(shape) == 3 {
			layouts = append(layouts, headMajor)
		}
		for j, l := range layouts {
			s.typed(func(d tensor.DType, suffix string) {
				s.gatedNormCase(d, suffix, shape, l, layouts[(j+1)%len(layouts)], i == 2)
			})
		}
	}
}

// gates returns values of a gate, with large ones of both signs.
func gates(d tensor.DType, x []float64) []float64 {
	for i := range x {
		x[i] *= 3
	}
	if len(x) > 50 {
		copy(x[20:], []float64{0, 90, -90, 200, -200, -1000, 1000, -87.5, 88.5})
	}
	return rounded(d, x)
}

func (s *suite) gatedNormCase(d tensor.DType, suffix string, shape []int64, lx, ly layout, nan bool) {
	const eps = 1e-5
	size := tensor.Of(nil, tensor.F32, shape...).Numel()
	n := shape[len(shape)-1]
	rows := size / n
	r := seeded(40, size, n)
	x, gate, w, dy, dw := normalAs(d, r, size), gates(d, normal(r, size)), normalAs(d, r, n), normalAs(d, r, size),
		normal(r, n)
	if nan {
		x[5*n+1], gate[7*n+2], dy[9*n] = math.NaN(), math.NaN(), math.NaN()
	}
	f := ref.Convert[float32, float64]
	y, rstd := ref.GatedRMSNorm(n, x, gate, w, eps)
	y32, rstd32 := ref.GatedRMSNorm(n, f(x), f(gate), f(w), eps)
	dw64, dw32 := append([]float64{}, dw...), f(dw)
	dx, dgate := ref.GatedRMSNormGrad(n, x, gate, w, rstd, dy, dw64)
	dx32, dgate32 := ref.GatedRMSNormGrad(n, f(x), f(gate), f(w), rstd32, f(dy), dw32)
	forward := []want{both("y", y, y32).as(d), both("rstd", rstd, rstd32)}
	backward := []want{both("dx", dx, dx32).as(d), both("dgate", dgate, dgate32).as(d), both("dw", dw64, dw32)}
	name := fmt.Sprint(shape, lx, ly, suffix)
	run := func(b *bench, x, y *array) ([]*array, error) {
		saved := b.out("rstd", tensor.F32, shifted, rows)
		return []*array{y, saved},
			b.dev.GatedRMSNormForward(b.stream,
				&device.GatedRMSNorm{X: x.Tensor, Y: y.Tensor, RStd: saved.Tensor, Eps: eps,
					Gate: b.in("gate", d, ly, gate, shape...).Tensor, W: b.in("w", d, shifted, w, n).Tensor})
	}
	s.check(name, forward, func(b *bench) ([]*array, error) {
		return run(b, b.in("x", d, lx, x, shape...), b.out("y", d, ly, shape...))
	})
	s.check(name+" in place", forward, func(b *bench) ([]*array, error) {
		y := b.inout("x", d, lx, x, shape...)
		return run(b, y, y)
	})
	back := func(b *bench, gate, dy, dx, dgate *array) ([]*array, error) {
		weights := b.inout("dw", tensor.F32, shifted, dw, n)
		return []*array{dx, dgate, weights}, b.dev.GatedRMSNormBackward(b.stream, &device.GatedRMSNormGrad{
			X: b.in("x", d, lx, x, shape...).Tensor, W: b.in("w", d, dense, w, n).Tensor,
			RStd: b.in("rstd", tensor.F32, dense, rstd, rows).Tensor, Gate: gate.Tensor, DY: dy.Tensor, DX: dx.Tensor,
			DGate: dgate.Tensor, DW: weights.Tensor})
	}
	s.check(name+" backward", backward, func(b *bench) ([]*array, error) {
		return back(b, b.in("gate", d, ly, gate, shape...), b.in("dy", d, lx, dy, shape...),
			b.out("dx", d, ly, shape...), b.out("dgate", d, lx, shape...))
	})
	s.check(name+" backward in place", backward, func(b *bench) ([]*array, error) {
		gate, dy := b.inout("gate", d, lx, gate, shape...), b.inout("dy", d, ly, dy, shape...)
		return back(b, gate, dy, dy, gate)
	})
}

func testSigmoidGate(s *suite) {
	for i, shape := range [][]int64{{1, 1}, {2, 3}, {7, 17}, {100, 65}, {3, 257}, {0, 9}, {7, 3, 16}, {65, 2, 33},
		{2, 0, 8}, {1, 90000}} {
		layouts := []layout{dense, padded}
		if len(shape) == 3 {
			layouts = append(layouts, headMajor)
		}
		for j, l := range layouts {
			s.typed(func(d tensor.DType, suffix string) {
				s.sigmoidGateCase(d, suffix, shape, l, layouts[(j+1)%len(layouts)], i == 2)
			})
		}
	}
}

func (s *suite) sigmoidGateCase(d tensor.DType, suffix string, shape []int64, lx, ly layout, nan bool) {
	size := tensor.Of(nil, tensor.F32, shape...).Numel()
	r := seeded(41, size)
	x, gate, dy := normalAs(d, r, size), gates(d, normal(r, size)), normalAs(d, r, size)
	if nan {
		x[1], gate[2], dy[3] = math.NaN(), math.NaN(), math.NaN()
	}
	f := ref.Convert[float32, float64]
	dx, dgate := ref.SigmoidGateGrad(x, gate, dy)
	dx32, dgate32 := ref.SigmoidGateGrad(f(x), f(gate), f(dy))
	forward := []want{both("y", ref.SigmoidGate(x, gate), ref.SigmoidGate(f(x), f(gate))).as(d)}
	backward := []want{both("dx", dx, dx32).as(d), both("dgate", dgate, dgate32).as(d)}
	name := fmt.Sprint(shape, lx, ly, suffix)
	s.check(name, forward, func(b *bench) ([]*array, error) {
		y := b.out("y", d, ly, shape...)
		return []*array{y}, b.dev.SigmoidGateForward(b.stream, &device.SigmoidGate{
			X: b.in("x", d, lx, x, shape...).Tensor, Gate: b.in("gate", d, ly, gate, shape...).Tensor, Y: y.Tensor})
	})
	s.check(name+" in place", forward, func(b *bench) ([]*array, error) {
		y := b.inout("x", d, lx, x, shape...)
		return []*array{y}, b.dev.SigmoidGateForward(b.stream, &device.SigmoidGate{
			X: y.Tensor, Gate: b.in("gate", d, ly, gate, shape...).Tensor, Y: y.Tensor})
	})
	back := func(b *bench, gate, dy, dx, dgate *array) ([]*array, error) {
		return []*array{dx, dgate},
			b.dev.SigmoidGateBackward(b.stream, &device.SigmoidGateGrad{X: b.in("x", d, lx, x, shape...).Tensor,
				Gate: gate.Tensor, DY: dy.Tensor, DX: dx.Tensor, DGate: dgate.Tensor})
	}
	s.check(name+" backward", backward, func(b *bench) ([]*array, error) {
		return back(b, b.in("gate", d, ly, gate, shape...), b.in("dy", d, lx, dy, shape...),
			b.out("dx", d, ly, shape...), b.out("dgate", d, lx, shape...))
	})
	s.check(name+" backward in place", backward, func(b *bench) ([]*array, error) {
		gate, dy := b.inout("gate", d, lx, gate, shape...), b.inout("dy", d, ly, dy, shape...)
		return back(b, gate, dy, dy, gate)
	})
}
