package cpu

import "testing"

func TestPeak(t *testing.T) {
	for _, isa := range ISAs() {
		for name, peak := range map[string]func(int, string) (float64, error){"FMA": PeakFMA, "dot": PeakDot} {
			for _, w := range []int{1, 2} {
				p, err := peak(w, isa)
				if err != nil || p < 1 {
					t.Fatalf("%s, %s, %d workers: %g GFLOP/s, %v", isa, name, w, p, err)
				}
				t.Logf("%s, %s, %d workers: %.0f GFLOP/s", isa, name, w, p)
			}
		}
	}
}
