package cuda

import (
	"testing"

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
	o := &delta{rule: device.GatedDelta{Q: k, K: k, V: v, Out: alloc(low, t, h, dv), G: g, Beta: g, Cu: cu, KeyHead: []int64{0, 1}, L2Norm: true, Scale: 1,
		StateOut: alloc(wide, 1, h, dk, dv)}}
	sizes := d.GatedDeltaSizes(&o.rule)
	o.rule.Saved, o.rule.Workspace = alloc(tensor.U8, max(sizes.Saved, 1)), alloc(tensor.U8, max(sizes.Forward, sizes.Backward, sizes.State, 1))
	o.grad = device.GatedDeltaGrad{GatedDelta: o.rule, DOut: v, DQ: alloc(low, t, hk, dk), DK: alloc(low, t, hk, dk), DV: alloc(low, t, h, dv), DG: alloc(wide, t, h),
		DBeta: alloc(wide, t, h)}
	o.state = device.DeltaState{K: k, V: v, G: g, Beta: g, KeyHead: o.rule.KeyHead, L2Norm: true, State: alloc(wide, h, dk, dv), Transition: alloc(wide, h, dk, dk),
		Workspace: o.rule.Workspace}
	o.back = device.DeltaStateGrad{Q: k, K: k, G: g, Beta: g, DOut: v, KeyHead: o.rule.KeyHead, L2Norm: true, Scale: 1, DState: alloc(wide, h, dk, dv), Workspace: o.rule.Workspace}
	o.fold = device.DeltaFold{M: o.state.Transition, X: o.state.State, E: o.back.DState, Y: o.back.DState}
	o.gates = device.DeltaGates{A: heads, B: heads, ALog: few, DtBias: alloc(low, h), G: o.grad.DG, Beta: o.grad.DBeta}
	o.dgate = device.DeltaGatesGrad{A: heads, B: heads, ALog: few, DtBias: o.gates.DtBias, DG: g, DBeta: g, DA: alloc(low, t, h), DB: alloc(low, t, h), DALog: alloc(wide, h),
		DDtBias: alloc(wide, h)}
	o.conv = device.Conv1d{X: x, Y: alloc(low, t, h*dv), W: alloc(low, h*dv, width), Before: alloc(low, width-1, h*dv), Cu: cu}
	o.dconv = device.Conv1dGrad{Conv1d: o.conv, DY: o.conv.Y, DX: o.conv.Y, DW: alloc(wide, h*dv, width), DBefore: alloc(low, width-1, h*dv)}
	o.norm = device.GatedRMSNorm{X: v, Gate: v, Y: o.rule.Out, W: w, RStd: alloc(wide, t, h), Eps: 1e-6}
	o.dnorm = device.GatedRMSNormGrad{X: v, Gate: v, W: w, RStd: o.norm.RStd, DY: v, DX: o.rule.Out, DGate: alloc(low, t, h, dv), DW: alloc(wide, dv)}
	o.sigma = device.SigmoidGate{X: v, Gate: v, Y: o.rule.Out}
	o.dsigm = device.SigmoidGateGrad{X: v, Gate: v, DY: v, DX: o.rule.Out, DGate: o.dnorm.DGate}
	return o
}

// TestDeltaNoAllocation: calls of linear attention allocate nothing.
func TestDeltaNoAllocation(t *testing.T) {
	d, s, alloc := opened(t)
	o := newDelta(d, alloc)
	calls := func() {
		for i, err := range [...]error{d.GatedDeltaForward(s, &o.rule), d.GatedDeltaBackward(s, &o.grad), d.DeltaState(s, &o.state), d.DeltaStateGrad(s, &o.back),
			d.DeltaFold(s, &o.fold), d.DeltaGatesForward(s, &o.gates), d.DeltaGatesBackward(s, &o.dgate), d.Conv1dForward(s, &o.conv), d.Conv1dBackward(s, &o.dconv),
			d.GatedRMSNormForward(s, &o.norm), d.GatedRMSNormBackward(s, &o.dnorm), d.SigmoidGateForward(s, &o.sigma), d.SigmoidGateBackward(s, &o.dsigm), s.Sync()} {
			if err != nil {
				t.Fatalf("call %d: %v", i, err)
			}
		}
		if sizes := d.GatedDeltaSizes(&o.rule); sizes.Saved <= 0 || sizes.Forward <= 0 || sizes.Backward <= 0 || sizes.State <= 0 {
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
