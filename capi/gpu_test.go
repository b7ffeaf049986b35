package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"ulysses/internal/cudatest"
)

// gpuHost is what a host whose tensors are on a GPU needs: the plug-in, and a CUDA runtime of its own, for which the stand-in's names serve.
func gpuHost(t *testing.T) []string {
	t.Helper()
	env := []string{"ULYSSES_CUDA_PLUGIN=" + cudatest.Use(t)}
	if os.Getenv("ULYSSES_TEST_CUDART") == "" && strings.Contains(env[0], "emulated") {
		env = append(env, "ULYSSES_TEST_CUDART="+cudatest.Use(t))
	}
	return env
}

// A host on a GPU: results near the CPU's, the bits of one rank on several, in the order of whatever stream the host brings, and nothing
// waited for in the calls.
func TestHostOnGPU(t *testing.T) {
	env := gpuHost(t)
	exe := compile(t, "gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-pedantic", "-Werror", "testdata/gpu.c", "-lpthread", "-ldl")
	for _, seed := range []string{"1", "2", "3"} {
		for _, mode := range []string{"alone", "hostile", "threads"} {
			t.Run(mode+" "+seed, func(t *testing.T) {
				out := output(t, 2*time.Minute, append(env, "ULYSSES_EMULATED_DEVICES=2", "ULYSSES_EMULATED_SEED="+seed), exe, mode)
				if !strings.Contains(out, "ok "+mode) || mode == "hostile" && len(env) > 1 && !strings.Contains(out, "two GPUs") {
					t.Error(out)
				}
			})
		}
	}
}

func TestHostOnGPUWithMPI(t *testing.T) {
	for _, variable := range gpuHost(t) {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	exe := compile(t, "mpicc", "-DWITH_MPI", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "testdata/gpu.c", "-lpthread", "-ldl")
	for _, n := range []int{1, 2, 3} {
		if out := mpirun(t, n, exe); !strings.Contains(out, "ok gpu") {
			t.Errorf("%d ranks: %s", n, out)
		}
	}
}
