package conformance

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testGemm(s *suite) {
	turned := layout{order: []int{1, 0}, gap: 2, shift: 1} // a transposed view
	sizes := [][3]int64{                                   // M, N, K
		{1, 1, 1}, {1, 2, 3}, {2, 1, 7}, {3, 3, 17}, {7, 17, 2}, {17, 7, 63}, {1, 257, 100}, {257, 1, 100},
		{100, 257, 1}, {1, 1, 257},
		{63, 65, 64}, {64, 64, 64}, {65, 63, 65}, {100, 100, 100}, {257, 100, 65}, {17, 257, 257}, {257, 65, 300},
		{3, 700, 40}, {700, 3, 40},
		{5, 5, 1500}, {0, 5, 3}, {5, 0, 3}, {5, 6, 0}, {130, 90, 600}, {1, 300, 520}, {210, 2100, 9},
	}
	layouts := []layout{dense, padded, turned}
	s.typed(func(d tensor.DType, _ string) {
		for i, z := range sizes {
			for mode := range 3 {
				for _, c := range outputs(d) {
					p := newGemm(d, c, z[0], z[1], z[2], mode)
					s.gemmCase(p, shifted, turned)
					for j, la := range layouts { // all nine pairs, three with each mode
						// half of the cases, a different half for the next size
						if s.emulated() && (i+j+mode)%2 == 0 {
							continue
						}
						s.gemmCase(p, la, layouts[(i+j+mode)%3])
					}
				}
			}
		}
		s.gemmNaN(d)
	})
}

// outputs returns the result types of a product of matrices of type d.
func outputs(d tensor.DType) []tensor.DType {
	if d == tensor.F32 {
		return []tensor.DType{d}
	}
	return []tensor.DType{d, tensor.F32}
}

// gemm is a matrix product and its expected result. mode 0 adds nothing, 1 adds a bias, 2
// accumulates.
type gemm struct {
	d, to         tensor.DType // of a, b and bias, and of c
	m, n, k       int64
	mode          int
	a, b, bias, c []float64
	want          want
}

func newGemm(d, to tensor.DType, m, n, k int64, mode int) *gemm {
	r := seeded(7, m, n, k)
	p := &gemm{d: d, to: to, m: m, n: n, k: k, mode: mode, a: normalAs(d, r, m*k), b: normalAs(d, r, k*n)}
	f := ref.Convert[float32, float64]
	var bias, c []float32
	switch mode {
	case 1:
		p.bias = normalAs(d, r, n)
		bias = f(p.bias)
	case 2:
		p.c = normalAs(to, r, m*n)
		c = f(p.c)
	}
	p.want = both("c", ref.Gemm(m, n, k, p.a, p.b, p.bias, p.c), ref.Gemm(m, n, k, f(p.a), f(p.b), bias, c)).as(to)
	return p
}

// truncated returns the error of a sum of k products on tensor cores: they add 16 products at a
// time to a sum in F32 that they truncate, by half a unit of the last place on average (Fasi,
// Higham, Mikaitis and Pranesh 2021, doi:10.7717/peerj-cs.330, section 4).
func truncated(k int64) float64 { return float64((k+15)/16) * ulp / 2 }

func (s *suite) gemmCase(p *gemm, la, lb layout) {
	if p.d == tensor.BF16 && s.one.Info().Kind == "cuda" && !s.emulated() {
		p.want.chain = max(resolution, truncated(p.k))
	}
	s.check(fmt.Sprintf("%dx%dx%d %v %v %d %v to %v", p.m, p.n, p.k, la, lb, p.mode, p.d, p.to), []want{p.want},
		func(b *bench) ([]*array, error) {
			g := &device.Gemm{
				A: b.in("a", p.d, la, p.a, p.m, p.k).Tensor,
				B: b.in("b", p.d, lb, p.b, p.k, p.n).Tensor,
			}
			if p.bias != nil {
				g.Bias = b.in("bias", p.d, shifted, p.bias, p.n).Tensor
			}
			out := b.inout("c", p.to, padded, p.c, p.m, p.n)
			g.C, g.Accumulate = out.Tensor, p.c != nil
			return []*array{out}, b.dev.Gemm(b.stream, g)
		})
}

func (s *suite) gemmNaN(d tensor.DType) {
	const m, n, k = 20, 70, 30
	r := seeded(8)
	a, x := normalAs(d, r, m*k), normalAs(d, r, k*n)
	a[7*k+29] = math.NaN()
	x[3*n+69] = math.Inf(1)
	w := want{name: "c", ref: ref.Gemm(m, n, k, a, x, nil, nil)}.as(d)
	s.check("NaN and infinity "+d.String(), []want{w}, func(b *bench) ([]*array, error) {
		out := b.out("c", d, dense, m, n)
		return []*array{out}, b.dev.Gemm(b.stream, &device.Gemm{
			A: b.in("a", d, dense, a, m, k).Tensor, B: b.in("b", d, dense, x, k, n).Tensor, C: out.Tensor})
	})
}
