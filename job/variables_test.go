package job

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestVariableNotes(t *testing.T) {
	environment := []string{"ULYSSES_TIMEOT=5s", "ULYSSES_ISA=avx2", "ULYSSES_KERNEL=gemm=naive", "ULYSSES_MPI_CUDA=1",
		"ULYSSES_DATA=/books", "ULYSSES_TEST_FAULTS=3", "ULYSSES_ATTEMPT=1", "ULYSSES_KERNELS=", "KERNELS=1",
		"ULYSSES_=1"}
	const (
		meant  = "ULYSSES_TIMEOT in the environment has no effect; did you mean ULYSSES_TIMEOUT?"
		kernel = "ULYSSES_KERNEL=gemm=naive in the environment has no effect, because this run uses the CPU; " +
			"ULYSSES_ISA selects the kernels there"
		mpi = "ULYSSES_MPI_CUDA=1 in the environment has no effect, because this run uses the CPU"
	)
	for kind, want := range map[string][]string{"cpu": {kernel, mpi, meant}, "cuda": {meant}} {
		if got := variableNotes(environment, kind); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", kind, got, want)
		}
	}
}

// A run warns of a variable that has no effect.
func TestRunWarnsOfVariables(t *testing.T) {
	t.Setenv("ULYSSES_KERNEL", "gemm=naive")
	var stdout, stderr bytes.Buffer
	if err := Run(Options{Path: filepath.Join(goldens, "attention-gqa-packed", "job.toml"), Ranks: 2, Stdout: &stdout,
		Stderr: &stderr, Sets: []string{"device.backend=cpu",
			"attention.output=" + filepath.Join(t.TempDir(), "out")}}); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(stderr.String(), "ULYSSES_KERNEL=gemm=naive"); n != 1 {
		t.Errorf("%d warnings: %s", n, stderr.String())
	}
}
