package conformance

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"ulysses/tensor"
	"ulysses/testkit/near"
	"ulysses/testkit/ref"
)

const (
	largest = 2e-5 // largest max|Δ|/max|ref| of any result in f32
	ulp     = 1.0 / (1 << 23)
	// always allowed: the roundings of the longest chain of operations, as a plain implementation
	// of a few elements may be exact by chance
	resolution = 4 * ulp

	// The same for results in BF16. Only the last rounding is to BF16: inputs are exact, sums are
	// in f32.
	largestBF16    = 1.0 / (1 << 7)
	resolutionBF16 = 1.0 / (1 << 9)
)

// want is an expected result and its tolerance.
type want struct {
	name string
	ref  []float64 // the reference
	// result of a plain f32 implementation: twice its error is allowed; nil = only the absolute
	// bound applies
	plain []float64
	bf16  bool // the result is in BF16
	// the result is in F32, but the plain implementation rounds factors of it to BF16: the bounds
	// of BF16 apply
	rounds bool
	exact  bool    // the result must be equal: copies and casts
	bound  float64 // largest error, for results more exact than f32; 0 = largest or largestBF16
	gate   float64 // largest error in BF16 of results with rounded factors; 0 = largestBF16
	chain  float64 // error that is always allowed, by a chain of roundings; 0 = resolution
	// the result is [tokens, heads], and each head is also compared relative to its own largest
	// value; 0 = only the whole result is compared
	heads int64
	// the result is [heads], and each head is also compared relative to this size, the sum of the
	// magnitudes of its terms
	sizes []float64
	// typical size of the terms of a result that is zero because they cancel. A library may sum
	// them in different orders, and then leaves a remainder in F32; 0 = the result must be zero
	terms float64
	// number, from 1, of the result of which this one must be the rounding to BF16; 0 = none
	low int
}

// both returns a want from the reference in two precisions.
func both(name string, ref64 []float64, ref32 []float32) want {
	return want{name: name, ref: ref64, plain: ref.Convert[float64](ref32)}
}

// as returns the want for a result of type d. The plain implementation rounds once, at the end.
func (w want) as(d tensor.DType) want {
	if d != tensor.BF16 {
		return w
	}
	w.bf16, w.plain = true, rounded(d, w.plain)
	if w.exact {
		w.ref = rounded(d, w.ref)
	}
	return w
}

// rounded returns x rounded to a type.
func rounded(d tensor.DType, x []float64) []float64 {
	if d != tensor.BF16 || x == nil {
		return x
	}
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(tensor.BF16ToF32(tensor.F32ToBF16(float32(v))))
	}
	return y
}

// compare fails the test unless got is within the tolerance.
func (w want) compare(t testing.TB, got []float64) {
	t.Helper()
	if len(got) != len(w.ref) {
		t.Errorf("%s: %d values, want %d", w.name, len(got), len(w.ref))
		return
	}
	e, fault := deviation(got, w.ref)
	bound, least := largest, resolution
	if math.IsInf(e, 1) && w.terms > 0 { // the reference is zero
		if e = max(slices.Max(got), -slices.Min(got)) / w.terms; !(e <= largest) {
			t.Errorf("%s: %.3g of its terms, at most %.3g, want 0", w.name, e, largest)
		}
		return
	}
	if w.bf16 || w.rounds {
		bound, least = max(w.gate, largestBF16), resolutionBF16
	}
	if w.bound > 0 {
		bound = w.bound
	} else if w.exact {
		bound = 0
	} else if w.plain != nil {
		p, f := deviation(w.plain, w.ref)
		if f != "" {
			t.Errorf("%s: the plain implementation fails: %s", w.name, f)
		}
		bound = min(bound, max(2*p, least, w.chain))
	}
	if fault != "" {
		t.Errorf("%s: %s", w.name, fault)
	} else if !(e <= bound) {
		t.Errorf("%s: error %.3g, at most %.3g: %s", w.name, e, bound, worst(got, w.ref))
	}
	w.compareHeads(t, got)
}

// compareHeads compares each head separately. If the decays of heads differ by orders of magnitude,
// the gradients of gates do as well. Then an error as large as one head's gradient may be only 1e-7
// of the tensor's largest value.
func (w want) compareHeads(t testing.TB, got []float64) {
	t.Helper()
	for h := range w.heads {
		one := want{name: fmt.Sprintf("%s of head %d", w.name, h), ref: columns(w.ref, w.heads, h, 1), bf16: w.bf16,
			rounds: w.rounds, bound: w.bound, gate: w.gate,
			// the roundings are relative to the tensor's largest value, which may be larger than
			// the head's
			chain: 2 * w.chain}
		if w.plain != nil {
			one.plain = columns(w.plain, w.heads, h, 1)
		}
		one.compare(t, columns(got, w.heads, h, 1))
	}
	for h, size := range w.sizes {
		if r := w.ref[h]; size == 0 || math.IsNaN(r) || math.IsInf(r, 0) {
			continue
		}
		e, bound := math.Abs(got[h]-w.ref[h])/size, min(largest, max(2*math.Abs(w.plain[h]-w.ref[h])/size, w.chain))
		if !(e <= bound) {
			t.Errorf("%s of head %d: error %.3g, at most %.3g: %.9g, want %.9g", w.name, h, e, bound, got[h], w.ref[h])
		}
	}
}

// deviation returns max|got-ref|/max|ref| over the finite elements of ref, and a fault if an
// element that is NaN or Inf in one slice is not the same in the other.
func deviation(got, ref []float64) (e float64, fault string) {
	var delta, size float64
	for i, r := range ref {
		g := got[i]
		switch {
		case math.IsNaN(r) || math.IsInf(r, 0):
			if g != r && !(g != g && r != r) {
				return 0, fmt.Sprintf("element %d is %v, want %v", i, g, r)
			}
		case math.IsNaN(g) || math.IsInf(g, 0):
			return 0, fmt.Sprintf("element %d is %v, want %v", i, g, r)
		default:
			delta, size = max(delta, math.Abs(g-r)), max(size, math.Abs(r))
		}
	}
	if delta == 0 {
		return 0, ""
	}
	return delta / size, ""
}

// largestOf returns the largest magnitude of the finite elements.
func largestOf(x []float64) float64 {
	size := 0.0
	for _, v := range x {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			size = max(size, math.Abs(v))
		}
	}
	return size
}

// rms returns the root of the mean square.
func rms(x []float64) float64 {
	sum := 0.0
	for _, v := range x {
		sum += v * v
	}
	return math.Sqrt(sum / float64(max(1, len(x))))
}

// worst returns the index of the finite element with the largest error, and both values.
func worst(got, ref []float64) string {
	d := &near.Difference{}
	for i, r := range ref {
		if !math.IsInf(r, 0) && !math.IsNaN(r) {
			d.Add(got[i], r, int64(i))
		}
	}
	return d.String()
}
