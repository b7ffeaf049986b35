package cpu

// #include "kernels/kernels.h"
import "C"

import "ulysses/tensor"

// grain is the number of elements of a task: 256 KiB of F32 take more than 20 µs in every
// operation, and fit in the L2 cache.
const grain = 1 << 16

// plane is the common shape of several operands, with their strides in elements. Axes of extent 1
// are dropped, and adjacent axes that are contiguous in all operands are merged. The axes are in
// the order of operand 0's strides, the largest first.
type plane struct {
	rank   int
	shape  [tensor.MaxDims]int64
	stride [C.ULY_OPERANDS][tensor.MaxDims]int64
	count  int
}

// merge returns the plane of operands of equal shape.
func merge(operands ...tensor.Tensor) plane {
	p := plane{count: len(operands)}
	first := &operands[0]
	var order [tensor.MaxDims]int
	n := 0
	for i := range int(first.NDim) {
		if first.Shape[i] == 1 {
			continue
		}
		j := n
		for ; j > 0 && first.Stride[order[j-1]] < first.Stride[i]; j-- {
			order[j] = order[j-1]
		}
		order[j] = i
		n++
	}
	for _, a := range order[:n] {
		if p.rank > 0 && p.extends(operands, a) {
			p.shape[p.rank-1] *= first.Shape[a]
		} else {
			p.shape[p.rank] = first.Shape[a]
			p.rank++
		}
		for o := range operands {
			p.stride[o][p.rank-1] = operands[o].Stride[a]
		}
	}
	return p
}

// extends reports whether axis a can be merged with the last axis of the plane in all operands.
func (p *plane) extends(operands []tensor.Tensor, a int) bool {
	for o := range operands {
		if p.stride[o][p.rank-1] != operands[o].Stride[a]*operands[o].Shape[a] {
			return false
		}
	}
	return true
}

// drop removes an axis.
func (p *plane) drop(axis int) {
	p.rank--
	copy(p.shape[axis:], p.shape[axis+1:])
	for o := range p.count {
		copy(p.stride[o][axis:], p.stride[o][axis+1:])
	}
}

// fewStreams reorders outer axes whose order differs between operands 0 and 1, so that the longer
// axis is the outer one. The inner loop then reads or writes as many sequential streams as the
// shorter axis has indices, and does not stride through a whole operand for each index.
func (p *plane) fewStreams() {
	for i := 0; i+2 < p.rank; i++ {
		for j := i; j >= 0 && p.stride[1][j] < p.stride[1][j+1] && p.shape[j] < p.shape[j+1]; j-- {
			p.shape[j], p.shape[j+1] = p.shape[j+1], p.shape[j]
			for o := range p.count {
				p.stride[o][j], p.stride[o][j+1] = p.stride[o][j+1], p.stride[o][j]
			}
		}
	}
}

// unit reports whether the innermost axis is dense in every operand.
func (p *plane) unit() bool {
	for o := range p.count {
		if p.rank > 0 && p.stride[o][p.rank-1] != 1 {
			return false
		}
	}
	return p.rank > 0
}

// divide writes the plane to x as units of at most segment elements of the innermost axis, divides
// the units into tasks of about grain elements, and returns the number of tasks. weight is the
// number of elements that a kernel processes for one element of the plane. If the kernel needs a
// dense inner axis and some operand has none, the inner axis has length 1.
func (p *plane) divide(x *C.uly_axes, dense bool, segment, weight int64) int64 {
	*x = C.uly_axes{length: 1}
	outer := p.rank
	if outer > 0 && (!dense || p.unit()) {
		outer--
		x.length = C.int64_t(p.shape[outer])
		for o := range p.count {
			x.inner[o] = C.int64_t(p.stride[o][outer])
		}
	}
	rows := int64(1)
	for i := range outer {
		x.shape[i] = C.int64_t(p.shape[i])
		rows *= p.shape[i]
		for o := range p.count {
			x.step[o][i] = C.int64_t(p.stride[o][i])
		}
	}
	length := int64(x.length)
	if rows == 0 || length == 0 {
		return 0
	}
	segment = min(segment, length)
	units := rows * ceilDiv(length, segment)
	perTask := max(1, grain/(segment*weight))
	x.rank, x.segment, x.units, x.per_task = C.int64_t(outer), C.int64_t(segment), C.int64_t(units), C.int64_t(perTask)
	return ceilDiv(units, perTask)
}
