package conformance

import "testing"

// fails counts the failures of a comparison.
type fails struct {
	testing.TB
	n int
}

func (f *fails) Helper()               {}
func (f *fails) Errorf(string, ...any) { f.n++ }

// An error of 1e-7 of a tensor that is as large as one head's gradient fails only if heads are
// compared separately.
func TestAHeadOfItsOwnSize(t *testing.T) {
	ref := []float64{1, 1e-7, -2, 2e-7} // [tokens, heads]
	plain := append([]float64{}, ref...)
	got := []float64{1, 2e-7, -2, 1e-7}
	for heads, faults := range map[int64]int{0: 0, 2: 1} {
		f := &fails{}
		want{name: "dg", ref: ref, plain: plain, heads: heads}.compare(f, got)
		if f.n != faults {
			t.Errorf("measured by %d heads: %d faults, want %d", heads, f.n, faults)
		}
	}
	f := &fails{}
	want{name: "dalog", ref: []float64{3, 1e-7}, plain: []float64{3, 1e-7}, sizes: []float64{4, 2e-7}}.compare(f,
		[]float64{3, 2e-7})
	if f.n != 1 {
		t.Errorf("measured by sizes: %d faults, want 1", f.n)
	}
}
