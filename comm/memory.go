package comm

import "unsafe"

// place returns the address of n bytes at an offset from p. It is nil for n = 0, because a pointer
// behind the end of Go memory must not be kept.
func place(p unsafe.Pointer, offset, n int64) unsafe.Pointer {
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

// room returns n bytes of scratch, which it allocates if scratch is smaller.
func room(scratch *[]byte, n int64) []byte {
	if int64(len(*scratch)) < n {
		*scratch = make([]byte, n)
	}
	return (*scratch)[:n]
}

// overlap reports whether two blocks of memory have bytes in common.
func overlap(a unsafe.Pointer, an int64, b unsafe.Pointer, bn int64) bool {
	x, y := uintptr(a), uintptr(b)
	return an > 0 && bn > 0 && x < y+uintptr(bn) && y < x+uintptr(an)
}
