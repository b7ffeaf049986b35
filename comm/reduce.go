package comm

import (
	"unsafe"

	"ulysses/tensor"
)

// reduceBlock is the number of elements that are combined at a time. They fit in the L1 cache.
const reduceBlock = 1024

type number interface {
	float32 | float64 | int32 | int64
}

// reduce writes blocks[0] ∘ blocks[1] ∘ … to dst, n elements each, in this order. Every
// communicator for host memory passes the blocks in rank order, so sums are bitwise equal with
// goroutine ranks and with MPI. BF16 is added in F32 and rounded once. Max and Min propagate NaN.
// dst may be one of the blocks.
func reduce(op Op, dtype tensor.DType, dst unsafe.Pointer, blocks []unsafe.Pointer, n int64) {
	switch dtype {
	case tensor.F32:
		reduceAs[float32](op, dst, blocks, n)
	case tensor.F64:
		reduceAs[float64](op, dst, blocks, n)
	case tensor.I32:
		reduceAs[int32](op, dst, blocks, n)
	case tensor.I64:
		reduceAs[int64](op, dst, blocks, n)
	case tensor.BF16:
		reduceBF16(op, dst, blocks, n)
	}
}

func view[T any](p unsafe.Pointer, lo, n int64) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Add(p, lo*int64(unsafe.Sizeof(t)))), n)
}

func reduceAs[T number](op Op, dst unsafe.Pointer, blocks []unsafe.Pointer, n int64) {
	var block [reduceBlock]T
	for lo := int64(0); lo < n; lo += reduceBlock {
		m := min(reduceBlock, n-lo)
		acc := block[:m]
		copy(acc, view[T](blocks[0], lo, m))
		for _, p := range blocks[1:] {
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

func reduceBF16(op Op, dst unsafe.Pointer, blocks []unsafe.Pointer, n int64) {
	var block, wide [reduceBlock]float32
	for lo := int64(0); lo < n; lo += reduceBlock {
		m := min(reduceBlock, n-lo)
		acc := block[:m]
		for k, p := range blocks {
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
