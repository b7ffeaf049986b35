package cpu

// #include "kernels.h"
import "C"

import (
	"math"

	"ulysses/device"
	"ulysses/tensor"
)

// AdamW takes one step. The order of operations is PyTorch's, so that the results agree to rounding.
func (d *Device) AdamW(_ device.Stream, a *device.AdamW) error {
	c := check{op: "AdamW"}
	shape := a.W.Shape[:a.W.NDim]
	c.dense("w", a.W, tensor.F32, shape...)
	c.dense("g", a.G, tensor.F32, shape...)
	c.dense("m", a.M, tensor.F32, shape...)
	c.dense("v", a.V, tensor.F32, shape...)
	if a.Step < 1 {
		c.fail("step %d: steps count from 1", a.Step)
	}
	if c.err != nil {
		return c.err
	}
	n, t := a.W.Numel(), float64(a.Step)
	*(*C.adamw_args)(d.args) = C.adamw_args{w: floatsOf(a.W), m: floatsOf(a.M), v: floatsOf(a.V), g: floatsOf(a.G), n: C.int64_t(n), piece: grain / 4,
		grad: C.float(a.GradScale), keep: C.float(1 - a.LR*a.WeightDecay), beta1: C.float(a.Beta1), beta2: C.float(a.Beta2),
		rest1: C.float(1 - a.Beta1), rest2: C.float(1 - a.Beta2), size: C.float(a.LR / (1 - math.Pow(a.Beta1, t))),
		root: C.float(math.Sqrt(1 - math.Pow(a.Beta2, t))), eps: C.float(a.Eps)}
	return d.run(C.K_adamw, ceil(n, grain/4))
}

// SGD takes one step without momentum.
func (d *Device) SGD(_ device.Stream, a *device.SGD) error {
	c := check{op: "SGD"}
	c.dense("w", a.W, tensor.F32, a.W.Shape[:a.W.NDim]...)
	c.dense("g", a.G, tensor.F32, a.W.Shape[:a.W.NDim]...)
	if c.err != nil {
		return c.err
	}
	n := a.W.Numel()
	*(*C.sgd_args)(d.args) = C.sgd_args{w: floatsOf(a.W), g: floatsOf(a.G), n: C.int64_t(n), piece: grain / 2,
		keep: C.float(1 - a.LR*a.WeightDecay), rate: C.float(a.LR * a.GradScale)}
	return d.run(C.K_sgd, ceil(n, grain/2))
}
