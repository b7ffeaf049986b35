package cuda

import "testing"

// TestDeltaIndex holds chunks, seams and workspaces of the gated delta rule against their
// definitions.
func TestDeltaIndex(t *testing.T) { hostProgram(t, "kernels/delta_index_test.cpp") }

// TestFragments holds what communication streams give to tensor cores, which the emulated plug-in
// does without, against NVIDIA's documentation.
func TestFragments(t *testing.T) { hostProgram(t, "kernels/mma_test.cpp") }
