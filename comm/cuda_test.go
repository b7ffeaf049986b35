package comm_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/testkit/cudatest"
)

// The communicators for memory of a GPU pass this package's suite. Where there is no GPU the
// emulated plug-in stands in, which runs what no event orders in any order; ULYSSES_CUDA_PLUGIN
// names another.

// ways are the communicators under test; with a cut, tensors go in pieces of so many bytes, as
// large ones do.
var ways = []struct {
	name, kind string
	cut        int64
}{{"ipc", "ipc", 0}, {"staged", "staged", 0}, {"pieces", "staged", 3000}, {"nccl", "nccl", 0}}

// runs reports whether the case is for these ranks: a device serves one goroutine; NCCL wants a GPU
// for each rank, and its sums have the bits of rank order for two.
func runs(t *testing.T, kind, name string, ranks int) bool {
	t.Helper()
	if kind != "nccl" || name == "Concurrent" {
		return name != "Concurrent"
	}
	found, err := cuda.Probe()
	if err != nil {
		t.Fatal(err)
	}
	has, _ := cuda.HasNCCL()
	return has && ranks <= min(2, found.Count)
}

// suiteOnGPU runs one case of the suite on this rank.
func suiteOnGPU(host comm.Comm, kind string, cut int64, run func(comm.Comm) error) error {
	var m *mirror
	err := onGPU(host, kind, func(d *cuda.Device, c *cuda.Comm) (err error) {
		if m, err = newMirror(d, c, cut); err != nil {
			return err
		}
		return run(m)
	})
	if m != nil {
		m.close() // memory that was exchanged outlives the communicator
	}
	return err
}

// onGPU runs f with a communicator of the kind, for a GPU that is this rank's or that ranks share.
func onGPU(host comm.Comm, kind string, f func(d *cuda.Device, c *cuda.Comm) error) error {
	found, err := cuda.Probe()
	if err != nil {
		return err
	}
	if found.Count == 0 {
		return comm.Wrong("no GPU: %s", found.Text)
	}
	d, err := cuda.Open(cuda.Options{Ordinal: host.Rank() % found.Count})
	if err != nil {
		return err
	}
	defer d.Close()
	c, err := cuda.NewComm(d, host, kind)
	if err != nil {
		return err
	}
	if err := f(d, c); err != nil {
		return err
	}
	return c.Close()
}

func TestCUDALocal(t *testing.T) {
	cudatest.Use(t)
	for _, w := range ways {
		for _, n := range []int{1, 2, 3, 4, 8} {
			for _, s := range comm.Suite {
				if !runs(t, w.kind, s.Name, n) || w.cut > 0 && n != 3 {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%d", w.name, s.Name, n), func(t *testing.T) {
					err := within(t, func() error {
						return comm.RunLocal(n, func(host comm.Comm) error { return suiteOnGPU(host, w.kind, w.cut, s.Run) })
					})
					if err != nil {
						t.Error(err)
					}
				})
			}
		}
	}
}

// within fails the test when f hangs, with all goroutines' stacks.
func within(t *testing.T, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(60 * time.Second):
		buffer := make([]byte, 1<<20)
		t.Fatalf("hangs:\n%s", buffer[:runtime.Stack(buffer, true)])
		return nil
	}
}
