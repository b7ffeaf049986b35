package dryrun

import (
	"cmp"

	"ulysses/device"
	"ulysses/tensor"
)

// chunk is the tokens of a chunk, where nobody says.
const chunk = 64

// deltaFlops is the rule's arithmetic over k and v, forward: products with the state, and within a
// chunk.
func deltaFlops(k, v tensor.Tensor, tokens int64) float64 {
	dk, dv := float64(k.Shape[2]), float64(v.Shape[2])
	c := float64(cmp.Or(tokens, chunk))
	return float64(v.Shape[0]) * float64(v.Shape[1]) * (6*dk*dv + 2*c*(3*dk+2*dv))
}

func (d *Device) GatedDeltaForward(s device.Stream, a *device.GatedDelta) error {
	return d.work(s, deltaFlops(a.K, a.V, a.Chunk), d.rates.Delta, a.Q, a.K, a.V, a.G, a.Beta, a.Out, a.StateIn, a.StateOut, a.Saved)
}

func (d *Device) GatedDeltaBackward(s device.Stream, a *device.GatedDeltaGrad) error {
	return d.work(s, 2.5*deltaFlops(a.K, a.V, a.Chunk), or(d.rates.DeltaBack, d.rates.Delta), a.Q, a.K, a.V, a.G, a.Beta, a.Saved, a.DOut, a.DQ, a.DK, a.DV, a.DG, a.DBeta)
}

// DeltaState is two thirds of the rule's forward: all but what makes outputs; the transition is as
// wide as a key.
func (d *Device) DeltaState(s device.Stream, a *device.DeltaState) error {
	flops := deltaFlops(a.K, a.V, a.Chunk) * 2 / 3
	if !a.Transition.IsNil() {
		flops *= 2
	}
	return d.work(s, flops, d.rates.Delta, a.K, a.V, a.G, a.Beta, a.State, a.Transition)
}

func (d *Device) DeltaStateGrad(s device.Stream, a *device.DeltaStateGrad) error {
	return d.work(s, deltaFlops(a.K, a.DOut, a.Chunk)*2/3, d.rates.Delta, a.Q, a.K, a.G, a.Beta, a.DOut, a.DState)
}

func (d *Device) DeltaFold(s device.Stream, a *device.DeltaFold) error {
	return d.work(s, 2*float64(a.Y.Numel())*float64(a.M.Shape[2]), d.rates.Delta, a.M, a.X, a.E, a.Y)
}

// stencil is work on each token and its neighbours, whose time on a CPU is set by its arithmetic.
func (d *Device) stencil(s device.Stream, touched ...tensor.Tensor) error {
	bytes := 0.0
	for _, t := range touched {
		if !t.IsNil() {
			bytes += float64(t.Bytes())
		}
	}
	return d.work(s, bytes, or(d.rates.Stencil, d.rates.Memory), touched...)
}

func (d *Device) DeltaGatesForward(s device.Stream, a *device.DeltaGates) error {
	return d.stencil(s, a.A, a.B, a.G, a.Beta)
}

func (d *Device) DeltaGatesBackward(s device.Stream, a *device.DeltaGatesGrad) error {
	return d.stencil(s, a.A, a.B, a.DG, a.DBeta, a.DA, a.DB)
}

func (d *Device) Conv1dForward(s device.Stream, a *device.Conv1d) error {
	return d.stencil(s, a.X, a.Y, a.W, a.Before)
}

func (d *Device) Conv1dBackward(s device.Stream, a *device.Conv1dGrad) error {
	return d.stencil(s, a.X, a.W, a.Before, a.DY, a.DX, a.DW, a.DBefore)
}

func (d *Device) GatedRMSNormForward(s device.Stream, a *device.GatedRMSNorm) error {
	return d.pass(s, a.X, a.Gate, a.Y, a.W, a.RStd)
}

func (d *Device) GatedRMSNormBackward(s device.Stream, a *device.GatedRMSNormGrad) error {
	return d.pass(s, a.X, a.Gate, a.W, a.RStd, a.DY, a.DX, a.DGate, a.DW)
}

func (d *Device) SigmoidGateForward(s device.Stream, a *device.SigmoidGate) error {
	return d.pass(s, a.X, a.Gate, a.Y)
}

func (d *Device) SigmoidGateBackward(s device.Stream, a *device.SigmoidGateGrad) error {
	return d.pass(s, a.X, a.Gate, a.DY, a.DX, a.DGate)
}
