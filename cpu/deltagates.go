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
	gateHeads = 1 << 10 // heads of a run: their partial sums fit in the scratch with maxSplits
	// rows of a split. It does not depend on the number of heads, so the sums of a head do not
	// depend on other heads.
	gateRows = 1 << 10
)

// gatesShape checks the inputs a and b [T, H] of the compute type t, and returns their extents.
func gatesShape(c *check, t tensor.DType, a, b *tensor.Tensor) (rows, heads int64) {
	c.typed("a", *a, t, whatever, whatever)
	rows, heads = a.Shape[0], a.Shape[1]
	c.typed("b", *b, t, rows, heads)
	return rows, heads
}

// parameter requires one value for each head, of the compute type t or F32, and returns its type as
// the kernels' argument.
func (c *check) parameter(name string, x tensor.Tensor, t tensor.DType, heads int64) (bf16 C.int64_t) {
	own, bf16 := c.compute(name, x)
	if own != tensor.F32 {
		own = t
	}
	c.dense(name, x, own, heads)
	return bf16
}

// DeltaGatesForward writes g = -exp(alog)·softplus(a + dtbias) and beta = sigmoid(b), both [T, H].
func (d *Device) DeltaGatesForward(_ device.Stream, a *device.DeltaGates) error {
	defer runtime.KeepAlive(a)
	c := check{op: "DeltaGatesForward"}
	t, bf16 := c.compute("a", a.A)
	rows, heads := gatesShape(&c, t, &a.A, &a.B)
	alogBF16, biasBF16 := c.parameter("alog", a.ALog, t, heads), c.parameter("dtbias", a.DtBias, t, heads)
	c.rows("g", a.G, rows, heads)
	c.rows("beta", a.Beta, rows, heads)
	if c.err != nil || heads == 0 {
		return c.err
	}
	perTask := max(1, grain/8/heads)
	*(*C.delta_gates_args)(d.args) = C.delta_gates_args{a: a.A.Data, b: a.B.Data, alog: a.ALog.Data,
		bias: a.DtBias.Data, g: floatsOf(a.G), beta: floatsOf(a.Beta), rows: C.int64_t(rows), heads: C.int64_t(heads),
		per_task: C.int64_t(perTask), bf16: bf16, alog_bf16: alogBF16, bias_bf16: biasBF16,
		a_row: C.int64_t(a.A.Stride[0]), b_row: C.int64_t(a.B.Stride[0]), g_row: C.int64_t(a.G.Stride[0]),
		beta_row: C.int64_t(a.Beta.Stride[0])}
	return d.run(C.K_delta_gates_forward, ceilDiv(rows, perTask))
}

// DeltaGatesBackward writes da and db and adds to dalog and ddtbias.
func (d *Device) DeltaGatesBackward(_ device.Stream, a *device.DeltaGatesGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "DeltaGatesBackward"}
	t, bf16 := c.compute("a", a.A)
	rows, heads := gatesShape(&c, t, &a.A, &a.B)
	alogBF16, biasBF16 := c.parameter("alog", a.ALog, t, heads), c.parameter("dtbias", a.DtBias, t, heads)
	c.rows("dg", a.DG, rows, heads)
	c.rows("dbeta", a.DBeta, rows, heads)
	c.typed("da", a.DA, t, rows, heads)
	c.typed("db", a.DB, t, rows, heads)
	c.dense("dalog", a.DALog, tensor.F32, heads)
	c.dense("ddtbias", a.DDtBias, tensor.F32, heads)
	if c.err != nil || rows == 0 {
		return c.err
	}
	splits := min(maxSplits, ceilDiv(rows, gateRows))
	for lo := int64(0); lo < heads; lo += gateHeads {
		n := min(gateHeads, heads-lo)
		at := func(t *tensor.Tensor) unsafe.Pointer { return t.Slice(int(t.NDim)-1, lo, lo+n).Data }
		floatsAt := func(t *tensor.Tensor) *C.float { return (*C.float)(at(t)) }
		*(*C.delta_gates_grad_args)(d.args) = C.delta_gates_grad_args{a: at(&a.A), b: at(&a.B), alog: at(&a.ALog),
			bias: at(&a.DtBias), dg: floatsAt(&a.DG), dbeta: floatsAt(&a.DBeta), da: at(&a.DA), db: at(&a.DB),
			partial: (*C.float)(d.scratch), rows: C.int64_t(rows), heads: C.int64_t(n), splits: C.int64_t(splits),
			bf16: bf16, alog_bf16: alogBF16, bias_bf16: biasBF16,
			a_row: C.int64_t(a.A.Stride[0]), b_row: C.int64_t(a.B.Stride[0]), dg_row: C.int64_t(a.DG.Stride[0]),
			dbeta_row: C.int64_t(a.DBeta.Stride[0]), da_row: C.int64_t(a.DA.Stride[0]),
			db_row: C.int64_t(a.DB.Stride[0])}
		if err := d.run(C.K_delta_gates_backward, splits); err != nil {
			return err
		}
		*(*C.delta_gates_fold_args)(d.args) = C.delta_gates_fold_args{partial: (*C.float)(d.scratch),
			dalog: floatsAt(&a.DALog), dbias: floatsAt(&a.DDtBias),
			heads: C.int64_t(n), splits: C.int64_t(splits)}
		if err := d.run(C.K_delta_gates_fold, 1); err != nil {
			return err
		}
	}
	return nil
}
