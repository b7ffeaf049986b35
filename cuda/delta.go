package cuda

/*
#include "bridge.h"
#cgo noescape plug_delta_sizes
#cgo nocallback plug_delta_sizes
*/
import "C"

import (
	"ulysses/device"
	"ulysses/tensor"
)

// The operations of linear attention: device.DeltaOps field by field.

// GatedDeltaSizes is the bytes that any row of kernels which may serve the call needs; 0 for a call
// that is refused.
func (d *Device) GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes {
	const op = "GatedDeltaSizes"
	if d.usable(op) != nil || a.Cu != nil && checkCu(op, a.Cu) != nil || checkKeyHead(op, a.KeyHead, a.V) != nil {
		return device.DeltaSizes{}
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_gated_delta](d)
	d.putGatedDelta(args, a)
	put(&args.saved, tensor.Tensor{})
	put(&args.workspace, tensor.Tensor{})
	var sizes C.uly_delta_sizes
	if C.plug_delta_sizes(d.table, d.d, args, &sizes) != 0 {
		return device.DeltaSizes{}
	}
	return device.DeltaSizes{Saved: int64(sizes.saved), Forward: int64(sizes.forward), Backward: int64(sizes.backward), State: int64(sizes.state)}
}

// GatedDeltaForward is the gated delta rule over packed documents.
func (d *Device) GatedDeltaForward(s device.Stream, a *device.GatedDelta) error {
	const op = "GatedDeltaForward"
	own, err := d.ofDelta(op, s, a.Cu, a.KeyHead, a.V)
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_gated_delta](d)
	d.putGatedDelta(args, a)
	return enqueue(d, own, C.ULY_OP_GATED_DELTA_FORWARD, args)
}

// GatedDeltaBackward is its derivative.
func (d *Device) GatedDeltaBackward(s device.Stream, g *device.GatedDeltaGrad) error {
	const op = "GatedDeltaBackward"
	own, err := d.ofDelta(op, s, g.Cu, g.KeyHead, g.V)
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_gated_delta_grad](d)
	d.putGatedDelta(&args.delta, &g.GatedDelta)
	args.per_head = flag(g.PerHead)
	put(&args.dout, g.DOut)
	put(&args.dstate_out, g.DStateOut)
	put(&args.dq, g.DQ)
	put(&args.dk, g.DK)
	put(&args.dv, g.DV)
	put(&args.dg, g.DG)
	put(&args.dbeta, g.DBeta)
	put(&args.dstate_in, g.DStateIn)
	return enqueue(d, own, C.ULY_OP_GATED_DELTA_BACKWARD, args)
}

// DeltaState sums up a stretch of a document.
func (d *Device) DeltaState(s device.Stream, a *device.DeltaState) error {
	const op = "DeltaState"
	own, err := d.of(op, s)
	if err == nil {
		err = checkKeyHead(op, a.KeyHead, a.V)
	}
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_delta_state](d)
	put(&args.k, a.K)
	put(&args.v, a.V)
	put(&args.g, a.G)
	put(&args.beta, a.Beta)
	list(d, &args.key_head, a.KeyHead)
	args.chunk, args.l2norm = C.int64_t(a.Chunk), flag(a.L2Norm)
	put(&args.state, a.State)
	put(&args.transition, a.Transition)
	put(&args.workspace, a.Workspace)
	return enqueue(d, own, C.ULY_OP_DELTA_STATE, args)
}

// DeltaStateGrad is the way back.
func (d *Device) DeltaStateGrad(s device.Stream, a *device.DeltaStateGrad) error {
	const op = "DeltaStateGrad"
	own, err := d.of(op, s)
	if err == nil {
		err = checkKeyHead(op, a.KeyHead, a.DOut)
	}
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_delta_state_grad](d)
	put(&args.q, a.Q)
	put(&args.k, a.K)
	put(&args.g, a.G)
	put(&args.beta, a.Beta)
	put(&args.dout, a.DOut)
	list(d, &args.key_head, a.KeyHead)
	args.scale, args.chunk, args.l2norm = C.double(a.Scale), C.int64_t(a.Chunk), flag(a.L2Norm)
	put(&args.dstate, a.DState)
	put(&args.workspace, a.Workspace)
	return enqueue(d, own, C.ULY_OP_DELTA_STATE_GRAD, args)
}

// DeltaFold is M·x + e head by head.
func (d *Device) DeltaFold(s device.Stream, a *device.DeltaFold) error {
	own, err := d.of("DeltaFold", s)
	if err != nil {
		return err
	}
	args := arguments[C.uly_delta_fold](d)
	put(&args.m, a.M)
	put(&args.x, a.X)
	put(&args.e, a.E)
	put(&args.y, a.Y)
	args.transpose = flag(a.Transpose)
	return enqueue(d, own, C.ULY_OP_DELTA_FOLD, args)
}

// ofDelta is the stream of a call, whose lists are what their lengths say.
func (d *Device) ofDelta(op string, s device.Stream, cu, keyHead []int64, values tensor.Tensor) (*stream, error) {
	own, err := d.of(op, s)
	if err == nil {
		err = checkCu(op, cu)
	}
	if err == nil {
		err = checkKeyHead(op, keyHead, values)
	}
	return own, err
}

// checkCu and checkKeyHead look at the lengths of lists, which the plug-in is not told.
func checkCu(op string, cu []int64) error {
	if len(cu) == 0 {
		return refuse(op, "Cu is empty: it must go from 0 to the number of rows")
	}
	return nil
}

func checkKeyHead(op string, keyHead []int64, values tensor.Tensor) error {
	if keyHead != nil && int64(len(keyHead)) != values.Shape[1] {
		return refuse(op, "KeyHead has %d entries for %d value heads", len(keyHead), values.Shape[1])
	}
	return nil
}

func (d *Device) putGatedDelta(args *C.uly_gated_delta, a *device.GatedDelta) {
	put(&args.q, a.Q)
	put(&args.k, a.K)
	put(&args.v, a.V)
	put(&args.out, a.Out)
	put(&args.g, a.G)
	put(&args.beta, a.Beta)
	list(d, &args.cu, a.Cu)
	list(d, &args.key_head, a.KeyHead)
	args.documents = C.int64_t(max(len(a.Cu)-1, 0))
	args.scale, args.chunk, args.l2norm = C.double(a.Scale), C.int64_t(a.Chunk), flag(a.L2Norm)
	put(&args.state_in, a.StateIn)
	put(&args.state_out, a.StateOut)
	put(&args.saved, a.Saved)
	put(&args.workspace, a.Workspace)
}
