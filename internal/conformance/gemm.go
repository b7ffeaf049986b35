package conformance

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/internal/ref"
	"ulysses/tensor"
)

func testGemm(s *suite) {
	turned := layout{order: []int{1, 0}, gap: 2, shift: 1} // a transposed view
	sizes := [][3]int64{                                   // M, N, K
		{1, 1, 1}, {1, 2, 3}, {2, 1, 7}, {3, 3, 17}, {7, 17, 2}, {17, 7, 63}, {1, 257, 100}, {257, 1, 100}, {100, 257, 1}, {1, 1, 257},
		{63, 65, 64}, {64, 64, 64}, {65, 63, 65}, {100, 100, 100}, {257, 100, 65}, {17, 257, 257}, {257, 65, 300}, {3, 700, 40}, {700, 3, 40},
		{5, 5, 1500}, {0, 5, 3}, {5, 0, 3}, {5, 6, 0}, {130, 90, 600}, {1, 300, 520}, {210, 2100, 9},
	}
	for i, z := range sizes {
		for _, la := range []layout{dense, padded, turned} {
			for _, lb := range []layout{dense, padded, turned} {
				s.gemmCase(z[0], z[1], z[2], la, lb, i%3)
			}
		}
		for mode := range 3 {
			s.gemmCase(z[0], z[1], z[2], shifted, turned, mode)
		}
	}
	s.gemmNaN()
}

// gemmCase has no addend (mode 0), a bias (1) or accumulates (2).
func (s *suite) gemmCase(m, n, k int64, la, lb layout, mode int) {
	r := seeded(7, m, n, k)
	a, x, bias, c := normal(r, m*k), normal(r, k*n), normal(r, n), normal(r, m*n)
	if mode != 1 {
		bias = nil
	}
	if mode != 2 {
		c = nil
	}
	f := ref.Convert[float32, float64]
	plainBias, plainC := f(bias), f(c)
	if bias == nil {
		plainBias = nil
	}
	if c == nil {
		plainC = nil
	}
	w := both("c", ref.Gemm(m, n, k, a, x, bias, c), ref.Gemm(m, n, k, f(a), f(x), plainBias, plainC))
	s.check(fmt.Sprintf("%dx%dx%d %v %v %d", m, n, k, la, lb, mode), []want{w}, func(b *bed) ([]*array, error) {
		g := &device.Gemm{
			A: b.in("a", tensor.F32, la, a, m, k).Tensor,
			B: b.in("b", tensor.F32, lb, x, k, n).Tensor,
		}
		if bias != nil {
			g.Bias = b.in("bias", tensor.F32, shifted, bias, n).Tensor
		}
		out := b.inout("c", tensor.F32, padded, c, m, n)
		g.C, g.Accumulate = out.Tensor, c != nil
		return []*array{out}, b.dev.Gemm(b.stream, g)
	})
}

func (s *suite) gemmNaN() {
	const m, n, k = 20, 70, 30
	r := seeded(8)
	a, x := normal(r, m*k), normal(r, k*n)
	a[7*k+29] = math.NaN()
	x[3*n+69] = math.Inf(1)
	w := want{name: "c", ref: ref.Gemm(m, n, k, a, x, nil, nil)}
	s.check("NaN and infinity", []want{w}, func(b *bed) ([]*array, error) {
		out := b.out("c", tensor.F32, dense, m, n)
		return []*array{out}, b.dev.Gemm(b.stream, &device.Gemm{
			A: b.in("a", tensor.F32, dense, a, m, k).Tensor, B: b.in("b", tensor.F32, dense, x, k, n).Tensor, C: out.Tensor})
	})
}
