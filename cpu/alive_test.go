package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// Operands on the Go heap to which the caller keeps no reference stay alive until the operation has
// ended, also if the garbage collector runs and freed memory is allocated again.
func TestOperandsStayAlive(t *testing.T) {
	d, err := New(Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	const n = 640
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for !stop.Load() {
			runtime.GC()
			for range 16 { // allocates freed memory again
				x := make([]float32, n*n)
				for i := range x {
					x[i] = 7
				}
			}
		}
	}()
	defer wg.Wait()
	defer stop.Store(true)
	ones := func() tensor.Tensor {
		x := make([]float32, n*n)
		for i := range x {
			x[i] = 1
		}
		return tensor.OfFloat32(x, n, n)
	}
	out, later := make([]float32, n*n), make(chan func() error, 1)
	for range 30 {
		x := device.Gemm{A: ones(), B: ones(), C: tensor.OfFloat32(out, n, n)}
		// as an asynchronous device stores its operations
		run := func() error { return d.Gemm(nil, &x) }
		later <- run
		if err := (<-later)(); err != nil {
			t.Fatal(err)
		}
		for i, v := range out {
			if v != n {
				t.Fatalf("element %d is %v, want %d", i, v, n)
			}
		}
	}
}
