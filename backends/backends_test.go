package backends

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/cuda"
	"ulysses/testkit/cudatest"
)

// TestWithoutPlugin runs without a CUDA plug-in, as on most machines.
func TestWithoutPlugin(t *testing.T) {
	t.Setenv("ULYSSES_CUDA_PLUGIN", "")
	d, why, err := Open(Choice{Backend: "auto", Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	if i := d.Info(); i.Kind != "cpu" || !strings.Contains(why, "no CUDA plug-in") {
		t.Errorf("auto is %v, because %q: want the CPU because there is no plug-in", i, why)
	}
	d.Close()
	if d, why, err = Open(Choice{Backend: "cpu", Threads: 1}); err != nil || d.Info().Kind != "cpu" || why != "" {
		t.Fatalf("cpu is %v, %q, %v", d, why, err)
	}
	d.Close()
	refused(t, "cuda", "no CUDA plug-in", "make cuda", `"auto"`)
	refused(t, "gpu", "use auto, cpu or cuda")
	if found, err := FindGPUs(); !NoPlugin(err) {
		t.Errorf("FindGPUs = %v, %v", found, err)
	}
}

func refused(t *testing.T, backend string, texts ...string) {
	t.Helper()
	d, _, err := Open(Choice{Backend: backend, Threads: 1})
	if err == nil || d != nil {
		t.Fatalf("%s opens %v", backend, d)
	}
	for _, w := range append(texts, `device.backend = "`+backend+`"`) {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%s: %v: want %q in it", backend, err, w)
		}
	}
}

// TestBrokenPlugin checks that a plug-in that cannot be used is an error, also with "auto".
func TestBrokenPlugin(t *testing.T) {
	path := filepath.Join(t.TempDir(), "libulysses_cuda.so")
	if err := os.WriteFile(path, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("ULYSSES_CUDA_PLUGIN", path)
	refused(t, "cuda", path)
	refused(t, "auto", path, `"cpu"`)
	if found, err := FindGPUs(); err == nil || NoPlugin(err) {
		t.Errorf("FindGPUs = %v, %v", found, err)
	}
}

// TestGPUs checks that the rank on the node selects the GPU, modulo the number of GPUs.
func TestGPUs(t *testing.T) {
	cudatest.Use(t)
	if os.Getenv("ULYSSES_EMULATED_DEVICES") == "" {
		t.Setenv("ULYSSES_EMULATED_DEVICES", "2")
	}
	found, err := FindGPUs()
	if err != nil || found.Count == 0 || len(found.Opened) != found.Count {
		t.Fatalf("%+v, %v", found, err)
	}
	for rank := range 5 {
		for _, backend := range []string{"auto", "cuda"} {
			d, why, err := Open(Choice{Backend: backend, LocalRank: rank, RanksOnNode: 5, Deterministic: true})
			if err != nil {
				t.Fatal(err)
			}
			gpu := d.(*cuda.Device).Details()
			if i := d.Info(); i.Kind != "cuda" || gpu.Ordinal != rank%found.Count ||
				gpu.UUID != found.Opened[gpu.Ordinal].UUID {
				t.Errorf("rank %d has %v %+v of %d GPUs", rank, i, gpu, found.Count)
			}
			if (why == "") != (backend == "cuda") {
				t.Errorf("%s has the reason %q", backend, why)
			}
			d.Close()
		}
	}
	t.Setenv("ULYSSES_KERNEL", "gemm=imagined")
	if d, _, err := Open(Choice{Backend: "cuda"}); err == nil || !strings.Contains(err.Error(), "imagined") {
		t.Errorf("an unknown kernel: %v, %v", d, err)
	}
}
