//go:build mpi

package comm_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/testkit/cudatest"
)

// TestCUDAMPI runs the suite on processes that share a GPU or have one each.
func TestCUDAMPI(t *testing.T) {
	if comm.Inside() == "" {
		onGPU := os.Getenv("ULYSSES_CUDA_PLUGIN") != ""
		cudatest.Use(t)
		t.Setenv("ULYSSES_EMULATED_SHARED", "1") // memory that other processes can map
		for _, n := range []int{2, 3, 4} {
			if out, err := comm.StartRanks(t, "cuda", n); err != nil {
				t.Errorf("%d ranks: %v\n%s", n, err, out)
			}
		}
		// every MPI library accepts the memory of an emulated GPU
		if !onGPU {
			t.Setenv("ULYSSES_MPI_CUDA", "1")
			if out, err := comm.StartRanks(t, "cuda", 3); err != nil {
				t.Errorf("MPI with GPU memory: %v\n%s", err, out)
			}
		}
		return
	}
	world, err := comm.World()
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range transports {
		for _, s := range comm.Suite {
			if !runs(t, w.kind, s.Name, world.Size()) {
				continue
			}
			host, err := world.Split(0, world.Rank()) // closed with the device's communicator
			if err != nil {
				t.Fatal(err)
			}
			name := w.name + ", " + s.Name
			watch := time.AfterFunc(20*time.Second, func() {
				fmt.Printf("rank %d: %s hangs\n", world.Rank(), name)
				world.Abort(status.Comm, "hangs")
			})
			err = suiteOnGPU(host, w.kind, w.chunk, s.Run)
			if err != nil {
				// print at once: other ranks may be waiting
				fmt.Printf("rank %d: %s: %v\n", world.Rank(), name, err)
			}
			if err := comm.Agree(world, err); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			watch.Stop()
		}
	}
}
