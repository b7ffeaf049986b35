package cpu

import (
	"math"
	"runtime"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// Denormals are zero in arithmetic, because a processor needs 100 times as long for them.
// Operations that move or add values keep them. After an operation the thread's floating-point mode
// is restored.
func TestDenormals(t *testing.T) {
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		t.Skip("the kernels treat denormals as zero on amd64 and arm64 only")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	tiny := float32(1e-40)
	for _, isa := range ISAs() {
		d := open(t, isa, 1)
		s, err := d.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		values := func(x ...float32) tensor.Tensor { return tensor.OfFloat32(x, int64(len(x))) }
		matrix := func(x float32) tensor.Tensor { return tensor.OfFloat32([]float32{x}, 1, 1) }
		one := func(name string, got tensor.Tensor, want float32, err error) {
			if x := got.Float32s()[0]; err != nil || x != want {
				t.Errorf("%s: %s is %g, want %g (%v)", isa, name, x, want, err)
			}
		}
		c := matrix(1)
		one("a product of denormals", c, 0, d.Gemm(s, &device.Gemm{A: matrix(tiny), B: matrix(1e30), C: c}))
		one("a product that is denormal", c, 0, d.Gemm(s, &device.Gemm{A: matrix(1e-20), B: matrix(1e-20), C: c}))
		m, v := values(tiny), values(tiny)
		one("a moment that decays", m, 0,
			d.AdamW(s, &device.AdamW{W: values(1), G: values(0), M: m, V: v, Beta1: 0.9, Beta2: 0.9, Eps: 1e-8,
				GradScale: 1, Step: 1}))
		dst := values(1)
		one("a copy", dst, tiny, d.Copy(s, dst, values(tiny)))
		one("a sum", dst, tiny+tiny, d.Add(s, dst, values(tiny), values(tiny)))
		sum, norm := matrix(1), matrix(1)
		err = d.AddRMSNorm(s, &device.AddRMSNorm{A: matrix(tiny), B: matrix(tiny), W: values(1), Sum: sum, Y: norm,
			RStd: values(0), Eps: 1})
		one("the sum before a norm", sum, tiny+tiny, err)
		one("the norm of a sum", norm, 0, err)
		if x := tiny * half(); x == 0 || math.IsNaN(float64(x)) {
			t.Errorf("%s: after an operation, half of %g is %g in Go", isa, tiny, x)
		}
	}
}

//go:noinline
func half() float32 { return 0.5 }
