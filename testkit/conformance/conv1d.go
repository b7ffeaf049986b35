package conformance

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// convInput has the values of a case, rounded to type d.
type convInput struct {
	d                    tensor.DType
	x, w, before, dy, dw []float64 // before nil = none
}

func newConvInput(d tensor.DType, g *ref.Conv1d, before bool) convInput {
	r := seeded(43, g.T(), g.C, g.Width)
	x := convInput{d: d, x: normalAs(d, r, g.T()*g.C), w: normalAs(d, r, g.C*g.Width), dy: normalAs(d, r, g.T()*g.C),
		dw: normal(r, g.C*g.Width)}
	if before {
		x.before = normalAs(d, r, (g.Width-1)*g.C)
	}
	return x
}

// convArgs returns the arguments of the forward operation, which the backward operation has as
// well.
func (b *bench) convArgs(g *ref.Conv1d, x convInput, l layout) device.Conv1d {
	a := device.Conv1d{X: b.in("x", x.d, l, x.x, g.T(), g.C).Tensor,
		W: b.in("w", x.d, shifted, x.w, g.C, g.Width).Tensor, Cu: g.Cu}
	if x.before != nil {
		a.Before = b.in("before", x.d, padded, x.before, g.Width-1, g.C).Tensor
	}
	return a
}

func (b *bench) conv(g *ref.Conv1d, x convInput, l layout) ([]*array, error) {
	a, y := b.convArgs(g, x, l), b.out("y", x.d, padded, g.T(), g.C)
	a.Y = y.Tensor
	return []*array{y}, b.dev.Conv1dForward(b.stream, &a)
}

// convGrad runs backward and returns dx, dw and, if requested, dbefore. In place, dx overwrites dy.
func (b *bench) convGrad(g *ref.Conv1d, x convInput, l layout, inPlace, wanted bool) ([]*array, error) {
	a := device.Conv1dGrad{Conv1d: b.convArgs(g, x, l)}
	dw := b.inout("dw", tensor.F32, shifted, x.dw, g.C, g.Width)
	dy := b.allocate("dy", x.d, padded, x.dy, []int64{g.T(), g.C})
	dx := dy
	if inPlace {
		dy.written = true
	} else {
		dx = b.out("dx", x.d, l, g.T(), g.C)
	}
	a.DY, a.DX, a.DW = dy.Tensor, dx.Tensor, dw.Tensor
	results := []*array{dx, dw}
	if wanted {
		dbefore := b.out("dbefore", x.d, padded, g.Width-1, g.C)
		a.DBefore = dbefore.Tensor
		results = append(results, dbefore)
	}
	return results, b.dev.Conv1dBackward(b.stream, &a)
}

func testConv1d(s *suite) {
	many := make([]int64, 300) // more than kernels take at a time
	for i := range many {
		many[i] = int64(i*i+i/7) % 4
	}
	for i, c := range []struct {
		channels, width int64
		lengths         []int64
	}{
		{1, 1, []int64{1}}, {3, 2, []int64{7}}, {17, 4, []int64{1, 1, 1}}, {64, 4, []int64{100}},
		{65, 4, []int64{0, 3, 0, 64, 1, 0}}, {257, 3, []int64{33}},
		{33, 5, []int64{2, 5, 1, 4}}, {5, 9, []int64{10, 3}}, {300, 4, []int64{70, 1}}, {7, 4, nil}, {7, 4, []int64{0}},
		{0, 4, []int64{3}}, {20, 4, []int64{1500}},
		{s.long(40, 9), 70, []int64{3, s.long(200, 90)}}, {16, 3, []int64{64, 65, 63}}, {600, 4, []int64{9}},
		{130, 1, []int64{40, 3}},
		{9, 4, many}, {5, 3, many},
	} {
		g := &ref.Conv1d{C: c.channels, Width: c.width, Cu: bounds(c.lengths...)}
		for _, before := range []bool{false, true} {
			l := []layout{dense, padded}[(i+len(c.lengths))%2]
			s.typed(func(d tensor.DType, suffix string) { s.convCase(d, suffix, g, l, before, false) })
		}
	}
	s.typed(func(d tensor.DType, suffix string) {
		s.convCase(d, suffix+" with NaN", &ref.Conv1d{C: 37, Width: 4, Cu: bounds(5, 90)}, dense, true, true)
	})
}

