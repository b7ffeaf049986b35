package job

import (
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"

	"ulysses/testkit/cudatest"
)

// hybridFromScratch is a job that trains a hybrid with weights as small as a new model's. With the
// goldens' weights, PyTorch's own losses in BF16 have an error of 0.03.
func hybridFromScratch(t *testing.T) string {
	t.Helper()
	tokens, err := filepath.Abs(filepath.Join(goldens, "data", "packed64.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "job.toml")
	text := fmt.Sprintf(`
[model.new]
model_type = "qwen3_5_text"
vocab_size = 256
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
full_attention_interval = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
linear_num_key_heads = 2
linear_num_value_heads = 4
linear_key_head_dim = 16
linear_value_head_dim = 24
[data]
path = [%q]
sequence = 64
batch = 2
shuffle = false
[optimizer]
lr = 0.005
warmup = 1
[train]
steps = 6
[output]
model = false
`, tokens)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// Six steps of a hybrid have the losses of the CPU: within 1e-3 in F32, 1e-2 in BF16, on one rank
// and four.
func TestCUDAHybrid(t *testing.T) {
	cudatest.Use(t)
	path, cpu := hybridFromScratch(t), t.TempDir()
	if err := Run(Options{Path: path, Sets: []string{"device.backend=cpu", "output.dir=" + cpu}, Ranks: 1,
		Stdout: io.Discard, Stderr: io.Discard}); err != nil {
		t.Fatal(err)
	}
	want := readMetrics(t, filepath.Join(cpu, "metrics.jsonl"))
	if first, last := want[0].Loss, want[len(want)-1].Loss; !(last < first-0.05) {
		t.Fatalf("it learns nothing: %g to %g", first, last)
	}
	for _, x := range []struct {
		dtype, strategy string
		ranks           int
		limit           float64
	}{{"f32", "state", 4, 1e-3}, {"bf16", "auto", 1, 1e-2}, {"bf16", "heads", 4, 1e-2}, {"bf16", "state", 4, 1e-2}} {
		t.Run(fmt.Sprint(x.dtype, " ", x.strategy, " ", x.ranks), func(t *testing.T) {
			out := t.TempDir()
			onCUDA(t, path, x.ranks, "output.dir="+out, "device.dtype="+x.dtype, "gdn.strategy="+x.strategy)
			got := readMetrics(t, filepath.Join(out, "metrics.jsonl"))
			if len(got) != len(want) {
				t.Fatalf("%d records", len(got))
			}
			most := 0.0
			for i, r := range got {
				d := math.Abs(r.Loss - want[i].Loss)
				if most = max(most, d); !(d <= x.limit) {
					t.Errorf("step %d: loss %.6f, on the CPU %.6f", i+1, r.Loss, want[i].Loss)
				}
			}
			t.Logf("largest difference %.1e", most)
		})
	}
}
