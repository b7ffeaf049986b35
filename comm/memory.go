package comm

import "unsafe"

// blockAt returns the address of a block of n bytes at an offset from p. It is nil for n = 0,
// because Go code must not keep a pointer behind the end of an allocation.
func blockAt(p unsafe.Pointer, offset, n int64) unsafe.Pointer {
	if n <= 0 {
		return nil
	}
	return unsafe.Add(p, offset)
}

// copyBytes copies n bytes. dst and src are equal or do not overlap.
func copyBytes(dst, src unsafe.Pointer, n int64) {
	if n > 0 && dst != src {
		copy(memory(dst, n), memory(src, n))
	}
}

// memory returns the n bytes at p, nil for n = 0.
func memory(p unsafe.Pointer, n int64) []byte {
	if n <= 0 {
		return nil
	}
	return unsafe.Slice((*byte)(p), n)
}

// pointer returns the address of b, nil for an empty slice.
func pointer(b []byte) unsafe.Pointer {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.SliceData(b))
}

// resize returns n bytes of scratch and allocates a new scratch if it is smaller.
func resize(scratch *[]byte, n int64) []byte {
	if int64(len(*scratch)) < n {
		*scratch = make([]byte, n)
	}
	return (*scratch)[:n]
}

// freeList keeps values for reuse, so that a call in the steady state allocates nothing.
type freeList[T any] []*T

// get returns a value that is not in use: one that was put back, or a new zero value.
func (l *freeList[T]) get() *T {
	n := len(*l)
	if n == 0 {
		return new(T)
	}
	x := (*l)[n-1]
	*l = (*l)[:n-1]
	return x
}

func (l *freeList[T]) put(x *T) { *l = append(*l, x) }

// overlap reports whether two blocks of memory have bytes in common.
func overlap(a unsafe.Pointer, an int64, b unsafe.Pointer, bn int64) bool {
	x, y := uintptr(a), uintptr(b)
	return an > 0 && bn > 0 && x < y+uintptr(bn) && y < x+uintptr(an)
}
