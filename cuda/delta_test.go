package cuda

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// delta has a small call of every operation of linear attention.
type delta struct {
	rule  device.GatedDelta
	grad  device.GatedDeltaGrad
	state device.DeltaState
	back  device.DeltaStateGrad
	fold  device.DeltaFold
	gates device.DeltaGates
	dgate device.DeltaGatesGrad
	conv  device.Conv1d
	dconv device.Conv1dGrad
	norm  device.GatedRMSNorm
	dnorm device.GatedRMSNormGrad
	sigma device.SigmoidGate
	dsigm device.SigmoidGateGrad
}

func newDelta(d *Device, alloc func(tensor.DType, ...int64) tensor.Tensor) *delta {
	const t, hk, h, dk, dv, width = 20, 2, 2, 16, 8, 4
	low, wide := tensor.BF16, tensor.F32
	k, v, g := alloc(low, t, hk, dk), alloc(low, t, h, dv), alloc(wide, t, h)
	x, w := alloc(low, t, h*dv), alloc(low, dv)
	heads, few := alloc(low, t, h), alloc(wide, h)
	cu := []int64{0, 13, t}
	o := &delta{rule: device.GatedDelta{Q: k, K: k, V: v, Out: alloc(low, t, h, dv), G: g, Beta: g, Cu: cu,
		KeyHead: []int64{0, 1}, L2Norm: true, Scale: 1,
		StateOut: alloc(wide, 1, h, dk, dv)}}
	sizes := d.GatedDeltaSizes(&o.rule)
	o.rule.Saved, o.rule.Workspace = alloc(tensor.U8, max(sizes.Saved, 1)),
		alloc(tensor.U8, max(sizes.Forward, sizes.Backward, sizes.State, 1))
	o.grad = device.GatedDeltaGrad{GatedDelta: o.rule, DOut: v, DQ: alloc(low, t, hk, dk), DK: alloc(low, t, hk, dk),
		DV: alloc(low, t, h, dv), DG: alloc(wide, t, h),
		DBeta: alloc(wide, t, h)}
	o.state = device.DeltaState{K: k, V: v, G: g, Beta: g, KeyHead: o.rule.KeyHead, L2Norm: true,
		State: alloc(wide, h, dk, dv), Transition: alloc(wide, h, dk, dk),
		Workspace: o.rule.Workspace}
	o.back = device.DeltaStateGrad{Q: k, K: k, G: g, Beta: g, DOut: v, KeyHead: o.rule.KeyHead, L2Norm: true, Scale: 1,
		DState: alloc(wide, h, dk, dv), Workspace: o.rule.Workspace}
	o.fold = device.DeltaFold{M: o.state.Transition, X: o.state.State, E: o.back.DState, Y: o.back.DState}
	o.gates = device.DeltaGates{A: heads, B: heads, ALog: few, DtBias: alloc(low, h), G: o.grad.DG, Beta: o.grad.DBeta}
	o.dgate = device.DeltaGatesGrad{A: heads, B: heads, ALog: few, DtBias: o.gates.DtBias, DG: g, DBeta: g,
		DA: alloc(low, t, h), DB: alloc(low, t, h), DALog: alloc(wide, h),
		DDtBias: alloc(wide, h)}
	o.conv = device.Conv1d{X: x, Y: alloc(low, t, h*dv), W: alloc(low, h*dv, width),
		Before: alloc(low, width-1, h*dv), Cu: cu}
	o.dconv = device.Conv1dGrad{Conv1d: o.conv, DY: o.conv.Y, DX: o.conv.Y, DW: alloc(wide, h*dv, width),
		DBefore: alloc(low, width-1, h*dv)}
	o.norm = device.GatedRMSNorm{X: v, Gate: v, Y: o.rule.Out, W: w, RStd: alloc(wide, t, h), Eps: 1e-6}
	o.dnorm = device.GatedRMSNormGrad{X: v, Gate: v, W: w, RStd: o.norm.RStd, DY: v, DX: o.rule.Out,
		DGate: alloc(low, t, h, dv), DW: alloc(wide, dv)}
	o.sigma = device.SigmoidGate{X: v, Gate: v, Y: o.rule.Out}
	o.dsigm = device.SigmoidGateGrad{X: v, Gate: v, DY: v, DX: o.rule.Out, DGate: o.dnorm.DGate}
	return o
}

