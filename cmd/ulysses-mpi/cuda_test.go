//go:build mpi

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/testkit/cudatest"
)

// Processes that share a GPU, or the emulated plug-in, have PyTorch's losses, with CUDA IPC and
// through host memory. NCCL needs one GPU for each rank; TestNCCL of make gpu-check tests it.
func TestCUDAProcesses(t *testing.T) {
	plugin := cudatest.Use(t)
	for _, c := range []struct {
		name, ranks, comm, aware, says string
	}{{"llama-sgd-packed", "2", "ipc", "0", "communicator: ipc: device.comm = "},
		{"llama-sgd-packed", "4", "ipc", "0", "ipc: "}, {"qwen3-adamw-dp2", "4", "ipc", "0", "ipc: "},
		{"qwen2-adamw-ignored", "4", "mpi", "0", "staged through host memory and mpi"},
		{"llama-sgd-packed", "2", "mpi", "1", "staged by mpi, which accepts GPU memory"}} {
		if c.aware == "1" && !cudatest.Emulated() {
			continue // memory of an emulated GPU is one that any MPI takes
		}
		t.Run(strings.Join([]string{c.name, c.ranks, c.comm, c.aware}, " "), func(t *testing.T) {
			dir, out := filepath.Join("../../testdata/goldens", c.name), t.TempDir()
			var golden struct{ Losses []float64 }
			b, err := os.ReadFile(filepath.Join(dir, "case.json"))
			if err == nil {
				err = json.Unmarshal(b, &golden)
			}
			if err != nil {
				t.Fatal(err)
			}
			args := []string{filepath.Join(dir, "job.toml")}
			sets := []string{"output.dir=" + out, "device.backend=cuda", "device.dtype=f32", "device.comm=" + c.comm}
			if c.ranks == "2" {
				sets = append(sets, "parallel.ulysses=2")
			}
			for _, s := range sets {
				args = append(args, "--set", s)
			}
			code, stdout, stderr := mpirun(t, c.ranks,
				[]string{"ULYSSES_CUDA_PLUGIN=" + plugin, "ULYSSES_MPI_CUDA=" + c.aware}, args...)
			if code != 0 {
				t.Fatalf("exit %d\n%s", code, stderr)
			}
			if !strings.Contains(strings.ReplaceAll(stderr, `\"`, `"`), c.says) {
				t.Errorf("%q is not in %s", c.says, stderr)
			}
			if !strings.Contains(stdout, "equal to the formulas") {
				t.Errorf("bytes sent are not the formula's: %s", stdout)
			}
			same(t, c.name, losses(t, out), golden.Losses, 3e-5)
		})
	}
}

// If CUDA cannot share memory between processes, ranks that share a GPU communicate through host
// memory, unless device.comm has another value. All ranks print the reason.
func TestCUDAWithoutIPC(t *testing.T) {
	plugin := cudatest.Use(t)
	if !cudatest.Emulated() {
		t.Skip("SKIPPED: a GPU cannot be told to refuse")
	}
	for _, c := range []struct {
		ipc, comm, says string
		fine            bool
	}{
		{"0", "auto", "staged through host memory and mpi: creating an event: cudaErrorNotSupported", true},
		{"1", "auto", "GPU memory: CUDA cannot map the memory of rank 1", true},
		{"1", "ipc", "CUDA cannot map the memory of rank", false},
	} {
		code, stdout, stderr := mpirun(t, "2",
			[]string{"ULYSSES_CUDA_PLUGIN=" + plugin, "ULYSSES_EMULATED_IPC=" + c.ipc},
			small(t.TempDir(), "train.steps=1", "device.backend=cuda", "device.comm="+c.comm,
				"model.new.num_hidden_layers=1", "data.sequence=64", "parallel.ulysses=2")...)
		if (code == 0) != c.fine || !strings.Contains(stderr, c.says) {
			t.Errorf("IPC %s, %s: exit %d\n%s\n%s", c.ipc, c.comm, code, stdout, stderr)
		}
		if c.fine && !strings.Contains(stdout, "that 2 ranks share") {
			t.Errorf("each plans on the whole memory: %s", stdout)
		}
	}
}

// A rank that fails or dies on a device ends the job as on the CPU. It does not free memory that
// other ranks have mapped, and no other rank fails.
func TestCUDAFaults(t *testing.T) {
	plugin := cudatest.Use(t)
	for _, fault := range []string{"fail:1:2", "panic:3:2", "kill:2:2", "late:3:2"} {
		code, _, stderr := mpirun(t, "4",
			[]string{"ULYSSES_CUDA_PLUGIN=" + plugin, "ULYSSES_FAULT=" + fault, "ULYSSES_TIMEOUT=3s"},
			small(t.TempDir(), "train.steps=4", "device.backend=cuda", "model.new.num_hidden_layers=1",
				"data.sequence=64")...)
		if code == 0 || !strings.Contains(stderr, "rank ") || strings.Contains(stderr, "cudaFree") ||
			strings.Contains(stderr, "wrote at byte") {
			t.Errorf("%s: exit %d: %s", fault, code, stderr)
		}
	}
}
