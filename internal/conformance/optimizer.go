package conformance

import (
	"fmt"

	"ulysses/device"
	"ulysses/internal/ref"
	"ulysses/tensor"
)

// testAdamW takes three steps, so that the moments count.
func testAdamW(s *suite) {
	for _, n := range []int64{0, 1, 3, 17, 64, 257, 150000} {
		for _, decay := range []float64{0, 0.1} {
			r := seeded(15, n)
			w, g := normal(r, n), normal(r, n)
			if n > 0 {
				g[n/2] = 0 // a weight without gradient stays, but for decay
			}
			f := ref.Convert[float32, float64]
			w64, m64, v64 := append([]float64{}, w...), make([]float64, n), make([]float64, n)
			w32, m32, v32 := f(w), f(m64), f(v64)
			zero := make([]float64, n)
			step := func(i int64) ref.AdamW {
				return ref.AdamW{LR: 0.01 * float64(i), Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: decay, GradScale: 0.25 / float64(i), Step: i}
			}
			for i := int64(1); i <= 3; i++ {
				ref.Update(step(i), w64, g, m64, v64)
				ref.Update(step(i), w32, f(g), m32, v32)
			}
			wants := []want{both("w", w64, w32), both("m", m64, m32), both("v", v64, v32)}
			s.check(fmt.Sprint(n, decay), wants, func(b *bed) ([]*array, error) {
				aw, am, av := b.inout("w", tensor.F32, shifted, w, n), b.inout("m", tensor.F32, dense, zero, n), b.inout("v", tensor.F32, shifted, zero, n)
				ag := b.in("g", tensor.F32, dense, g, n)
				for i := int64(1); i <= 3; i++ {
					p := step(i)
					err := b.dev.AdamW(b.stream, &device.AdamW{W: aw.Tensor, G: ag.Tensor, M: am.Tensor, V: av.Tensor, LR: p.LR, Beta1: p.Beta1,
						Beta2: p.Beta2, Eps: p.Eps, WeightDecay: p.WeightDecay, GradScale: p.GradScale, Step: i})
					if err != nil {
						return nil, err
					}
				}
				return []*array{aw, am, av}, nil
			})
		}
	}
}

func testSGD(s *suite) {
	for _, n := range []int64{0, 1, 3, 17, 257, 150000} {
		r := seeded(16, n)
		w, g := normal(r, n), normal(r, n)
		f := ref.Convert[float32, float64]
		w64, w32 := append([]float64{}, w...), f(w)
		ref.SGD(w64, g, 0.1, 0.2, 0.3)
		ref.SGD(w32, f(g), 0.1, 0.2, 0.3)
		s.check(fmt.Sprint(n), []want{both("w", w64, w32)}, func(b *bed) ([]*array, error) {
			a := b.inout("w", tensor.F32, shifted, w, n)
			return []*array{a}, b.dev.SGD(b.stream, &device.SGD{W: a.Tensor, G: b.in("g", tensor.F32, dense, g, n).Tensor,
				LR: 0.1, WeightDecay: 0.2, GradScale: 0.3})
		})
	}
}
