package comm_test

import (
	"fmt"
	"testing"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/testkit/cudatest"
)

// These tests run the suite with the communicators for GPU memory. Without a GPU they use the
// emulated plug-in, which runs operations that no event orders in any order. ULYSSES_CUDA_PLUGIN
// selects another plug-in.

// transports are the communicators under test. With chunk > 0, operations run in chunks of so many
// bytes, as they otherwise do with large tensors.
var transports = []struct {
	name, kind string
	chunk      int64
}{{"ipc", "ipc", 0}, {"staged", "staged", 0}, {"chunks", "staged", 3000}, {"nccl", "nccl", 0}}

// runs reports whether a case is possible with these ranks. A device serves one goroutine. NCCL
// needs a GPU for each rank, and its sums are in rank order only for two ranks.
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
func suiteOnGPU(host comm.Comm, kind string, chunk int64, run func(comm.Comm) error) error {
	var m *mirror
	err := onGPU(host, kind, func(d *cuda.Device, c *cuda.Comm) (err error) {
		if m, err = newMirror(d, c, chunk); err != nil {
			return err
		}
		return run(m)
	})
	if m != nil {
		m.close() // after the communicator, which may use the memory until then
	}
	return err
}

// onGPU runs f with a communicator of the kind, on this rank's GPU, which ranks may share.
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
	for _, w := range transports {
		for _, n := range []int{1, 2, 3, 4, 8} {
			for _, s := range comm.Suite {
				if !runs(t, w.kind, s.Name, n) || w.chunk > 0 && n != 3 {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%d", w.name, s.Name, n), func(t *testing.T) {
					err := comm.Within(t, func() error {
						return comm.RunLocal(n, func(host comm.Comm) error {
							return suiteOnGPU(host, w.kind, w.chunk, s.Run)
						})
					})
					if err != nil {
						t.Error(err)
					}
				})
			}
		}
	}
}