// TestDeltaNoAllocation: calls of linear attention allocate nothing.
func TestDeltaNoAllocation(t *testing.T) {
	d, s, alloc := opened(t)
	o := newDelta(d, alloc)
	calls := func() {
		for i, err := range [...]error{d.GatedDeltaForward(s, &o.rule), d.GatedDeltaBackward(s, &o.grad),
			d.DeltaState(s, &o.state), d.DeltaStateGrad(s, &o.back), d.DeltaFold(s, &o.fold),
			d.DeltaGatesForward(s, &o.gates), d.DeltaGatesBackward(s, &o.dgate), d.Conv1dForward(s, &o.conv),
			d.Conv1dBackward(s, &o.dconv), d.GatedRMSNormForward(s, &o.norm), d.GatedRMSNormBackward(s, &o.dnorm),
			d.SigmoidGateForward(s, &o.sigma),
			d.SigmoidGateBackward(s, &o.dsigm), s.Sync()} {
			if err != nil {
				t.Fatalf("call %d: %v", i, err)
			}
		}
		if sizes := d.GatedDeltaSizes(&o.rule); sizes.Saved <= 0 || sizes.Forward <= 0 || sizes.Backward <= 0 ||
			sizes.State <= 0 {
			t.Fatalf("sizes %+v", sizes)
		}
	}
	calls()
	if n := testing.AllocsPerRun(2, calls); n != 0 {
		t.Errorf("%v allocations for fifteen calls, want none", n)
	}
}

// TestDeltaLists: lists of wrong lengths, which the plug-in cannot check, are refused.
func TestDeltaLists(t *testing.T) {
	d, s, alloc := opened(t)
	good := newDelta(d, alloc)
	refused := func(name string, err error) {
		t.Helper()
		if status.Of(err) != status.InvalidArgument {
			t.Errorf("%s: %v: want an error", name, err)
		}
	}
	for name, change := range map[string]func(a *device.GatedDelta){
		"no documents":           func(a *device.GatedDelta) { a.Cu = nil },
		"empty documents":        func(a *device.GatedDelta) { a.Cu = []int64{} },
		"documents end early":    func(a *device.GatedDelta) { a.Cu = []int64{0, 13} },
		"documents go back":      func(a *device.GatedDelta) { a.Cu = []int64{0, 17, 13, 20} },
		"key heads too few":      func(a *device.GatedDelta) { a.KeyHead = []int64{0} },
		"key heads, but empty":   func(a *device.GatedDelta) { a.KeyHead = []int64{} },
		"key heads out of range": func(a *device.GatedDelta) { a.KeyHead = []int64{0, 2} },
		"key heads go back":      func(a *device.GatedDelta) { a.KeyHead = []int64{1, 0} },
	} {
		o := *good
		change(&o.rule)
		o.grad.Cu, o.grad.KeyHead, o.conv.Cu, o.dconv.Cu = o.rule.Cu, o.rule.KeyHead, o.rule.Cu, o.rule.Cu
		o.state.KeyHead, o.back.KeyHead = o.rule.KeyHead, o.rule.KeyHead
		refused(name+", forward", d.GatedDeltaForward(s, &o.rule))
		refused(name+", backward", d.GatedDeltaBackward(s, &o.grad))
		if len(o.rule.Cu) != 3 {
			refused(name+", convolution", d.Conv1dForward(s, &o.conv))
			refused(name+", convolution backward", d.Conv1dBackward(s, &o.dconv))
		} else {
			refused(name+", state", d.DeltaState(s, &o.state))
			refused(name+", way back", d.DeltaStateGrad(s, &o.back))
		}
	}
	if err := s.Sync(); err != nil {
		t.Error(err)
	}
}

