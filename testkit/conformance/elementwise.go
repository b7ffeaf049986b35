package conformance

import (
	"fmt"
	"math"

	"ulysses/tensor"
)

func testFill(s *suite) {
	for _, d := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F64, tensor.I32, tensor.I64, tensor.U8} {
		for _, shape := range [][]int64{{1}, {257}, {3, 65}, {7, 2, 17}, {0, 3}, {150000}} {
			for _, l := range []layout{dense, padded, {inner: 2, gap: 1}} {
				n := tensor.Of(nil, d, shape...).Numel()
				x := make([]float64, n)
				for i := range x {
					x[i] = 7
				}
				s.check(fmt.Sprintf("%v%v %v", d, shape, l), []want{{name: "dst", ref: x, exact: true}},
					func(b *bench) ([]*array, error) {
						dst := b.out("dst", d, l, shape...)
						return []*array{dst}, b.dev.Fill(b.stream, dst.Tensor, 7)
					})
			}
		}
	}
	s.check("-inf", []want{{name: "dst", ref: []float64{math.Inf(-1), math.Inf(-1)}, exact: true}},
		func(b *bench) ([]*array, error) {
			dst := b.out("dst", tensor.F32, dense, 2)
			return []*array{dst}, b.dev.Fill(b.stream, dst.Tensor, math.Inf(-1))
		})
}

func testAdd(s *suite) { s.typed(s.addCases) }

func (s *suite) addCases(d tensor.DType, suffix string) {
	for i, shape := range [][]int64{{1}, {3}, {257}, {2, 100}, {17, 65}, {5, 3, 64}, {3, 7, 2}, {0, 5}, {150000}} {
		n := tensor.Of(nil, tensor.F32, shape...).Numel()
		r := seeded(3, n)
		x, y, sum := normalAs(d, r, n), normalAs(d, r, n), make([]float64, n)
		if n > 0 {
			x[n/2] = math.NaN()
		}
		for i := range sum {
			sum[i] = float64(float32(x[i]) + float32(y[i]))
		}
		wants := []want{want{name: "dst", ref: sum, exact: true}.as(d)}
		name := fmt.Sprint(shape, suffix)
		la, lb := dense, padded
		if i%2 == 1 {
			la, lb = padded, shifted
		}
		s.check(name, wants, func(b *bench) ([]*array, error) {
			a, c, dst := b.in("a", d, la, x, shape...), b.in("b", d, lb, y, shape...), b.out("dst", d, lb, shape...)
			return []*array{dst}, b.dev.Add(b.stream, dst.Tensor, a.Tensor, c.Tensor)
		})
		s.check(name+" into a", wants, func(b *bench) ([]*array, error) {
			a, c := b.inout("a", d, la, x, shape...), b.in("b", d, lb, y, shape...)
			return []*array{a}, b.dev.Add(b.stream, a.Tensor, a.Tensor, c.Tensor)
		})
		s.check(name+" into b", wants, func(b *bench) ([]*array, error) {
			a, c := b.in("a", d, la, x, shape...), b.inout("b", d, lb, y, shape...)
			return []*array{c}, b.dev.Add(b.stream, c.Tensor, a.Tensor, c.Tensor)
		})
	}
}

func testScale(s *suite) { s.typed(s.scaleCases) }

func (s *suite) scaleCases(d tensor.DType, suffix string) {
	for _, n := range []int64{0, 1, 3, 64, 257, 150000} {
		x := normalAs(d, seeded(4, n), n)
		y := make([]float64, n)
		for i := range y {
			y[i] = float64(float32(x[i]) * float32(0.3))
		}
		s.check(fmt.Sprint(n, suffix), []want{want{name: "x", ref: y, exact: true}.as(d)},
			func(b *bench) ([]*array, error) {
				a := b.inout("x", d, shifted, x, n)
				return []*array{a}, b.dev.Scale(b.stream, a.Tensor, 0.3)
			})
	}
}
