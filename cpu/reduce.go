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
	maxSplits = 64      // most splits, and tasks, of a sum over rows
	splitSize = 1 << 15 // elements of x of a split, at least
	maxSums   = 1 << 12 // most partial sums of a whole array
)

// rowSplits returns the number of splits of a sum over rows of n features, which depends on the
// shape alone, and the memory of their partial sums, 2·n floats each. The memory is d.scratch,
// which the kernels of such sums do not use otherwise. If one partial sum does not fit, partial is
// nil and there is one split.
func (d *Device) rowSplits(rows, n int64) (splits int64, partial *C.float) {
	fit := C.ULY_SCRATCH_BYTES / 8 / max(n, 1)
	if fit == 0 {
		return 1, nil
	}
	return max(1, min(maxSplits, fit, ceilDiv(rows*n, splitSize), rows)), (*C.float)(d.scratch)
}

// runSplits runs a kernel that sums over rows, one task for each split, and adds the partial sums
// to dst [n].
func (d *Device) runSplits(kernel int, dst tensor.Tensor, splits int64, partial *C.float) error {
	if err := d.run(kernel, splits); err != nil || partial == nil {
		return err
	}
	*(*C.fold_args)(d.args) = C.fold_args{partial: partial, dst: floatsOf(dst), n: C.int64_t(dst.Shape[0]),
		splits: C.int64_t(splits)}
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
	splits, partial := d.rowSplits(rows, n)
	*(*C.column_args)(d.args) = C.column_args{x: x.Data, dst: floatsOf(dst), partial: partial, rows: C.int64_t(rows),
		n: C.int64_t(n), stride: C.int64_t(x.Stride[0]), splits: C.int64_t(splits), bf16: bf16}
	return d.runSplits(C.K_column_sum, dst, splits, partial)
}

// Sum writes Σx over all elements to out, one F64.
func (d *Device) Sum(_ device.Stream, out, x tensor.Tensor) error {
	defer runtime.KeepAlive(out.Data)
	defer runtime.KeepAlive(x.Data)
	total, err := d.sum("Sum", out, x, 0)
	if err == nil {
		*(*float64)(out.Data) = total
	}
	return err
}

// SumSquares adds Σx² over all elements to out, one F64.
func (d *Device) SumSquares(_ device.Stream, out, x tensor.Tensor) error {
	defer runtime.KeepAlive(out.Data)
	defer runtime.KeepAlive(x.Data)
	total, err := d.sum("SumSquares", out, x, 1)
	if err == nil {
		*(*float64)(out.Data) += total
	}
	return err
}

// sum returns Σx or Σx² in double precision, for the operation op.
func (d *Device) sum(op string, out, x tensor.Tensor, squares C.int64_t) (total float64, err error) {
	c := check{op: op}
	c.dense("x", x, tensor.F32, x.Shape[:x.NDim]...)
	c.dense("out", out, tensor.F64, out.Shape[:out.NDim]...)
	if out.Numel() != 1 {
		c.fail("out is %v; want one element", out)
	}
	if c.err != nil {
		return 0, c.err
	}
	n := x.Numel()
	perTask := max(splitSize, ceilDiv(n, maxSums))
	tasks := ceilDiv(n, perTask)
	partial := unsafe.Slice((*float64)(d.scratch), maxSums)
	*(*C.sum_args)(d.args) = C.sum_args{x: floatsOf(x), partial: (*C.double)(d.scratch), n: C.int64_t(n),
		per_task: C.int64_t(perTask), squares: squares}
	if err := d.run(C.K_sum, tasks); err != nil {
		return 0, err
	}
	for _, s := range partial[:tasks] {
		total += s
	}
	return total, nil
}
