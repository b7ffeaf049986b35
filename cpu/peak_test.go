package cpu

import "testing"

func TestPeakFMA(t *testing.T) {
	for _, isa := range ISAs() {
		for _, w := range []int{1, 2} {
			p, err := PeakFMA(w, isa)
			if err != nil || p < 1 {
				t.Fatalf("%s, %d workers: %g GFLOP/s, %v", isa, w, p, err)
			}
			t.Logf("%s, %d workers: %.0f GFLOP/s", isa, w, p)
		}
	}
}
