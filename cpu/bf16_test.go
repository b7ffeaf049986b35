package cpu

import (
	"math"
	"testing"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

func ofBF16(x []uint16) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(x)), tensor.BF16, int64(len(x)))
}

// everyOther returns elements 0, 2, ... of x. Kernels process strided elements one by one.
func everyOther(x tensor.Tensor) tensor.Tensor {
	x.Shape[0], x.Stride[0] = x.Shape[0]/2, 2
	return x
}

// The kernels round and widen as package tensor does: all values of BF16, and the F32 values next
// to them and next to the ties between them, by vectors and one by one.
func TestRoundingOfBF16(t *testing.T) {
	const all = 1 << 16
	low := make([]uint16, all)
	var between []float32
	for i := range low {
		low[i] = uint16(i)
		for _, rest := range []uint32{0, 1, 0x7fff, 0x8000, 0x8001, 0xffff} {
			between = append(between, math.Float32frombits(uint32(i)<<16|rest))
		}
	}
	for _, isa := range ISAs() {
		t.Run(isa, func(t *testing.T) {
			d := open(t, isa, 2)
			try := func(err error) {
				if err != nil {
					t.Fatal(err)
				}
			}
			wide, apart := make([]float32, all), make([]float32, all)
			try(d.Copy(nil, tensor.OfFloat32(wide, all), ofBF16(low)))
			try(d.Copy(nil, everyOther(tensor.OfFloat32(apart, all)), everyOther(ofBF16(low))))
			for i, b := range low {
				want := uint32(b) << 16
				if got := math.Float32bits(wide[i]); got != want {
					t.Fatalf("%#04x widened is %#08x", b, got)
				}
				if got := math.Float32bits(apart[i]); i%2 == 0 && got != want {
					t.Fatalf("%#04x widened alone is %#08x", b, got)
				}
			}

			n := int64(len(between))
			rounded, alone := make([]uint16, n), make([]uint16, n)
			// with the shifts, each value is in a vector once, and the last values are not a whole
			// vector
			for shift := range int64(3) {
				x := tensor.OfFloat32(between, n).Slice(0, shift, n)
				try(d.Copy(nil, ofBF16(rounded[shift:]), x))
				try(d.Copy(nil, everyOther(ofBF16(alone[shift:])), everyOther(x)))
			}
			for i, f := range between {
				want := tensor.F32ToBF16(f)
				if rounded[i] != want || i+2 < len(between) && alone[i] != want {
					t.Fatalf("%#08x rounded is %#04x, alone %#04x, want %#04x", math.Float32bits(f), rounded[i],
						alone[i], want)
				}
			}

			sum, addend := make([]uint16, all-1), make([]uint16, all-1)
			for _, b := range []float32{float32(math.Copysign(0, -1)), 1, -1.0 / 256, 1.5 / (1 << 126), -3e38,
				float32(math.Inf(1))} {
				for i := range addend {
					addend[i] = tensor.F32ToBF16(b)
				}
				try(d.Add(nil, ofBF16(sum), ofBF16(low[1:]), ofBF16(addend)))
				for i, a := range low[1:] {
					if want := tensor.F32ToBF16(tensor.BF16ToF32(a) + tensor.BF16ToF32(addend[i])); sum[i] != want {
						t.Fatalf("%#04x + %v is %#04x, want %#04x", a, b, sum[i], want)
					}
				}
			}
		})
	}
}

// An instruction set that adds products of pairs to another set has bitwise equal results in F32,
// so ranks may mix the two sets (device.Info.KernelsIn). Results in BF16 differ.
func TestPairsDifferInBF16Alone(t *testing.T) {
	const m, n, k = 131, 95, 700
	c := attentionCase{cuQ: cu(300, 37), cuK: cu(300, 37), heads: 4, kvHeads: 2, d: 40, dv: 24, causal: true}
	for _, isa := range ISAs() {
		row, err := choose(isa)
		if err != nil || row.rest == nil {
			continue
		}
		lender := ""
		for i := range tables {
			if tables[i].kernels == row.rest {
				lender = tables[i].name
			}
		}
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			var product, heads [2]uint64
			var agreed [2]string
			for i, isa := range []string{isa, lender} {
				d := open(t, isa, 2)
				x := normal(t, d, tensor.F32, m, n)
				if err := d.Gemm(nil,
					&device.Gemm{A: normal(t, d, dtype, m, k), B: normal(t, d, dtype, k, n), C: x}); err != nil {
					t.Fatal(err)
				}
				g := c.typed(t, d, dtype)
				both(t, d, g)
				product[i], heads[i] = hash(x.View(m, n, 1)), hash(g.Out, g.DQ, g.DK, g.DV)
				agreed[i] = d.Info().KernelsIn(dtype)
			}
			same := dtype == tensor.F32
			if product[0] == product[1] != same || heads[0] == heads[1] != same || agreed[0] == agreed[1] != same {
				t.Errorf("%v on %s and %s: products %x, attention %x, kernels %q", dtype, isa, lender, product,
					heads, agreed)
			}
		}
	}
}
