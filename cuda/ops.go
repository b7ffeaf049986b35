package cuda

// #include "bridge.h"
import "C"

import (
	"ulysses/device"
	"ulysses/tensor"
)

// The operations: device.Ops field by field. What they compute is said there; the plug-in checks
// shapes.

// Fill writes value into every element.
func (d *Device) Fill(s device.Stream, dst tensor.Tensor, value float64) error {
	own, err := d.of("Fill", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_fill](d)
	put(&a.dst, dst)
	a.value = C.double(value)
	return enqueue(d, own, C.ULY_OP_FILL, a)
}

// Add writes a + b.
func (d *Device) Add(s device.Stream, dst, x, y tensor.Tensor) error {
	own, err := d.of("Add", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_add](d)
	put(&a.dst, dst)
	put(&a.a, x)
	put(&a.b, y)
	return enqueue(d, own, C.ULY_OP_ADD, a)
}

// Scale multiplies in place.
func (d *Device) Scale(s device.Stream, x tensor.Tensor, f float64) error {
	own, err := d.of("Scale", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_scale](d)
	put(&a.x, x)
	a.f = C.double(f)
	return enqueue(d, own, C.ULY_OP_SCALE, a)
}

// ColumnSum adds the sum over rows.
func (d *Device) ColumnSum(s device.Stream, dst, x tensor.Tensor) error {
	own, err := d.of("ColumnSum", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_column_sum](d)
	put(&a.dst, dst)
	put(&a.x, x)
	return enqueue(d, own, C.ULY_OP_COLUMN_SUM, a)
}

// Sum writes Σx, SumSquares adds Σx².
func (d *Device) Sum(s device.Stream, out, x tensor.Tensor) error {
	return d.sum(s, "Sum", C.ULY_OP_SUM, out, x)
}
func (d *Device) SumSquares(s device.Stream, out, x tensor.Tensor) error {
	return d.sum(s, "SumSquares", C.ULY_OP_SUM_SQUARES, out, x)
}

func (d *Device) sum(s device.Stream, name string, op C.int32_t, out, x tensor.Tensor) error {
	own, err := d.of(name, s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_sum](d)
	put(&a.out, out)
	put(&a.x, x)
	return enqueue(d, own, op, a)
}

// Gemm is A·B (+ Bias) (+ C).
func (d *Device) Gemm(s device.Stream, g *device.Gemm) error {
	own, err := d.of("Gemm", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_gemm](d)
	put(&a.a, g.A)
	put(&a.b, g.B)
	put(&a.c, g.C)
	put(&a.bias, g.Bias)
	a.accumulate = flag(g.Accumulate)
	return enqueue(d, own, C.ULY_OP_GEMM, a)
}

