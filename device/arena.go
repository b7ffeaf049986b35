package device

import (
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Arena is a bump allocator over one Buffer, with scopes in stack order (Mark, Reset). A plan sets
// its size before the first step. An allocation beyond the size fails with OutOfMemory and names
// the component: a wrong plan must not be repaired in the step loop.
type Arena struct {
	name       string
	buffer     Buffer
	align      int64
	place      tensor.Place
	used, peak int64
}

// NewArena allocates bytes on the device. Errors and the memory table show name as the component.
func NewArena(d Device, name string, bytes int64) (*Arena, error) {
	b, err := d.Alloc(max(bytes, 1))
	if err != nil {
		return nil, status.Errorf(status.Of(err), "memory for %s: %w", name, err)
	}
	return &Arena{name: name, buffer: b, align: d.Info().Align, place: d.Info().Place}, nil
}

// HostAllocator is a device with its own memory that also allocates host memory. Copies between
// the two run asynchronously to the host.
type HostAllocator interface {
	AllocHost(bytes int64) (Buffer, error) // zeroed
}

// NewHostArena allocates bytes of host memory, for tensors that are offloaded from the device. On a
// device that computes in host memory it is NewArena.
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

// Sketch returns an arena without memory. Its tensors have shapes and no data. Allocating from it
// gives the size of the arena with memory (Peak).
func Sketch(d Device, name string) *Arena {
	return &Arena{name: name, align: d.Info().Align, place: d.Info().Place}
}

// Sketched reports whether the arena has no memory. Operations must not run on its tensors.
func (a *Arena) Sketched() bool { return a.buffer == nil }

// Padded returns the bytes that one tensor of n bytes occupies in an arena of the device.
func Padded(d Device, n int64) int64 { return roundUp(n, d.Info().Align) }

func roundUp(n, align int64) int64 { return (n + align - 1) / align * align }

// Tensor allocates a dense tensor. Its contents are undefined.
func (a *Arena) Tensor(dtype tensor.DType, shape ...int64) (tensor.Tensor, error) {
	t := tensor.Of(nil, dtype, shape...)
	t.Where = a.place
	lo := roundUp(a.used, a.align)
	hi := lo + t.Bytes()
	if a.buffer == nil {
		a.used, a.peak = hi, max(a.peak, hi)
		return t, nil
	}
	if hi > a.buffer.Bytes() {
		return t, status.Errorf(status.OutOfMemory,
			"arena %s: %v needs %d bytes, %d of %d are free; the planned size is too small",
			a.name, t, t.Bytes(), max(0, a.buffer.Bytes()-lo), a.buffer.Bytes())
	}
	a.used, a.peak = hi, max(a.peak, hi)
	return a.All().At(lo, dtype, shape...), nil
}

// All returns the memory of the arena as bytes, whether allocated or not. The arena has memory.
func (a *Arena) All() tensor.Tensor {
	all := tensor.Of(a.buffer.Pointer(), tensor.U8, a.buffer.Bytes())
	all.Where = a.place
	return all
}

// Mark returns the end of the allocations, for Reset.
func (a *Arena) Mark() int64 { return a.used }

// Reset frees all allocations since Mark.
func (a *Arena) Reset(mark int64) { a.used = mark }

// Name returns the component in errors and in the memory table.
func (a *Arena) Name() string { return a.name }

// Place returns where the memory is.
func (a *Arena) Place() tensor.Place { return a.place }

// Peak returns the largest number of bytes that were in use.
func (a *Arena) Peak() int64 { return a.peak }

// Bytes returns the size of the arena; without memory, the peak.
func (a *Arena) Bytes() int64 {
	if a.buffer == nil {
		return a.peak
	}
	return a.buffer.Bytes()
}

// Free frees the memory of the arena.
func (a *Arena) Free() {
	if a.buffer != nil {
		a.buffer.Free()
	}
}
