package cpu

// #include "kernels/kernels.h"
import "C"

import "ulysses/tensor"

// grain is the elements of one task: 256 KiB of F32 is above 20 µs of work for any operation, and
// stays in the second cache.
const grain = 1 << 16

// plane is a shape with the strides of several operands, axes of extent 1 dropped and axes that lie
// as one merged, outermost first in the order of operand 0.
type plane struct {
	rank   int
	shape  [tensor.MaxDims]int64
	stride [C.ULY_OPERANDS][tensor.MaxDims]int64
	count  int
}

// merge makes the plane of operands of equal shape.
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

// extends reports that axis a continues the last axis of the plane in every operand.
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

// fewStreams reorders outer axes whose order differs between operands 0 and 1: with the longer
// outside, a loop over the shorter reads or writes as many streams, each in its order, where the
// other way it would jump through all of an operand for each index.
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

// unit reports that the innermost axis is dense in every operand.
func (p *plane) unit() bool {
	for o := range p.count {
		if p.rank > 0 && p.stride[o][p.rank-1] != 1 {
			return false
		}
	}
	return p.rank > 0
}

// cut lays the plane out as units of at most piece elements of its innermost axis, and tasks of
// about `size` elements each; weight is the elements behind one element of the plane. It returns
// the number of tasks. The kernel may ask that runs be dense: if they cannot be, they have length
// 1.
func (p *plane) cut(x *C.uly_axes, dense bool, piece, weight int64) int64 {
	*x = C.uly_axes{run: 1}
	outer := p.rank
	if outer > 0 && (!dense || p.unit()) {
		outer--
		x.run = C.int64_t(p.shape[outer])
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
	run := int64(x.run)
	if rows == 0 || run == 0 {
		return 0
	}
	piece = min(piece, run)
	units := rows * ceil(run, piece)
	per := max(1, grain/(piece*weight))
	x.rank, x.piece, x.units, x.per = C.int64_t(outer), C.int64_t(piece), C.int64_t(units), C.int64_t(per)
	return ceil(units, per)
}

func ceil(n, d int64) int64 { return (n + d - 1) / d }
