package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"math"

	"ulysses/device"
	"ulysses/tensor"
)

// AdamW makes one step. The order of operations is that of PyTorch, so results differ by rounding
// only.
func (d *Device) AdamW(s device.Stream, a *device.AdamW) error {
	defer runtime.KeepAlive(a)
	c := check{op: "AdamW"}
	shape := a.W.Shape[:a.W.NDim]
	c.dense("w", a.W, tensor.F32, shape...)
	c.dense("g", a.G, tensor.F32, shape...)
	c.dense("m", a.M, tensor.F32, shape...)
	c.dense("v", a.V, tensor.F32, shape...)
	c.update(a.W, a.Low, a.Decay)
	if a.Step < 1 {
		c.fail("Step is %d; steps count from 1", a.Step)
	}
	if c.err != nil {
		return c.err
	}
	t := float64(a.Step)
	w, g, m, v := flat(a.W), flat(a.G), flat(a.M), flat(a.V)
	args := C.adamw_args{per_task: grain / 4,
		grad: C.float(a.GradScale), beta1: C.float(a.Beta1), beta2: C.float(a.Beta2),
		rest1: C.float(1 - a.Beta1), rest2: C.float(1 - a.Beta2), size: C.float(a.LR / (1 - math.Pow(a.Beta1, t))),
		root: C.float(math.Sqrt(1 - math.Pow(a.Beta2, t))), eps: C.float(a.Eps)}
	err := eachRange(w.Numel(), a.WeightDecay, a.Decay, func(lo, hi int64, decay float64) error {
		args.w, args.m, args.v, args.g = floatsOf(w.Offset(lo)), floatsOf(m.Offset(lo)), floatsOf(v.Offset(lo)),
			floatsOf(g.Offset(lo))
		args.n, args.keep = C.int64_t(hi-lo), C.float(1-a.LR*decay)
		*(*C.adamw_args)(d.args) = args
		return d.run(C.K_adamw, ceilDiv(hi-lo, grain/4))
	})
	return d.lower(s, a.Low, a.W, err)
}

// SGD makes one step without momentum.
func (d *Device) SGD(s device.Stream, a *device.SGD) error {
	defer runtime.KeepAlive(a)
	c := check{op: "SGD"}
	c.dense("w", a.W, tensor.F32, a.W.Shape[:a.W.NDim]...)
	c.dense("g", a.G, tensor.F32, a.W.Shape[:a.W.NDim]...)
	c.update(a.W, a.Low, a.Decay)
	if c.err != nil {
		return c.err
	}
	w, g := flat(a.W), flat(a.G)
	err := eachRange(w.Numel(), a.WeightDecay, a.Decay, func(lo, hi int64, decay float64) error {
		*(*C.sgd_args)(d.args) = C.sgd_args{w: floatsOf(w.Offset(lo)), g: floatsOf(g.Offset(lo)), n: C.int64_t(hi - lo),
			per_task: grain / 2, keep: C.float(1 - a.LR*decay), rate: C.float(a.LR * a.GradScale)}
		return d.run(C.K_sgd, ceilDiv(hi-lo, grain/2))
	})
	return d.lower(s, a.Low, a.W, err)
}

func flat(t tensor.Tensor) tensor.Tensor { return t.View(t.Numel()) }

// lower copies the weights w to low, rounded to BF16, unless low is nil or err is not.
func (d *Device) lower(s device.Stream, low, w tensor.Tensor, err error) error {
	defer runtime.KeepAlive(low.Data)
	defer runtime.KeepAlive(w.Data)
	if err != nil || low.IsNil() {
		return err
	}
	return d.Copy(s, low, w)
}

// eachRange divides [0, n) into the given ranges and the gaps between them, and calls f for each in
// order: with the weight decay for a range, with 0 for a gap. nil ranges are one range, [0, n).
func eachRange(n int64, decay float64, ranges []device.Range, f func(lo, hi int64, decay float64) error) error {
	if ranges == nil {
		return f(0, n, decay)
	}
	at := int64(0)
	step := func(hi int64, decay float64) (err error) {
		if hi > at {
			err, at = f(at, hi, decay), hi
		}
		return err
	}
	for _, r := range ranges {
		if err := step(r.Lo, 0); err != nil {
			return err
		}
		if err := step(r.Hi, decay); err != nil {
			return err
		}
	}
	return step(n, 0)
}

// update requires a BF16 copy of the weights, if there is one, and ascending ranges of decay.
func (c *check) update(w, low tensor.Tensor, ranges []device.Range) {
	if !low.IsNil() {
		c.dense("low", low, tensor.BF16, w.Shape[:w.NDim]...)
	}
	at := int64(0)
	for _, r := range ranges {
		if r.Lo < at || r.Hi < r.Lo || r.Hi > w.Numel() {
			c.fail("decay range [%d, %d) starts before %d or ends after %d; ranges must ascend inside the tensor", r.Lo,
				r.Hi, at, w.Numel())
		}
		at = r.Hi
	}
}
