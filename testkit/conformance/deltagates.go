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

// gatesInput has the values of a case: a, b, dg and dbeta [tokens, heads], the parameters and their
// gradients [heads].
type gatesInput struct {
	rows, heads              int64
	a, b, dg, dbeta          []float64
	alog, bias, dalog, dbias []float64
}

// newGatesInput returns random values: a and b of type d, parameters of type p.
func newGatesInput(d, p tensor.DType, rows, heads int64) gatesInput {
	r := seeded(42, rows, heads)
	n := rows * heads
	x := gatesInput{rows, heads, gates(d, normal(r, n)), gates(d, normal(r, n)), normal(r, n), normal(r, n),
		normal(r, heads), normalAs(p, r, heads), normal(r, heads), normal(r, heads)}
	for h := range x.alog { // of rates in [0, 16), as layers have them when they are new
		x.alog[h] = math.Log(16 * r.Float64())
	}
	x.alog = rounded(p, ref.Convert[float64](ref.Convert[float32](x.alog)))
	return x
}

func (b *bench) gates(d, p tensor.DType, l layout, x gatesInput) ([]*array, error) {
	rows, heads := x.rows, x.heads
	g, beta := b.out("g", tensor.F32, l, rows, heads), b.out("beta", tensor.F32, padded, rows, heads)
	return []*array{g, beta}, b.dev.DeltaGatesForward(b.stream, &device.DeltaGates{
		A: b.in("a", d, l, x.a, rows, heads).Tensor, B: b.in("b", d, padded, x.b, rows, heads).Tensor,
		ALog: b.in("alog", p, shifted, x.alog, heads).Tensor, DtBias: b.in("dtbias", p, dense, x.bias, heads).Tensor,
		G: g.Tensor, Beta: beta.Tensor})
}

// gatesGrad runs backward. In place, da and db overwrite a and b.
func (b *bench) gatesGrad(d, p tensor.DType, l layout, x gatesInput, inPlace bool) ([]*array, error) {
	rows, heads := x.rows, x.heads
	y := &device.DeltaGatesGrad{ALog: b.in("alog", p, shifted, x.alog, heads).Tensor,
		DtBias: b.in("dtbias", p, dense, x.bias, heads).Tensor,
		DG:     b.in("dg", tensor.F32, padded, x.dg, rows, heads).Tensor,
		DBeta:  b.in("dbeta", tensor.F32, l, x.dbeta, rows, heads).Tensor}
	dalog, dbias := b.inout("dalog", tensor.F32, shifted, x.dalog, heads),
		b.inout("ddtbias", tensor.F32, dense, x.dbias, heads)
	var da, db *array
	if inPlace {
		da, db = b.inout("a", d, l, x.a, rows, heads), b.inout("b", d, padded, x.b, rows, heads)
		y.A, y.B = da.Tensor, db.Tensor
	} else {
		da, db = b.out("da", d, padded, rows, heads), b.out("db", d, l, rows, heads)
		y.A, y.B = b.in("a", d, l, x.a, rows, heads).Tensor, b.in("b", d, padded, x.b, rows, heads).Tensor
	}
	y.DA, y.DB, y.DALog, y.DDtBias = da.Tensor, db.Tensor, dalog.Tensor, dbias.Tensor
	return []*array{da, db, dalog, dbias}, b.dev.DeltaGatesBackward(b.stream, y)
}

func testDeltaGates(s *suite) {
	for i, shape := range [][2]int64{{2, 1}, {3, 2}, {65, 33}, {7, 17}, {100, 8}, {1, 300}, {0, 4}, {5, 0}, {2500, 3},
		{70, 1100}} {
		s.typed(func(d tensor.DType, suffix string) {
			s.gatesCase(d, d, suffix, shape[0], shape[1], []layout{dense, padded}[i%2], i == 3)
			if d != tensor.F32 && i < 5 {
				s.gatesCase(d, tensor.F32, suffix+", parameters in F32", shape[0], shape[1], padded, i == 3)
			}
		})
	}
}

