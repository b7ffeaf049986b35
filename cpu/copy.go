package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"encoding/binary"
	"math"
	"math/bits"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// streamFrom is the size in bytes from which a copy is written around the caches. A copy of this
// size would evict other data, and lines that are written as a whole are then not read first.
const streamFrom = 8 << 20

// transposeSegment is the extent of a strip of a transpose: a few cache lines, so both operands
// stay in the L1 cache.
const transposeSegment = 64

// copyKind returns the conversion of an element, COPY_*. ok is false if no kernel has it.
func copyKind(to, from tensor.DType) (kind C.int64_t, ok bool) {
	if to == from {
		// COPY_1, COPY_2, COPY_4, COPY_8
		return C.int64_t(bits.TrailingZeros64(uint64(to.Size()))), to != tensor.Invalid
	}
	switch [2]tensor.DType{from, to} {
	case [2]tensor.DType{tensor.F32, tensor.BF16}:
		return C.COPY_F32_BF16, true
	case [2]tensor.DType{tensor.BF16, tensor.F32}:
		return C.COPY_BF16_F32, true
	case [2]tensor.DType{tensor.F32, tensor.F64}:
		return C.COPY_F32_F64, true
	case [2]tensor.DType{tensor.F64, tensor.F32}:
		return C.COPY_F64_F32, true
	case [2]tensor.DType{tensor.F16, tensor.F32}:
		return C.COPY_F16_F32, true
	}
	return 0, false
}

// Copy writes src to dst, with a cast if their types differ. Operands with a dense inner axis are
// copied by vectors, transposed operands by tiles, others element by element.
func (d *Device) Copy(_ device.Stream, dst, src tensor.Tensor) error {
	defer runtime.KeepAlive(dst.Data)
	defer runtime.KeepAlive(src.Data)
	if dst.Where != tensor.Host || src.Where != tensor.Host || dst.NDim != src.NDim || dst.Shape != src.Shape {
		return status.Errorf(status.InvalidArgument,
			"cpu.Copy: src is %v, dst is %v; both must be host memory of the same shape", src, dst)
	}
	kind, ok := copyKind(dst.DType, src.DType)
	if !ok {
		return status.Errorf(status.Unsupported,
			"cpu.Copy: src is %v, dst is %v; supported casts are F32 to and from BF16 and F64, and F16 to F32",
			src, dst)
	}
	p := merge(dst, src)
	p.fewStreams()
	if tasks, ok := d.transpose(&p, dst, src); ok {
		return d.run(C.K_transpose, tasks)
	}
	a := (*C.copy_args)(d.args)
	a.dst, a.src, a.kind, a.stream = dst.Data, src.Data, kind, 0
	if dst.Bytes() >= streamFrom {
		a.stream = 1
	}
	return d.run(C.K_copy, p.divide(&a.axes, false, grain, 1))
}

// transpose prepares the arguments of a transpose if the copy is one: dst is dense along one axis
// and src along another. It returns the number of tasks; ok is false for other copies.
func (d *Device) transpose(p *plane, dst, src tensor.Tensor) (tasks int64, ok bool) {
	x, y := p.rank-1, p.rank-1
	for i := range p.rank {
		if p.stride[1][i] == 1 {
			y = i
		}
	}
	if dst.DType != src.DType || x == y || p.stride[0][x] != 1 {
		return 0, false
	}
	a := (*C.transpose_args)(d.args)
	a.dst, a.src, a.size = dst.Data, src.Data, C.int64_t(dst.DType.Size())
	a.dst_y, a.src_x = C.int64_t(p.stride[0][y]), C.int64_t(p.stride[1][x])
	inner, other := y, x
	a.along_x = 0
	if p.shape[x] > p.shape[y] {
		inner, other, a.along_x = x, y, 1
	}
	n := p.shape[other]
	a.n = C.int64_t(n)
	q := plane{count: p.count}
	for i := range p.rank + 1 { // the inner axis is last, and the kernel loops over the other one
		axis := i
		if i == p.rank {
			axis = inner
		} else if i == x || i == y {
			continue
		}
		q.shape[q.rank] = p.shape[axis]
		for o := range p.count {
			q.stride[o][q.rank] = p.stride[o][axis]
		}
		q.rank++
	}
	return q.divide(&a.axes, false, transposeSegment, max(n, 1)), true
}

// Fill writes value into every element of dst, converted to its type.
func (d *Device) Fill(_ device.Stream, dst tensor.Tensor, value float64) error {
	defer runtime.KeepAlive(dst.Data)
	if dst.Where != tensor.Host || dst.IsNil() || dst.DType == tensor.F16 {
		return status.Errorf(status.InvalidArgument, "cpu.Fill: dst is %v; want host memory of a type other than F16",
			dst)
	}
	var bits uint64
	switch dst.DType {
	case tensor.F32:
		bits = uint64(math.Float32bits(float32(value)))
	case tensor.BF16:
		bits = uint64(tensor.F32ToBF16(float32(value)))
	case tensor.F64:
		bits = math.Float64bits(value)
	default:
		bits = uint64(int64(value))
	}
	p := merge(dst)
	a := (*C.fill_args)(d.args)
	a.dst, a.size = dst.Data, C.int64_t(dst.DType.Size())
	var raw [8]byte
	binary.LittleEndian.PutUint64(raw[:], bits) // the first bytes are the value in shorter types
	for i, v := range raw {
		a.value[i] = C.uint8_t(v)
	}
	return d.run(C.K_fill, p.divide(&a.axes, false, grain, 1))
}
