package conformance

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testSwiGLU(s *suite) {
	for _, shape := range [][]int64{{1, 1}, {2, 3}, {7, 17}, {63, 64}, {100, 65}, {3, 257}, {0, 9}, {257, 100},
		{1, 90000}} {
		for _, l := range []layout{dense, padded} {
			s.typed(func(d tensor.DType, suffix string) {
				for form := range swigluForms {
					s.swigluCase(d, suffix, shape[0], shape[1], l, form)
				}
			})
		}
	}
}

// swigluForms are GELU and Clamped of each form.
var swigluForms = [][2]bool{{false, false}, {true, false}, {false, true}}

func (s *suite) swigluCase(d tensor.DType, suffix string, t, n int64, l layout, form int) {
	gelu, clamped := swigluForms[form][0], swigluForms[form][1]
	r := seeded(12, t, n)
	gate, up, dy := normal(r, t*n), normal(r, t*n), normal(r, t*n)
	up, dy = rounded(d, up), rounded(d, dy)
	for i := range gate {
		gate[i] = float64(float32(gate[i] * 3))
	}
	if t == 3 { // far out on both sides, and what is not a number
		copy(gate, []float64{0, 90, -90, 200, -200, -1000, 1000, math.NaN(), -87.5, 88.5})
	}
	gate = rounded(d, gate)
	if clamped {
		atLimits(gate, up)
	}
	f := ref.Convert[float32, float64]
	of, of32 := ref.SwiGLUForm[float64](gelu, clamped), ref.SwiGLUForm[float32](gelu, clamped)
	dgate, dup := of.Grad(gate, up, dy)
	dgate32, dup32 := of32.Grad(f(gate), f(up), f(dy))
	y, y32 := of.Gate(gate, up), of32.Gate(f(gate), f(up))
	suffix += []string{"", " gelu", " clamped"}[form]
	forward := []want{both("y", y, y32).as(d)}
	backward := []want{both("dgate", dgate, dgate32).as(d), both("dup", dup, dup32).as(d)}
	name := fmt.Sprintf("%dx%d %v%s", t, n, l, suffix)
	s.check(name, forward, func(b *bench) ([]*array, error) {
		y := b.out("y", d, padded, t, n)
		return []*array{y}, b.dev.SwiGLUForward(b.stream, &device.SwiGLU{
			Gate: b.in("gate", d, l, gate, t, n).Tensor, Up: b.in("up", d, l, up, t, n).Tensor, Y: y.Tensor, GELU: gelu,
			Clamped: clamped})
	})
	s.check(name+" backward", backward, func(b *bench) ([]*array, error) {
		dg, du := b.out("dgate", d, dense, t, n), b.out("dup", d, l, t, n)
		return []*array{dg, du}, b.dev.SwiGLUBackward(b.stream, &device.SwiGLUGrad{
			Gate: b.in("gate", d, l, gate, t, n).Tensor, Up: b.in("up", d, l, up, t, n).Tensor,
			DY: b.in("dy", d, shifted, dy, t, n).Tensor, DGate: dg.Tensor, DUp: du.Tensor, GELU: gelu,
			Clamped: clamped})
	})
	s.check(name+" backward in place", backward, func(b *bench) ([]*array, error) {
		dg, du := b.inout("gate", d, l, gate, t, n), b.inout("up", d, l, up, t, n)
		return []*array{dg, du}, b.dev.SwiGLUBackward(b.stream, &device.SwiGLUGrad{
			Gate: dg.Tensor, Up: du.Tensor, DY: b.in("dy", d, l, dy, t, n).Tensor, DGate: dg.Tensor, DUp: du.Tensor,
			GELU: gelu, Clamped: clamped})
	})
	s.check(name+" backward, restored", append(backward, forward...), func(b *bench) ([]*array, error) {
		dg, du, y := b.inout("gate", d, l, gate, t, n), b.inout("up", d, l, up, t, n), b.inout("dy", d, l, dy, t, n)
		return []*array{dg, du, y}, b.dev.SwiGLUBackward(b.stream, &device.SwiGLUGrad{
			Gate: dg.Tensor, Up: du.Tensor, DY: y.Tensor, DGate: dg.Tensor, DUp: du.Tensor, Restore: true, GELU: gelu,
			Clamped: clamped})
	})
}

// atLimits sets gates and ups to the limits of the clamped form, beyond them, and to NaN.
func atLimits(gate, up []float64) {
	const n = 8
	if at := len(gate) - n; at >= 0 {
		copy(gate[at:], []float64{7, 8, -8, 1, 1, 1, 1, 1})
		copy(up[at:], []float64{1, 1, 1, 7, -7, 9, -9, math.NaN()})
	}
}
