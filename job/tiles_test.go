package job

import (
	"bytes"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tiledRun runs a golden's job with tiles, with its sequences sharded over all ranks.
func tiledRun(t *testing.T, path string, ranks int, mlp, loss string) (losses []float64, weights map[string][]float32) {
	t.Helper()
	out := t.TempDir()
	var stdout, stderr bytes.Buffer
	err := Run(Options{Path: path,
		Sets: []string{"output.dir=" + out, "parallel.ulysses=0", "train.steps=1", "optimizer.schedule=constant",
			"optimizer.warmup=0",
			"tile.mlp=" + mlp, "tile.loss=" + loss},
		Ranks: ranks, Verbose: true, Stdout: &stdout, Stderr: &stderr})
	if err != nil {
		t.Fatal(err, stderr.String())
	}
	if tiled := mlp != "off"; strings.Contains(stdout.String(), "MLP in tiles of") != tiled || tiled &&
		!strings.Contains(stdout.String(), mlp+" tokens") {
		t.Errorf("tile.mlp = %s: the table of memory says otherwise:\n%s", mlp, stdout.String())
	}
	for _, r := range readSteps(t, out, 1) {
		if losses = append(losses, r.Loss); r.LR*r.GradNorm == 0 {
			t.Error("nothing was stepped")
		}
	}
	weights, _ = readWeights(t, filepath.Join(out, "model", "model.safetensors"))
	return losses, weights
}

// Jobs with tiles, from one token to more tokens than there are, have the results of jobs without:
// SGD's weights are equal within 1e-7, or one unit in the last place for weights near 1. The first
// loss is bitwise equal.
func TestTiledJobs(t *testing.T) {
	for _, name := range []string{"llama-sgd-packed", "qwen3-sgd-ignored"} {
		path := filepath.Join(goldens, name, "job.toml")
		for _, ranks := range []int{1, 2, 4} {
			losses, weights := tiledRun(t, path, ranks, "off", "off")
			for _, rows := range []string{"1", "7", "64", "100000"} {
				gotLosses, got := tiledRun(t, path, ranks, rows, rows)
				if !slices.Equal(gotLosses, losses) {
					t.Errorf("%s, %d ranks, tiles of %s: losses %v, untiled %v", name, ranks, rows, gotLosses, losses)
				}
				for tensor, want := range weights {
					for i := range want {
						if d := math.Abs(float64(got[tensor][i] - want[i])); !(d <= max(1e-7, ulp(want[i]))) {
							t.Fatalf("%s, %d ranks, tiles of %s: weight %d of %s is off by %.2g", name, ranks, rows, i,
								tensor, d)
						}
					}
				}
			}
		}
	}
}

// ulp returns the distance to the next F32 number.
func ulp(x float32) float64 {
	x = float32(math.Abs(float64(x)))
	return float64(math.Nextafter32(x, math.MaxFloat32) - x)
}
