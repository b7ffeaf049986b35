package cpu

import (
	"strings"
	"sync/atomic"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// In each of many short runs, each task runs once, whichever workers arrive in time.
func TestPoolRuns(t *testing.T) {
	p := newPool(4)
	defer p.close()
	var next atomic.Int64
	var done [64]atomic.Int32
	body := func(worker int) {
		for i := next.Add(1) - 1; i < 64; i = next.Add(1) - 1 {
			done[i].Add(1)
		}
	}
	for run := range int32(2000) {
		next.Store(0)
		if err := p.run(3, body); err != nil {
			t.Fatal(err)
		}
		for i := range done {
			if n := done[i].Load(); n != run+1 {
				t.Fatalf("run %d: task %d was done %d times", run, i, n)
			}
		}
	}
}

// A panic, on the caller's worker or on another, is an error of that run and not of the next.
func TestPoolPanic(t *testing.T) {
	p := newPool(3)
	defer p.close()
	for _, bad := range []int{0, 1} {
		arrived := make(chan int, 3)
		err := p.run(2, func(worker int) {
			arrived <- worker
			if worker == 0 && bad != 0 {
				for w := <-arrived; w == 0; w = <-arrived { // until another worker is here
				}
			}
			if worker == bad || bad != 0 && worker != 0 {
				panic("task 7")
			}
		})
		if status.Of(err) != status.Internal || !strings.Contains(err.Error(), "task 7") {
			t.Errorf("worker %d: %v", bad, err)
		}
		if err := p.run(2, func(int) {}); err != nil {
			t.Errorf("the run after a panic: %v", err)
		}
	}
}

// Operations do not allocate Go memory.
func TestNoAllocation(t *testing.T) {
	d := open(t, "", 2)
	c := attentionCase{cuQ: cu(40, 300), cuK: cu(40, 300), heads: 4, kvHeads: 2, d: 32, dv: 32,
		kvHead: []int64{0, 0, 0, 1}, causal: true, headMajor: true}
	g := c.make(t, d)
	x := tensor.OfFloat32(floats(t, d, 256*256), 256, 256)
	m := device.Gemm{A: x, B: x.Permute(1, 0), C: tensor.OfFloat32(floats(t, d, 256*256), 256, 256)}
	n := testing.AllocsPerRun(50, func() {
		both(t, d, g)
		if err := d.Gemm(nil, &m); err != nil {
			t.Fatal(err)
		}
	})
	if n > 0 {
		t.Errorf("%g allocations", n)
	}
}

func TestNewRefuses(t *testing.T) {
	for _, o := range []Options{{ISA: "sse9"}, {Workers: -1}} {
		if _, err := New(o); status.Of(err) != status.Unsupported && status.Of(err) != status.InvalidArgument {
			t.Errorf("%+v: %v", o, err)
		}
	}
	t.Setenv(EnvISA, "portable")
	if k := open(t, "", 1).Info().Kernels; k != "portable" {
		t.Errorf("%s=portable gives %s", EnvISA, k)
	}
	d := open(t, "", 1)
	for _, n := range []int64{-1, 1 << 60} {
		if _, err := d.Alloc(n); err == nil {
			t.Errorf("Alloc of %d bytes succeeded", n)
		}
	}
	for _, n := range []int64{0, 1, 63, 2<<20 - 1, 2 << 20, 5<<20 + 3} {
		b, err := d.Alloc(n)
		if err != nil || b.Bytes() != n || uintptr(b.Pointer())%align != 0 {
			t.Fatalf("%d bytes: %v", n, err)
		}
		for i, x := range tensor.Of(b.Pointer(), tensor.U8, n).RawBytes() {
			if x != 0 {
				t.Fatalf("%d bytes: byte %d is %d", n, i, x)
			}
		}
		b.Free()
		b.Free()
	}
}

// Forward and backward pass of one head with 65,536 tokens need far less than 512 MiB on a host
// with 64 workers, including the tensors.
func TestAttentionMemory(t *testing.T) {
	const s, dim, limit = 65536, 64, 448 << 20
	for _, causal := range []bool{true, false} {
		x := tensor.Of(nil, tensor.F32, s, 1, dim)
		a := device.Attention{Q: x, K: x, V: x, Out: x, CuQ: cu(s), CuK: cu(s), Causal: causal}
		if n := open(t, "", 64).AttentionWorkspace(&a, true) + 8*x.Bytes(); n > limit {
			t.Errorf("causal %v: %d MiB", causal, n>>20)
		}
	}
}
