package cuda

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"

	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// opened returns a device with a stream, and a function that allocates tensors. Results are bitwise
// reproducible unless the options say otherwise.
func opened(t testing.TB, options ...Options) (*Device, device.Stream,
	func(d tensor.DType, shape ...int64) tensor.Tensor) {
	t.Helper()
	cudatest.Use(t)
	d, err := Open(append(options, Options{Deterministic: true})[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return d, s, func(dtype tensor.DType, shape ...int64) tensor.Tensor {
		x := tensor.Of(nil, dtype, shape...)
		b, err := d.Alloc(x.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.Free)
		x.Data, x.Where = b.Pointer(), tensor.CUDA
		return x
	}
}

func TestInfo(t *testing.T) {
	d, _, _ := opened(t)
	i, more := d.Info(), d.Details()
	if i.Kind != "cuda" || i.Name == "" || i.Kernels == "" || i.Align != 256 || i.Place != tensor.CUDA ||
		!i.TokenMajor || i.Memory <= 0 {
		t.Errorf("%+v", i)
	}
	if len(i.Compute) != 2 || i.Compute[0] != tensor.BF16 || i.Compute[1] != tensor.F32 {
		t.Errorf("computes in %v, want BF16 first, then F32", i.Compute)
	}
	if more.UUID == "" || more.Free <= 0 || more.Free > i.Memory || more.SM <= 0 {
		t.Errorf("%+v", more)
	}
	for _, ordinal := range []int{1 << 20, 1 << 31, 1 << 32, 1<<32 - 1, -2} {
		d, err := Open(Options{Ordinal: ordinal})
		if err == nil || !strings.Contains(err.Error(), fmt.Sprint("GPU ", ordinal, " ")) {
			t.Errorf("GPU %d = %v, %v: want an error that names it", ordinal, d, err)
		}
	}
	if b, err := d.Alloc(1 << 60); err == nil ||
		!strings.Contains(err.Error(), "device memory: out of GPU memory: 1152921504606846976 bytes requested on "+
			i.Name) || !strings.Contains(err.Error(), "; end other processes on this GPU") {
		t.Errorf("2^60 bytes: %v, %v: want an error with the size, the GPU and the fix", b, err)
	}
	for _, kernels := range []string{"gemm=imagined", "gemm=naive,gemm=imagined"} {
		if d, err := Open(Options{Kernels: kernels}); err == nil || !strings.Contains(err.Error(), "imagined") {
			t.Errorf("an unknown kernel in %s: %v, %v: want an error that names it", kernels, d, err)
		}
	}
	long, err := Open(Options{Kernels: strings.Repeat("gemm=naive,", 50) + "rope=own"})
	if err != nil {
		t.Fatal(err)
	}
	defer long.Close()
	if kernels := long.Info().Kernels; !strings.HasSuffix(kernels, "gemm=naive,rope=own") {
		t.Errorf("the kernels of a long list are %q: ranks could not compare its end", kernels)
	}
}

// TestClosing closes devices, streams, events and buffers in every order, and uses closed ones.
func TestClosing(t *testing.T) {
	cudatest.Use(t)
	parts := func() (d *Device, s device.Stream, e device.Event, b, host device.Buffer) {
		t.Helper()
		d, err := Open(Options{})
		if err != nil {
			t.Fatal(err)
		}
		var errs [4]error
		s, errs[0] = d.NewStream()
		e, errs[1] = d.NewEvent()
		b, errs[2] = d.Alloc(1000)
		host, errs[3] = d.AllocHost(1000)
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
		return d, s, e, b, host
	}
	for _, order := range [][]int{{0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {2, 0, 4, 1, 3}} {
		d, s, e, b, host := parts()
		x := tensor.Of(b.Pointer(), tensor.F32, 10)
		x.Where = tensor.CUDA
		if err := d.Fill(s, x, 1); err != nil { // work to wait for
			t.Fatal(err)
		}
		steps := []func(){d.Close, s.Close, e.Close, b.Free, host.Free}
		for range 2 {
			for _, i := range order {
				steps[i]()
			}
		}
		if d.d != nil || d.live != 0 {
			t.Errorf("order %v: %d objects still keep the GPU open", order, d.live)
		}
		_, noStream := d.NewStream()
		_, noEvent := d.NewEvent()
		_, noMemory := d.Alloc(1)
		for name, err := range map[string]error{"Fill": d.Fill(s, x, 1), "Sync": s.Sync(), "Record": s.Record(e),
			"Wait": s.Wait(e), "Event.Sync": e.Sync(),
			"NewStream": noStream, "NewEvent": noEvent, "Alloc": noMemory} {
			if status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), "closed") {
				t.Errorf("%s after Close: %v", name, err)
			}
		}
	}
}

func TestForeign(t *testing.T) {
	d, s, alloc := opened(t)
	_, other, _ := opened(t)
	host, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	alien, _ := host.NewStream()
	mark, _ := host.NewEvent()
	x := alloc(tensor.F32, 4)
	for name, err := range map[string]error{
		"no stream": d.Fill(nil, x, 1), "the CPU's stream": d.Fill(alien, x, 1),
		"another GPU's stream":     d.Fill(other, x, 1),
		"Copy on another's stream": d.Copy(other, x, x), "no event": s.Wait(nil), "the CPU's event": s.Record(mark),
		"Alloc of -1": func() error { _, err := d.Alloc(-1); return err }(),
	} {
		if status.Of(err) != status.InvalidArgument {
			t.Errorf("%s: %v: want an error", name, err)
		}
	}
	if err := s.Sync(); err != nil {
		t.Errorf("after the errors: %v", err)
	}
}

// TestNoAllocation: a call allocates no Go memory, whatever its arguments.
func TestNoAllocation(t *testing.T) {
	d, s, alloc := opened(t)
	const n, heads, dim = 24, 2, 8
	x, w, rstd := alloc(tensor.BF16, n, dim), alloc(tensor.BF16, dim), alloc(tensor.F32, n)
	flat, qkv := alloc(tensor.F32, 100), alloc(tensor.BF16, n, heads, dim)
	a := &device.Attention{Q: qkv, K: qkv, V: qkv, Out: alloc(tensor.BF16, n, heads, dim),
		LSE: alloc(tensor.F32, n, heads), CuQ: []int64{0, 5, n}, CuK: []int64{0, 5, n}, KVHead: []int64{0, 1},
		Causal: true, Scale: 1,
		Window: &device.Window{Left: 3, Right: -1}}
	a.Workspace = alloc(tensor.U8, max(d.AttentionWorkspace(a, true), d.AttentionWorkspace(a, false), 1))
	grad := &device.AttentionGrad{Attention: *a, DOut: a.Out, DQ: alloc(tensor.BF16, n, heads, dim),
		DK: alloc(tensor.BF16, n, heads, dim), DV: alloc(tensor.BF16, n, heads, dim)}
	norm := &device.RMSNorm{X: x, W: w, Y: x, RStd: rstd}
	adam := &device.AdamW{W: flat, G: flat, M: flat, V: flat, Step: 1,
		Decay: []device.Range{{Lo: 0, Hi: 10}, {Lo: 20, Hi: 100}}}
	e, err := d.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	back := tensor.OfFloat32(make([]float32, 100), 100)
	calls := func() {
		for _, err := range []error{d.Fill(s, flat, 1), d.RMSNormForward(s, norm), d.AttentionForward(s, a),
			d.AttentionBackward(s, grad), d.AdamW(s, adam), d.Copy(s, flat, back), d.Copy(s, back, flat), s.Record(e),
			s.Wait(e), s.Sync()} {
			if err != nil {
				t.Fatal(err)
			}
		}
		if d.AttentionWorkspace(a, true) <= 0 {
			t.Fatal("no workspace")
		}
	}
	calls()
	if n := testing.AllocsPerRun(20, calls); n != 0 {
		t.Errorf("%v allocations for twelve calls, want none", n)
	}
}

// TestThreads uses a device in several goroutines, one after another, each on its own thread, and
// two devices in two goroutines at the same time.
func TestThreads(t *testing.T) {
	type rank struct {
		d *Device
		s device.Stream
		x tensor.Tensor
	}
	var ranks [2]rank
	for i := range ranks {
		d, s, alloc := opened(t)
		ranks[i] = rank{d, s, alloc(tensor.F32, 1000)}
	}
	for round := range 8 {
		var all sync.WaitGroup
		for _, r := range ranks {
			all.Go(func() {
				runtime.LockOSThread() // not unlocked, so the thread ends with the goroutine
				host := make([]float32, 1000)
				for _, err := range []error{r.d.Fill(r.s, r.x, float64(round)),
					r.d.Copy(r.s, tensor.OfFloat32(host, 1000), r.x), r.s.Sync()} {
					if err != nil {
						t.Error(err)
					}
				}
				if host[0] != float32(round) || host[999] != float32(round) {
					t.Errorf("round %d: %v, %v", round, host[0], host[999])
				}
			})
		}
		all.Wait()
	}
}

// TestAttentionLists: lists of wrong lengths, which the plug-in cannot check, are refused.
func TestAttentionLists(t *testing.T) {
	d, s, alloc := opened(t)
	good := device.Attention{Q: alloc(tensor.F32, 3, 2, 8), K: alloc(tensor.F32, 3, 1, 8),
		V: alloc(tensor.F32, 3, 1, 8), Out: alloc(tensor.F32, 3, 2, 8), LSE: alloc(tensor.F32, 3, 2),
		CuQ: []int64{0, 3}, CuK: []int64{0, 3}, Scale: 1}
	good.Workspace = alloc(tensor.U8, max(1, d.AttentionWorkspace(&good, false)))
	if err := d.AttentionForward(s, &good); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(a *device.Attention){
		"no documents":         func(a *device.Attention) { a.CuQ, a.CuK = nil, nil },
		"empty documents":      func(a *device.Attention) { a.CuQ, a.CuK = []int64{}, []int64{} },
		"other documents":      func(a *device.Attention) { a.CuK = []int64{0, 1, 3} },
		"key heads too few":    func(a *device.Attention) { a.KVHead = []int64{0} },
		"key heads, but empty": func(a *device.Attention) { a.KVHead = []int64{} },
	} {
		a := good
		change(&a)
		for pass, err := range map[string]error{"forward": d.AttentionForward(s, &a),
			"backward": d.AttentionBackward(s,
				&device.AttentionGrad{Attention: a, DOut: a.Out, DQ: a.Q, DK: a.K, DV: a.V})} {
			if status.Of(err) != status.InvalidArgument {
				t.Errorf("%s, %s: %v: want an error", name, pass, err)
			}
		}
	}
}
