package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

const (
	maxParts = 64      // of a sum over rows: as many tasks at most
	partSize = 1 << 15 // elements of x that are worth a part of their own
	maxSums  = 1 << 12 // partial sums of a whole array
)

// parts cuts rows of n features into parts, by shape alone. What each sums, twice n floats, has its
// place in d.scratch, which no kernel of such a run uses otherwise: partial is nil when it does not
// fit, and then there is one part.
func (d *Device) parts(rows, n int64) (parts int64, partial *C.float) {
	fit := C.ULY_SCRATCH_BYTES / 8 / max(n, 1)
	if fit == 0 {
		return 1, nil
	}
	return max(1, min(maxParts, fit, ceil(rows*n, partSize), rows)), (*C.float)(d.scratch)
}

// fold adds what parts left to dst [n].
func (d *Device) fold(dst tensor.Tensor, parts int64, partial *C.float) error {
	if partial == nil {
		return nil
	}
	*(*C.fold_args)(d.args) = C.fold_args{partial: partial, dst: floatsOf(dst), n: C.int64_t(dst.Shape[0]), parts: C.int64_t(parts)}
	return d.run(C.K_column_fold, 1)
}

// ColumnSum adds the sum over the rows of x [T, N] to dst [N].
func (d *Device) ColumnSum(_ device.Stream, dst, x tensor.Tensor) error {
	defer runtime.KeepAlive(dst.Data)
	defer runtime.KeepAlive(x.Data)
	c := check{op: "ColumnSum"}
	t, bf16 := c.compute("x", x)
	c.typed("x", x, t, whatever, whatever)
	c.dense("dst", dst, tensor.F32, x.Shape[1])
	if c.err != nil {
		return c.err
	}
	rows, n := x.Shape[0], x.Shape[1]
	if rows*n == 0 {
		return nil
	}
	parts, partial := d.parts(rows, n)
	*(*C.column_args)(d.args) = C.column_args{x: x.Data, dst: floatsOf(dst), partial: partial, rows: C.int64_t(rows), n: C.int64_t(n),
		stride: C.int64_t(x.Stride[0]), parts: C.int64_t(parts), bf16: bf16}
	if err := d.run(C.K_column_sum, parts); err != nil {
		return err
	}
	return d.fold(dst, parts, partial)
}

// Sum writes Σx to out.
func (d *Device) Sum(_ device.Stream, out, x tensor.Tensor) error {
	defer runtime.KeepAlive(out.Data)
	defer runtime.KeepAlive(x.Data)
	total, err := d.sum("Sum", out, x, 0)
	if err == nil {
		*(*float64)(out.Data) = total
	}
	return err
}

// SumSquares adds Σx² to out.
func (d *Device) SumSquares(_ device.Stream, out, x tensor.Tensor) error {
	defer runtime.KeepAlive(out.Data)
	defer runtime.KeepAlive(x.Data)
	total, err := d.sum("SumSquares", out, x, 1)
	if err == nil {
		*(*float64)(out.Data) += total
	}
	return err
}

func (d *Device) sum(op string, out, x tensor.Tensor, squares C.int64_t) (total float64, err error) {
	c := check{op: op}
	c.dense("x", x, tensor.F32, x.Shape[:x.NDim]...)
	c.dense("out", out, tensor.F64, out.Shape[:out.NDim]...)
	if out.Numel() != 1 {
		c.fail("out is %v: want one element", out)
	}
	if c.err != nil {
		return 0, c.err
	}
	n := x.Numel()
	piece := max(partSize, ceil(n, maxSums))
	parts := ceil(n, piece)
	partial := unsafe.Slice((*float64)(d.scratch), maxSums)
	*(*C.sum_args)(d.args) = C.sum_args{x: floatsOf(x), partial: (*C.double)(d.scratch), n: C.int64_t(n), piece: C.int64_t(piece), squares: squares}
	if err := d.run(C.K_sum, parts); err != nil {
		return 0, err
	}
	for _, s := range partial[:parts] {
		total += s
	}
	return total, nil
}
