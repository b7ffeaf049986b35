package conformance

import (
	"fmt"
	"math"
	"slices"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// decays returns ranges of n elements to which weight decay applies: all, none, and some as in a
// model.
func decays(n int64) [][]device.Range {
	several := []device.Range{{Lo: 0, Hi: n / 7}, {Lo: n / 7, Hi: n / 5}, {Lo: n / 3, Hi: n / 3},
		{Lo: n / 2, Hi: max(n/2, n-1)}}
	many := []device.Range{}
	for lo := int64(0); lo < min(n, 900); lo += 3 {
		many = append(many, device.Range{Lo: lo, Hi: min(lo+1+lo%2, n)})
	}
	return [][]device.Range{nil, {}, {{Lo: 0, Hi: n}}, several, many}
}

// eachRange calls f for consecutive ranges of [0, n), with the decay of each.
func eachRange(n int64, decay float64, ranges []device.Range, f func(lo, hi int64, decay float64)) {
	if ranges == nil {
		ranges = []device.Range{{Lo: 0, Hi: n}}
	}
	at := int64(0)
	for _, r := range ranges {
		f(at, r.Lo, 0)
		f(r.Lo, r.Hi, decay)
		at = r.Hi
	}
	f(at, n, 0)
}

// testAdamW runs three steps, so that the moments have an effect.
func testAdamW(s *suite) {
	for _, n := range []int64{0, 1, 3, 17, 64, 257, 150000} {
		for i, ranges := range decays(n) {
			s.adamwCase(n, 0.1, fmt.Sprint(n, " decay ", i), ranges)
		}
		s.adamwCase(n, 0, fmt.Sprint(n), nil)
	}
	s.refusedRanges(func(b *bench, x tensor.Tensor, r []device.Range) error {
		return b.dev.AdamW(b.stream, &device.AdamW{W: x, G: x, M: x, V: x, Decay: r, Step: 1})
	})
}

func (s *suite) adamwCase(n int64, decay float64, name string, ranges []device.Range) {
	r := seeded(15, n)
	w, g := normal(r, n), normal(r, n)
	if n > 0 {
		g[n/2] = 0 // without a gradient, a weight only decays
	}
	if n > 100 {
		g[99] = math.NaN()
	}
	f := ref.Convert[float32, float64]
	w64, m64, v64 := append([]float64{}, w...), make([]float64, n), make([]float64, n)
	w32, m32, v32, g32 := f(w), f(m64), f(v64), f(g)
	zero := make([]float64, n)
	step := func(i int64) ref.AdamW {
		return ref.AdamW{LR: 0.01 * float64(i), Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: decay,
			GradScale: 0.25 / float64(i), Step: i}
	}
	for i := int64(1); i <= 3; i++ {
		eachRange(n, decay, ranges, func(lo, hi int64, decay float64) {
			p := step(i)
			p.WeightDecay = decay
			ref.Update(p, w64[lo:hi], g[lo:hi], m64[lo:hi], v64[lo:hi])
			ref.Update(p, w32[lo:hi], g32[lo:hi], m32[lo:hi], v32[lo:hi])
		})
	}
	wants := []want{both("w", w64, w32), both("m", m64, m32), both("v", v64, v32),
		{name: "low", ref: w64, exact: true, low: 1}}
	run := func(low bool) body {
		return func(b *bench) ([]*array, error) {
			aw, am, av := b.inout("w", tensor.F32, shifted, w, n), b.inout("m", tensor.F32, dense, zero, n),
				b.inout("v", tensor.F32, shifted, zero, n)
			ag, results := b.in("g", tensor.F32, dense, g, n), []*array{aw, am, av}
			a := device.AdamW{W: aw.Tensor, G: ag.Tensor, M: am.Tensor, V: av.Tensor}
			if low {
				al := b.out("low", tensor.BF16, shifted, n)
				a.Low, results = al.Tensor, append(results, al)
			}
			for i := int64(1); i <= 3; i++ {
				p, c := step(i), a
				c.LR, c.Beta1, c.Beta2, c.Eps, c.WeightDecay, c.GradScale, c.Step = p.LR, p.Beta1, p.Beta2, p.Eps,
					p.WeightDecay, p.GradScale, i
				c.Decay = slices.Clone(ranges)
				err := b.dev.AdamW(b.stream, &c)
				clear(c.Decay) // which is the caller's again
				if err != nil {
					return nil, err
				}
			}
			return results, nil
		}
	}
	s.check(name, wants[:3], run(false))
	s.check(name+" with low", wants, run(true))
}

func testSGD(s *suite) {
	for _, n := range []int64{0, 1, 3, 17, 257, 150000} {
		for i, ranges := range decays(n) {
			s.sgdCase(n, fmt.Sprint(n, " decay ", i), ranges)
		}
	}
	s.refusedRanges(func(b *bench, x tensor.Tensor, r []device.Range) error {
		return b.dev.SGD(b.stream, &device.SGD{W: x, G: x, Decay: r})
	})
}

func (s *suite) sgdCase(n int64, name string, ranges []device.Range) {
	r := seeded(16, n)
	w, g := normal(r, n), normal(r, n)
	w64, w32, g32 := append([]float64{}, w...), ref.Convert[float32](w), ref.Convert[float32](g)
	eachRange(n, 0.2, ranges, func(lo, hi int64, decay float64) {
		ref.SGD(w64[lo:hi], g[lo:hi], 0.1, decay, 0.3)
		ref.SGD(w32[lo:hi], g32[lo:hi], 0.1, decay, 0.3)
	})
	wants := []want{both("w", w64, w32), {name: "low", ref: w64, exact: true, low: 1}}
	run := func(low bool) body {
		return func(b *bench) ([]*array, error) {
			a := b.inout("w", tensor.F32, shifted, w, n)
			results := []*array{a}
			c := &device.SGD{W: a.Tensor, G: b.in("g", tensor.F32, dense, g, n).Tensor, LR: 0.1, WeightDecay: 0.2,
				GradScale: 0.3, Decay: slices.Clone(ranges)}
			if low {
				al := b.out("low", tensor.BF16, shifted, n)
				c.Low, results = al.Tensor, append(results, al)
			}
			err := b.dev.SGD(b.stream, c)
			clear(c.Decay)
			return results, err
		}
	}
	s.check(name, wants[:1], run(false))
	s.check(name+" with low", wants, run(true))
}

// refusedRanges calls an optimizer on ten elements with ranges outside them or out of order.
func (s *suite) refusedRanges(try func(b *bench, x tensor.Tensor, r []device.Range) error) {
	b := newBench(s.t, s.one)
	defer b.close()
	x := b.in("x", tensor.F32, dense, make([]float64, 10), 10).Tensor
	for _, r := range [][]device.Range{{{Lo: 0, Hi: 11}}, {{Lo: -1, Hi: 3}}, {{Lo: 4, Hi: 3}},
		{{Lo: 0, Hi: 5}, {Lo: 4, Hi: 6}}, {{Lo: 11, Hi: 11}},
		{{Lo: 5, Hi: 6}, {Lo: 0, Hi: 1}}, {{Lo: 0, Hi: 1 << 62}}} {
		if err := b.settle(try(b, x, r)); status.Of(err) != status.InvalidArgument {
			s.t.Errorf("decay ranges %v of 10 elements: %v, want an error", r, err)
		}
	}
	b.finish()
}
