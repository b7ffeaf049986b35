package cuda

// #include "bridge.h"
import "C"

import "ulysses/device"

// The operations around the gated delta rule.

// DeltaGatesForward makes decays and betas.
func (d *Device) DeltaGatesForward(s device.Stream, g *device.DeltaGates) error {
	own, err := d.of("DeltaGatesForward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_delta_gates](d)
	put(&a.a, g.A)
	put(&a.b, g.B)
	put(&a.a_log, g.ALog)
	put(&a.dt_bias, g.DtBias)
	put(&a.g, g.G)
	put(&a.beta, g.Beta)
	return enqueue(d, own, C.ULY_OP_DELTA_GATES_FORWARD, a)
}

// DeltaGatesBackward is its derivative.
func (d *Device) DeltaGatesBackward(s device.Stream, g *device.DeltaGatesGrad) error {
	own, err := d.of("DeltaGatesBackward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_delta_gates_grad](d)
	put(&a.a, g.A)
	put(&a.b, g.B)
	put(&a.a_log, g.ALog)
	put(&a.dt_bias, g.DtBias)
	put(&a.dg, g.DG)
	put(&a.dbeta, g.DBeta)
	put(&a.da, g.DA)
	put(&a.db, g.DB)
	put(&a.da_log, g.DALog)
	put(&a.ddt_bias, g.DDtBias)
	return enqueue(d, own, C.ULY_OP_DELTA_GATES_BACKWARD, a)
}

// Conv1dForward is a causal convolution, channel by channel, and SiLU.
func (d *Device) Conv1dForward(s device.Stream, c *device.Conv1d) error {
	const op = "Conv1dForward"
	own, err := d.of(op, s)
	if err == nil {
		err = checkCu(op, c.Cu)
	}
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	a := arguments[C.uly_conv1d](d)
	d.putConv1d(a, c)
	return enqueue(d, own, C.ULY_OP_CONV1D_FORWARD, a)
}

// Conv1dBackward is its derivative.
func (d *Device) Conv1dBackward(s device.Stream, c *device.Conv1dGrad) error {
	const op = "Conv1dBackward"
	own, err := d.of(op, s)
	if err == nil {
		err = checkCu(op, c.Cu)
	}
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	a := arguments[C.uly_conv1d_grad](d)
	d.putConv1d(&a.conv, &c.Conv1d)
	put(&a.dy, c.DY)
	put(&a.dx, c.DX)
	put(&a.dw, c.DW)
	put(&a.dbefore, c.DBefore)
	return enqueue(d, own, C.ULY_OP_CONV1D_BACKWARD, a)
}

func (d *Device) putConv1d(a *C.uly_conv1d, c *device.Conv1d) {
	put(&a.x, c.X)
	put(&a.y, c.Y)
	put(&a.w, c.W)
	put(&a.before, c.Before)
	list(d, &a.cu, c.Cu)
	a.documents = C.int64_t(len(c.Cu) - 1)
}

// GatedRMSNormForward normalises rows and gates them.
func (d *Device) GatedRMSNormForward(s device.Stream, n *device.GatedRMSNorm) error {
	own, err := d.of("GatedRMSNormForward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_gated_rmsnorm](d)
	put(&a.x, n.X)
	put(&a.gate, n.Gate)
	put(&a.y, n.Y)
	put(&a.w, n.W)
	put(&a.rstd, n.RStd)
	a.eps = C.double(n.Eps)
	return enqueue(d, own, C.ULY_OP_GATED_RMSNORM_FORWARD, a)
}

// GatedRMSNormBackward is its derivative.
func (d *Device) GatedRMSNormBackward(s device.Stream, n *device.GatedRMSNormGrad) error {
	own, err := d.of("GatedRMSNormBackward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_gated_rmsnorm_grad](d)
	put(&a.x, n.X)
	put(&a.gate, n.Gate)
	put(&a.w, n.W)
	put(&a.rstd, n.RStd)
	put(&a.dy, n.DY)
	put(&a.dx, n.DX)
	put(&a.dgate, n.DGate)
	put(&a.dw, n.DW)
	return enqueue(d, own, C.ULY_OP_GATED_RMSNORM_BACKWARD, a)
}

// SigmoidGateForward is x·sigmoid(gate).
func (d *Device) SigmoidGateForward(s device.Stream, g *device.SigmoidGate) error {
	own, err := d.of("SigmoidGateForward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_sigmoid_gate](d)
	put(&a.x, g.X)
	put(&a.gate, g.Gate)
	put(&a.y, g.Y)
	return enqueue(d, own, C.ULY_OP_SIGMOID_GATE_FORWARD, a)
}

// SigmoidGateBackward is its derivative.
func (d *Device) SigmoidGateBackward(s device.Stream, g *device.SigmoidGateGrad) error {
	own, err := d.of("SigmoidGateBackward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_sigmoid_gate_grad](d)
	put(&a.x, g.X)
	put(&a.gate, g.Gate)
	put(&a.dy, g.DY)
	put(&a.dx, g.DX)
	put(&a.dgate, g.DGate)
	return enqueue(d, own, C.ULY_OP_SIGMOID_GATE_BACKWARD, a)
}
