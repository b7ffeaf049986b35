package conformance

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

var normShapes = [][]int64{{1, 1}, {1, 257}, {3, 2}, {2, 3}, {17, 7}, {100, 63}, {65, 64}, {7, 65}, {257, 100}, {0, 16},
	{9, 4097}, {300, 192},
	{7, 3, 16}, {65, 2, 33}, {5, 1, 128}, {2, 0, 8}, {1500, 17}, {40, 256}, {19, 512}, {3, 2048}, {2, 4096}, {2, 8192},
	{2, 2880}, {2, 6144}, {1, 8200}, {40, 3, 128}}

// eachNorm calls f for each shape, type and layout. next is another layout.
func (s *suite) eachNorm(f func(i int, shape []int64, d tensor.DType, suffix string, l, next layout)) {
	for i, shape := range normShapes {
		layouts := []layout{dense, padded}
		if len(shape) == 3 {
			layouts = append(layouts, headMajor)
		}
		for j, l := range layouts {
			s.typed(func(d tensor.DType, suffix string) { f(i, shape, d, suffix, l, layouts[(j+1)%len(layouts)]) })
		}
	}
}

func testRMSNorm(s *suite) {
	s.eachNorm(func(i int, shape []int64, d tensor.DType, suffix string, l, next layout) {
		s.normCase(d, suffix, shape, l, next, float64(i/2%2), i%2 == 0, i == 5)
	})
}

func (s *suite) normCase(d tensor.DType, suffix string, shape []int64, lx, ly layout, centre float64, add, nan bool) {
	const eps = 1e-5
	size := tensor.Of(nil, tensor.F32, shape...).Numel()
	n := shape[len(shape)-1]
	rows := size / n
	r := seeded(9, size, n)
	x, w, dy, was, dw := normalAs(d, r, size), normalAs(d, r, n), normalAs(d, r, size), normalAs(d, r, size),
		normal(r, n)
	if nan {
		x[5*n+1] = math.NaN()
	}
	f := ref.Convert[float32, float64]
	y, rstd := ref.RMSNorm(n, x, w, centre, eps)
	y32, rstd32 := ref.RMSNorm(n, f(x), f(w), float32(centre), eps)
	name := fmt.Sprint(shape, lx, ly, " centre ", centre, suffix)
	forward := []want{both("y", y, y32).as(d), both("rstd", rstd, rstd32)}
	s.check(name, forward, func(b *bench) ([]*array, error) {
		out, saved := b.out("y", d, ly, shape...), b.out("rstd", tensor.F32, shifted, rows)
		return []*array{out, saved}, b.dev.RMSNormForward(b.stream, &device.RMSNorm{
			X: b.in("x", d, lx, x, shape...).Tensor, W: b.in("w", d, shifted, w, n).Tensor,
			Y: out.Tensor, RStd: saved.Tensor, Eps: eps, Centre: centre})
	})
	s.check(name+" in place", forward, func(b *bench) ([]*array, error) {
		out, saved := b.inout("x", d, lx, x, shape...), b.out("rstd", tensor.F32, dense, rows)
		return []*array{out, saved}, b.dev.RMSNormForward(b.stream, &device.RMSNorm{
			X: out.Tensor, W: b.in("w", d, dense, w, n).Tensor, Y: out.Tensor, RStd: saved.Tensor, Eps: eps,
			Centre: centre})
	})

	dw64, dw32 := append([]float64{}, dw...), f(dw)
	dx, dx32 := ref.RMSNormGrad(n, x, w, centre, rstd, dy, dw64),
		ref.RMSNormGrad(n, f(x), f(w), float32(centre), rstd32, f(dy), dw32)
	if add {
		for i, v := range was {
			dx[i], dx32[i] = dx[i]+v, dx32[i]+float32(v)
		}
	}
	backward := []want{both("dx", dx, dx32).as(d), both("dw", dw64, dw32)}
	grad := func(b *bench, dyl layout) (*device.RMSNormGrad, *array) {
		weights := b.inout("dw", tensor.F32, shifted, dw, n)
		return &device.RMSNormGrad{
			X: b.in("x", d, lx, x, shape...).Tensor, W: b.in("w", d, dense, w, n).Tensor,
			RStd: b.in("rstd", tensor.F32, dense, rstd, rows).Tensor, DW: weights.Tensor, AddDX: add,
			Centre: centre}, weights
	}
	s.check(name+" backward", backward, func(b *bench) ([]*array, error) {
		a, weights := grad(b, ly)
		out := b.inout("dx", d, lx, was, shape...)
		a.DY, a.DX = b.in("dy", d, ly, dy, shape...).Tensor, out.Tensor
		return []*array{out, weights}, b.dev.RMSNormBackward(b.stream, a)
	})
	if !add {
		s.check(name+" backward in place", backward, func(b *bench) ([]*array, error) {
			a, weights := grad(b, ly)
			out := b.inout("dy", d, ly, dy, shape...)
			a.DY, a.DX = out.Tensor, out.Tensor
			return []*array{out, weights}, b.dev.RMSNormBackward(b.stream, a)
		})
	}
}
