package comm

import (
	"unsafe"

	"ulysses/tensor"
)

// reduceBlock is the elements combined at a time, few enough to stay in the first cache.
const reduceBlock = 1024

type number interface {
	float32 | float64 | int32 | int64
}

// reduce writes parts[0] ∘ parts[1] ∘ … to dst, n elements each, always in that order: every
// communicator calls it with the parts in rank order, so a sum has the same bits with goroutines
// and with MPI, whatever the library's algorithm. BF16 is added up in f32 and rounded once. Max and
// Min let a NaN through. dst may be one of the parts.
func reduce(op Op, dtype tensor.DType, dst unsafe.Pointer, parts []unsafe.Pointer, n int64) {
	switch dtype {
	case tensor.F32:
		reduceAs[float32](op, dst, parts, n)
	case tensor.F64:
		reduceAs[float64](op, dst, parts, n)
	case tensor.I32:
		reduceAs[int32](op, dst, parts, n)
	case tensor.I64:
		reduceAs[int64](op, dst, parts, n)
	case tensor.BF16:
		reduceBF16(op, dst, parts, n)
	}
}

func view[T any](p unsafe.Pointer, lo, n int64) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Add(p, lo*int64(unsafe.Sizeof(t)))), n)
}

func reduceAs[T number](op Op, dst unsafe.Pointer, parts []unsafe.Pointer, n int64) {
	var block [reduceBlock]T
	for lo := int64(0); lo < n; lo += reduceBlock {
		m := min(reduceBlock, n-lo)
		acc := block[:m]
		copy(acc, view[T](parts[0], lo, m))
		for _, p := range parts[1:] {
			combine(op, acc, view[T](p, lo, m))
		}
		copy(view[T](dst, lo, m), acc)
	}
}

func combine[T number](op Op, acc, x []T) {
	x = x[:len(acc)]
	switch op {
	case Sum:
		for i := range acc {
			acc[i] += x[i]
		}
	case Max:
		for i := range acc {
			acc[i] = max(acc[i], x[i])
		}
	case Min:
		for i := range acc {
			acc[i] = min(acc[i], x[i])
		}
	}
}

func reduceBF16(op Op, dst unsafe.Pointer, parts []unsafe.Pointer, n int64) {
	var block, wide [reduceBlock]float32
	for lo := int64(0); lo < n; lo += reduceBlock {
		m := min(reduceBlock, n-lo)
		acc := block[:m]
		for k, p := range parts {
			to := acc
			if k > 0 {
				to = wide[:m]
			}
			for i, b := range view[uint16](p, lo, m) {
				to[i] = tensor.BF16ToF32(b)
			}
			if k > 0 {
				combine(op, acc, to)
			}
		}
		for i, out := 0, view[uint16](dst, lo, m); i < len(acc); i++ {
			out[i] = tensor.F32ToBF16(acc[i])
		}
	}
}
