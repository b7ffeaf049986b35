package device

import (
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Arena hands out parts of one Buffer in stack order. It is sized by a plan before the first step;
// asking for more is OutOfMemory, which names the component, because a plan that is wrong must not
// be repaired in the step loop.
type Arena struct {
	name       string
	buffer     Buffer
	align      int64
	place      tensor.Place
	used, peak int64
}

// NewArena allocates bytes on the device. The name is the component in error texts and in the
// memory table.
func NewArena(d Device, name string, bytes int64) (*Arena, error) {
	b, err := d.Alloc(max(bytes, 1))
	if err != nil {
		return nil, status.Errorf(status.Of(err), "memory for %s: %w", name, err)
	}
	return &Arena{name: name, buffer: b, align: d.Info().Align, place: d.Info().Place}, nil
}

// HostAllocator is a device with memory of its own that can allocate host memory too, to and from
// which copies run beside the host's work.
type HostAllocator interface {
	AllocHost(bytes int64) (Buffer, error) // zeroed
}

// NewHostArena allocates bytes of the host's memory, for what a device's memory has no room for. On
// a device without memory of its own it is an arena like any other.
func NewHostArena(d Device, name string, bytes int64) (*Arena, error) {
	a, ok := d.(HostAllocator)
	if !ok {
		return NewArena(d, name, bytes)
	}
	b, err := a.AllocHost(max(bytes, 1))
	if err != nil {
		return nil, status.Errorf(status.Of(err), "host memory for %s: %w", name, err)
	}
	return &Arena{name: name, buffer: b, align: d.Info().Align, place: tensor.Host}, nil
}

// Sketch is an arena without memory: its tensors have shapes and no data. Laying a plan out on it
// gives the size of the real one (Peak).
func Sketch(d Device, name string) *Arena {
	return &Arena{name: name, align: d.Info().Align, place: d.Info().Place}
}

// Sketched reports an arena without memory; operations on its tensors must not run.
func (a *Arena) Sketched() bool { return a.buffer == nil }

// Padded is the bytes that one tensor of n bytes takes from an arena of the device.
func Padded(d Device, n int64) int64 { a := d.Info().Align; return (n + a - 1) / a * a }

// Tensor takes a dense tensor from the arena; its contents are whatever was there.
func (a *Arena) Tensor(dtype tensor.DType, shape ...int64) (tensor.Tensor, error) {
	t := tensor.Of(nil, dtype, shape...)
	t.Where = a.place
	lo := (a.used + a.align - 1) / a.align * a.align
	hi := lo + t.Bytes()
	if a.buffer == nil {
		a.used, a.peak = hi, max(a.peak, hi)
		return t, nil
	}
	if hi > a.buffer.Bytes() {
		return t, status.Errorf(status.OutOfMemory, "arena %s: %v needs %d bytes, %d of %d are free: a planned size is too small",
			a.name, t, t.Bytes(), max(0, a.buffer.Bytes()-lo), a.buffer.Bytes())
	}
	a.used, a.peak = hi, max(a.peak, hi)
	all := tensor.Of(a.buffer.Pointer(), tensor.U8, a.buffer.Bytes())
	all.Where = a.place
	return all.At(lo, dtype, shape...), nil
}

// Mark and Reset bracket a scope: Reset(Mark()) gives back what was taken since.
func (a *Arena) Mark() int64      { return a.used }
func (a *Arena) Reset(mark int64) { a.used = mark }

// Name, Bytes and Peak are for the memory table.
func (a *Arena) Name() string { return a.name }
func (a *Arena) Peak() int64  { return a.peak }

func (a *Arena) Bytes() int64 {
	if a.buffer == nil {
		return a.peak
	}
	return a.buffer.Bytes()
}

func (a *Arena) Free() {
	if a.buffer != nil {
		a.buffer.Free()
	}
}
