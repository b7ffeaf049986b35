package cpu

import (
	"testing"

	"ulysses/device"
	"ulysses/internal/conformance"
)

// TestConformance holds every instruction set that this CPU runs against the reference.
func TestConformance(t *testing.T) {
	for _, isa := range ISAs() {
		t.Run(isa, func(t *testing.T) {
			conformance.Run(t, func(t testing.TB, workers int) device.Device {
				d, err := New(Options{Workers: workers, ISA: isa})
				if err != nil {
					t.Fatal(err)
				}
				return d
			})
		})
	}
}
