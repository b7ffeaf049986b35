package conformance

import (
	"fmt"
	"math"
	"math/rand/v2"

	"ulysses/tensor"
)

func testCopy(s *suite) {
	types := []tensor.DType{tensor.F32, tensor.BF16, tensor.F16, tensor.F64, tensor.I32, tensor.I64, tensor.U8}
	extents := []int64{1, 1, 2, 2, 3, 4, 5, 7, 16, 17, 63, 65, 100}
	for i := range int64(80) {
		r := seeded(1, i)
		var shape []int64
		for n := int64(1); len(shape) <= int(i%tensor.MaxDims); n *= shape[len(shape)-1] {
			d := extents[r.IntN(len(extents))]
			for n*d > 40000 {
				d = extents[r.IntN(6)]/2 + 1
				if d > 1 && n*d > 80000 {
					d = 1
				}
			}
			shape = append(shape, d)
		}
		s.copyCase(types[i%7], shape, randomLayout(r, len(shape)), randomLayout(r, len(shape)))
	}
	// Copies of a reshard, and transposes of matrices in both directions.
	for _, d := range []tensor.DType{tensor.F32, tensor.BF16} {
		for _, shape := range [][]int64{{4, 257, 64}, {257, 3, 33}, {2, 2100, 80}, {1, 17, 128}, {700, 1, 200},
			{65, 9, 1}} {
			s.copyCase(d, shape, dense, headMajor)
			s.copyCase(d, shape, headMajor, dense)
		}
		for _, shape := range [][]int64{{1, 257}, {3, 100}, {16, 16}, {17, 65}, {257, 100}, {512, 384}} {
			transposed := layout{order: []int{1, 0}}
			s.copyCase(d, shape, dense, transposed)
			s.copyCase(d, shape, transposed, layout{gap: 3, shift: 1})
			s.copyCase(d, shape, layout{inner: 3}, layout{inner: 2, order: []int{1, 0}})
		}
	}
	for _, d := range types {
		s.copyCase(d, []int64{130, 99}, dense, layout{order: []int{1, 0}})
		// longer than any block of work
		s.copyCase(d, []int64{150001}, dense, shifted)
		s.copyCase(d, []int64{2, 0, 3}, dense, dense)
		s.copyCase(d, nil, dense, dense)
	}
	s.check("broadcast", []want{{name: "dst", ref: []float64{1, 2, 3, 1, 2, 3}, exact: true}},
		func(b *bench) ([]*array, error) {
			src, dst := b.in("src", tensor.F32, dense, []float64{1, 2, 3}, 1, 3), b.out("dst", tensor.F32, padded, 2, 3)
			row := src.Tensor
			row.Shape[0], row.Stride[0] = 2, 0
			return []*array{dst}, b.dev.Copy(b.stream, dst.Tensor, row)
		})
}

func randomLayout(r *rand.Rand, axes int) layout {
	l := layout{order: r.Perm(axes), gap: r.Int64N(4), shift: r.Int64N(5), inner: 1}
	if r.IntN(4) == 0 {
		l.inner = 2
	}
	if r.IntN(2) == 0 { // most copies keep the order
		l.order = nil
	}
	return l
}

func (s *suite) copyCase(d tensor.DType, shape []int64, from, to layout) {
	n := tensor.Of(nil, d, shape...).Numel()
	x := floats(integers(seeded(n), n, 251))
	if d == tensor.F32 || d == tensor.F64 {
		x = normal(seeded(n), n)
	}
	name := fmt.Sprintf("%v%v %v to %v", d, shape, from, to)
	s.check(name, []want{{name: "dst", ref: x, exact: true}}, func(b *bench) ([]*array, error) {
		src, dst := b.in("src", d, from, x, shape...), b.out("dst", d, to, shape...)
		return []*array{dst}, b.dev.Copy(b.stream, dst.Tensor, src.Tensor)
	})
}

// testCast converts types, with values that are difficult to round.
func testCast(s *suite) {
	special := []float64{0, math.Copysign(0, -1), 1, -1, math.NaN(), math.Inf(1), math.Inf(-1), 1e-40, -1e-45, 3.3e38,
		math.MaxFloat32,
		// NaNs of all ones, which overflow if rounded up
		math.Float64frombits(1<<63 - 1), math.Float64frombits(1<<64 - 1),
		1 + 1.0/256, 1 + 3.0/256, 1 + 1.0/256 + ulp, -1 - 1.0/256, 1e-39, 65504, 1e30}
	const f16Bits = 1 << 16
	for _, c := range []struct{ from, to tensor.DType }{
		{tensor.F32, tensor.BF16}, {tensor.BF16, tensor.F32}, {tensor.F32, tensor.F64}, {tensor.F64, tensor.F32},
		{tensor.F16, tensor.F32},
	} {
		for _, n := range []int64{1, 3, 17, 64, 257, 70001} {
			for _, l := range []layout{dense, shifted, {inner: 2, shift: 1}} {
				x := normal(seeded(n), n)
				copy(x, special)
				if c.from == tensor.BF16 {
					for i, v := range x {
						x[i] = float64(tensor.BF16ToF32(tensor.F32ToBF16(float32(v))))
					}
				}
				if c.from == tensor.F16 {
					x = floats(integers(seeded(n), n, f16Bits))
					if n > f16Bits { // all of them
						for i := range int64(f16Bits) {
							x[i] = float64(i)
						}
					}
				}
				y := make([]float64, n)
				for i, v := range x {
					switch {
					case c.from == tensor.F16:
						y[i] = float64(tensor.F16ToF32(uint16(v)))
					case c.to == tensor.BF16:
						y[i] = float64(tensor.BF16ToF32(tensor.F32ToBF16(float32(v))))
					default:
						y[i] = float64(float32(v))
					}
				}
				name := fmt.Sprintf("%v to %v %d %v", c.from, c.to, n, l)
				s.check(name, []want{{name: "dst", ref: y, exact: true}}, func(b *bench) ([]*array, error) {
					src, dst := b.in("src", c.from, l, x, n), b.out("dst", c.to, l, n)
					return []*array{dst}, b.dev.Copy(b.stream, dst.Tensor, src.Tensor)
				})
			}
		}
		// A cast that also permutes axes: [T, H, D] to [H, T, D].
		x := floats(integers(seeded(5), 5*7*33, 200))
		y := x
		if c.from == tensor.F16 {
			y = make([]float64, len(x))
			for i, v := range x {
				y[i] = float64(tensor.F16ToF32(uint16(v)))
			}
		}
		s.check(fmt.Sprintf("%v to %v, moved", c.from, c.to), []want{{name: "dst", ref: y, exact: true}},
			func(b *bench) ([]*array, error) {
				src, dst := b.in("src", c.from, padded, x, 5, 7, 33), b.out("dst", c.to, headMajor, 5, 7, 33)
				return []*array{dst}, b.dev.Copy(b.stream, dst.Tensor, src.Tensor)
			})
	}
}