func (s *suite) gatesCase(d, p tensor.DType, suffix string, rows, heads int64, l layout, nan bool) {
	x := newGatesInput(d, p, rows, heads)
	if nan { // in two heads of many
		x.a[1], x.dbeta[heads+2] = math.NaN(), math.NaN()
	}
	f := ref.Convert[float32, float64]
	clone := func(x []float64) []float64 { return append([]float64{}, x...) }
	g, beta := ref.DeltaGates(x.a, x.b, x.alog, x.bias)
	g32, beta32 := ref.DeltaGates(f(x.a), f(x.b), f(x.alog), f(x.bias))
	dalog, dbias, dalog32, dbias32 := clone(x.dalog), clone(x.dbias), f(x.dalog), f(x.dbias)
	da, db := ref.DeltaGatesGrad(x.a, x.b, x.alog, x.bias, x.dg, x.dbeta, dalog, dbias)
	da32, db32 := ref.DeltaGatesGrad(f(x.a), f(x.b), f(x.alog), f(x.bias), f(x.dg), f(x.dbeta), dalog32, dbias32)
	wants := []want{both("g", g, g32), both("beta", beta, beta32),
		both("da", da, da32).as(d), both("db", db, db32).as(d), both("dalog", dalog, dalog32),
		both("ddtbias", dbias, dbias32)}
	for i := range wants { // sum, two exponentials, quotient, logarithm, product
		wants[i].chain = 6 * ulp
	}
	magnitudes := func(x []float64) []float64 {
		y := clone(x)
		for i := range y {
			y[i] = math.Abs(y[i])
		}
		return y
	}
	// The terms of a head have one sign: dg = |dg|, so each has the sign of -A. The initial value
	// has the same sign.
	sizeA, sizeBias := make([]float64, heads), make([]float64, heads)
	ref.DeltaGatesGrad(x.a, x.b, x.alog, x.bias, magnitudes(x.dg), x.dbeta, sizeA, sizeBias)
	for h := range heads {
		sizeA[h], sizeBias[h] = math.Abs(sizeA[h])+math.Abs(x.dalog[h]), math.Abs(sizeBias[h])+math.Abs(x.dbias[h])
	}
	wants[4].sizes, wants[5].sizes = sizeA, sizeBias
	name := fmt.Sprintf("%dx%d %v%s", rows, heads, l, suffix)
	s.check(name, wants[:2], func(b *bench) ([]*array, error) { return b.gates(d, p, l, x) })
	for _, inPlace := range []bool{false, true} {
		s.check(fmt.Sprint(name, " backward, in place ", inPlace), wants[2:], func(b *bench) ([]*array, error) {
			return b.gatesGrad(d, p, l, x, inPlace)
		})
	}
}

// gatesAlone runs all heads, then ranges of them, as on a rank that has some of the heads. The bits
// are equal.
func (s *suite) gatesAlone(t *testing.T, d tensor.DType) {
	const rows, heads = 1100, 7
	x := newGatesInput(d, d, rows, heads)
	run := func(x gatesInput) [][]byte {
		return s.bits(t, func(b *bench) ([]*array, error) {
			forward, err := b.gates(d, d, padded, x)
			if err != nil {
				return nil, err
			}
			backward, err := b.gatesGrad(d, d, padded, x, false)
			return append(forward, backward...), err
		})
	}
	all := run(x)
	names, size := []string{"g", "beta", "da", "db", "dalog", "ddtbias"}, []int64{4, 4, d.Size(), d.Size(), 4, 4}
	for _, part := range [][2]int64{{0, 1}, {1, 3}, {3, 7}} {
		lo, n := part[0], part[1]-part[0]
		cut := func(x []float64) []float64 { return columns(x, heads, lo, n) }
		alone := run(gatesInput{rows, n, cut(x.a), cut(x.b), cut(x.dg), cut(x.dbeta), cut(x.alog), cut(x.bias),
			cut(x.dalog), cut(x.dbias)})
		for i := range alone {
			if !bytes.Equal(alone[i], columns(all[i], heads*size[i], lo*size[i], n*size[i])) {
				t.Errorf("%s of heads %v alone differs in bits from the run of %d heads", names[i], part, heads)
			}
		}
	}
}
