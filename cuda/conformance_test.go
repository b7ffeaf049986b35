package cuda

import (
	"os"
	"testing"

	"ulysses/device"
	"ulysses/testkit/conformance"
	"ulysses/testkit/cudatest"
)

// opener opens GPUs in the way of the options, again and again.
func opener(o Options) conformance.Opener {
	return func(t testing.TB, _ int) device.Device {
		d, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

// TestConformance holds the plug-in against the reference: on a GPU the one that is named, else the
// one built for the host. ULYSSES_KERNEL pins rows of kernels.
func TestConformance(t *testing.T) {
	cudatest.Use(t)
	// cuDNN or kernels of ours; below, ours alone are held to all laws
	run := conformance.RunChoosing
	if cudatest.Emulated() {
		run = conformance.Run
	}
	run(t, opener(Options{Deterministic: true, Kernels: os.Getenv("ULYSSES_KERNEL")}))
}

// TestConformanceOfRows pins the rows that the first choice passes over, and lets libraries choose
// what need not be repeatable.
func TestConformanceOfRows(t *testing.T) {
	cudatest.Use(t)
	d := opener(Options{})(t, 1).(*Device)
	emulated := d.Details().Emulated
	d.Close()
	t.Run("small", func(t *testing.T) { // attention for GPUs with less shared memory
		small := opener(Options{Deterministic: true, Kernels: "attention_forward=small,attention_backward=small"})
		if emulated {
			conformance.RunAttentionFew(t, small)
			return
		}
		conformance.RunSome(t, small, "Attention", "AttentionWide")
	})
	t.Run("own", func(t *testing.T) {
		own := opener(Options{Deterministic: true, Kernels: "gemm=naive,attention_forward=own,attention_backward=own"})
		if emulated { // what it serves in BF16 without a pin is not what tensor cores serve
			conformance.RunSome(t, own, "AttentionWide")
			return
		}
		conformance.Run(t, own)
	})
	if emulated { // it has no other rows
		return
	}
	t.Run("mma", func(t *testing.T) {
		conformance.RunAttentionTiled(t, opener(Options{Deterministic: true, Kernels: "attention_forward=mma,attention_backward=mma"}))
	})
	t.Run("any", func(t *testing.T) { conformance.RunUnrepeatable(t, opener(Options{})) })
}
