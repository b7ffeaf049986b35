package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"testing"
	"unsafe"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/conformance"
	"ulysses/testkit/cudatest"
)

// bench is a device with a stream, and memory that is freed at the end of the test.
type bench struct {
	t *testing.T
	d *Device
	s *stream
}

func newBench(t *testing.T) *bench {
	t.Helper()
	cudatest.Use(t)
	d, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	s, err := d.newStream(forCompute)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return &bench{t, d, s}
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// host returns bytes as a tensor in host memory.
func host(x []byte, d tensor.DType, shape ...int64) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(x)), d, shape...)
}

// put returns device memory with the content x, `shift` bytes from an aligned address.
func (b *bench) put(x []byte, shift int64, d tensor.DType, shape ...int64) tensor.Tensor {
	b.t.Helper()
	memory, err := b.d.Alloc(shift + int64(len(x)) + 1)
	b.must(err)
	b.t.Cleanup(memory.Free)
	t := tensor.Of(unsafe.Add(memory.Pointer(), shift), d, shape...)
	t.Where = tensor.CUDA
	b.must(b.d.Copy(b.s, t, host(x, d, shape...)))
	return t
}

// get returns the content of dense device memory.
func (b *bench) get(x tensor.Tensor) []byte {
	b.t.Helper()
	y := make([]byte, x.Bytes())
	b.must(b.d.Copy(b.s, host(y, x.DType, x.Dims()...), x))
	b.must(b.s.Sync())
	return y
}

// TestWideIndices runs kernels in the variant for 2^31 elements and more, whose indices are divided
// in 64 bits.
func TestWideIndices(t *testing.T) {
	logLaunches(t)
	b := newBench(t)
	if !b.d.Details().Emulated {
		t.Skip("SKIPPED: only the emulated plug-in can use 64-bit indices for small arrays")
	}
	t.Setenv("ULYSSES_EMULATED_WIDE", "1")
	conformance.RunSome(t, opener(Options{}), "Copy", "Cast", "Fill", "Add", "Rope", "SwiGLU", "Embedding",
		"GatedRMSNorm", "SigmoidGate", "DeltaGates")
	conformance.RunAligned(t, opener(Options{}), "Copy", "Add", "SwiGLU", "SigmoidGate")
}

// TestCopyInPieces copies host memory that must be converted or scattered and is larger than the
// scratch of a stream.
func TestCopyInPieces(t *testing.T) {
	b := newBench(t)
	shape := []int64{5, 700, 120}
	if !b.d.Details().Emulated { // a GPU has larger scratch
		shape[1] *= 64
	}
	n := shape[0] * shape[1] * shape[2]
	x, want := make([]byte, 4*n), make([]byte, 2*n)
	for i := range n {
		v := float32(i%65521) * 0.37
		binary.LittleEndian.PutUint32(x[4*i:], math.Float32bits(v))
		binary.LittleEndian.PutUint16(want[2*i:], tensor.F32ToBF16(v))
	}
	memory, err := b.d.Alloc(2 * n)
	b.must(err)
	defer memory.Free()
	dense := tensor.Of(memory.Pointer(), tensor.BF16, n)
	dense.Where = tensor.CUDA
	scattered := dense.View(shape[1], shape[2], shape[0]).Permute(2, 0, 1)
	for _, there := range []tensor.Tensor{dense.View(shape...), scattered} {
		b.must(b.d.Fill(b.s, dense, math.NaN()))
		b.must(b.d.Copy(b.s, there, host(x, tensor.F32, shape...)))
		back, wide := make([]byte, 2*n), make([]byte, 4*n)
		b.must(b.d.Copy(b.s, host(back, tensor.BF16, shape...), there))
		b.must(b.d.Copy(b.s, host(wide, tensor.F32, shape...), there))
		b.must(b.s.Sync())
		for i := range n {
			w := binary.LittleEndian.Uint16(want[2*i:])
			g, f := binary.LittleEndian.Uint16(back[2*i:]), binary.LittleEndian.Uint32(wide[4*i:])
			if g != w || f != uint32(w)<<16 {
				t.Fatalf("element %d of %v is %#x and %#x, want %#x", i, there, g, f, w)
			}
		}
	}
}

