package conformance

import (
	"fmt"
	"math"

	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testColumnSum(s *suite) {
	for _, shape := range [][]int64{{0, 5}, {1, 1}, {3, 7}, {257, 1}, {17, 65}, {100, 257}, {3000, 33}, {2, 1000},
		{700, 100}} {
		for _, l := range []layout{dense, padded} {
			s.typed(func(d tensor.DType, suffix string) { s.columnSumCase(d, suffix, shape[0], shape[1], l) })
		}
	}
}

func (s *suite) columnSumCase(d tensor.DType, suffix string, t, n int64, l layout) {
	r := seeded(5, t, n)
	x, was := normalAs(d, r, t*n), normal(r, n)
	if t == 17 {
		x[3] = math.NaN()
	}
	sum, plain := append([]float64{}, was...), ref.Convert[float32](was)
	ref.ColumnSum(sum, x)
	ref.ColumnSum(plain, ref.Convert[float32](x))
	s.check(fmt.Sprint(t, n, l, suffix), []want{both("dst", sum, plain)}, func(b *bench) ([]*array, error) {
		a, dst := b.in("x", d, l, x, t, n), b.inout("dst", tensor.F32, shifted, was, n)
		return []*array{dst}, b.dev.ColumnSum(b.stream, dst.Tensor, a.Tensor)
	})
}

// testSum tests sums in float64, as needed for gradient norms over 10⁹ elements. The bound is the
// error of the reference, which adds one element after the other.
func testSum(s *suite) {
	for _, n := range []int64{0, 1, 2, 3, 17, 65, 257, 40000, 300001} {
		x := normal(seeded(6, n), n)
		for i := range x {
			x[i] = float64(float32(math.Abs(x[i])))
		}
		if n == 17 {
			x[16] = math.NaN()
		}
		sum := want{name: "Σx", ref: []float64{ref.Sum(x)}, bound: 1e-12}
		squares := want{name: "Σx²", ref: []float64{ref.SumSquares(x) + 2.5}, bound: 1e-12}
		s.check(fmt.Sprint(n), []want{sum, squares}, func(b *bench) ([]*array, error) {
			a := b.in("x", tensor.F32, shifted, x, n)
			out := b.out("sum", tensor.F64, dense, 1)
			out2 := b.inout("squares", tensor.F64, dense, []float64{2.5}, 1)
			if err := b.dev.Sum(b.stream, out.Tensor, a.Tensor); err != nil {
				return nil, err
			}
			return []*array{out, out2}, b.dev.SumSquares(b.stream, out2.Tensor, a.Tensor)
		})
	}
}
