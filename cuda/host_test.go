package cuda

import (
	"errors"
	"math"
	"runtime"
	"testing"
	"time"

	"ulysses/tensor"
)

// TestCollector: the garbage collector does not free the host memory of a copy before the copy has
// completed, even if no variable refers to it.
func TestCollector(t *testing.T) {
	d, s, alloc := opened(t)
	x := alloc(tensor.F32, 1<<16)
	if err := d.Fill(s, x, math.NaN()); err != nil {
		t.Fatal(err)
	}
	collected := make(chan bool, 1)
	func() {
		host := new([1 << 16]float32)
		runtime.AddCleanup(host, func(c chan bool) { c <- true }, collected)
		if err := d.Copy(s, tensor.OfFloat32(host[:], 1<<16), x); err != nil {
			t.Fatal(err)
		}
	}()
	for range 3 {
		runtime.GC()
	}
	select {
	case <-collected:
		t.Error("the memory was collected before the copy wrote it")
	default:
	}
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		runtime.GC()
		select {
		case <-collected:
			return
		default:
			runtime.Gosched()
		}
	}
	t.Error("the memory is kept after the copy has completed")
}

// TestSource overwrites the source of a copy from host memory as soon as the call has returned.
func TestSource(t *testing.T) {
	d, s, alloc := opened(t)
	const n = 1 << 18
	x, src, back := alloc(tensor.F32, n), make([]float32, n), make([]float32, n)
	for _, v := range []float32{1, 2, 3} {
		for i := range src {
			src[i] = v
		}
		if err := d.Copy(s, x, tensor.OfFloat32(src, n)); err != nil {
			t.Fatal(err)
		}
		clear(src)
		if err := errors.Join(d.Copy(s, tensor.OfFloat32(back, n), x), s.Sync()); err != nil {
			t.Fatal(err)
		}
		if back[0] != v || back[n-1] != v {
			t.Errorf("%v ... %v arrived, want %v", back[0], back[n-1], v)
		}
	}
}

// TestHostZero: pinned memory is zeroed, also where freed memory is reused.
func TestHostZero(t *testing.T) {
	d, _, _ := opened(t)
	for range 3 {
		b, err := d.AllocHost(5000)
		if err != nil {
			t.Fatal(err)
		}
		for i, x := range tensor.Of(b.Pointer(), tensor.F32, 1250).Float32s() {
			if x != 0 {
				t.Fatalf("element %d of fresh memory is %v", i, x)
			}
		}
		for i := range tensor.Of(b.Pointer(), tensor.F32, 1250).Float32s() {
			tensor.Of(b.Pointer(), tensor.F32, 1250).Float32s()[i] = 7
		}
		b.Free()
	}
}

// TestForgottenStream drops a stream with an enqueued copy, as a program may after an error. The
// garbage collector must not end the program.
func TestForgottenStream(t *testing.T) {
	d, _, alloc := opened(t)
	x := alloc(tensor.F32, 10)
	func() {
		s, err := d.newStream(forCompute)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Copy(s, tensor.OfFloat32(make([]float32, 10), 10), x); err != nil {
			t.Fatal(err)
		}
	}()
	for range 5 {
		runtime.GC()
		time.Sleep(time.Millisecond) // for finalizers
	}
	for s := range kept.streams {
		if s.d == d {
			s.Close()
		}
	}
}
