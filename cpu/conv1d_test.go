package cpu

import (
	"fmt"
	"math"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/near"
	"ulysses/testkit/ref"
)

// For a great width, blocks have fewer channels, as many as fit in the scratch. A width without any
// is refused.
func TestConv1dOfGreatWidth(t *testing.T) {
	d := open(t, "", 2)
	const tokens, channels, width = 9, 40, 3000
	x, y, w, before := floats(t, d, tokens*channels), floats(t, d, tokens*channels), floats(t, d, channels*width),
		floats(t, d, (width-1)*channels)
	for i := range w {
		w[i] = float32(math.Sin(float64(i * i)))
	}
	for i := range before {
		before[i] = float32(math.Cos(float64(i*i))) / 50
	}
	for i := range x {
		x[i] = float32(math.Sin(float64(i)))
	}
	a := device.Conv1d{X: tensor.OfFloat32(x, tokens, channels), Y: tensor.OfFloat32(y, tokens, channels),
		W: tensor.OfFloat32(w, channels, width), Before: tensor.OfFloat32(before, width-1, channels), Cu: cu(5, 4)}
	if err := d.Conv1dForward(nil, &a); err != nil {
		t.Fatal(err)
	}
	g := &ref.Conv1d{C: channels, Width: width, Cu: a.Cu}
	for i, want := range ref.Conv1dForward(g, wide(x), wide(w), wide(before)) {
		if !near.Value(t, fmt.Sprintf("y[%d]", i), y[i], want, 1e-5) {
			t.FailNow()
		}
	}
	dx, dw, dbefore := make([]float32, len(x)), make([]float32, len(w)), make([]float32, len(before))
	grad := device.Conv1dGrad{Conv1d: a, DY: a.X, DX: tensor.OfFloat32(dx, tokens, channels),
		DW:      tensor.OfFloat32(dw, channels, width),
		DBefore: tensor.OfFloat32(dbefore, width-1, channels)}
	if err := d.Conv1dBackward(nil, &grad); err != nil {
		t.Fatal(err)
	}
	dw64 := make([]float64, len(dw))
	dx64, dbefore64 := ref.Conv1dBackward(g, wide(x), wide(w), wide(before), wide(x), dw64)
	for _, r := range []struct {
		name string
		got  []float32
		want []float64
	}{{"dx", dx, dx64}, {"dw", dw, dw64}, {"dbefore", dbefore, dbefore64}} {
		for i, want := range r.want {
			if !(math.Abs(want-float64(r.got[i])) <= 1e-5) {
				t.Fatalf("%s[%d] = %v, want %v", r.name, i, r.got[i], want)
			}
		}
	}
	a.W, a.Before = tensor.OfFloat32(make([]float32, channels*4000), channels, 4000), tensor.Tensor{}
	if err := d.Conv1dForward(nil, &a); status.Of(err) != status.Unsupported {
		t.Errorf("width 4000: %v", err)
	}
}

// The operations around the gated delta rule do not allocate Go memory.
func TestNoAllocationOfSmallOperations(t *testing.T) {
	d := open(t, "", 2)
	f := func(shape ...int64) tensor.Tensor {
		n := int64(1)
		for _, m := range shape {
			n *= m
		}
		return tensor.OfFloat32(floats(t, d, n), shape...)
	}
	x, y, w, rows := f(70, 3, 40), f(70, 3, 40), f(40), f(70*3)
	conv := device.Conv1d{X: f(70, 120), Y: f(70, 120), W: f(120, 4), Before: f(3, 120), Cu: cu(30, 40)}
	convGrad := device.Conv1dGrad{Conv1d: conv, DY: f(70, 120), DX: f(70, 120), DW: f(120, 4), DBefore: f(3, 120)}
	a, b, h := f(70, 3), f(70, 3), f(3)
	gates := device.DeltaGates{A: a, B: b, ALog: h, DtBias: h, G: f(70, 3), Beta: f(70, 3)}
	gatesGrad := device.DeltaGatesGrad{A: a, B: b, ALog: h, DtBias: h, DG: gates.G, DBeta: gates.Beta, DA: a, DB: b,
		DALog: f(3), DDtBias: f(3)}
	norm := device.GatedRMSNorm{X: x, Gate: y, Y: x, W: w, RStd: rows, Eps: 1e-6}
	normGrad := device.GatedRMSNormGrad{X: x, Gate: y, W: w, RStd: rows, DY: f(70, 3, 40), DX: f(70, 3, 40), DGate: y,
		DW: f(40)}
	gate := device.SigmoidGate{X: x, Gate: y, Y: x}
	gateGrad := device.SigmoidGateGrad{X: x, Gate: y, DY: x, DX: x, DGate: y}
	n := testing.AllocsPerRun(20, func() {
		for _, err := range [...]error{
			d.Conv1dForward(nil, &conv), d.Conv1dBackward(nil, &convGrad), d.DeltaGatesForward(nil, &gates),
			d.DeltaGatesBackward(nil, &gatesGrad), d.GatedRMSNormForward(nil, &norm),
			d.GatedRMSNormBackward(nil, &normGrad), d.SigmoidGateForward(nil, &gate),
			d.SigmoidGateBackward(nil, &gateGrad),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	})
	if n > 0 {
		t.Errorf("%g allocations", n)
	}
}
