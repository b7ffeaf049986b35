package fake

import (
	"slices"
	"syscall"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// buffer has an address range without access, which tensors point to, and the real memory at
// another address.
type buffer struct {
	d     *Device
	shown []byte        // the address range without access
	real  device.Buffer // the memory that operations use
	bytes int64
}

// Alloc returns zeroed memory.
func (d *Device) Alloc(bytes int64) (device.Buffer, error) {
	if limit := d.options.Memory; limit > 0 && d.used+bytes > limit {
		return nil, status.Errorf(status.OutOfMemory, "fake.Alloc: %d bytes, but only %d of %d are free", bytes,
			limit-d.used, limit)
	}
	real, err := d.inner.Alloc(bytes)
	if err != nil {
		return nil, err
	}
	shown, err := syscall.Mmap(-1, 0, int(max(bytes, 1)), syscall.PROT_NONE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		real.Free()
		return nil, status.Errorf(status.OutOfMemory, "fake.Alloc: %d bytes of addresses: %w", bytes, err)
	}
	b := &buffer{d, shown, real, bytes}
	d.memory = append(d.memory, b)
	d.used += bytes
	return b, nil
}

// AllocHost returns zeroed host memory, in place of pinned memory. Operations other than Copy
// return an error for it.
func (d *Device) AllocHost(bytes int64) (device.Buffer, error) {
	if limit := d.options.HostMemory; limit > 0 && bytes > limit {
		return nil, status.Errorf(status.OutOfMemory, "fake.AllocHost: %d bytes, but an allocation has at most %d",
			bytes, limit)
	}
	return d.inner.Alloc(bytes)
}

func (b *buffer) Pointer() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b.shown)) }
func (b *buffer) Bytes() int64            { return b.bytes }

// Free waits for all streams, as a GPU does.
func (b *buffer) Free() {
	if b.shown == nil {
		return
	}
	b.d.drain()
	b.d.memory = slices.DeleteFunc(b.d.memory, func(x *buffer) bool { return x == b })
	b.d.used -= b.bytes
	b.real.Free()
	_ = syscall.Munmap(b.shown)
	b.shown = nil
}

// real returns a tensor over the real memory of t. It returns an error for a host tensor, and for a
// tensor that is not inside one allocation.
func (d *Device) real(t tensor.Tensor) (tensor.Tensor, error) {
	if t.IsNil() {
		return t, nil
	}
	if t.Where != tensor.CUDA {
		return t, status.Errorf(status.InvalidArgument, "%v is in host memory", t)
	}
	lo, hi := int64(0), int64(0) // bytes from Data
	if t.Numel() > 0 {
		hi = t.DType.Size()
		for i := range t.NDim {
			if n := (t.Shape[i] - 1) * t.Stride[i] * t.DType.Size(); n < 0 {
				lo += n
			} else {
				hi += n
			}
		}
	} else if t.Data == nil {
		t.Where = tensor.Host
		return t, nil
	}
	for _, b := range d.memory {
		if at := int64(uintptr(t.Data) - uintptr(b.Pointer())); at+lo >= 0 && at+hi <= b.bytes && at >= 0 &&
			at <= b.bytes {
			t.Data, t.Where = unsafe.Add(b.real.Pointer(), at), tensor.Host
			return t, nil
		}
	}
	return t, status.Errorf(status.InvalidArgument, "%v at %p is not inside one allocation", t, t.Data)
}
