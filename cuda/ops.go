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

// Arguments are copied into C memory that the device owns, so that a call allocates nothing. They
// are copied as bytes, which hides the addresses in them from the garbage collector. Therefore
// lists and host tensors are pinned during the call.

// enqueue enqueues an operation on a stream of this device. The plug-in checks types and shapes.
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
		// until the stream is synchronized.
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

// put copies arguments to the device's C memory and pins their lists. It returns the copy.
func (d *Device) put(o *device.Operation, args unsafe.Pointer) unsafe.Pointer {
	for i := range o.Lists {
		if p := o.Lists[i].Data(args); p != nil {
			d.pins.Pin(p)
		}
	}
	copy(unsafe.Slice((*byte)(d.args), o.Size), unsafe.Slice((*byte)(args), o.Size))
	return d.args
}

// query is put for a query of sizes or of a kernel, whose tensors may be without memory.
func (d *Device) query(name string, op device.Op, args unsafe.Pointer) (unsafe.Pointer, error) {
	if err := d.usable(name); err != nil {
		return nil, err
	}
	o := &device.Operations[op]
	if err := o.Check(args, true); err != nil {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: %w", name, err)
	}
	return d.put(o, args), nil
}

// AttentionWorkspace returns bytes of Attention.Workspace that are enough for each kernel that
// supports the call; 0 if the arguments are invalid.
func (d *Device) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	defer d.pins.Unpin()
	args, err := d.query("AttentionWorkspace", device.OpAttentionForward, unsafe.Pointer(a))
	if err != nil {
		return 0
	}
	var bytes C.int64_t
	if C.plug_workspace(d.table, d.d, (*C.uly_attention)(args), flag(backward), &bytes) != 0 {
		return 0
	}
	return int64(bytes)
}

// GatedDeltaSizes returns bytes that are enough for each kernel that supports the call; 0 if the
// arguments are invalid.
func (d *Device) GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes {
	defer d.pins.Unpin()
	args, err := d.query("GatedDeltaSizes", device.OpGatedDeltaForward, unsafe.Pointer(a))
	if err != nil {
		return device.DeltaSizes{}
	}
	var sizes C.uly_delta_sizes
	if C.plug_delta_sizes(d.table, d.d, (*C.uly_gated_delta)(args), &sizes) != 0 {
		return device.DeltaSizes{}
	}
	return device.DeltaSizes{Saved: int64(sizes.saved), Forward: int64(sizes.forward), Backward: int64(sizes.backward),
		State: int64(sizes.state)}
}

// AttentionKernel returns the name of the kernel that would run the call or its gradient (see
// device.AttentionKernels).
func (d *Device) AttentionKernel(a *device.Attention, backward bool) (string, error) {
	g := device.AttentionGrad{Attention: *a}
	op := device.OpAttentionForward
	if backward {
		op = device.OpAttentionBackward
	}
	defer d.pins.Unpin()
	args, err := d.query("AttentionKernel", op, unsafe.Pointer(&g))
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
