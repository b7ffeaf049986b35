package job

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/cuda"
	"ulysses/internal/status"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/near"
)

// The tests of this file use the plug-in that ULYSSES_CUDA_PLUGIN names, on a machine with a GPU,
// otherwise the emulated plug-in. Their ranks are goroutines that share GPUs. The tests of
// cmd/ulysses-mpi use processes.

// onCUDA runs a job on the plug-in and returns its report.
func onCUDA(t *testing.T, path string, ranks int, sets ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	if err := Run(Options{Path: path, Sets: append([]string{"device.backend=cuda"}, sets...), Ranks: ranks,
		Verbose: true, Stdout: &stdout, Stderr: &stderr}); err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	return stdout.String()
}

// Five steps in F32 have PyTorch's losses, gradient norms and weights, with CUDA IPC and through
// host memory. On the emulated plug-in, each model and kind of data runs with one of the two
// optimizers.
func TestCUDAGoldenTraining(t *testing.T) {
	cudatest.Use(t)
	cases, turns, i := readGoldens(t, "train"), map[string]int{}, 0
	for _, dir := range slices.Sorted(maps.Keys(cases)) {
		c := cases[dir]
		if strings.HasPrefix(c.Name, "qwen3_5-") && strings.HasSuffix(c.Name, "plain") {
			continue // kernels see no more of them than of the packed ones
		}
		other := strings.NewReplacer("-adamw-", "-sgd-", "-sgd-", "-adamw-").Replace(dir)
		if _, ok := cases[other]; ok && cudatest.Emulated() {
			pair := min(dir, other)
			if _, seen := turns[pair]; !seen {
				turns[pair] = len(turns)
			}
			if (dir == pair) != (turns[pair]%2 == 0) {
				continue
			}
		}
		i++
		policy := []string{"ipc", "mpi"}[i%2]
		t.Run(c.Name+" "+policy, func(t *testing.T) {
			out := t.TempDir()
			sets := []string{"output.dir=" + out, "device.dtype=f32", "device.comm=" + policy}
			if i%3 == 0 { // in segments, so that models of two layers also offload
				sets = append(sets, "memory.block_input=offload", "memory.attention=offload", "memory.qkv=recompute",
					"memory.mlp=offload", "memory.segment=2")
			}
			report := onCUDA(t, filepath.Join(dir, c.Job), c.Ranks, sets...)
			if !strings.Contains(report, ": equal") {
				t.Errorf("bytes sent are not the formula's: %s", report)
			}
			if len(sets) > 3 && !strings.Contains(report, "offloaded activations") {
				t.Errorf("nothing was offloaded: %s", report)
			}
			for i, r := range readSteps(t, out, c.Steps) {
				if !(math.Abs(r.Loss-c.Losses[i]) <= 2e-4) ||
					!(math.Abs(r.GradNorm-c.GradNorms[i]) <= 2e-3*c.GradNorms[i]) {
					t.Errorf("step %d: loss %.7f, gradient norm %.6f; PyTorch %.7f, %.6f", i+1, r.Loss, r.GradNorm,
						c.Losses[i], c.GradNorms[i])
				}
			}
			checkWeights(t, filepath.Join(out, "model", "model.safetensors"), filepath.Join(dir, c.Model), c)
		})
	}
}

// Twenty steps of a small Llama and Qwen3 have the losses of the CPU: within 1e-3 in F32, 1e-2 in
// BF16, on one rank and four.
func TestCUDALosses(t *testing.T) {
	cudatest.Use(t)
	for _, name := range []string{"llama-adamw-packed", "qwen3-adamw-packed"} {
		path := filepath.Join(goldens, name, "job.toml")
		cpu := t.TempDir()
		common := []string{"train.steps=20", "parallel.ulysses=0", "optimizer.lr=0.001", "output.model=false"}
		if err := Run(Options{Path: path, Sets: append(common, "output.dir="+cpu), Ranks: 1, Stdout: io.Discard,
			Stderr: io.Discard}); err != nil {
			t.Fatal(err)
		}
		want := readMetrics(t, filepath.Join(cpu, "metrics.jsonl"))
		if first, last := want[0].Loss, want[len(want)-1].Loss; !(last < first-0.05) {
			t.Fatalf("%s learns nothing: %g to %g", name, first, last)
		}
		for dtype, limit := range map[string]float64{"f32": 1e-3, "bf16": 1e-2} {
			for _, ranks := range []int{1, 4} {
				if cudatest.Emulated() && (ranks == 1) == (dtype == "f32") == (name[0] == 'l') {
					continue // each model in both types, on one rank and on four
				}
				t.Run(fmt.Sprint(name, " ", dtype, " ", ranks), func(t *testing.T) {
					out := t.TempDir()
					onCUDA(t, path, ranks, append(common, "output.dir="+out, "device.dtype="+dtype)...)
					got := readMetrics(t, filepath.Join(out, "metrics.jsonl"))
					if len(got) != 20 {
						t.Fatalf("%d records", len(got))
					}
					most := 0.0
					for i, r := range got {
						d := math.Abs(r.Loss - want[i].Loss)
						if most = max(most, d); !(d <= limit) {
							t.Errorf("step %d: loss %.6f, on the CPU %.6f", i+1, r.Loss, want[i].Loss)
						}
					}
					t.Logf("largest difference %.1e", most)
				})
			}
		}
	}
}

