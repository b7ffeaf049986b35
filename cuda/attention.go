package cuda

/*
#include "bridge.h"
#cgo noescape plug_workspace
#cgo nocallback plug_workspace
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// AttentionWorkspace is the bytes that any row of kernels which may serve the call needs; 0 for a
// call that is refused.
func (d *Device) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	if d.usable("AttentionWorkspace") != nil || checkAttention("AttentionWorkspace", a) != nil {
		return 0
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_attention](d)
	d.putAttention(args, a)
	args.backward = flag(backward)
	put(&args.workspace, tensor.Tensor{})
	var bytes C.int64_t
	if C.plug_workspace(d.table, d.d, args, &bytes) != 0 {
		return 0
	}
	return int64(bytes)
}

// AttentionKernel is the row of kernels that would serve the call or its gradient:
// device.AttentionKernels.
func (d *Device) AttentionKernel(a *device.Attention, backward bool) (string, error) {
	const op = "AttentionKernel"
	err := d.usable(op)
	if err == nil {
		err = checkAttention(op, a)
	}
	if err != nil {
		return "", err
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_attention](d)
	d.putAttention(args, a)
	which := C.int32_t(C.ULY_OP_ATTENTION_FORWARD)
	if backward {
		args.backward, which = 1, C.ULY_OP_ATTENTION_BACKWARD
	}
	var row *C.char
	if err := d.result(C.plug_kernel_of(d.table, d.d, which, unsafe.Pointer(args), &row)); err != nil {
		return "", err
	}
	return C.GoString(row), nil
}

// AttentionForward is softmax(scale·q·kᵀ)·v.
func (d *Device) AttentionForward(s device.Stream, a *device.Attention) error {
	const op = "AttentionForward"
	own, err := d.of(op, s)
	if err == nil {
		err = checkDocuments(op, a)
	}
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_attention](d)
	d.putAttention(args, a)
	return enqueue(d, own, C.ULY_OP_ATTENTION_FORWARD, args)
}

// AttentionBackward is its derivative.
func (d *Device) AttentionBackward(s device.Stream, g *device.AttentionGrad) error {
	const op = "AttentionBackward"
	own, err := d.of(op, s)
	if err == nil {
		err = checkDocuments(op, &g.Attention)
	}
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	args := arguments[C.uly_attention](d)
	d.putAttention(args, &g.Attention)
	args.backward = 1
	put(&args.dout, g.DOut)
	put(&args.dq, g.DQ)
	put(&args.dk, g.DK)
	put(&args.dv, g.DV)
	return enqueue(d, own, C.ULY_OP_ATTENTION_BACKWARD, args)
}

// checkDocuments wants documents, which only a question for workspace may leave open.
func checkDocuments(op string, a *device.Attention) error {
	if len(a.CuQ) < 1 {
		return refuse(op, "CuQ is empty: it must go from 0 to the number of rows")
	}
	return checkAttention(op, a)
}

// checkAttention looks at the lengths of the lists, which the plug-in is not told.
func checkAttention(op string, a *device.Attention) error {
	switch {
	case len(a.CuQ) != len(a.CuK):
		return refuse(op, "CuQ names %d documents, CuK %d: they must agree", len(a.CuQ)-1, len(a.CuK)-1)
	case a.CuQ != nil && len(a.CuQ) == 0:
		return refuse(op, "CuQ is empty: it must go from 0 to the number of rows")
	case a.KVHead != nil && int64(len(a.KVHead)) != a.Q.Shape[1]:
		return refuse(op, "KVHead has %d entries for %d query heads", len(a.KVHead), a.Q.Shape[1])
	}
	return nil
}

var _ device.AttentionKernels = (*Device)(nil)

func (d *Device) putAttention(args *C.uly_attention, a *device.Attention) {
	put(&args.q, a.Q)
	put(&args.k, a.K)
	put(&args.v, a.V)
	put(&args.out, a.Out)
	put(&args.lse, a.LSE)
	put(&args.workspace, a.Workspace)
	list(d, &args.cu_q, a.CuQ)
	list(d, &args.cu_k, a.CuK)
	list(d, &args.kv_head, a.KVHead)
	args.documents = C.int64_t(max(len(a.CuQ)-1, 0))
	args.left, args.right = -1, -1
	if w := a.Window; w != nil {
		args.left, args.right = C.int64_t(w.Left), C.int64_t(w.Right)
	}
	args.scale, args.causal, args.deterministic = C.double(a.Scale), flag(a.Causal), flag(a.Deterministic)
}
