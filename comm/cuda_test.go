package comm_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/internal/cudatest"
)

// The communicators for memory of a GPU pass this package's suite. Where there is no GPU the emulated plug-in stands in, which runs what
// no event orders in any order; ULYSSES_CUDA_PLUGIN names another.

var kinds = []string{"ipc", "staged"}

// onGPU runs f with a communicator of the kind, for a GPU that is this rank's or that ranks share.
func onGPU(host comm.Comm, kind string, f func(d *cuda.Device, c *cuda.Comm) error) error {
	found, err := cuda.Probe()
	if err != nil {
		return err
	}
	if found.GPUs == 0 {
		return comm.Wrong("no GPU: %s", found.Text)
	}
	d, err := cuda.Open(cuda.Options{Ordinal: host.Rank() % found.GPUs})
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
	for _, kind := range kinds {
		for _, n := range []int{1, 2, 3, 4, 8} {
			for _, s := range comm.Suite {
				if s.Name == "Concurrent" {
					continue // a device serves one goroutine
				}
				t.Run(fmt.Sprintf("%s/%s/%d", kind, s.Name, n), func(t *testing.T) {
					err := within(t, func() error {
						return comm.RunLocal(n, func(host comm.Comm) error {
							return onGPU(host, kind, func(d *cuda.Device, c *cuda.Comm) error {
								m, err := newMirror(d, c)
								if err != nil {
									return err
								}
								defer m.close()
								return s.Run(m)
							})
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
