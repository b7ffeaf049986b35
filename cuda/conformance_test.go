package cuda

import (
	"os"
	"testing"

	"ulysses/device"
	"ulysses/testkit/conformance"
	"ulysses/testkit/cudatest"
)

// opener returns a function that opens GPUs with the options.
func opener(o Options) conformance.Opener {
	return func(t testing.TB, _ int) device.Device {
		d, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

// TestConformance compares the plug-in with the reference: on a GPU the plug-in that
// ULYSSES_CUDA_PLUGIN names, otherwise the emulated plug-in. ULYSSES_KERNEL selects kernels.
func TestConformance(t *testing.T) {
	logLaunches(t)
	// cuDNN or the plug-in's own kernels; the subtests below test the own kernels only
	run := conformance.RunChoosing
	if cudatest.Emulated() {
		run = conformance.Run
	}
	run(t, opener(Options{Deterministic: true, Kernels: os.Getenv("ULYSSES_KERNEL")}))
}

// TestConformanceOfKernels selects the kernels that are not the first choice, and lets libraries
// run calls that need not be reproducible.
func TestConformanceOfKernels(t *testing.T) {
	logLaunches(t)
	d := opener(Options{})(t, 1).(*Device)
	emulated := d.Details().Emulated
	d.Close()
	t.Run("small", func(t *testing.T) { // attention for GPUs with less shared memory
		small := opener(Options{Deterministic: true, Kernels: "attention_forward=small,attention_backward=small"})
		if emulated {
			conformance.RunAttentionFew(t, small)
			return
		}
		conformance.RunSome(t, small, "Attention", "AttentionWide", "AttentionOptions")
	})
	t.Run("own", func(t *testing.T) {
		own := opener(Options{Deterministic: true, Kernels: "gemm=naive,attention_forward=own,attention_backward=own"})
		if emulated { // it runs mma in BF16 only if ULYSSES_KERNEL selects it
			conformance.RunSome(t, own, "AttentionWide")
			return
		}
		conformance.Run(t, own)
	})
	// the backward pass whose blocks add to dq in any order
	t.Run("adding", func(t *testing.T) {
		conformance.RunAttentionUnrepeatable(t,
			opener(Options{Kernels: "attention_forward=mma,attention_backward=mma"}))
	})
	// heads and documents may be divided by the shape of the call
	t.Run("delta", func(t *testing.T) { conformance.RunSome(t, opener(Options{}), "GatedDelta", "DeltaLaws") })
	if emulated { // it has no other kernels
		t.Run("99 KiB", func(t *testing.T) { // of shared memory for a block, as on sm_86, sm_89 and sm_120
			t.Setenv("ULYSSES_EMULATED_SHARED", "101376")
			conformance.RunDeltaLarge(t, opener(Options{Deterministic: true}))
		})
		return
	}
	t.Run("mma", func(t *testing.T) {
		conformance.RunAttentionTiled(t,
			opener(Options{Deterministic: true, Kernels: "attention_forward=mma,attention_backward=mma"}))
	})
	t.Run("any", func(t *testing.T) { conformance.RunUnrepeatable(t, opener(Options{})) })
}

// TestConformanceOfWarpgroups selects the kernels of attention with Hopper's products of
// warpgroups. It is a test of its own because kernels that wait for each other can hang.
func TestConformanceOfWarpgroups(t *testing.T) {
	logLaunches(t)
	d := opener(Options{})(t, 1).(*Device)
	sm := d.Details().SM
	d.Close()
	if sm != 90 {
		t.Skip("SKIPPED: products of warpgroups need a GPU of compute capability 9.0")
	}
	conformance.RunAttentionPlain(t,
		opener(Options{Deterministic: true, Kernels: "attention_forward=wgmma,attention_backward=wgmma"}), 1, 128)
	// heads of 256 have a forward pass only
	t.Run("forward", func(t *testing.T) {
		conformance.RunAttentionPlain(t,
			opener(Options{Deterministic: true, Kernels: "attention_forward=wgmma,attention_backward=mma"}), 129, 256)
	})
}
