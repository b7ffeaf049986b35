package cuda

/*
#include "bridge.h"
#cgo noescape plug_enqueue
#cgo nocallback plug_enqueue
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Arguments are written into C memory that the device owns, so that a call allocates nothing and
// moves no Go memory. Addresses are written as numbers: the collector never learns of what lies
// there, and a stale one harms nobody. Whatever is Go memory is pinned for the call.

// numbers is a tensor.Tensor whose address is a number.
type numbers struct {
	data  uintptr
	types [3]uint8
	axes  [2 * tensor.MaxDims]int64
}

// What both sides lay out or number must agree: where it does not, this does not compile.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(tensor.Tensor{})-C.sizeof_uly_tensor]
	_ = [1]struct{}{}[unsafe.Sizeof(numbers{})-C.sizeof_uly_tensor]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.DType)-unsafe.Offsetof(C.uly_tensor{}.dtype)]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.Where)-unsafe.Offsetof(C.uly_tensor{}.where)]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.NDim)-unsafe.Offsetof(C.uly_tensor{}.ndim)]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.Shape)-unsafe.Offsetof(C.uly_tensor{}.shape)]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.Stride)-unsafe.Offsetof(C.uly_tensor{}.stride)]
	_ = [1]struct{}{}[unsafe.Offsetof(numbers{}.axes)-unsafe.Offsetof(C.uly_tensor{}.shape)]
	_ = [1]struct{}{}[unsafe.Sizeof(device.Range{})-C.sizeof_uly_range]
	_ = [1]struct{}{}[unsafe.Offsetof(device.Range{}.Hi)-unsafe.Offsetof(C.uly_range{}.hi)]

	_ = [1]struct{}{}[tensor.F32-C.ULY_F32]
	_ = [1]struct{}{}[tensor.BF16-C.ULY_BF16]
	_ = [1]struct{}{}[tensor.F16-C.ULY_F16]
	_ = [1]struct{}{}[tensor.F64-C.ULY_F64]
	_ = [1]struct{}{}[tensor.I32-C.ULY_I32]
	_ = [1]struct{}{}[tensor.I64-C.ULY_I64]
	_ = [1]struct{}{}[tensor.U8-C.ULY_U8]
	_ = [1]struct{}{}[tensor.Host-C.ULY_HOST]
	_ = [1]struct{}{}[tensor.CUDA-C.ULY_CUDA]

	_ = [1]struct{}{}[status.InvalidArgument-C.ULY_INVALID_ARGUMENT]
	_ = [1]struct{}{}[status.Unsupported-C.ULY_UNSUPPORTED]
	_ = [1]struct{}{}[status.OutOfMemory-C.ULY_OUT_OF_MEMORY]
	_ = [1]struct{}{}[status.Comm-C.ULY_COMM]
	_ = [1]struct{}{}[status.Device-C.ULY_DEVICE]
	_ = [1]struct{}{}[status.Internal-C.ULY_INTERNAL]
)

// put writes a tensor.
func put(dst *C.uly_tensor, t tensor.Tensor) {
	*(*numbers)(unsafe.Pointer(dst)) = *(*numbers)(unsafe.Pointer(&t))
}

// address writes a pointer: dst is the field's own address.
func address[T, P any](dst **T, p *P) { *(*uintptr)(unsafe.Pointer(dst)) = uintptr(unsafe.Pointer(p)) }

// list writes a slice of host memory, pinned until the call returns. An empty one that is not nil
// is told from nil: it has an address.
func list[T, E any](d *Device, dst **T, x []E) {
	switch {
	case x == nil:
		address(dst, (*E)(nil))
	case len(x) == 0:
		address(dst, (*byte)(d.args))
	default:
		d.pins.Pin(&x[0])
		address(dst, &x[0])
	}
}

// arguments clears the argument block and returns it, for an operation on one of this device's
// streams.
func arguments[T any](d *Device) *T {
	clear(unsafe.Slice((*byte)(d.args), unsafe.Sizeof(*new(T))))
	return (*T)(d.args)
}

// enqueue hands the argument block over; the plug-in has taken what it needs of it when it returns.
func enqueue[T any](d *Device, s *stream, op C.int32_t, a *T) error {
	return d.result(C.plug_enqueue(d.table, d.d, s.s, op, unsafe.Pointer(a), C.int64_t(unsafe.Sizeof(*a))))
}

// refuse is for what only this side can see.
func refuse(op, format string, args ...any) error {
	return status.Errorf(status.InvalidArgument, "cuda."+op+": "+format, args...)
}

// Copy writes src into dst. One side may be host memory. From the host, the values are taken before
// it returns; to the host, they are there after Sync, and until then the memory is kept from the
// collector.
func (d *Device) Copy(s device.Stream, dst, src tensor.Tensor) error {
	own, err := d.of("Copy", s)
	if err != nil {
		return err
	}
	if src.Where == tensor.Host && src.Data != nil {
		d.pins.Pin(src.Data)
		defer d.pins.Unpin()
	}
	if dst.Where == tensor.Host && dst.Data != nil {
		own.pins.Pin(dst.Data)
	}
	a := arguments[C.uly_copy](d)
	put(&a.dst, dst)
	put(&a.src, src)
	return enqueue(d, own, C.ULY_OP_COPY, a)
}
