package cpu

import (
	"flag"
	"testing"

	"ulysses/device"
	"ulysses/testkit/conformance"
)

func init() {
	flag.IntVar(&conformance.Every, "every", 1, "run each n-th case of a conformance test")
}

// TestConformance compares all instruction sets of this CPU with the reference. A set that adds
// products of pairs to another set is tested in these operations only.
func TestConformance(t *testing.T) {
	for _, isa := range ISAs() {
		t.Run(isa, func(t *testing.T) {
			open := opener(isa)
			if row, err := choose(isa); err == nil && row.rest != nil {
				conformance.RunSome(t, open, "Gemm", "Attention", "AttentionLaws", "AttentionOptions", "Aligned", "Far")
				return
			}
			conformance.Run(t, open)
		})
	}
}

// opener opens devices with an instruction set.
func opener(isa string) conformance.Opener {
	return func(t testing.TB, workers int) device.Device {
		d, err := New(Options{Workers: workers, ISA: isa})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}