// TestMisaligned: misaligned addresses are refused with a message, because a misaligned access ends
// all work of the process on the GPU.
func TestMisaligned(t *testing.T) {
	b := newBench(t)
	view := func(d tensor.DType, shift int64, shape ...int64) tensor.Tensor {
		memory, err := b.d.Alloc(1024)
		b.must(err)
		t.Cleanup(memory.Free)
		x := tensor.Of(unsafe.Add(memory.Pointer(), shift), d, shape...)
		x.Where = tensor.CUDA
		return x
	}
	f32, bf16 := view(tensor.F32, 0, 4, 4), view(tensor.BF16, 0, 4, 4)
	odd32, odd16 := view(tensor.F32, 2, 4, 4), view(tensor.BF16, 1, 4, 4)
	l := &commStream{d: b.d, s: b.s}
	for name, err := range map[string]error{
		"Fill":    b.d.Fill(b.s, odd32, 1),
		"Add":     b.d.Add(b.s, bf16, odd16, bf16),
		"Copy":    b.d.Copy(b.s, odd32, f32),
		"cast":    b.d.Copy(b.s, odd16, f32),
		"to host": b.d.Copy(b.s, host(make([]byte, 64), tensor.F32, 4, 4), odd32),
		"to GPU":  b.d.Copy(b.s, odd16, host(make([]byte, 32), tensor.BF16, 4, 4)),
		"Gemm A":  b.d.Gemm(b.s, &device.Gemm{A: odd32, B: f32, C: f32}),
		"Gemm C":  b.d.Gemm(b.s, &device.Gemm{A: bf16, B: bf16, C: odd16}),
		"RankSum": l.combine(address(f32.Data), []uintptr{address(f32.Data), address(odd32.Data)}, 4, tensor.F32,
			comm.Sum),
		"into odd": l.combine(address(odd16.Data), []uintptr{address(bf16.Data)}, 4, tensor.BF16, comm.Max),
	} {
		if status.Of(err) != status.InvalidArgument || !strings.Contains(fmt.Sprint(err), "multiple") {
			t.Errorf("%s: %v, want an error", name, err)
		}
	}
	b.must(b.d.Fill(b.s, odd32.Slice(0, 0, 0), 1)) // there are no elements
	b.must(b.s.Sync())
}

// TestFaults: errors that only a kernel can detect are returned by the next Sync, once. The stream
// remains usable.
func TestFaults(t *testing.T) {
	b := newBench(t)
	table := b.put(make([]byte, 4*4*3), 0, tensor.F32, 4, 3)
	y := b.put(make([]byte, 4*2*3), 0, tensor.F32, 2, 3)
	ids := func(x ...int32) tensor.Tensor {
		var p []byte
		for _, v := range x {
			p = binary.LittleEndian.AppendUint32(p, uint32(v))
		}
		return b.put(p, 0, tensor.I32, int64(len(x)))
	}
	nll := b.put(make([]byte, 8), 0, tensor.F32, 2)
	wrong, negative, right := ids(3, 1<<30), ids(-7, 0), ids(3, 0)
	for _, c := range []struct {
		want string
		run  func(x tensor.Tensor) error
		bad  tensor.Tensor
	}{
		{"cuda.EmbeddingForward: id 1073741824 of token 1", func(x tensor.Tensor) error {
			return b.d.EmbeddingForward(b.s, &device.Embedding{Table: table, IDs: x, Y: y})
		}, wrong},
		{"cuda.EmbeddingBackward: id -7 of token 0", func(x tensor.Tensor) error {
			return b.d.EmbeddingBackward(b.s, &device.EmbeddingGrad{DTable: table, IDs: x, DY: y})
		}, negative},
		{"cuda.CrossEntropy: target -7 of row 0", func(x tensor.Tensor) error {
			return b.d.CrossEntropy(b.s,
				&device.CrossEntropy{Logits: table.Slice(0, 0, 2).Slice(1, 0, 3), Targets: x, NLL: nll})
		}, negative},
		{"cuda.CrossEntropy: target 3 of row 1", func(x tensor.Tensor) error {
			return b.d.CrossEntropy(b.s, &device.CrossEntropy{Logits: table.Slice(0, 0, 2), Targets: x, NLL: nll})
		}, ids(0, 3)},
	} {
		b.must(c.run(c.bad))
		if err := b.s.Sync(); status.Of(err) != status.Internal || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("%v: want %q with status internal", err, c.want)
		}
		b.must(b.s.Sync())
	}
	b.must(b.d.EmbeddingForward(b.s, &device.Embedding{Table: table, IDs: right, Y: y}))
	b.must(b.s.Sync())
}

