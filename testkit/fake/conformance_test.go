package fake

import (
	"testing"

	"ulysses/device"
	"ulysses/testkit/conformance"
)

// The test device runs the CPU's operations. This checks what it adds: types, lists and order.
func TestConformance(t *testing.T) {
	conformance.RunSome(t, func(t testing.TB, workers int) device.Device {
		d, err := Open(Options{Seed: uint64(workers)})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}, "AttentionOptions", "GatedRMSNorm", "SigmoidGate", "Conv1d", "DeltaGates", "DeltaStates", "DeltaLaws")
}