func (s *suite) convCase(d tensor.DType, suffix string, g *ref.Conv1d, l layout, before, nan bool) {
	x := newConvInput(d, g, before)
	if nan { // each in a channel of its own
		x.x[40*g.C+3], x.dy[50*g.C+9], x.before[5] = math.NaN(), math.NaN(), math.NaN()
	}
	f := ref.Convert[float32, float64]
	before32 := f(x.before)
	if !before {
		before32 = nil
	}
	dw, dw32 := slices.Clone(x.dw), f(x.dw)
	dx, dbefore := ref.Conv1dBackward(g, x.x, x.w, x.before, x.dy, dw)
	dx32, dbefore32 := ref.Conv1dBackward(g, f(x.x), f(x.w), before32, f(x.dy), dw32)
	forward := []want{both("y", ref.Conv1dForward(g, x.x, x.w, x.before),
		ref.Conv1dForward(g, f(x.x), f(x.w), before32)).as(d)}
	backward := []want{both("dx", dx, dx32).as(d), both("dw", dw, dw32), both("dbefore", dbefore, dbefore32).as(d)}
	for i := range backward { // sum, exponential, quotient, the two factors of silu', product
		backward[i].chain = 6 * ulp
	}
	backward[1].chain *= growth(x.dw, dw)
	name := fmt.Sprintf("%d channels, width %d, %v %v, before %v%s", g.C, g.Width, listed(g.Cu), l, before, suffix)
	s.check(name, forward, func(b *bench) ([]*array, error) { return b.conv(g, x, l) })
	s.check(name+" backward", backward, func(b *bench) ([]*array, error) { return b.convGrad(g, x, l, false, true) })
	s.check(name+" backward in place", backward[:2], func(b *bench) ([]*array, error) {
		return b.convGrad(g, x, l, true, false)
	})
}

// growth returns how many times larger than the sum its largest term is: the relative error of the
// sum grows by this factor.
func growth(was, sum []float64) float64 {
	var parts, all float64
	for i, s := range sum {
		if finite := s - s; finite == 0 {
			parts, all = max(parts, math.Abs(was[i]), math.Abs(s-was[i])), max(all, math.Abs(s))
		}
	}
	if all == 0 {
		return 1
	}
	return max(1, parts/all)
}

var convResults = []string{"y", "dx", "dw", "dbefore"}

// convBits returns the bits of y, dx, dw and dbefore.
func (s *suite) convBits(t *testing.T, g *ref.Conv1d, x convInput) [][]byte {
	return s.bits(t, func(b *bench) ([]*array, error) {
		y, err := b.conv(g, x, padded)
		if err != nil {
			return nil, err
		}
		d, err := b.convGrad(g, x, padded, false, true)
		return append(y, d...), err
	})
}

// channelsAlone runs all channels, then ranges of them, as on a rank that has some of the heads.
// The bits are equal.
func (s *suite) channelsAlone(t *testing.T, d tensor.DType) {
	for _, width := range []int64{3, 4, 5} {
		g := &ref.Conv1d{C: 300, Width: width, Cu: bounds(1, 90, 2, 0, 107)}
		x := newConvInput(d, g, true)
		all, size := s.convBits(t, g, x), []int64{d.Size(), d.Size(), 4 * width, d.Size()}
		for _, part := range [][2]int64{{0, 1}, {1, 17}, {8, 72}, {17, 300}, {256, 258}} {
			lo, n := part[0], part[1]-part[0]
			sub := &ref.Conv1d{C: n, Width: width, Cu: g.Cu}
			cut := func(x []float64, of int64) []float64 { return columns(x, g.C*of, lo*of, n*of) }
			alone := s.convBits(t, sub,
				convInput{d, cut(x.x, 1), cut(x.w, width), cut(x.before, 1), cut(x.dy, 1), cut(x.dw, width)})
			for i := range alone {
				if !bytes.Equal(alone[i], columns(all[i], g.C*size[i], lo*size[i], n*size[i])) {
					t.Errorf("width %d: %s of channels %v alone differs in bits from the run of %d channels", width,
						convResults[i], part, g.C)
				}
			}
		}
	}
}

// convDocuments runs packed documents, then each alone. Only the first document reads the tokens
// before it.
func (s *suite) convDocuments(t *testing.T, d tensor.DType) {
	g := &ref.Conv1d{C: 33, Width: 4, Cu: bounds(5, 1, 70, 2, 64)}
	x := newConvInput(d, g, true)
	packed := s.convBits(t, g, x)
	for i := range g.Cu[1:] {
		lo, hi := g.Cu[i]*g.C, g.Cu[i+1]*g.C
		y := convInput{d, x.x[lo:hi], x.w, nil, x.dy[lo:hi], x.dw}
		if i == 0 {
			y.before = x.before
		}
		alone := s.convBits(t, &ref.Conv1d{C: g.C, Width: g.Width, Cu: one(g.Cu[i+1] - g.Cu[i])}, y)
		for j, n := range []int64{d.Size(), d.Size()} {
			if !bytes.Equal(alone[j], packed[j][lo*n:hi*n]) {
				t.Errorf("%s of document %d alone differs in bits from the packed run", convResults[j], i)
			}
		}
	}
}
