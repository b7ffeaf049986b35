package cuda

/*
#include "bridge.h"
#cgo noescape plug_enqueue
#cgo nocallback plug_enqueue
#cgo noescape plug_workspace
#cgo nocallback plug_workspace
#cgo noescape plug_delta_sizes
#cgo nocallback plug_delta_sizes
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Arguments are copied into C memory that the device owns, so that a call allocates nothing and
// moves no Go memory. They are copied as bytes: the collector does not learn of addresses that lie
// there, and an old one does no harm. Lists and host tensors are pinned for the call.

// enqueue runs an operation on a stream of this device. The plug-in checks types and shapes.
func (d *Device) enqueue(s device.Stream, op device.Op, args unsafe.Pointer) error {
	o := &device.Operations[op]
	own, err := d.of(o.Name, s)
	if err != nil {
		return err
	}
	if err := o.Check(args, false); err != nil {
		return status.Errorf(status.InvalidArgument, "cuda.%s: %w", o.Name, err)
	}
	defer d.pins.Unpin()
	for i := range o.Operands {
		p := &o.Operands[i]
		if !p.Host {
			continue
		}
		// A copy from the host has read its source when the call returns. A copy to the host writes
		// until the stream has been waited for.
		if t := p.Tensor(args); t.Where == tensor.Host && t.Data != nil {
			if p.Out {
				own.pins.Pin(t.Data)
			} else {
				d.pins.Pin(t.Data)
			}
		}
	}
	return d.result(C.plug_enqueue(d.table, d.d, own.s, C.int32_t(op), d.put(o, args), C.int64_t(o.Size)))
}

// put copies arguments into the argument block and pins their lists.
func (d *Device) put(o *device.Operation, args unsafe.Pointer) unsafe.Pointer {
	for i := range o.Lists {
		if p := o.Lists[i].Data(args); p != nil {
			d.pins.Pin(p)
		}
	}
	copy(unsafe.Slice((*byte)(d.args), o.Size), unsafe.Slice((*byte)(args), o.Size))
	return d.args
}

// question puts the arguments of a call that asks for sizes or for a kernel alone.
func (d *Device) question(name string, op device.Op, args unsafe.Pointer) (unsafe.Pointer, error) {
	if err := d.usable(name); err != nil {
		return nil, err
	}
	o := &device.Operations[op]
	if err := o.Check(args, true); err != nil {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: %w", name, err)
	}
	return d.put(o, args), nil
}

// AttentionWorkspace returns the bytes of Attention.Workspace that are enough for each kernel which
// may serve the call; 0 for a call that is refused.
func (d *Device) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	defer d.pins.Unpin()
	args, err := d.question("AttentionWorkspace", device.OpAttentionForward, unsafe.Pointer(a))
	if err != nil {
		return 0
	}
	var bytes C.int64_t
	if C.plug_workspace(d.table, d.d, (*C.uly_attention)(args), flag(backward), &bytes) != 0 {
		return 0
	}
	return int64(bytes)
}

// GatedDeltaSizes returns the bytes that are enough for each kernel which may serve the call; 0 for
// a call that is refused.
func (d *Device) GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes {
	defer d.pins.Unpin()
	args, err := d.question("GatedDeltaSizes", device.OpGatedDeltaForward, unsafe.Pointer(a))
	if err != nil {
		return device.DeltaSizes{}
	}
	var sizes C.uly_delta_sizes
	if C.plug_delta_sizes(d.table, d.d, (*C.uly_gated_delta)(args), &sizes) != 0 {
		return device.DeltaSizes{}
	}
	return device.DeltaSizes{Saved: int64(sizes.saved), Forward: int64(sizes.forward), Backward: int64(sizes.backward), State: int64(sizes.state)}
}

// AttentionKernel returns the name of the kernel that would serve the call or its gradient. See
// device.AttentionKernels.
func (d *Device) AttentionKernel(a *device.Attention, backward bool) (string, error) {
	g := device.AttentionGrad{Attention: *a}
	op := device.OpAttentionForward
	if backward {
		op = device.OpAttentionBackward
	}
	defer d.pins.Unpin()
	args, err := d.question("AttentionKernel", op, unsafe.Pointer(&g))
	if err != nil {
		return "", err
	}
	var kernel *C.char
	if err := d.result(C.plug_kernel_of(d.table, d.d, C.int32_t(op), args, &kernel)); err != nil {
		return "", err
	}
	return C.GoString(kernel), nil
}

var _ device.AttentionKernels = (*Device)(nil)