// TestDeltaSegments: the sequence of a few heads is divided into segments, which changes bits but
// not values. A deterministic call, or any call on a deterministic device, is not divided and
// needs no memory for segments.
func TestDeltaSegments(t *testing.T) {
	const tokens, hv, dk, dv = 600, 2, 16, 16
	random := rand.New(rand.NewPCG(3, 4))
	values := func(n int64, f func() float64) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(f())
		}
		return x
	}
	q, k, v := values(tokens*dk, random.NormFloat64), values(tokens*dk, random.NormFloat64),
		values(tokens*hv*dv, random.NormFloat64)
	g, beta := values(tokens*hv, func() float64 { return -0.02 * random.Float64() }), values(tokens*hv, random.Float64)
	run := func(d *Device, s device.Stream, alloc func(tensor.DType, ...int64) tensor.Tensor, deterministic bool,
		panel int64) (bits []uint32, size device.DeltaSizes) {
		put := func(x []float32, shape ...int64) tensor.Tensor {
			y, from := alloc(tensor.F32, shape...), tensor.Of(unsafe.Pointer(&x[0]), tensor.F32, shape...)
			if err := d.Copy(s, y, from); err != nil {
				t.Fatal(err)
			}
			return y
		}
		a := &device.GatedDelta{Q: put(q, tokens, 1, dk), K: put(k, tokens, 1, dk), V: put(v, tokens, hv, dv),
			Out: alloc(tensor.F32, tokens, hv, dv), G: put(g, tokens, hv), Beta: put(beta, tokens, hv),
			Cu: []int64{0, tokens}, L2Norm: true, Scale: 1, Chunk: 16, Panel: panel, Deterministic: deterministic}
		size = d.GatedDeltaSizes(a)
		a.Saved, a.Workspace = alloc(tensor.U8, size.Saved), alloc(tensor.U8, max(size.Forward, size.Backward))
		if err := d.GatedDeltaForward(s, a); err != nil {
			t.Fatal(err)
		}
		y := &device.GatedDeltaGrad{GatedDelta: *a, DOut: a.V, DQ: alloc(tensor.F32, tokens, 1, dk),
			DK: alloc(tensor.F32, tokens, 1, dk), DV: alloc(tensor.F32, tokens, hv, dv),
			DG: alloc(tensor.F32, tokens, hv), DBeta: alloc(tensor.F32, tokens, hv)}
		if err := d.GatedDeltaBackward(s, y); err != nil {
			t.Fatal(err)
		}
		for _, x := range []tensor.Tensor{a.Out, y.DQ, y.DK, y.DV, y.DG, y.DBeta} {
			to := make([]uint32, x.Numel())
			if err := d.Copy(s, tensor.Of(unsafe.Pointer(&to[0]), tensor.F32, x.Dims()...), x); err != nil {
				t.Fatal(err)
			}
			if err := s.Sync(); err != nil {
				t.Fatal(err)
			}
			bits = append(bits, to...)
		}
		return bits, size
	}
	d, s, alloc := opened(t, Options{})
	if !d.Details().Emulated {
		t.Skip("SKIPPED: a GPU does not divide so short a sequence")
	}
	divided, size := run(d, s, alloc, false, 0)
	again, _ := run(d, s, alloc, false, 0)
	whole, small := run(d, s, alloc, true, 0)
	panels, less := run(d, s, alloc, true, 65)
	one, more := run(d, s, alloc, true, math.MaxInt64)
	exact, sExact, allocExact := opened(t)
	same, smallToo := run(exact, sExact, allocExact, false, 0)
	if !slices.Equal(divided, again) {
		t.Error("a second call has other bits")
	}
	if slices.Equal(divided, whole) {
		t.Error("the call is not divided into segments")
	}
	if !slices.Equal(whole, same) {
		t.Error("a deterministic device and a deterministic call differ in bits")
	}
	if small != smallToo || small.Saved >= size.Saved || small.Forward >= size.Forward ||
		small.Backward >= size.Backward {
		t.Errorf("%+v with segments, %+v and %+v without", size, small, smallToo)
	}
	if !slices.Equal(whole, panels) || !slices.Equal(whole, one) {
		t.Error("panels change bits of a deterministic call")
	}
	if less.Backward >= small.Backward || small.Backward >= more.Backward || less.Saved <= small.Saved ||
		small.Saved <= more.Saved {
		t.Errorf("panels of 64 tokens need %+v, of the default %+v, of all tokens %+v", less, small, more)
	}
	var most, largest float64
	for i := range whole {
		x := float64(math.Float32frombits(whole[i]))
		most, largest = max(most, math.Abs(x-float64(math.Float32frombits(divided[i])))), max(largest, math.Abs(x))
	}
	if !(most <= 2e-5*largest) {
		t.Errorf("segments change values by %g of %g", most, largest)
	}
}
