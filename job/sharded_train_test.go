package job

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"
	"testing"
)

// Sharded weights, gradients and optimizer states have PyTorch's losses and write the same model
// folder. Verify finds the gradients and weights of one rank.
func TestShardedGoldens(t *testing.T) {
	for dir, c := range namedGoldens(t, "qwen3-adamw-packed", "gemma3-adamw-packed", "llama-sgd-dp2") {
		for zero := 1; zero <= 3; zero++ {
			t.Run(fmt.Sprintf("%s, stage %d", c.Name, zero), func(t *testing.T) {
				out := t.TempDir()
				var stdout, stderr bytes.Buffer
				o := Options{Path: filepath.Join(dir, c.Job),
					Sets: []string{"output.dir=" + out, fmt.Sprintf("parallel.zero=%d", zero)}, Ranks: c.Ranks,
					Verbose: true, Stdout: &stdout, Stderr: &stderr}
				if err := Run(o); err != nil {
					t.Fatal(err, stderr.String())
				}
				for i, r := range readSteps(t, out, c.Steps) {
					if d := math.Abs(r.Loss - c.Losses[i]); !(d <= 2e-4) {
						t.Errorf("step %d: loss %.7f, PyTorch %.7f: off by %.1e", i+1, r.Loss, c.Losses[i], d)
					}
				}
				checkWeights(t, filepath.Join(out, "model", "model.safetensors"), filepath.Join(dir, c.Model), c)
				// which has no state
				if !strings.Contains(stdout.String(), "shard") && !(zero == 1 && strings.Contains(c.Name, "sgd")) {
					t.Errorf("the memory table has no shards:\n%s", stdout.String())
				}
				o.Stdout = io.Discard
				if err := Verify(o); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
