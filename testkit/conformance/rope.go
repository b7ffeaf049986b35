package conformance

import (
	"fmt"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testRope(s *suite) {
	for _, c := range []struct{ tokens, heads, dim, rotary int64 }{
		{1, 1, 2, 2}, {3, 2, 7, 4}, {17, 1, 64, 64}, {65, 3, 33, 32}, {100, 4, 80, 16}, {257, 2, 128, 128},
		{7, 3, 5, 0}, {0, 2, 8, 8},
		{2, 7, 200, 200}, {63, 2, 34, 34}, {5, 0, 8, 4},
	} {
		s.ropeTableCase(c.tokens, c.rotary)
		s.typed(func(d tensor.DType, suffix string) {
			s.ropeCase(d, suffix, c.tokens, c.heads, c.dim, c.rotary, headMajor, dense, padded, headMajor)
			s.normedRopeCase(d, suffix, c.tokens, c.heads, c.dim, c.rotary, headMajor, dense, padded, headMajor)
		})
	}
}

// angles returns positions, and frequencies rounded to F32.
func angles(tokens, rotary int64) (positions []int64, freq []float64) {
	freq = ref.RopeFrequencies(5e5, rotary)
	for i, f := range freq {
		freq[i] = float64(float32(f))
	}
	return integers(seeded(10, tokens), tokens, 1<<22), freq
}

func (s *suite) ropeTableCase(tokens, rotary int64) {
	positions, freq := angles(tokens, rotary)
	half := rotary / 2
	for _, x := range []struct {
		scale, beta float64
		length      int64
	}{{}, {scale: 1.25}, {beta: 0.5, length: 1000}, {1.25, -0.125, 1}, {0, 3, 1 << 33}} {
		cos, sin := ref.RopeTable[float64](positions, freq, x.scale)
		cos32, sin32 := ref.RopeTable[float32](positions, freq, x.scale)
		if x.length > 0 {
			for t, gain := range ref.Gains(positions, x.beta, x.length) {
				for i := range half {
					at := int64(t)*half + i
					cos[at], sin[at] = cos[at]*gain, sin[at]*gain
					cos32[at], sin32[at] = cos32[at]*float32(gain), sin32[at]*float32(gain)
				}
			}
		}
		s.check(fmt.Sprintf("table %dx%d %+v", tokens, half, x),
			[]want{both("cos", cos, cos32), both("sin", sin, sin32)}, func(b *bench) ([]*array, error) {
				c, z := b.out("cos", tensor.F32, dense, tokens, half), b.out("sin", tensor.F32, shifted, tokens, half)
				return []*array{c, z}, b.dev.RopeTable(b.stream, &device.RopeTable{
					Positions: b.in("positions", tensor.I32, shifted, floats(positions), tokens).Tensor,
					Freq:      b.in("freq", tensor.F32, shifted, freq, half).Tensor, Cos: c.Tensor, Sin: z.Tensor,
					Scale: x.scale, Beta: x.beta, Length: x.length})
			})
	}
}

func (s *suite) ropeCase(d tensor.DType, suffix string, tokens, heads, dim, rotary int64, to layout, from ...layout) {
	name := fmt.Sprintf("%dx%dx%d of %d%s", tokens, heads, dim, rotary, suffix)
	positions, freq := angles(tokens, rotary)
	half := rotary / 2
	cos, sin := ref.RopeTable[float64](positions, freq, 0)
	for i := range cos {
		cos[i], sin[i] = float64(float32(cos[i])), float64(float32(sin[i]))
	}
	x := normalAs(d, seeded(11, tokens, dim), tokens*heads*dim)
	f := ref.Convert[float32, float64]
	for _, inverse := range []bool{false, true} {
		w := []want{both("y", ref.Rope(tokens, heads, dim, x, cos, sin, inverse),
			ref.Rope(tokens, heads, dim, f(x), f(cos), f(sin), inverse)).as(d)}
		args := func(b *bench, x, y *array) *device.Rope {
			return &device.Rope{X: x.Tensor, Y: y.Tensor, Inverse: inverse,
				Cos: b.in("cos", tensor.F32, dense, cos, tokens, half).Tensor,
				Sin: b.in("sin", tensor.F32, dense, sin, tokens, half).Tensor}
		}
		for _, l := range from {
			s.check(fmt.Sprint(name, l, inverse), w, func(b *bench) ([]*array, error) {
				in, out := b.in("x", d, l, x, tokens, heads, dim), b.out("y", d, to, tokens, heads, dim)
				return []*array{out}, b.dev.Rope(b.stream, args(b, in, out))
			})
			s.check(fmt.Sprint(name, l, inverse, " in place"), w, func(b *bench) ([]*array, error) {
				in := b.inout("x", d, l, x, tokens, heads, dim)
				return []*array{in}, b.dev.Rope(b.stream, args(b, in, in))
			})
		}
	}
}

// normedRopeCase compares a rotation with a norm to the two operations one after the other, with
// the same rounding between them.
func (s *suite) normedRopeCase(d tensor.DType, suffix string, tokens, heads, dim, rotary int64, to layout,
	from ...layout) {
	positions, freq := angles(tokens, rotary)
	half := rotary / 2
	cos, sin := ref.RopeTable[float64](positions, freq, 0)
	for i := range cos {
		cos[i], sin[i] = float64(float32(cos[i])), float64(float32(sin[i]))
	}
	const eps = 1e-6
	x, w := normalAs(d, seeded(12, tokens, dim), tokens*heads*dim), normalAs(d, seeded(13, dim), dim)
	f := ref.Convert[float32, float64]
	for _, centre := range []float64{0, 1} {
		name := fmt.Sprintf("normed, centre %v, %dx%dx%d of %d%s", centre, tokens, heads, dim, rotary, suffix)
		y, rstd := ref.RMSNorm(dim, x, w, centre, eps)
		y32, rstd32 := ref.RMSNorm(dim, f(x), f(w), float32(centre), eps)
		y32 = f(rounded(d, ref.Convert[float64](y32))) // as the norm by itself leaves it
		want := []want{both("y", ref.Rope(tokens, heads, dim, y, cos, sin, false),
			ref.Rope(tokens, heads, dim, y32, f(cos), f(sin), false)).as(d), both("rstd", rstd, rstd32)}
		args := func(b *bench, x, y, r *array) *device.Rope {
			return &device.Rope{X: x.Tensor, Y: y.Tensor, W: b.in("w", d, shifted, w, dim).Tensor, RStd: r.Tensor,
				Eps: eps, Centre: centre, Cos: b.in("cos", tensor.F32, dense, cos, tokens, half).Tensor,
				Sin: b.in("sin", tensor.F32, dense, sin, tokens, half).Tensor}
		}
		for _, l := range from {
			s.check(fmt.Sprint(name, l), want, func(b *bench) ([]*array, error) {
				in, out, r := b.in("x", d, l, x, tokens, heads, dim), b.out("y", d, to, tokens, heads, dim),
					b.out("rstd", tensor.F32, padded, tokens, heads)
				return []*array{out, r}, b.dev.Rope(b.stream, args(b, in, out, r))
			})
			s.check(fmt.Sprint(name, l, " in place"), want, func(b *bench) ([]*array, error) {
				in, r := b.inout("x", d, l, x, tokens, heads, dim), b.out("rstd", tensor.F32, dense, tokens, heads)
				return []*array{in, r}, b.dev.Rope(b.stream, args(b, in, in, r))
			})
		}
	}
}
