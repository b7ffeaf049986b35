package fake

import (
	"slices"
	"syscall"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// buffer has an address range that nobody can read or write, and real memory elsewhere.
type buffer struct {
	d     *Device
	shown []byte        // the address range, without access
	real  device.Buffer // what operations work on
	bytes int64
}

// Alloc returns zeroed memory.
func (d *Device) Alloc(bytes int64) (device.Buffer, error) {
	if limit := d.options.Memory; limit > 0 && d.used+bytes > limit {
		return nil, status.Errorf(status.OutOfMemory, "fake.Alloc: %d bytes: %d of %d are free", bytes, limit-d.used, limit)
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

// AllocHost returns zeroed memory of the host. It stands for pinned memory: operations other than
// Copy refuse it.
func (d *Device) AllocHost(bytes int64) (device.Buffer, error) { return d.inner.Alloc(bytes) }

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

// real is the tensor in memory that can be used. A tensor of the host, or one that leaves its
// allocation, is refused.
func (d *Device) real(t tensor.Tensor) (tensor.Tensor, error) {
	if t.IsNil() {
		return t, nil
	}
	if t.Where != tensor.CUDA {
		return t, status.Errorf(status.InvalidArgument, "%v lies in host memory", t)
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
		if at := int64(uintptr(t.Data) - uintptr(b.Pointer())); at+lo >= 0 && at+hi <= b.bytes && at >= 0 && at <= b.bytes {
			t.Data, t.Where = unsafe.Add(b.real.Pointer(), at), tensor.Host
			return t, nil
		}
	}
	return t, status.Errorf(status.InvalidArgument, "%v at %p does not lie inside one allocation", t, t.Data)
}
