package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// open returns a device that is closed at the end of the test.
func open(t testing.TB, isa string, workers int) *Device {
	d, err := New(Options{Workers: workers, ISA: isa})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d.(*Device)
}

// floats returns device memory with normal variates. The seed is the size.
func floats(t testing.TB, d *Device, n int64) []float32 {
	b, err := d.Alloc(4 * n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Free)
	x := unsafe.Slice((*float32)(b.Pointer()), n)
	r := rand.New(rand.NewPCG(uint64(n), 1))
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// view returns a matrix [rows, columns] in x with row stride ld, or, if it is transposed, with
// contiguous columns and column stride ld.
func view(x []float32, rows, columns, ld int64, transposed bool) tensor.Tensor {
	t := tensor.OfFloat32(x, rows, columns)
	t.Stride[0], t.Stride[1] = ld, 1
	if transposed {
		t.Stride[0], t.Stride[1] = 1, ld
	}
	return t
}

func at(t tensor.Tensor, i, j int64) *float32 {
	return (*float32)(unsafe.Add(t.Data, 4*(i*t.Stride[0]+j*t.Stride[1])))
}

func TestGemm(t *testing.T) {
	sizes := [][3]int64{{1, 1, 1}, {1, 5, 3}, {5, 1, 7}, {3, 33, 0}, {12, 32, 256}, {13, 31, 257}, {64, 64, 64},
		{17, 96, 50}, {33, 16, 128}, {65, 17, 300}, {2, 700, 20},
		{250, 130, 70}, {9, 515, 513}, {400, 48, 9}}
	for _, isa := range ISAs() {
		d := open(t, isa, 2)
		for _, s := range sizes {
			for mode := range 12 {
				m, n, k := s[0], s[1], s[2]
				ta, tb, epilogue := mode&1 == 1, mode&2 == 2, mode/4
				lda, ldb := k+3, n+5
				if ta {
					lda = m + 3
				}
				if tb {
					ldb = k + 5
				}
				a := view(floats(t, d, (max(m, k)+1)*(lda+1)), m, k, lda, ta)
				b := view(floats(t, d, (max(n, k)+1)*(ldb+1)), k, n, ldb, tb)
				raw := floats(t, d, m*(n+7)+1)
				c := view(raw, m, n, n+7, false)
				before := append([]float32(nil), raw...)
				g := device.Gemm{A: a, B: b, C: c, Accumulate: epilogue == 1}
				bias := floats(t, d, n)
				if epilogue == 2 {
					g.Bias = tensor.OfFloat32(bias, n)
				}
				if err := d.Gemm(nil, &g); err != nil {
					t.Fatal(err)
				}
				worst, top := 0.0, 1e-30
				for i := range m {
					for j := range n {
						want := 0.0
						for q := range k {
							want += float64(*at(a, i, q)) * float64(*at(b, q, j))
						}
						switch epilogue {
						case 1:
							want += float64(before[i*(n+7)+j])
						case 2:
							want += float64(bias[j])
						}
						e := math.Abs(want - float64(*at(c, i, j)))
						if !(e <= worst) {
							worst = e
						}
						top = max(top, math.Abs(want))
					}
					for j := n; j < n+7; j++ {
						if raw[i*(n+7)+j] != before[i*(n+7)+j] {
							t.Fatalf("%s %v mode %d: wrote beyond row %d", isa, s, mode, i)
						}
					}
				}
				if !(worst/top <= 1e-6) {
					t.Errorf("%s [%d %d %d] mode %d: error %g", isa, m, n, k, mode, worst/top)
				}
			}
		}
	}
}

// A small product without packing is bitwise equal to one that is packed because its rows are far
// apart.
func TestGemmDirect(t *testing.T) {
	const m, n, k, far = 50, 48, 70, 300
	for _, isa := range ISAs() {
		d := open(t, isa, 1)
		for mode := range 3 { // plain, accumulate, bias
			var want []float32
			for _, gap := range []int64{0, far} {
				a, b := view(floats(t, d, m*(k+gap)), m, k, k+gap, false),
					view(floats(t, d, k*(n+gap)), k, n, n+gap, false)
				for i, x := range []tensor.Tensor{a, b} { // the same values whatever the gap
					for r := range x.Shape[0] {
						for c := range x.Shape[1] {
							*at(x, r, c) = float32(math.Sin(float64(i) + 0.37*float64(r*x.Shape[1]+c)))
						}
					}
				}
				c := floats(t, d, m*n)
				g := device.Gemm{A: a, B: b, C: tensor.OfFloat32(c, m, n), Accumulate: mode == 1}
				if mode == 2 {
					g.Bias = tensor.OfFloat32(floats(t, d, n), n)
				}
				if err := d.Gemm(nil, &g); err != nil {
					t.Fatal(err)
				}
				if want == nil {
					want = append(want, c...)
				}
				for i, x := range c {
					if x != want[i] {
						t.Fatalf("%s mode %d: c[%d] = %g packed, %g in place", isa, mode, i, x, want[i])
					}
				}
			}
		}
	}
}

// gemmTypes are the types of A and B, and of C.
var gemmTypes = [][2]tensor.DType{{tensor.F32, tensor.F32}, {tensor.BF16, tensor.F32}, {tensor.BF16, tensor.BF16}}

// normal returns a dense matrix of normal variates in a type.
func normal(t testing.TB, d *Device, dtype tensor.DType, rows, columns int64) tensor.Tensor {
	x := tensor.OfFloat32(floats(t, d, rows*columns), rows, columns)
	if dtype == tensor.F32 {
		return x
	}
	b, err := d.Alloc(2 * rows * columns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Free)
	low := tensor.Of(b.Pointer(), dtype, rows, columns)
	for i, f := range x.Float32s() {
		unsafe.Slice((*uint16)(low.Data), rows*columns)[i] = tensor.F32ToBF16(f)
	}
	return low
}

// elements returns the elements of a dense matrix.
func elements(x tensor.Tensor) []float32 {
	if x.DType == tensor.F32 {
		return slices.Clone(x.Float32s())
	}
	v := make([]float32, x.Numel())
	for i, b := range unsafe.Slice((*uint16)(x.Data), x.Numel()) {
		v[i] = tensor.BF16ToF32(b)
	}
	return v
}

// Results are bitwise equal for any number of workers, although the blocks of tasks differ. A NaN
// affects its row and no other.
func TestGemmWorkers(t *testing.T) {
	const m, n, k = 401, 330, 1101
	for _, isa := range ISAs() {
		for _, types := range gemmTypes {
			var want []float32
			for _, w := range []int{1, 2, 3, 7} {
				d := open(t, isa, w)
				a, b, c := normal(t, d, types[0], m, k), normal(t, d, types[0], k, n), normal(t, d, types[1], m, n)
				if types[0] == tensor.F32 {
					a.Float32s()[5*k+k-1] = float32(math.NaN())
				} else {
					unsafe.Slice((*uint16)(a.Data), m*k)[5*k+k-1] = 0x7fc0
				}
				if err := d.Gemm(nil, &device.Gemm{A: a, B: b, C: c, Accumulate: true}); err != nil {
					t.Fatal(err)
				}
				got := elements(c)
				if want == nil {
					want = got
				}
				for i, x := range got {
					if isNaN := x != x; isNaN != (i/n == 5) || !isNaN && x != want[i] {
						t.Fatalf("%s, %v, %d workers: c[%d] = %g, want %g", isa, types, w, i, x, want[i])
					}
				}
			}
		}
	}
}

// The product of some rows of A and columns of B is bitwise equal to these elements of the whole
// product.
func TestGemmRows(t *testing.T) {
	const m, n, k = 401, 330, 1101
	for _, isa := range ISAs() {
		d := open(t, isa, 2)
		for _, types := range gemmTypes {
			a, b, whole := normal(t, d, types[0], m, k), normal(t, d, types[0], k, n), normal(t, d, types[1], m, n)
			if err := d.Gemm(nil, &device.Gemm{A: a, B: b, C: whole}); err != nil {
				t.Fatal(err)
			}
			want := elements(whole)
			for _, z := range [][4]int64{{0, 1, 0, n}, {7, 20, 0, n}, {200, 401, 3, 260}, {0, m, 17, 18}} {
				block := normal(t, d, types[1], z[1]-z[0], z[3]-z[2])
				if err := d.Gemm(nil,
					&device.Gemm{A: a.Slice(0, z[0], z[1]), B: b.Slice(1, z[2], z[3]), C: block}); err != nil {
					t.Fatal(err)
				}
				for i, x := range elements(block) {
					if w := want[(z[0]+int64(i)/block.Shape[1])*n+z[2]+int64(i)%block.Shape[1]]; x != w {
						t.Fatalf("%s, %v: element %d of rows and columns %v is %g alone, %g in the whole", isa, types,
							i, z, x, w)
					}
				}
			}
		}
	}
}

// C in BF16 is C in F32 rounded once, for any number of chunks.
func TestGemmRounds(t *testing.T) {
	for _, isa := range ISAs() {
		d := open(t, isa, 2)
		for _, z := range [][3]int64{{37, 50, 0}, {5, 70, 1}, {37, 50, 255}, {401, 330, 512}, {401, 330, 1101}} {
			m, n, k := z[0], z[1], z[2]
			a, b, bias := normal(t, d, tensor.BF16, m, k), normal(t, d, tensor.BF16, k, n),
				normal(t, d, tensor.BF16, 1, n).Select(0, 0)
			wide, low := normal(t, d, tensor.F32, m, n), normal(t, d, tensor.BF16, m, n)
			for _, c := range []tensor.Tensor{wide, low} {
				if err := d.Gemm(nil, &device.Gemm{A: a, B: b, C: c, Bias: bias}); err != nil {
					t.Fatal(err)
				}
			}
			got := elements(low)
			for i, x := range elements(wide) {
				if want := tensor.BF16ToF32(tensor.F32ToBF16(x)); got[i] != want {
					t.Fatalf("%s %v: c[%d] = %g, want %g of %g", isa, z, i, got[i], want, x)
				}
			}
		}
	}
}

func TestGemmRefuses(t *testing.T) {
	d := open(t, "", 1)
	x := floats(t, d, 100)
	a := view(x, 4, 4, 9, false)
	a.Stride[1] = 2
	ok, low := view(x, 4, 4, 4, false), normal(t, d, tensor.BF16, 4, 4)
	for i, g := range []device.Gemm{{A: a, B: ok, C: ok}, {A: ok, B: view(x, 5, 4, 4, false), C: ok},
		{A: ok, B: ok, C: view(x, 4, 4, 4, true)},
		{A: ok, B: ok, C: ok, Bias: tensor.OfFloat32(x, 4), Accumulate: true}, {A: ok, B: low, C: ok},
		{A: ok, B: ok, C: low},
		{A: low, B: low, C: low, Bias: tensor.OfFloat32(x, 4)}} {
		if d.Gemm(nil, &g) == nil {
			t.Errorf("case %d was not refused", i)
		}
	}
}

// best runs some functions alternately for the time of the benchmark. It returns the shortest time
// and the shortest processor time of each, in seconds. The processor time divided by the number of
// workers is the time on an idle machine, because it does not include other processes.
func best(b *testing.B, f ...func() error) (wall, cpu []float64) {
	wall, cpu = make([]float64, len(f)), make([]float64, len(f))
	for b.Loop() {
		for i := range f {
			start, used := time.Now(), processorTime()
			if err := f[i](); err != nil {
				b.Fatal(err)
			}
			if s := time.Since(start).Seconds(); wall[i] == 0 || s < wall[i] {
				wall[i] = s
			}
			if s := processorTime() - used; cpu[i] == 0 || s < cpu[i] {
				cpu[i] = s
			}
		}
	}
	return wall, cpu
}

func processorTime() float64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// BenchmarkGemm reports the best rate and its share of the measured peak. The three products of a
// linear layer: y = x·Wᵀ, dx = dy·W, dW += dyᵀ·x, in F32 and in BF16, where dW is F32.
func BenchmarkGemm(b *testing.B) {
	for _, isa := range ISAs()[:max(1, len(ISAs())-1)] {
		for _, workers := range []int{1, 2} {
			for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
				peak, _ := PeakFMA(workers, isa)
				if dtype == tensor.BF16 {
					peak, _ = PeakDot(workers, isa)
				}
				for _, s := range [][3]int64{{2048, 2048, 2048}, {512, 256, 256}, {2048, 192, 192}, {512, 1024, 256},
					{2048, 256, 1024}} {
					for kind, name := range []string{"y", "dx", "dW"} {
						b.Run(fmt.Sprintf("%s/%v/%d/%dx%dx%d/%s", isa, dtype, workers, s[0], s[1], s[2], name),
							func(b *testing.B) {
								d := open(b, isa, workers)
								T, N, K := s[0], s[1], s[2]
								x, w, y, dw := normal(b, d, dtype, T, K), normal(b, d, dtype, N, K),
									normal(b, d, dtype, T, N), normal(b, d, tensor.F32, N, K)
								g := []device.Gemm{{A: x, B: w.Permute(1, 0), C: y}, {A: y, B: w, C: x},
									{A: y.Permute(1, 0), B: x, C: dw, Accumulate: true}}[kind]
								wall, cpu := best(b, func() error { return d.Gemm(nil, &g) })
								flops := 2e-9 * float64(T) * float64(N) * float64(K)
								r := flops / wall[0]
								b.ReportMetric(r, "GF/s")
								b.ReportMetric(r/peak, "ofpeak")
								b.ReportMetric(flops/cpu[0]*float64(workers)/peak, "ofpeak/cpu")
							})
					}
				}
			}
		}
	}
}
