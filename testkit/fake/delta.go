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
			t.Where = tensor.Host
		}
	}
}

// GatedDeltaSizes are the CPU's.
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
	return d.enqueue(s, "GatedDeltaForward", tensors{&x.Q, &x.K, &x.V, &x.Out, &x.G, &x.Beta, &x.StateIn, &x.StateOut, &x.Saved, &x.Workspace},
		func() error { return d.inner.GatedDeltaForward(d.host, &x) })
}

func (d *Device) GatedDeltaBackward(s device.Stream, a *device.GatedDeltaGrad) error {
	x := *a
	x.GatedDelta = gatedDelta(&a.GatedDelta)
	x.Out = tensor.Tensor{} // not read
	return d.enqueue(s, "GatedDeltaBackward", tensors{&x.Q, &x.K, &x.V, &x.G, &x.Beta, &x.StateIn, &x.StateOut, &x.Saved, &x.Workspace, &x.DOut, &x.DStateOut, &x.DQ, &x.DK, &x.DV,
		&x.DG, &x.DBeta, &x.DStateIn},
		func() error { return d.inner.GatedDeltaBackward(d.host, &x) })
}

func (d *Device) DeltaState(s device.Stream, a *device.DeltaState) error {
	x := *a
	x.KeyHead = slices.Clone(a.KeyHead)
	return d.enqueue(s, "DeltaState", tensors{&x.K, &x.V, &x.G, &x.Beta, &x.State, &x.Transition, &x.Workspace},
		func() error { return d.inner.DeltaState(d.host, &x) })
}

func (d *Device) DeltaStateGrad(s device.Stream, a *device.DeltaStateGrad) error {
	x := *a
	x.KeyHead = slices.Clone(a.KeyHead)
	return d.enqueue(s, "DeltaStateGrad", tensors{&x.Q, &x.K, &x.G, &x.Beta, &x.DOut, &x.DState, &x.Workspace},
		func() error { return d.inner.DeltaStateGrad(d.host, &x) })
}

func (d *Device) DeltaFold(s device.Stream, a *device.DeltaFold) error {
	x := *a
	return d.enqueue(s, "DeltaFold", tensors{&x.M, &x.X, &x.E, &x.Y}, func() error { return d.inner.DeltaFold(d.host, &x) })
}

func (d *Device) DeltaGatesForward(s device.Stream, a *device.DeltaGates) error {
	x := *a
	return d.enqueue(s, "DeltaGatesForward", tensors{&x.A, &x.B, &x.ALog, &x.DtBias, &x.G, &x.Beta},
		func() error { return d.inner.DeltaGatesForward(d.host, &x) })
}

func (d *Device) DeltaGatesBackward(s device.Stream, a *device.DeltaGatesGrad) error {
	x := *a
	return d.enqueue(s, "DeltaGatesBackward", tensors{&x.A, &x.B, &x.ALog, &x.DtBias, &x.DG, &x.DBeta, &x.DA, &x.DB, &x.DALog, &x.DDtBias},
		func() error { return d.inner.DeltaGatesBackward(d.host, &x) })
}

func (d *Device) Conv1dForward(s device.Stream, a *device.Conv1d) error {
	x := *a
	x.Cu = slices.Clone(a.Cu)
	return d.enqueue(s, "Conv1dForward", tensors{&x.X, &x.Y, &x.W, &x.Before}, func() error { return d.inner.Conv1dForward(d.host, &x) })
}

func (d *Device) Conv1dBackward(s device.Stream, a *device.Conv1dGrad) error {
	x := *a
	x.Cu, x.Y = slices.Clone(a.Cu), tensor.Tensor{} // y is not read
	return d.enqueue(s, "Conv1dBackward", tensors{&x.X, &x.W, &x.Before, &x.DY, &x.DX, &x.DW, &x.DBefore},
		func() error { return d.inner.Conv1dBackward(d.host, &x) })
}

func (d *Device) GatedRMSNormForward(s device.Stream, a *device.GatedRMSNorm) error {
	x := *a
	return d.enqueue(s, "GatedRMSNormForward", tensors{&x.X, &x.Gate, &x.W, &x.Y, &x.RStd}, func() error { return d.inner.GatedRMSNormForward(d.host, &x) })
}

func (d *Device) GatedRMSNormBackward(s device.Stream, a *device.GatedRMSNormGrad) error {
	x := *a
	return d.enqueue(s, "GatedRMSNormBackward", tensors{&x.X, &x.Gate, &x.W, &x.RStd, &x.DY, &x.DX, &x.DGate, &x.DW},
		func() error { return d.inner.GatedRMSNormBackward(d.host, &x) })
}

func (d *Device) SigmoidGateForward(s device.Stream, a *device.SigmoidGate) error {
	x := *a
	return d.enqueue(s, "SigmoidGateForward", tensors{&x.X, &x.Gate, &x.Y}, func() error { return d.inner.SigmoidGateForward(d.host, &x) })
}

func (d *Device) SigmoidGateBackward(s device.Stream, a *device.SigmoidGateGrad) error {
	x := *a
	return d.enqueue(s, "SigmoidGateBackward", tensors{&x.X, &x.Gate, &x.DY, &x.DX, &x.DGate}, func() error { return d.inner.SigmoidGateBackward(d.host, &x) })
}
