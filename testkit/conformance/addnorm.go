package conformance

import (
	"bytes"
	"fmt"
	"math"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testAddRMSNorm(s *suite) {
	s.eachNorm(func(i int, shape []int64, d tensor.DType, suffix string, l, next layout) {
		s.addNormCase(d, suffix, shape, l, next, float64(i/2%2), i == 5)
	})
}

// addNormCase compares the sum and its norm with the reference and, bitwise, with Add followed by
// RMSNormForward. The results overwrite no operand, or one of them, or both.
func (s *suite) addNormCase(d tensor.DType, suffix string, shape []int64, la, lb layout, centre float64, nan bool) {
	const eps = 1e-5
	size := tensor.Of(nil, tensor.F32, shape...).Numel()
	n := shape[len(shape)-1]
	rows := size / n
	r := seeded(35, size, n)
	x, added, w := normalAs(d, r, size), normalAs(d, r, size), normalAs(d, r, n)
	if nan {
		x[5*n+1] = math.NaN()
	}
	if n > 64 && size > 0 { // a sum that is a denormal, which Add keeps
		x[3], added[3] = 1.5*0x1p-126, -0x1p-126
	}
	sum := make([]float64, size)
	for i := range sum {
		sum[i] = float64(float32(x[i] + added[i]))
	}
	sum = rounded(d, sum)
	f := ref.Convert[float32, float64]
	y, rstd := ref.RMSNorm(n, sum, w, centre, eps)
	y32, rstd32 := ref.RMSNorm(n, f(sum), f(w), float32(centre), eps)
	wants := []want{{name: "sum", ref: sum, exact: true}, both("y", y, y32).as(d), both("rstd", rstd, rstd32)}

	// operands allocates the operands and the results, in the memory of operands if sumIn or yIn
	// has their number, 1 or 2.
	operands := func(b *bench, sumIn, yIn int) (a device.AddRMSNorm, results []*array) {
		of := [3][]float64{nil, x, added}
		memory, layouts := [3]*array{}, [3]layout{lb, la, lb}
		for i := 1; i < 3; i++ {
			if i == sumIn || i == yIn {
				memory[i] = b.inout("operand", d, layouts[i], of[i], shape...)
			} else {
				memory[i] = b.in("operand", d, layouts[i], of[i], shape...)
			}
		}
		result := func(name string, in int, l layout) *array {
			if in > 0 {
				return memory[in]
			}
			return b.out(name, d, l, shape...)
		}
		results = []*array{result("sum", sumIn, lb), result("y", yIn, la), b.out("rstd", tensor.F32, shifted, rows)}
		return device.AddRMSNorm{A: memory[1].Tensor, B: memory[2].Tensor, W: b.in("w", d, shifted, w, n).Tensor,
			Sum: results[0].Tensor, Y: results[1].Tensor, RStd: results[2].Tensor, Eps: eps, Centre: centre}, results
	}
	name := fmt.Sprint(shape, la, lb, " centre ", centre, suffix)
	for _, in := range []struct {
		name   string
		sum, y int
	}{{"", 0, 0}, {", y in b", 0, 2}, {", sum in a, y in b", 1, 2}, {", sum in b, y in a", 2, 1}} {
		s.check(name+in.name, wants, func(b *bench) ([]*array, error) {
			a, results := operands(b, in.sum, in.y)
			return results, b.dev.AddRMSNorm(b.stream, &a)
		})
	}
	if !s.reproducible {
		return
	}
	s.t.Run(name+", as Add and RMSNorm", func(t *testing.T) {
		one := s.bits(t, func(b *bench) ([]*array, error) {
			a, results := operands(b, 0, 0)
			return results, b.dev.AddRMSNorm(b.stream, &a)
		})
		two := s.bits(t, func(b *bench) ([]*array, error) {
			a, results := operands(b, 0, 0)
			if err := b.dev.Add(b.stream, a.Sum, a.A, a.B); err != nil {
				return nil, err
			}
			return results,
				b.dev.RMSNormForward(b.stream,
					&device.RMSNorm{X: a.Sum, W: a.W, Y: a.Y, RStd: a.RStd, Eps: eps, Centre: centre})
		})
		for i, w := range wants {
			if !bytes.Equal(one[i], two[i]) {
				t.Errorf("%s: the bits differ from the results of Add and RMSNorm", w.name)
			}
		}
	})
}
