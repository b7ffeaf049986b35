package cuda

import (
	flags "flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"ulysses/testkit/conformance"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/need"
)

func init() {
	flags.IntVar(&conformance.Every, "every", 1, "run each n-th case of a conformance test")
}

// TestInstructions runs each fifth case of the conformance suite, without the laws, on the PTX
// instructions of the GPU build, which the emulated plug-in interprets and in which it looks for
// races. It needs make cuda. make cuda-instructions runs the whole suite, in ten minutes.
func TestInstructions(t *testing.T) {
	plugin := cudatest.Use(t)
	if !cudatest.Emulated() {
		t.Skip("SKIPPED: a GPU runs the instructions itself")
	}
	folder, err := filepath.Abs(need.File(t, "../build/cuda/ptx/kernels", "run make cuda"))
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(os.Args[0], "-test.run", "^TestConformance", "-test.skip", "/Laws$|//Laws$", "-every", "5")
	c.Env = append(os.Environ(), "ULYSSES_EMULATED_PTX="+folder, "ULYSSES_EMULATED_RACES=1",
		"ULYSSES_CUDA_PLUGIN="+plugin)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out[max(0, len(out)-1<<14):])
	}
}
