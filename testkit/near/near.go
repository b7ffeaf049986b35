// Package near compares results of tests with the values that they should be close to.
//
// Value compares two numbers and Slice two slices, both with a tolerance for the absolute
// difference. Relative compares two slices with a tolerance for max|got-want| / max|want|, the
// measure of the project's bounds on errors. A test whose values are in strided tensors adds them
// one at a time to a Difference and checks that.
//
// NaN and Inf always fail, on either side. Slices of different lengths fail. A comparison such as
// math.Abs(got-want) > tolerance accepts NaN; internal/arch refuses it in tests. A test in which an
// infinity is a right answer (the log-sum-exp of a query that sees no key) compares that element
// itself and leaves it out.
//
// A failure prints the name, the index of the largest difference and both values there.
package near

import (
	"fmt"
	"math"
	"testing"
)

// Float is the type of the compared values.
type Float interface{ ~float32 | ~float64 }

// Difference is the largest difference between pairs of values. The zero value has no pairs.
// It is not safe for concurrent use.
type Difference struct {
	// Max is the largest |got-want| so far, +Inf after a NaN or Inf.
	Max float64
	// Scale is the largest finite |want| so far.
	Scale float64
	// Index, Got and Want are of the pair with the largest difference.
	Index     []int64
	Got, Want float64
	pairs     int64
}

// Add adds the pair at an index, which has one number for a slice and one for each axis of a
// tensor.
func (d *Difference) Add(got, want float64, index ...int64) {
	delta := math.Abs(got - want)
	if !finite(got) || !finite(want) {
		delta = math.Inf(1)
	}
	if d.pairs == 0 || !(delta <= d.Max) {
		d.Max, d.Got, d.Want, d.Index = delta, got, want, append(d.Index[:0], index...)
	}
	if size := math.Abs(want); finite(size) {
		d.Scale = max(d.Scale, size)
	}
	d.pairs++
}

// Relative returns max|got-want| / max|want|: +Inf after a NaN or Inf, and where all want is zero
// and got is not.
func (d *Difference) Relative() float64 {
	if d.Max == 0 {
		return 0
	}
	return d.Max / d.Scale
}

// String returns the index of the largest difference and both values there.
func (d *Difference) String() string {
	switch {
	case d.pairs == 0:
		return "no values"
	case len(d.Index) == 0:
		return fmt.Sprintf("%.9g, want %.9g", d.Got, d.Want)
	}
	return fmt.Sprintf("%v: %.9g, want %.9g", d.Index, d.Got, d.Want)
}

// Within returns an error unless pairs were added and Max is at most tolerance.
func (d *Difference) Within(name string, tolerance float64) error {
	if d.pairs > 0 && finite(d.Max) && d.Max <= tolerance {
		return nil
	}
	return fmt.Errorf("%s%v: the difference is %.3g, at most %.3g is allowed", space(name, d), d, d.Max, tolerance)
}

// WithinRelative returns an error unless pairs were added and Relative is at most tolerance.
func (d *Difference) WithinRelative(name string, tolerance float64) error {
	if d.pairs > 0 && finite(d.Relative()) && d.Relative() <= tolerance {
		return nil
	}
	return fmt.Errorf("%s%v: max|got-want| / max|want| is %.3g, at most %.3g is allowed", space(name, d), d,
		d.Relative(), tolerance)
}

// space puts a colon between a name and what follows, unless an index does.
func space(name string, d *Difference) string {
	if len(d.Index) > 0 {
		return name
	}
	return name + ": "
}

// Of returns the difference between two slices of the same length. It panics if the lengths differ.
func Of[G, W Float](got []G, want []W) *Difference {
	if len(got) != len(want) {
		panic(fmt.Sprintf("near.Of: %d values, want %d", len(got), len(want)))
	}
	d := &Difference{}
	for i, w := range want {
		d.Add(float64(got[i]), float64(w), int64(i))
	}
	return d
}

// Value fails the test unless |got-want| is at most tolerance.
func Value[G, W Float](t testing.TB, name string, got G, want W, tolerance float64) bool {
	t.Helper()
	d := &Difference{}
	d.Add(float64(got), float64(want))
	return report(t, d.Within(name, tolerance))
}

// Slice fails the test unless every |got[i]-want[i]| is at most tolerance. Empty slices are equal.
func Slice[G, W Float](t testing.TB, name string, got []G, want []W, tolerance float64) bool {
	t.Helper()
	if len(got) != len(want) || len(want) == 0 {
		return sameLength(t, name, len(got), len(want))
	}
	return report(t, Of(got, want).Within(name, tolerance))
}

// Relative fails the test unless max|got-want| / max|want| is at most tolerance. Empty slices are
// equal.
func Relative[G, W Float](t testing.TB, name string, got []G, want []W, tolerance float64) bool {
	t.Helper()
	if len(got) != len(want) || len(want) == 0 {
		return sameLength(t, name, len(got), len(want))
	}
	return report(t, Of(got, want).WithinRelative(name, tolerance))
}

func sameLength(t testing.TB, name string, got, want int) bool {
	t.Helper()
	if got != want {
		t.Errorf("%s: %d values, want %d", name, got, want)
	}
	return got == want
}

func report(t testing.TB, err error) bool {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
	return err == nil
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
