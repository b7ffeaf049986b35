package job

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// trained runs a golden's job and returns its losses and the bytes of its weights.
func trained(t *testing.T, path string, ranks int, sets ...string) (losses []float64, weights []byte) {
	t.Helper()
	losses, weights, _ = trainedOn(t, opener{}, path, ranks, sets...)
	return losses, weights
}

// trainedOn is trained with an opener, and also returns what the run has printed.
func trainedOn(t *testing.T, open opener, path string, ranks int, sets ...string) (losses []float64, weights []byte,
	printed string) {
	t.Helper()
	out := t.TempDir()
	var stdout, stderr bytes.Buffer
	err := Run(Options{Path: path, Sets: append([]string{"output.dir=" + out}, sets...), Ranks: ranks, Verbose: true,
		Stdout: &stdout, Stderr: &stderr, open: open})
	if err != nil {
		t.Fatalf("%v: %v\n%s", sets, err, stderr.String())
	}
	for _, r := range readMetrics(t, filepath.Join(out, "metrics.jsonl")) {
		losses = append(losses, r.Loss)
	}
	weights, err = os.ReadFile(filepath.Join(out, "model", "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	return losses, weights, stdout.String() + stderr.String()
}

// Overlapping projections with all-to-alls changes no bit of losses and weights: with norms of q
// and k, biases, key heads on several ranks, output gates, ZeRO and recomputation.
func TestOverlapChangesNothing(t *testing.T) {
	for _, name := range []string{"llama-sgd-packed", "qwen2-sgd-plain", "qwen3-sgd-packed", "gemma2-sgd-plain",
		"gemma3-sgd-packed", "qwen3_5-sgd-packed"} {
		for _, sets := range [][]string{{}, {"parallel.zero=3"}, {"memory.qkv=recompute"},
			{"memory.attention=recompute", "memory.block_input=keep"}} {
			for _, ranks := range []int{2, 3, 4} {
				t.Run(fmt.Sprintf("%s/%v/%d", name, sets, ranks), func(t *testing.T) {
					path := filepath.Join(goldens, name, "job.toml")
					sets := append([]string{"parallel.ulysses=0"}, sets...)
					losses, weights := trained(t, path, ranks, append(sets, "parallel.overlap=off")...)
					got, same := trained(t, path, ranks, append(sets, "parallel.overlap=on")...)
					if !slices.Equal(got, losses) || !bytes.Equal(same, weights) {
						t.Errorf("losses %v, without overlap %v; weights are equal: %v", got, losses,
							bytes.Equal(same, weights))
					}
				})
			}
		}
	}
}
