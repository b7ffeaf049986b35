package fake

import (
	"slices"

	"ulysses/device"
	"ulysses/tensor"
)

// onHost are the tensors of a call as the CPU would be given them, to be measured.
func onHost(all ...*tensor.Tensor) {
	for _, t := range all {
		if !t.IsNil() {
			t.DType, t.Where = tensor.F32, tensor.Host
		}
	}
}

// GatedDeltaSizes are the CPU's, for tensors in F32.
func (d *Device) GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes {
	x := *a
	onHost(&x.Q, &x.K, &x.V, &x.Out, &x.G, &x.Beta, &x.StateIn, &x.StateOut)
	return d.inner.GatedDeltaSizes(&x)
}

// gatedDelta copies the lists, which the caller may use again.
func gatedDelta(a *device.GatedDelta) device.GatedDelta {
	x := *a
	x.Cu, x.KeyHead = slices.Clone(a.Cu), slices.Clone(a.KeyHead)
	return x
}

func (d *Device) GatedDeltaForward(s device.Stream, a *device.GatedDelta) error {
	x := gatedDelta(a)
	all := tensors{x.Q, x.K, x.V, x.Out, x.G, x.Beta, x.StateIn, x.StateOut, x.Saved, x.Workspace}
	return d.enqueue(s, "GatedDeltaForward", all, func(f *frame) func() error {
		f.gatedDelta(&x)
		x.Out, x.StateOut = f.out(x.Out), f.raw(x.StateOut)
		return func() error { return d.inner.GatedDeltaForward(d.host, &x) }
	})
}

// gatedDelta finds what both directions read.
func (f *frame) gatedDelta(x *device.GatedDelta) {
	x.Q, x.K, x.V, x.G, x.Beta, x.StateIn = f.in(x.Q), f.in(x.K), f.in(x.V), f.raw(x.G), f.raw(x.Beta), f.raw(x.StateIn)
	x.Saved, x.Workspace = f.raw(x.Saved), f.raw(x.Workspace)
}

// GatedDeltaBackward rounds each value head's dq and dk to their type before they are summed over those of a key head.
func (d *Device) GatedDeltaBackward(s device.Stream, a *device.GatedDeltaGrad) error {
	x := *a
	x.GatedDelta = gatedDelta(&a.GatedDelta)
	all := tensors{x.Q, x.K, x.V, x.G, x.Beta, x.StateIn, x.StateOut, x.Saved, x.Workspace, x.DOut, x.DStateOut, x.DQ, x.DK, x.DV, x.DG, x.DBeta, x.DStateIn}
	return d.enqueue(s, "GatedDeltaBackward", all, func(f *frame) func() error {
		f.gatedDelta(&x.GatedDelta)
		x.Out, x.StateOut = tensor.Tensor{}, f.raw(x.StateOut) // out is not read
		x.DOut, x.DStateOut, x.DQ, x.DK, x.DV = f.in(x.DOut), f.raw(x.DStateOut), f.out(x.DQ), f.out(x.DK), f.out(x.DV)
		x.DG, x.DBeta, x.DStateIn = f.raw(x.DG), f.raw(x.DBeta), f.raw(x.DStateIn)
		if x.PerHead || a.DQ.DType != tensor.BF16 {
			return func() error { return d.inner.GatedDeltaBackward(d.host, &x) }
		}
		return func() error { return d.backwardOfHeads(&x) }
	})
}

func (d *Device) backwardOfHeads(a *device.GatedDeltaGrad) error {
	x := *a
	dims := []int64{x.V.Shape[0], x.V.Shape[1], x.K.Shape[2]}
	n := dims[0] * dims[1] * dims[2]
	dq, dk := make([]float32, n), make([]float32, n)
	x.PerHead, x.DQ, x.DK = true, tensor.OfFloat32(dq, dims...), tensor.OfFloat32(dk, dims...)
	if err := d.inner.GatedDeltaBackward(d.host, &x); err != nil {
		return err
	}
	sum := func(dst tensor.Tensor, each []float32) {
		y := dst.Float32s()
		clear(y)
		for i, v := range each {
			t, h, c := int64(i)/dims[2]/dims[1], int64(i)/dims[2]%dims[1], int64(i)%dims[2]
			key := h / max(1, dims[1]/max(1, x.K.Shape[1]))
			if x.KeyHead != nil {
				key = x.KeyHead[h]
			}
			y[(t*x.K.Shape[1]+key)*dims[2]+c] += tensor.BF16ToF32(tensor.F32ToBF16(v))
		}
	}
	sum(a.DQ, dq)
	sum(a.DK, dk)
	return nil
}

func (d *Device) DeltaState(s device.Stream, a *device.DeltaState) error {
	x := *a
	x.KeyHead = slices.Clone(a.KeyHead)
	return d.enqueue(s, "DeltaState", tensors{x.K, x.V, x.G, x.Beta, x.State, x.Transition, x.Workspace}, func(f *frame) func() error {
		x.K, x.V, x.G, x.Beta = f.in(x.K), f.in(x.V), f.raw(x.G), f.raw(x.Beta)
		x.State, x.Transition, x.Workspace = f.raw(x.State), f.raw(x.Transition), f.raw(x.Workspace)
		return func() error { return d.inner.DeltaState(d.host, &x) }
	})
}

func (d *Device) DeltaStateGrad(s device.Stream, a *device.DeltaStateGrad) error {
	x := *a
	x.KeyHead = slices.Clone(a.KeyHead)
	return d.enqueue(s, "DeltaStateGrad", tensors{x.Q, x.K, x.G, x.Beta, x.DOut, x.DState, x.Workspace}, func(f *frame) func() error {
		x.Q, x.K, x.G, x.Beta, x.DOut = f.in(x.Q), f.in(x.K), f.raw(x.G), f.raw(x.Beta), f.in(x.DOut)
		x.DState, x.Workspace = f.raw(x.DState), f.raw(x.Workspace)
		return func() error { return d.inner.DeltaStateGrad(d.host, &x) }
	})
}

