package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"math"
	"runtime"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// CrossEntropy writes the negative log-likelihood of each row's target to nll [T], and the gradient
// of GradScale·Σnll to dlogits [T, V] if DLogits is given. Rows whose target is -100 count as 0.
func (d *Device) CrossEntropy(_ device.Stream, a *device.CrossEntropy) error {
	defer runtime.KeepAlive(a)
	c := check{op: "CrossEntropy"}
	c.rows("logits", a.Logits, whatever, whatever)
	rows, vocab := a.Logits.Shape[0], a.Logits.Shape[1]
	c.dense("targets", a.Targets, tensor.I32, rows)
	c.dense("nll", a.NLL, tensor.F32, rows)
	var bf16 C.int64_t
	if !a.DLogits.IsNil() {
		var t tensor.DType
		t, bf16 = c.compute("dlogits", a.DLogits)
		c.typed("dlogits", a.DLogits, t, rows, vocab)
	}
	if !(a.Softcap >= 0) || math.IsInf(a.Softcap, 0) {
		c.fail("softcap is %v; it must be finite and not negative", a.Softcap)
	}
	if c.err != nil {
		return c.err
	}
	for t, target := range a.Targets.Int32s() {
		if target != C.CROSS_IGNORED && (target < 0 || int64(target) >= vocab) {
			return status.Errorf(status.Internal,
				"cpu.CrossEntropy: row %d has target %d and %d logits; the data reader should have refused this target",
				t, target, vocab)
		}
	}
	perTask := max(1, grain/4/max(1, vocab))
	*(*C.cross_args)(d.args) = C.cross_args{logits: floatsOf(a.Logits), targets: (*C.int32_t)(a.Targets.Data),
		nll: floatsOf(a.NLL), dlogits: a.DLogits.Data, bf16: bf16, rows: C.int64_t(rows), vocab: C.int64_t(vocab),
		logits_row: C.int64_t(a.Logits.Stride[0]), dlogits_row: C.int64_t(a.DLogits.Stride[0]),
		per_task: C.int64_t(perTask), scale: C.double(a.GradScale),
		softcap: C.double(a.Softcap)}
	return d.run(C.K_cross_entropy, ceilDiv(rows, perTask))
}
