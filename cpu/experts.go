package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"cmp"
	"math"
	"runtime"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// number returns 1 for true, as an argument of a kernel.
func number(b bool) C.int64_t {
	if b {
		return 1
	}
	return 0
}

func ints(t tensor.Tensor) *C.int32_t   { return (*C.int32_t)(t.Data) }
func doubles(t tensor.Tensor) *C.double { return (*C.double)(t.Data) }

// choices requires the tensors of T·K choices among E experts. It returns K.
func (c *check) choices(experts, rows tensor.Tensor, tokens, among int64) int64 {
	c.dense("experts", experts, tensor.I32, tokens, whatever)
	k := experts.Shape[1]
	c.dense("rows", rows, tensor.I32, tokens, k)
	if k < 1 || k > among || among > math.MaxInt32 || tokens > math.MaxInt32/max(1, k) {
		c.fail("%d tokens choose %d of %d experts; choose at least 1 and at most all, less than 2^31 in total", tokens,
			k, among)
	}
	return k
}

// inside returns an error if a value of x [T, K] or [T] is not in [lo, n).
func (c *check) inside(name string, x tensor.Tensor, lo int32, n int64) error {
	if c.err != nil {
		return c.err
	}
	for i, v := range x.Int32s() {
		if v < lo || int64(v) >= n {
			return status.Errorf(status.Internal, "cpu.%s: %s %d is %d; it must be below %d", c.op, name, i, v, n)
		}
	}
	return nil
}

// groups requires offsets [E+1] that rise from 0 to a number of rows.
func (c *check) groups(offsets tensor.Tensor, experts, rows int64) error {
	c.dense("offsets", offsets, tensor.I32, experts+1)
	if c.err != nil {
		return c.err
	}
	last := int32(0)
	for e, at := range offsets.Int32s() {
		if at < last || e == 0 && at != 0 || int64(e) == experts && int64(at) != rows {
			return status.Errorf(status.Internal,
				"cpu.%s: offset %d is %d after %d; offsets must rise from 0 to the %d rows", c.op, e, at, last, rows)
		}
		last = at
	}
	return nil
}

// groupsOf requires groups of experts of which k experts can be chosen.
func (c *check) groupsOf(a *device.Route, experts, k int64) (groups, kept int64) {
	groups, kept = max(1, a.Groups), max(1, a.KeptGroups)
	if groups > device.MaxGroups || kept > groups || experts%groups != 0 || k > kept*(experts/groups) ||
		groups > 1 && experts/groups < 2 {
		c.fail("%d experts are in %d groups, of which %d are kept, and a token chooses %d experts; groups must be equal, "+
			"at most %d with at least 2 experts each, and the kept ones need enough experts", experts, groups, kept, k,
			device.MaxGroups)
	}
	if !a.Sigmoid && !a.Bias.IsNil() && groups > 1 {
		c.fail("%d groups with a bias and without Sigmoid are not built", groups)
	}
	return groups, kept
}

// RouteForward chooses experts, see device.Route. The choice is divided by tokens, the sort is one
// task.
func (d *Device) RouteForward(_ device.Stream, a *device.Route) error {
	defer runtime.KeepAlive(a)
	c := check{op: "RouteForward"}
	c.rows("logits", a.Logits, whatever, whatever)
	tokens, experts := a.Logits.Shape[0], a.Logits.Shape[1]
	k := c.choices(a.Experts, a.Rows, tokens, experts)
	groups, kept := c.groupsOf(a, experts, k)
	c.dense("weights", a.Weights, tensor.F32, tokens*k)
	c.dense("offsets", a.Offsets, tensor.I32, experts+1)
	if !a.Bias.IsNil() {
		c.dense("bias", a.Bias, tensor.F32, experts)
	}
	counted := !a.Sequence.IsNil()
	if counted {
		c.dense("sequence", a.Sequence, tensor.I32, tokens)
		c.dense("counts", a.Counts, tensor.F64, whatever, experts)
		c.dense("sums", a.Sums, tensor.F64, a.Counts.Shape[0], experts)
		if err := c.inside("the sequence of token", a.Sequence, math.MinInt32, a.Counts.Shape[0]); err != nil {
			return err
		}
	}
	if c.err != nil {
		return c.err
	}
	defer d.forget()
	const band = 16 // experts of a task that adds probabilities: two cache lines
	perTask := max(1, grain/8/max(1, experts))
	p := (*C.route_args)(d.args)
	*p = C.route_args{logits: floatsOf(a.Logits), chosen: ints(a.Experts), rows: ints(a.Rows), offsets: ints(a.Offsets),
		weights: floatsOf(a.Weights), tokens: C.int64_t(tokens), experts: C.int64_t(experts), k: C.int64_t(k),
		per_task: C.int64_t(perTask), logits_row: C.int64_t(a.Logits.Stride[0]), normalize: number(a.Normalize),
		sums_per_task: band, sigmoid: number(a.Sigmoid), groups: C.int64_t(groups), kept_groups: C.int64_t(kept),
		weight_scale: C.float(cmp.Or(a.WeightScale, 1))}
	if !a.Bias.IsNil() {
		p.bias = floatsOf(a.Bias)
	}
	if counted {
		p.sequence, p.counts, p.sums = ints(a.Sequence), doubles(a.Counts), doubles(a.Sums)
	}
	if err := d.runKeeping(C.K_route_tokens, ceilDiv(tokens, perTask)); err != nil {
		return err
	}
	if err := d.runKeeping(C.K_route_sort, 1); err != nil || !counted {
		return err
	}
	return d.runKeeping(C.K_route_sums, ceilDiv(experts, band))
}