func (d *Device) DeltaFold(s device.Stream, a *device.DeltaFold) error {
	x := *a
	return d.enqueue(s, "DeltaFold", tensors{x.M, x.X, x.E, x.Y}, func(f *frame) func() error {
		x.M, x.X, x.E, x.Y = f.raw(x.M), f.raw(x.X), f.raw(x.E), f.raw(x.Y)
		return func() error { return d.inner.DeltaFold(d.host, &x) }
	})
}

func (d *Device) DeltaGatesForward(s device.Stream, a *device.DeltaGates) error {
	x := *a
	return d.enqueue(s, "DeltaGatesForward", tensors{x.A, x.B, x.ALog, x.DtBias, x.G, x.Beta}, func(f *frame) func() error {
		x.A, x.B, x.ALog, x.DtBias, x.G, x.Beta = f.in(x.A), f.in(x.B), f.in(x.ALog), f.in(x.DtBias), f.raw(x.G), f.raw(x.Beta)
		return func() error { return d.inner.DeltaGatesForward(d.host, &x) }
	})
}

func (d *Device) DeltaGatesBackward(s device.Stream, a *device.DeltaGatesGrad) error {
	x := *a
	all := tensors{x.A, x.B, x.ALog, x.DtBias, x.DG, x.DBeta, x.DA, x.DB, x.DALog, x.DDtBias}
	return d.enqueue(s, "DeltaGatesBackward", all, func(f *frame) func() error {
		x.A, x.B, x.ALog, x.DtBias, x.DG, x.DBeta = f.in(x.A), f.in(x.B), f.in(x.ALog), f.in(x.DtBias), f.raw(x.DG), f.raw(x.DBeta)
		x.DA, x.DB, x.DALog, x.DDtBias = f.out(x.DA), f.out(x.DB), f.raw(x.DALog), f.raw(x.DDtBias)
		return func() error { return d.inner.DeltaGatesBackward(d.host, &x) }
	})
}

func (d *Device) Conv1dForward(s device.Stream, a *device.Conv1d) error {
	x := *a
	x.Cu = slices.Clone(a.Cu)
	return d.enqueue(s, "Conv1dForward", tensors{x.X, x.Y, x.W, x.Before}, func(f *frame) func() error {
		x.X, x.W, x.Before, x.Y = f.in(x.X), f.in(x.W), f.in(x.Before), f.out(x.Y)
		return func() error { return d.inner.Conv1dForward(d.host, &x) }
	})
}

func (d *Device) Conv1dBackward(s device.Stream, a *device.Conv1dGrad) error {
	x := *a
	x.Cu = slices.Clone(a.Cu)
	return d.enqueue(s, "Conv1dBackward", tensors{x.X, x.W, x.Before, x.DY, x.DX, x.DW, x.DBefore}, func(f *frame) func() error {
		x.X, x.W, x.Before, x.Y, x.DY = f.in(x.X), f.in(x.W), f.in(x.Before), tensor.Tensor{}, f.in(x.DY)
		x.DX, x.DW, x.DBefore = f.out(x.DX), f.raw(x.DW), f.out(x.DBefore)
		return func() error { return d.inner.Conv1dBackward(d.host, &x) }
	})
}

func (d *Device) GatedRMSNormForward(s device.Stream, a *device.GatedRMSNorm) error {
	x := *a
	return d.enqueue(s, "GatedRMSNormForward", tensors{x.X, x.Gate, x.W, x.Y, x.RStd}, func(f *frame) func() error {
		x.X, x.Gate, x.W, x.RStd, x.Y = f.in(x.X), f.in(x.Gate), f.in(x.W), f.raw(x.RStd), f.out(x.Y)
		return func() error { return d.inner.GatedRMSNormForward(d.host, &x) }
	})
}

func (d *Device) GatedRMSNormBackward(s device.Stream, a *device.GatedRMSNormGrad) error {
	x := *a
	return d.enqueue(s, "GatedRMSNormBackward", tensors{x.X, x.Gate, x.W, x.RStd, x.DY, x.DX, x.DGate, x.DW}, func(f *frame) func() error {
		x.X, x.Gate, x.W, x.RStd, x.DY = f.in(x.X), f.in(x.Gate), f.in(x.W), f.raw(x.RStd), f.in(x.DY)
		x.DX, x.DGate, x.DW = f.out(x.DX), f.out(x.DGate), f.raw(x.DW)
		return func() error { return d.inner.GatedRMSNormBackward(d.host, &x) }
	})
}

func (d *Device) SigmoidGateForward(s device.Stream, a *device.SigmoidGate) error {
	x := *a
	return d.enqueue(s, "SigmoidGateForward", tensors{x.X, x.Gate, x.Y}, func(f *frame) func() error {
		x.X, x.Gate, x.Y = f.in(x.X), f.in(x.Gate), f.out(x.Y)
		return func() error { return d.inner.SigmoidGateForward(d.host, &x) }
	})
}

func (d *Device) SigmoidGateBackward(s device.Stream, a *device.SigmoidGateGrad) error {
	x := *a
	return d.enqueue(s, "SigmoidGateBackward", tensors{x.X, x.Gate, x.DY, x.DX, x.DGate}, func(f *frame) func() error {
		x.X, x.Gate, x.DY, x.DX, x.DGate = f.in(x.X), f.in(x.Gate), f.in(x.DY), f.out(x.DX), f.out(x.DGate)
		return func() error { return d.inner.SigmoidGateBackward(d.host, &x) }
	})
}
