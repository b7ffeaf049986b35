package cuda

import (
	"os"
	"testing"

	"ulysses/testkit/conformance"
	"ulysses/testkit/cudatest"
)

// TestGuards stops kernels that read or write outside of their arrays, of a stream's scratch or of
// dynamic shared memory: all of these end, or begin, at a page without access. An end that is
// aligned to 16 bytes allows the widest accesses; with an end that is not aligned, every byte
// outside is detected. Workspaces and saved memory, which are divided, are guarded as a whole.
// ULYSSES_TEST_GUARDS=1 runs all operations (make cuda-guards).
func TestGuards(t *testing.T) {
	cudatest.Use(t)
	if !cudatest.Emulated() {
		t.Skip("SKIPPED: on a GPU, compute-sanitizer checks this")
	}
	names := []string{"ColumnSum", "Sum", "SwiGLU", "Embedding", "CrossEntropy", "DeltaGates"}
	all := os.Getenv("ULYSSES_TEST_GUARDS") != ""
	if all {
		names = append(names, "Copy", "Cast", "Fill", "Add", "Scale", "Gemm", "RMSNorm", "AddRMSNorm", "Rope", "AdamW",
			"SGD", "Attention", "AttentionWide", "GatedRMSNorm", "SigmoidGate",
			"Conv1d", "GatedDelta", "DeltaStates", "Dropout", "Experts", "Aligned")
	}
	for _, guard := range []string{"1", "16", "-1"} {
		t.Run(guard, func(t *testing.T) {
			t.Setenv("ULYSSES_EMULATED_GUARD", guard)
			conformance.RunBare(t, opener(Options{Deterministic: true}), names...)
			if all {
				t.Run("small", func(t *testing.T) {
					conformance.RunBare(t,
						opener(Options{Deterministic: true,
							Kernels: "attention_forward=small,attention_backward=small"}), "Attention")
				})
				t.Run("wgmma", func(t *testing.T) {
					conformance.RunAttentionPlainBare(t,
						opener(Options{Deterministic: true,
							Kernels: "attention_forward=wgmma,attention_backward=wgmma"}), 1, 128)
				})
			}
		})
	}
}