// RouteBackward writes the gradient of the logits, see device.RouteGrad.
func (d *Device) RouteBackward(_ device.Stream, a *device.RouteGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "RouteBackward"}
	c.rows("probs", a.Probs, whatever, whatever)
	tokens, experts := a.Probs.Shape[0], a.Probs.Shape[1]
	k := c.choices(a.Experts, a.Rows, tokens, experts)
	c.dense("weights", a.Weights, tensor.F32, tokens*k)
	c.dense("dweights", a.DWeights, tensor.F32, tokens*k)
	t, bf16 := c.compute("dlogits", a.DLogits)
	c.typed("dlogits", a.DLogits, t, tokens, experts)
	counted := !a.Sequence.IsNil()
	if counted && a.Sigmoid {
		c.fail("a gradient of the balance of experts with Sigmoid is not built")
	}
	if counted {
		c.dense("sequence", a.Sequence, tensor.I32, tokens)
		c.dense("counts", a.Counts, tensor.F64, whatever, experts)
		c.dense("scale", a.Scale, tensor.F32, a.Counts.Shape[0])
		if err := c.inside("the sequence of token", a.Sequence, math.MinInt32, a.Counts.Shape[0]); err != nil {
			return err
		}
	}
	if err := c.inside("expert", a.Experts, 0, experts); err != nil {
		return err
	}
	if err := c.inside("row", a.Rows, 0, tokens*k); err != nil {
		return err
	}
	perTask := max(1, grain/8/max(1, experts))
	p := (*C.route_grad_args)(d.args)
	*p = C.route_grad_args{probs: floatsOf(a.Probs), chosen: ints(a.Experts), rows: ints(a.Rows),
		weights: floatsOf(a.Weights), dweights: floatsOf(a.DWeights), dlogits: a.DLogits.Data,
		tokens: C.int64_t(tokens), experts: C.int64_t(experts), k: C.int64_t(k), per_task: C.int64_t(perTask),
		probs_row: C.int64_t(a.Probs.Stride[0]), dlogits_row: C.int64_t(a.DLogits.Stride[0]),
		normalize: number(a.Normalize), sigmoid: number(a.Sigmoid), bf16: bf16,
		weight_scale: C.double(cmp.Or(a.WeightScale, 1))}
	if counted {
		p.sequence, p.counts, p.scale = ints(a.Sequence), doubles(a.Counts), floatsOf(a.Scale)
	}
	return d.run(C.K_route_backward, ceilDiv(tokens, perTask))
}

// SpreadRows copies each token to its rows.
func (d *Device) SpreadRows(_ device.Stream, a *device.SpreadRows) error {
	defer runtime.KeepAlive(a)
	return d.moveRows("SpreadRows", C.K_spread_rows, a.X, a.Y, a.X, a.Y, &device.CombineRows{Rows: a.Rows})
}

// CombineRows adds the rows of each token.
func (d *Device) CombineRows(_ device.Stream, a *device.CombineRows) error {
	defer runtime.KeepAlive(a)
	return d.moveRows("CombineRows", C.K_combine_rows, a.Y, a.X, a.X, a.Y, a)
}

// moveRows runs a kernel from x to y. One of them, tokens [T, N], is by token, the other, sorted
// [T·K, N], by row. a has the rows, the weights and the own rows.
func (d *Device) moveRows(op string, kernel int, tokens, sorted, x, y tensor.Tensor, a *device.CombineRows) error {
	c, rows := check{op: op}, a.Rows
	t, bf16 := c.compute("x", x)
	c.dense("rows", rows, tensor.I32, whatever, whatever)
	n, k, features := rows.Shape[0], rows.Shape[1], tokens.Shape[1]
	c.typed("the tensor by token", tokens, t, n, whatever)
	c.typed("the tensor by row", sorted, t, n*k, features)
	if !a.Weights.IsNil() {
		c.dense("weights", a.Weights, tensor.F32, n*k)
	}
	if !a.Own.IsNil() {
		c.typed("own", a.Own, t, n, features)
	}
	if !a.OwnWeights.IsNil() {
		c.dense("own weights", a.OwnWeights, tensor.F32, n)
	}
	if err := c.inside("row", rows, 0, n*k); err != nil {
		return err
	}
	perTask := max(1, grain/max(1, features*k))
	p := (*C.rows_args)(d.args)
	*p = C.rows_args{x: x.Data, y: y.Data, rows: ints(rows), tokens: C.int64_t(n), k: C.int64_t(k),
		n: C.int64_t(features), x_row: C.int64_t(x.Stride[0]), y_row: C.int64_t(y.Stride[0]),
		per_task: C.int64_t(perTask), bf16: bf16}
	if !a.Weights.IsNil() {
		p.weights = floatsOf(a.Weights)
	}
	if !a.Own.IsNil() {
		p.own, p.own_row = a.Own.Data, C.int64_t(a.Own.Stride[0])
	}
	if !a.OwnWeights.IsNil() {
		p.own_weights = floatsOf(a.OwnWeights)
	}
	return d.run(kernel, ceilDiv(n, perTask))
}

