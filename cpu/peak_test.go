package cpu

import (
	"testing"

	"github.com/klauspost/cpuid/v2"
)

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

// Products of BF16 pairs are preferred on CPUs on which they are faster.
func TestTablesFor(t *testing.T) {
	for vendor, want := range map[cpuid.Vendor]string{cpuid.AMD: "avx512bf16", cpuid.Intel: "avx512",
		cpuid.VendorUnknown: "avx512bf16"} {
		sets := tablesFor(vendor)
		if got := sets[0].name; got != want || len(sets) != 5 || sets[4].name != "portable" {
			t.Errorf("%v: %s first of %d, want %s", vendor, got, len(sets), want)
		}
	}
}
