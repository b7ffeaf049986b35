package job

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/testkit/cudatest"
)

// sinksFromScratch is a job that trains gpt-oss's attention with a dense MLP, on packed documents
// that are longer than its window. 3 query heads share each key head.
func sinksFromScratch(t *testing.T) string {
	t.Helper()
	return fromScratch(t, `
model_type = "gpt_oss"
num_local_experts = 0
vocab_size = 256
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 3
num_attention_heads = 6
num_key_value_heads = 2
head_dim = 16
sliding_window = 11
initializer_range = 0.1
`, "[output]\nmodel = false\n")
}

// fromScratch is a job that trains a new model by SGD for three steps on packed documents. more are
// further tables.
func fromScratch(t *testing.T, model, more string) string {
	t.Helper()
	tokens, err := filepath.Abs(filepath.Join(goldens, "data", "packed64.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "job.toml")
	put(t, path, fmt.Sprintf(`
[model.new]
%s
[data]
path = [%q]
sequence = 64
global_batch = 4
shuffle = false
[optimizer]
name = "sgd"
lr = 0.05
clip = 0.0
[train]
steps = 3
%s`, model, tokens, more))
	return path
}

// The gradients of sinks, and of everything else, are the gradients of one rank: with ZeRO, with
// recomputed and offloaded activations, in groups of heads, over rings and with overlap.
func TestSinksOnEveryMesh(t *testing.T) {
	path := sinksFromScratch(t)
	for _, m := range []struct {
		ranks, ulysses, ring int
		sets                 string
	}{
		{2, 2, 1, "parallel.overlap=on"}, {3, 3, 1, "parallel.zero=1 memory.qkv=recompute parallel.overlap=on"},
		{4, 4, 1, "parallel.zero=2 memory.attention=recompute"},
		{8, 8, 1, "parallel.zero=3"}, {4, 2, 2, "parallel.zero=3 memory.qkv=recompute"},
		{4, 1, 4, "parallel.gather=on memory.segment=2"}, {6, 2, 3, "parallel.gather=off memory.attention=recompute"},
		{4, 2, 1, "parallel.zero=2 memory.head_groups=2"}, {4, 2, 2, "memory.head_groups=2 memory.qkv=recompute"},
		{2, 2, 1, "memory.qkv=offload memory.attention=offload memory.host=1.0"},
		{4, 4, 1, "device.dtype=bf16"},
	} {
		sets := append([]string{"device.backend=cpu", fmt.Sprintf("parallel.ulysses=%d", m.ulysses),
			fmt.Sprintf("parallel.ring=%d", m.ring), "output.dir=" + t.TempDir()}, strings.Fields(m.sets)...)
		var stderr bytes.Buffer
		if err := Verify(Options{Path: path, Sets: sets, Ranks: m.ranks, Stdout: io.Discard,
			Stderr: &stderr}); err != nil {
			t.Errorf("%v: %v\n%s", sets, err, stderr.String())
		}
	}
}

// Steps on the CUDA plug-in have the losses of the CPU: within 1e-4 in F32, 1e-2 in BF16.
func TestCUDASinks(t *testing.T) {
	cudatest.Use(t)
	lossesOfCPU(t, sinksFromScratch(t), []cudaMesh{{"f32", 1, 1, 1e-4}, {"f32", 4, 2, 1e-4}, {"bf16", 2, 1, 1e-2}})
}

// cudaMesh is a mesh, the type in which it computes, and the largest difference of a loss.
type cudaMesh struct {
	dtype       string
	ranks, ring int
	limit       float64
}

// lossesOfCPU checks that steps on the CUDA plug-in have the losses of the CPU.
func lossesOfCPU(t *testing.T, path string, meshes []cudaMesh) {
	t.Helper()
	cpu := t.TempDir()
	if err := Run(Options{Path: path, Sets: []string{"device.backend=cpu", "output.dir=" + cpu}, Ranks: 1,
		Stdout: io.Discard, Stderr: io.Discard}); err != nil {
		t.Fatal(err)
	}
	want := readMetrics(t, filepath.Join(cpu, "metrics.jsonl"))
	for _, x := range meshes {
		out := t.TempDir()
		onCUDA(t, path, x.ranks, "output.dir="+out, "device.dtype="+x.dtype,
			fmt.Sprintf("parallel.ulysses=%d", x.ranks/x.ring), fmt.Sprintf("parallel.ring=%d", x.ring))
		got := readMetrics(t, filepath.Join(out, "metrics.jsonl"))
		for i, r := range got {
			if d := math.Abs(r.Loss - want[i].Loss); !(d <= x.limit) || len(got) != len(want) {
				t.Errorf("%v: step %d of %d: loss %.6f, on the CPU %.6f", x, i+1, len(got), r.Loss, want[i].Loss)
			}
		}
	}
}
