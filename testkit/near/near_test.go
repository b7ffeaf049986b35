package near

import (
	"fmt"
	"math"
	"testing"
)

// recorder records the failures of the comparisons under test.
type recorder struct {
	testing.TB
	said []string
}

func (r *recorder) Helper()           {}
func (r *recorder) Error(args ...any) { r.said = append(r.said, fmt.Sprint(args...)) }
func (r *recorder) Errorf(format string, args ...any) {
	r.said = append(r.said, fmt.Sprintf(format, args...))
}

func TestNear(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	value := func(got, want, tolerance float64) func(testing.TB) bool {
		return func(t testing.TB) bool { return Value(t, "x", got, want, tolerance) }
	}
	slice := func(got []float32, want []float64, tolerance float64) func(testing.TB) bool {
		return func(t testing.TB) bool { return Slice(t, "x", got, want, tolerance) }
	}
	relative := func(got, want []float64, tolerance float64) func(testing.TB) bool {
		return func(t testing.TB) bool { return Relative(t, "x", got, want, tolerance) }
	}
	for i, x := range []struct {
		compare func(testing.TB) bool
		want    string
	}{
		{value(1, 1.25, 0.25), ""},
		{value(1, 1.25, 0.2), "x: 1, want 1.25: the difference is 0.25, at most 0.2 is allowed"},
		{value(nan, 1, inf), "x: NaN, want 1: the difference is +Inf, at most +Inf is allowed"},
		{value(nan, 1, 9), "x: NaN, want 1: the difference is +Inf, at most 9 is allowed"},
		{value(1, nan, 9), "x: 1, want NaN: the difference is +Inf, at most 9 is allowed"},
		{value(nan, nan, 9), "x: NaN, want NaN: the difference is +Inf, at most 9 is allowed"},
		{value(inf, inf, 9), "x: +Inf, want +Inf: the difference is +Inf, at most 9 is allowed"},
		{value(1, 1, nan), "x: 1, want 1: the difference is 0, at most NaN is allowed"},
		{slice([]float32{1, 2}, []float64{1, 2}, 0), ""},
		{slice(nil, nil, 0), ""},
		{slice([]float32{1, 2, 3}, []float64{1, 4, 3.5}, 1),
			"x[1]: 2, want 4: the difference is 2, at most 1 is allowed"},
		{slice([]float32{1, float32(nan), 3}, []float64{1, 4, 9}, 1),
			"x[1]: NaN, want 4: the difference is +Inf, at most 1 is allowed"},
		{slice([]float32{1}, nil, 1), "x: 1 values, want 0"},
		{relative([]float64{100, 1}, []float64{100, 2}, 0.01), ""},
		{relative([]float64{100, 1}, []float64{100, 3}, 0.01),
			"x[1]: 1, want 3: max|got-want| / max|want| is 0.02, at most 0.01 is allowed"},
		{relative([]float64{0, 1}, []float64{0, 0}, 9),
			"x[1]: 1, want 0: max|got-want| / max|want| is +Inf, at most 9 is allowed"},
		{relative([]float64{1, 1}, []float64{1, -inf}, 9),
			"x[1]: 1, want -Inf: max|got-want| / max|want| is +Inf, at most 9 is allowed"},
		{relative([]float64{0}, []float64{0}, 0), ""},
		{relative([]float64{0}, []float64{0, 1}, 0), "x: 1 values, want 2"},
	} {
		r := &recorder{}
		ok, said := x.compare(r), ""
		for _, s := range r.said {
			said += s
		}
		if said != x.want || ok != (x.want == "") {
			t.Errorf("case %d: %q (%v), want %q", i, said, ok, x.want)
		}
	}
}

func TestDifference(t *testing.T) {
	d := &Difference{}
	if d.Within("x", math.Inf(1)) == nil {
		t.Error("a comparison of no values passes")
	}
	d.Add(1, 1, 0, 0)
	d.Add(2, -8, 0, 1)
	d.Add(3, 4, 1, 0)
	if d.Max != 10 || d.Scale != 8 || d.Relative() != 1.25 || d.String() != "[0 1]: 2, want -8" {
		t.Errorf("%+v: %v", *d, d)
	}
	d.Add(math.NaN(), 1, 7, 7)
	if err := d.WithinRelative("y", 100); err == nil ||
		err.Error() != "y[7 7]: NaN, want 1: max|got-want| / max|want| is +Inf, at most 100 is allowed" {
		t.Error(err)
	}
}