// RMSNormForward normalises rows.
func (d *Device) RMSNormForward(s device.Stream, n *device.RMSNorm) error {
	own, err := d.of("RMSNormForward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_rmsnorm](d)
	put(&a.x, n.X)
	put(&a.w, n.W)
	put(&a.y, n.Y)
	put(&a.rstd, n.RStd)
	a.eps, a.centre = C.double(n.Eps), C.double(n.Centre)
	return enqueue(d, own, C.ULY_OP_RMSNORM_FORWARD, a)
}

// RMSNormBackward is its derivative.
func (d *Device) RMSNormBackward(s device.Stream, n *device.RMSNormGrad) error {
	own, err := d.of("RMSNormBackward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_rmsnorm_grad](d)
	put(&a.x, n.X)
	put(&a.w, n.W)
	put(&a.rstd, n.RStd)
	put(&a.dy, n.DY)
	put(&a.dx, n.DX)
	put(&a.dw, n.DW)
	a.centre, a.add_dx = C.double(n.Centre), flag(n.AddDX)
	return enqueue(d, own, C.ULY_OP_RMSNORM_BACKWARD, a)
}

// RopeTable makes the table of angles.
func (d *Device) RopeTable(s device.Stream, r *device.RopeTable) error {
	own, err := d.of("RopeTable", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_rope_table](d)
	put(&a.positions, r.Positions)
	put(&a.freq, r.Freq)
	put(&a.cos, r.Cos)
	put(&a.sin, r.Sin)
	a.scale = C.double(r.Scale)
	return enqueue(d, own, C.ULY_OP_ROPE_TABLE, a)
}

// Rope rotates heads by the table.
func (d *Device) Rope(s device.Stream, r *device.Rope) error {
	own, err := d.of("Rope", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_rope](d)
	put(&a.x, r.X)
	put(&a.y, r.Y)
	put(&a.cos, r.Cos)
	put(&a.sin, r.Sin)
	put(&a.w, r.W)
	put(&a.rstd, r.RStd)
	a.eps, a.centre = C.double(r.Eps), C.double(r.Centre)
	a.inverse = flag(r.Inverse)
	return enqueue(d, own, C.ULY_OP_ROPE, a)
}

// SwiGLUForward is silu(gate)·up.
func (d *Device) SwiGLUForward(s device.Stream, g *device.SwiGLU) error {
	own, err := d.of("SwiGLUForward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_swiglu](d)
	put(&a.gate, g.Gate)
	put(&a.up, g.Up)
	put(&a.y, g.Y)
	return enqueue(d, own, C.ULY_OP_SWIGLU_FORWARD, a)
}

// SwiGLUBackward is its derivative.
func (d *Device) SwiGLUBackward(s device.Stream, g *device.SwiGLUGrad) error {
	own, err := d.of("SwiGLUBackward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_swiglu_grad](d)
	put(&a.gate, g.Gate)
	put(&a.up, g.Up)
	put(&a.dy, g.DY)
	put(&a.dgate, g.DGate)
	put(&a.dup, g.DUp)
	a.restore = flag(g.Restore)
	return enqueue(d, own, C.ULY_OP_SWIGLU_BACKWARD, a)
}

// EmbeddingForward takes a row of the table for every id; an id out of range shows when the stream
// is waited for.
func (d *Device) EmbeddingForward(s device.Stream, e *device.Embedding) error {
	own, err := d.of("EmbeddingForward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_embedding](d)
	put(&a.table, e.Table)
	put(&a.ids, e.IDs)
	put(&a.y, e.Y)
	return enqueue(d, own, C.ULY_OP_EMBEDDING_FORWARD, a)
}

// EmbeddingBackward adds gradients to the rows they came from.
func (d *Device) EmbeddingBackward(s device.Stream, e *device.EmbeddingGrad) error {
	own, err := d.of("EmbeddingBackward", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_embedding_grad](d)
	put(&a.ids, e.IDs)
	put(&a.dy, e.DY)
	put(&a.dtable, e.DTable)
	return enqueue(d, own, C.ULY_OP_EMBEDDING_BACKWARD, a)
}

// CrossEntropy is the loss of every row and its gradient.
func (d *Device) CrossEntropy(s device.Stream, c *device.CrossEntropy) error {
	own, err := d.of("CrossEntropy", s)
	if err != nil {
		return err
	}
	a := arguments[C.uly_cross_entropy](d)
	put(&a.logits, c.Logits)
	put(&a.targets, c.Targets)
	put(&a.nll, c.NLL)
	put(&a.dlogits, c.DLogits)
	a.grad_scale = C.double(c.GradScale)
	return enqueue(d, own, C.ULY_OP_CROSS_ENTROPY, a)
}

// AdamW takes one step.
func (d *Device) AdamW(s device.Stream, w *device.AdamW) error {
	own, err := d.of("AdamW", s)
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	a := arguments[C.uly_adamw](d)
	put(&a.w, w.W)
	put(&a.g, w.G)
	put(&a.m, w.M)
	put(&a.v, w.V)
	put(&a.low, w.Low)
	a.lr, a.beta1, a.beta2, a.eps = C.double(w.LR), C.double(w.Beta1), C.double(w.Beta2), C.double(w.Eps)
	a.weight_decay, a.grad_scale, a.step = C.double(w.WeightDecay), C.double(w.GradScale), C.int64_t(w.Step)
	list(d, &a.decay, w.Decay)
	a.decays = C.int64_t(len(w.Decay))
	return enqueue(d, own, C.ULY_OP_ADAMW, a)
}

// SGD takes one step without momentum.
func (d *Device) SGD(s device.Stream, w *device.SGD) error {
	own, err := d.of("SGD", s)
	if err != nil {
		return err
	}
	defer d.pins.Unpin()
	a := arguments[C.uly_sgd](d)
	put(&a.w, w.W)
	put(&a.g, w.G)
	put(&a.low, w.Low)
	a.lr, a.weight_decay, a.grad_scale = C.double(w.LR), C.double(w.WeightDecay), C.double(w.GradScale)
	list(d, &a.decay, w.Decay)
	a.decays = C.int64_t(len(w.Decay))
	return enqueue(d, own, C.ULY_OP_SGD, a)
}