// GroupedGemm runs a Gemm for each expert with rows.
func (d *Device) GroupedGemm(s device.Stream, a *device.GroupedGemm) error {
	c := check{op: "GroupedGemm"}
	t, _ := c.compute("A", a.A)
	c.typed("A", a.A, t, whatever, whatever)
	rows, k := a.A.Shape[0], a.A.Shape[1]
	c.shape("B", a.B, t, whatever, k, whatever)
	experts, n := a.B.Shape[0], a.B.Shape[2]
	c.typed("C", a.C, t, rows, n)
	if !a.Bias.IsNil() {
		c.typed("bias", a.Bias, t, experts, n)
	}
	return d.each(&c, a.Offsets, experts, rows, func(e, lo, hi int64) error {
		d.grouped = device.Gemm{A: a.A.Slice(0, lo, hi), B: a.B.Select(0, e), C: a.C.Slice(0, lo, hi)}
		if !a.Bias.IsNil() {
			d.grouped.Bias = a.Bias.Select(0, e)
		}
		return d.Gemm(s, &d.grouped)
	})
}

// GroupedGemmWeights runs a Gemm for each expert with rows.
func (d *Device) GroupedGemmWeights(s device.Stream, a *device.GroupedGemmWeights) error {
	c := check{op: "GroupedGemmWeights"}
	t, _ := c.compute("A", a.A)
	c.typed("A", a.A, t, whatever, whatever)
	c.typed("B", a.B, t, a.A.Shape[0], whatever)
	c.typed("C", a.C, tensor.F32, whatever, a.A.Shape[1], a.B.Shape[1])
	return d.each(&c, a.Offsets, a.C.Shape[0], a.A.Shape[0], func(e, lo, hi int64) error {
		d.grouped = device.Gemm{A: a.A.Slice(0, lo, hi).Permute(1, 0), B: a.B.Slice(0, lo, hi), C: a.C.Select(0, e),
			Accumulate: true}
		return d.Gemm(s, &d.grouped)
	})
}

// each calls f for each expert with rows.
func (d *Device) each(c *check, offsets tensor.Tensor, experts, rows int64, f func(e, lo, hi int64) error) error {
	if err := c.groups(offsets, experts, rows); err != nil {
		return err
	}
	defer func() { d.grouped = device.Gemm{} }() // it refers to the caller's memory
	at := offsets.Int32s()
	for e := range experts {
		if at[e] == at[e+1] {
			continue
		}
		if err := f(e, int64(at[e]), int64(at[e+1])); err != nil {
			return err
		}
	}
	return nil
}

// WeightedSwiGLUBackward writes dgate, dup and dweights. With Restore it also writes weights·y to
// dy.
func (d *Device) WeightedSwiGLUBackward(_ device.Stream, a *device.WeightedSwiGLUGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "WeightedSwiGLUBackward"}
	bf16 := c.alike(2, operand{"gate", a.Gate}, operand{"up", a.Up}, operand{"dy", a.DY}, operand{"dgate", a.DGate},
		operand{"dup", a.DUp})
	rows, n := a.Gate.Shape[0], a.Gate.Shape[1]
	c.dense("weights", a.Weights, tensor.F32, rows)
	c.dense("dweights", a.DWeights, tensor.F32, rows)
	form := c.form(a.GELU, a.Clamped)
	if c.err != nil {
		return c.err
	}
	perTask := max(1, grain/2/max(1, n))
	*(*C.swiglu_weighted_args)(d.args) = C.swiglu_weighted_args{gate: a.Gate.Data, up: a.Up.Data, dy: a.DY.Data,
		dgate: a.DGate.Data, dup: a.DUp.Data, weights: floatsOf(a.Weights), dweights: floatsOf(a.DWeights),
		rows: C.int64_t(rows), n: C.int64_t(n), per_task: C.int64_t(perTask), gate_row: C.int64_t(a.Gate.Stride[0]),
		up_row: C.int64_t(a.Up.Stride[0]), dy_row: C.int64_t(a.DY.Stride[0]), dgate_row: C.int64_t(a.DGate.Stride[0]),
		dup_row: C.int64_t(a.DUp.Stride[0]), bf16: bf16, restore: number(a.Restore), form: form}
	return d.run(C.K_swiglu_weighted, ceilDiv(rows, perTask))
}
