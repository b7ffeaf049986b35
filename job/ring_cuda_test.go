package job

import (
	"math"
	"path/filepath"
	"testing"

	"ulysses/testkit/cudatest"
)

// A ring on the plug-in has PyTorch's losses and weights, in F32: with packed documents, and with
// ulysses x ring.
func TestCUDARingGoldens(t *testing.T) {
	cudatest.Use(t)
	for dir, c := range namedGoldens(t, "qwen3-sgd-packed") {
		for _, m := range []struct {
			ranks int
			sets  []string
		}{
			{2, []string{"parallel.ulysses=1", "parallel.ring=2"}},
			{4, []string{"parallel.ulysses=2", "parallel.ring=2"}},
		} {
			out := t.TempDir()
			onCUDA(t, filepath.Join(dir, c.Job), m.ranks, append(m.sets, "output.dir="+out, "device.dtype=f32")...)
			for i, r := range readSteps(t, out, c.Steps) {
				if !(math.Abs(r.Loss-c.Losses[i]) <= 2e-4) {
					t.Errorf("%v: step %d: loss %.7f, PyTorch %.7f", m.sets, i+1, r.Loss, c.Losses[i])
				}
			}
			checkWeights(t, filepath.Join(out, "model", "model.safetensors"), filepath.Join(dir, c.Model), c)
		}
	}
}