// Requests that GPUs do not support are refused by name before anything is computed or printed, on
// every rank.
func TestCUDARefusesWideHeads(t *testing.T) {
	cudatest.Use(t)
	quick := filepath.Join("..", "examples", "quickstart.toml")
	var stdout bytes.Buffer
	err := Run(Options{Path: quick, Ranks: 3, Verbose: true, Stdout: &stdout, Stderr: io.Discard,
		Sets: []string{"device.backend=cuda", "parallel.ulysses=3", "model.new.num_attention_heads=2",
			"model.new.num_key_value_heads=1", "model.new.head_dim=258", "output.dir=" + t.TempDir()}})
	if status.Of(err) != status.Unsupported ||
		!strings.Contains(err.Error(), `head_dim = 258: attention of device cuda supports at most 256`) ||
		stdout.Len() > 0 {
		t.Errorf("%v; printed %q", err, stdout.String())
	}
}

// Attention jobs have PyTorch's results in float64 within the tolerance, and verify finds one rank
// and several bitwise equal.
func TestCUDAAttention(t *testing.T) {
	cudatest.Use(t)
	dirs, err := filepath.Glob(filepath.Join(goldens, "attention-*"))
	if err != nil || len(dirs) < 3 {
		t.Fatal(dirs, err)
	}
	for _, dir := range dirs {
		for dtype, limit := range map[string]float64{"f32": 2e-5, "bf16": 2e-2} {
			t.Run(filepath.Base(dir)+" "+dtype, func(t *testing.T) {
				path := filepath.Join(dir, "job.toml")
				want, got := filepath.Join(t.TempDir(), "cpu"), filepath.Join(t.TempDir(), "cuda")
				if err := Run(Options{Path: path, Sets: []string{"attention.output=" + want}, Ranks: 1,
					Stdout: io.Discard,
					Stderr: io.Discard}); err != nil {
					t.Fatal(err)
				}
				onCUDA(t, path, 3, "attention.output="+got, "device.dtype="+dtype)
				compareFiles(t, got, want, limit)
				var stdout bytes.Buffer
				err := Verify(Options{Path: path,
					Sets: []string{"device.backend=cuda", "device.deterministic=true", "attention.output=" + got,
						"device.dtype=" + dtype},
					Ranks: 4, Verbose: true, Stdout: &stdout, Stderr: os.Stderr})
				if err != nil {
					t.Errorf("verify: %v\n%s", err, stdout.String())
				}
			})
		}
	}
}

// compareFiles checks max|Δ|/max|ref| of every tensor.
func compareFiles(t *testing.T, got, want string, limit float64) {
	t.Helper()
	a, _ := readWeights(t, got)
	b, _ := readWeights(t, want)
	if len(a) != len(b) || len(a) < 5 {
		t.Fatalf("%d tensors, want %d", len(a), len(b))
	}
	for name, ref := range b {
		d := &near.Difference{}
		for i, v := range ref {
			if math.IsInf(float64(v), -1) && a[name][i] == v {
				continue // a query without keys
			}
			d.Add(float64(a[name][i]), float64(v), int64(i))
		}
		if err := d.WithinRelative(name, limit); err != nil {
			t.Error(err)
		}
	}
}

// Ranks plan with the memory that other processes leave on their GPU. A plan that exceeds it is
// refused before the first step, on all ranks, with both numbers and what to do.
func TestCUDAMemoryInUse(t *testing.T) {
	if cudatest.Use(t); !cudatest.Emulated() {
		t.Skip("SKIPPED: the size of a GPU's memory cannot be set")
	}
	const total, left = 512 << 20, 32 << 20
	t.Setenv("ULYSSES_EMULATED_MEMORY", fmt.Sprint(total))
	other, err := cuda.Open(cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	free, err := other.FreeMemory()
	if err != nil {
		t.Fatal(err)
	}
	b, err := other.Alloc(free - left)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	err = Run(Options{Path: filepath.Join(goldens, "llama-adamw-packed", "job.toml"),
		Sets: []string{"device.backend=cuda", "device.dtype=f32", "device.comm=ipc",
			"parallel.ulysses=2", "data.batch=512", "output.dir=" + t.TempDir()}, Ranks: 2, Stdout: io.Discard,
		Stderr: io.Discard})
	if status.Of(err) != status.OutOfMemory {
		t.Fatal(err)
	}
	for _, text := range []string{
		"which 2 ranks share, has for each 256.0 MiB, of which contexts, communicators and other processes leave ",
		"end other processes on the GPU"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%v; want %q", err, text)
		}
	}
}