// summand is a type of elements, and its addition on the host.
type summand struct {
	dtype  tensor.DType
	encode func(p []byte, v float64)
	join   func(op comm.Op, a, b float64) float64 // a ∘ b as the type adds
	decode func(p []byte) float64
}

func joinFloats[T float32 | float64](op comm.Op, a, b float64) float64 {
	switch {
	case op == comm.Sum:
		return float64(T(a) + T(b))
	case math.IsNaN(a) || math.IsNaN(b):
		return math.NaN()
	case op == comm.Max:
		return max(a, b)
	}
	return min(a, b)
}

var summands = []summand{
	{tensor.F32, func(p []byte, v float64) { binary.LittleEndian.PutUint32(p, math.Float32bits(float32(v))) },
		joinFloats[float32],
		func(p []byte) float64 { return float64(math.Float32frombits(binary.LittleEndian.Uint32(p))) }},
	{tensor.BF16, func(p []byte, v float64) { binary.LittleEndian.PutUint16(p, tensor.F32ToBF16(float32(v))) },
		joinFloats[float32],
		func(p []byte) float64 { return float64(tensor.BF16ToF32(binary.LittleEndian.Uint16(p))) }},
	{tensor.F64, func(p []byte, v float64) { binary.LittleEndian.PutUint64(p, math.Float64bits(v)) },
		joinFloats[float64],
		func(p []byte) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(p)) }},
	{tensor.I32, func(p []byte, v float64) { binary.LittleEndian.PutUint32(p, uint32(int32(v*1000))) },
		joinFloats[float64],
		func(p []byte) float64 { return float64(int32(binary.LittleEndian.Uint32(p))) }},
	{tensor.I64, func(p []byte, v float64) { binary.LittleEndian.PutUint64(p, uint64(int64(v*1e9))) },
		joinFloats[float64],
		func(p []byte) float64 { return float64(int64(binary.LittleEndian.Uint64(p))) }},
}

// TestRankSum adds in rank order, into separate memory or into the memory of a rank.
func TestRankSum(t *testing.T) {
	logLaunches(t)
	b := newBench(t)
	l := &commStream{d: b.d, s: b.s}
	for _, c := range summands {
		float := c.dtype == tensor.F32 || c.dtype == tensor.BF16 || c.dtype == tensor.F64
		size := c.dtype.Size()
		for _, op := range []comm.Op{comm.Sum, comm.Max, comm.Min} {
			for _, ranks := range []int{1, 2, 3, 8} {
				for _, n := range []int64{1, 3, 64, 1003} {
					for _, into := range []int{-1, ranks - 1} { // the rank whose memory is dst
						shift := size * (n % 2) // odd lengths have odd addresses
						want := make([]float64, n)
						var src []uintptr
						var at []tensor.Tensor
						for r := range ranks {
							x := make([]byte, n*size)
							for i := range n {
								v := math.Sin(float64(i*7+int64(r)*13)) * float64(1+i%5)
								if float && i == 2 && r == ranks/2 {
									v = math.NaN()
								}
								c.encode(x[i*size:], v)
								if v = c.decode(x[i*size:]); r > 0 {
									v = c.join(op, want[i], v)
								}
								want[i] = v
							}
							at = append(at, b.put(x, shift, c.dtype, n))
							src = append(src, address(at[r].Data))
						}
						dst := b.put(make([]byte, n*size), shift, c.dtype, n)
						if into >= 0 && ranks > 1 {
							dst = at[into]
						}
						b.must(l.combine(address(dst.Data), src, n, c.dtype, op))
						got := b.get(dst)
						for i := range n {
							p := make([]byte, 8)
							if c.dtype == tensor.BF16 { // rounded once, at the end
								c.encode(p, want[i])
								want[i] = c.decode(p)
							}
							if g := c.decode(got[i*size:]); g != want[i] && !(g != g && want[i] != want[i]) {
								t.Fatalf("%v, operation %d of %d ranks: element %d of %d is %v, want %v", c.dtype, op,
									ranks, i, n, g, want[i])
							}
						}
					}
				}
			}
		}
	}
	if err := l.combine(8, []uintptr{8, 8}, 1, tensor.F16, comm.Sum); status.Of(err) != status.Unsupported {
		t.Errorf("a sum in F16: %v, want an error that names the type", err)
	}
}
