package cuda

// #include "bridge.h"
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Arguments are written into C memory that the device owns, so that a call allocates nothing and moves no Go memory. Addresses are written as
// numbers: the collector never learns of what lies there, and a stale one harms nobody. Whatever is Go memory is pinned for the call.

// numbers is a tensor.Tensor whose address is a number.
type numbers struct {
	data  uintptr
	types [3]uint8
	axes  [2 * tensor.MaxDims]int64
}

// put writes a tensor.
func put(dst *C.uly_tensor, t tensor.Tensor) {
	*(*numbers)(unsafe.Pointer(dst)) = *(*numbers)(unsafe.Pointer(&t))
}

// address writes a pointer: dst is the field's own address.
func address[T, P any](dst **T, p *P) { *(*uintptr)(unsafe.Pointer(dst)) = uintptr(unsafe.Pointer(p)) }

// list writes a slice of host memory, pinned until the call returns. An empty one that is not nil is told from nil: it has an address.
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

// arguments clears the argument block and returns it, for an operation on one of this device's streams.
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

// Copy writes src into dst. One side may be host memory. From the host, the values are taken before it returns; to the host, they are there
// after Sync, and until then the memory is kept from the collector.
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
