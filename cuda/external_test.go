package cuda

import (
	"errors"
	"math"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// TestExternalStream orders operations with a stream of the host program, in both directions.
// Another stream of the device takes the place of the host program's.
func TestExternalStream(t *testing.T) {
	d, s, alloc := opened(t)
	g, err := d.NewExternalStream()
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	theirs, err := d.newStream(forCompute)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	const n = 1 << 12
	x, y := alloc(tensor.F32, n), alloc(tensor.F32, n)
	host := make([]float32, n)
	for i := range 20 {
		want := float64(i)
		address := *(*uintptr)(unsafe.Pointer(theirs.s)) // the first field of uly_stream is its cudaStream_t
		err := errors.Join(d.Fill(theirs, y, math.NaN()), d.Fill(theirs, x, want), g.Enter(address, s),
			d.Add(s, y, x, x), g.Leave(address, s), d.Copy(theirs, tensor.OfFloat32(host, n), y), theirs.Sync())
		if err != nil {
			t.Fatal(err)
		}
		if host[0] != float32(2*want) || host[n-1] != float32(2*want) {
			t.Fatalf("run %d: %v ... %v, want %v", i, host[0], host[n-1], 2*want)
		}
	}
	for _, byName := range []uintptr{0, 1, 2} {
		if err := errors.Join(g.Enter(byName, s), g.Leave(byName, s), s.Sync()); err != nil {
			t.Errorf("stream %d: %v", byName, err)
		}
	}
	if err := d.Scale(&stream{d: d, s: g.external}, tensor.Tensor{}, 1); err == nil ||
		!strings.Contains(err.Error(), "belongs to the host program") {
		t.Errorf("an operation on a host program's stream: %v", err)
	}
	if n := testing.AllocsPerRun(100, func() {
		if _, _, err := g.MemoryKindOf(x.Data); err != nil {
			t.Error(err)
		}
		if err := errors.Join(g.Enter(0, s), g.Leave(0, s)); err != nil {
			t.Error(err)
		}
	}); n != 0 {
		t.Errorf("%v mallocs a call", n)
	}
}

// TestMemoryKinds checks the kind of the host program's memory.
func TestMemoryKinds(t *testing.T) {
	d, _, alloc := opened(t)
	g, err := d.NewExternalStream()
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	pinned, err := d.AllocHost(64)
	if err != nil {
		t.Fatal(err)
	}
	defer pinned.Free()
	x, own := alloc(tensor.F32, 100), make([]float32, 100)
	for _, c := range []struct {
		p    unsafe.Pointer
		want MemoryKind
		gpu  int
	}{{x.Data, GPUMemory, d.Details().Ordinal}, {unsafe.Add(x.Data, 396), GPUMemory, d.Details().Ordinal},
		{unsafe.Pointer(&own[0]), HostMemory, -1},
		{pinned.Pointer(), PinnedMemory, d.Details().Ordinal}, {pointer(4096), HostMemory, -1}} {
		if at, gpu, err := g.MemoryKindOf(c.p); err != nil || at != c.want || gpu != c.gpu {
			t.Errorf("%p has kind %d, GPU %d, %v: want %d, %d", c.p, at, gpu, err, c.want, c.gpu)
		}
	}
}

// TestContext: calls do not change the GPU that the host program's thread has selected.
func TestContext(t *testing.T) {
	cudatest.Use(t)
	t.Setenv("ULYSSES_EMULATED_DEVICES", "2")
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	d, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	before := d.SaveContext()
	other, err := Open(Options{Ordinal: 1})
	if err != nil {
		t.Skip("SKIPPED: needs two GPUs: ", err)
	}
	defer other.Close()
	if d.SaveContext() != before {
		t.Error("opening another GPU changed the thread's GPU")
	}
	b, err := other.Alloc(16)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	now := d.SaveContext()
	d.RestoreContext(before)
	if now == before || d.SaveContext() != before {
		t.Errorf("the contexts of the thread were %#x, then %#x, and now %#x", before, now, d.SaveContext())
	}
}
