package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"math"
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// drops returns a probability of dropout as an integer times 2^-24, and the factor of the elements
// that are kept.
func drops(p float64) (drop C.int64_t, kept C.float) {
	return C.int64_t(math.RoundToEven(p * (1 << 24))), C.float(1 / (1 - p))
}

// Dropout writes y, or adds to it. Work is divided by tokens.
func (d *Device) Dropout(_ device.Stream, a *device.Dropout) error {
	defer runtime.KeepAlive(a)
	c := check{op: "Dropout"}
	bf16 := c.alike(2, operand{"x", a.X}, operand{"y", a.Y})
	tokens, n := a.X.Shape[0], a.X.Shape[1]
	c.dense("tokens", a.Tokens, tensor.I64, tokens)
	if !(a.P >= 0 && a.P < 1) {
		c.fail("P is %g; it must be in [0, 1)", a.P)
	}
	if c.err != nil || n == 0 {
		return c.err
	}
	per := max(1, grain/2/n)
	k := (*C.dropout_args)(d.args)
	k.x, k.y, k.numbers = a.X.Data, a.Y.Data, (*C.int64_t)(a.Tokens.Data)
	k.tokens, k.n, k.per_task, k.bf16, k.add = C.int64_t(tokens), C.int64_t(n), C.int64_t(per), bf16, number(a.Add)
	k.x_row, k.y_row = C.int64_t(a.X.Stride[0]), C.int64_t(a.Y.Stride[0])
	k.seed = C.uint64_t(a.Seed)
	k.drop, k.kept = drops(a.P)
	return d.run(C.K_dropout, ceilDiv(tokens, per))
}
