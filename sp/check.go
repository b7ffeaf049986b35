package sp

import (
	"ulysses/internal/status"
	"ulysses/tensor"
)

// What is checked at each call is what memory safety needs; all else was settled in NewPlan and
// NewBatch.

func (p *Plan) checkForward(b *Batch, a *Args) error {
	const op = "sp.Forward"
	if err := p.checkBatch(op, b); err != nil {
		return err
	}
	l, n := &p.layer, b.spec.Batch
	if err := p.checkOperands(op, b, [4]operand{
		{"q", a.Q, false, l.Dim}, {"k", a.K, true, l.Dim}, {"v", a.V, true, l.VDim}, {"out", a.Out, false, l.VDim},
	}); err != nil {
		return err
	}
	if !a.LSE.IsNil() {
		if err := checkShape(op, "lse", a.LSE, tensor.F32, n, b.Rows(), l.Heads); err != nil {
			return err
		}
	}
	return p.checkMemory(op, b, a)
}

// operand is a tensor of the layer's type in a call: [B, rows, heads, dim], the rows and heads of
// keys or of queries.
type operand struct {
	name string
	t    tensor.Tensor
	keys bool
	dim  int64
}

func (p *Plan) checkOperands(op string, b *Batch, xs [4]operand) error {
	for i := range xs {
		x, rows, heads := &xs[i], b.Rows(), p.layer.Heads
		if x.keys {
			rows, heads = b.KVRows(), p.layer.KVHeads
		}
		if err := checkTensor(op, x.name, x.t, p.layer.DType, b.spec.Batch, rows, heads, x.dim); err != nil {
			return err
		}
	}
	return nil
}

// checkMemory checks the tables of angles, the saved memory and the workspace of a call.
func (p *Plan) checkMemory(op string, b *Batch, a *Args) error {
	if err := p.checkRotation(op, b, a); err != nil {
		return err
	}
	if err := p.checkSaved(op, b, a); err != nil {
		return err
	}
	return checkBytes(op, "workspace", a.Workspace, p.Sizes(b).Workspace)
}

// checkSaved holds what is saved, if anything is, to its size.
func (p *Plan) checkSaved(op string, b *Batch, a *Args) error {
	need := p.Sizes(b).Saved
	if !a.SavedLSE.IsNil() {
		if a.Saved.IsNil() {
			return status.Errorf(status.InvalidArgument, "%s: saved_lse without saved: give both or neither", op)
		}
		saved, lse := p.Apart(b)
		if err := checkBytes(op, "saved_lse", a.SavedLSE, lse); err != nil {
			return err
		}
		need = saved
	}
	if a.Saved.IsNil() {
		return nil
	}
	return checkBytes(op, "saved", a.Saved, need)
}

func (p *Plan) checkBackward(b *Batch, a *Args, g *Grads) error {
	const op = "sp.Backward"
	if err := p.checkBatch(op, b); err != nil {
		return err
	}
	if p.layer.NoBackward || a.Saved.IsNil() {
		return status.Errorf(status.InvalidArgument, "%s: the layer was planned, or its forward called, without a backward: keep what it saves", op)
	}
	l := &p.layer
	if err := p.checkOperands(op, b, [4]operand{
		{"dout", g.DOut, false, l.VDim}, {"dq", g.DQ, false, l.Dim}, {"dk", g.DK, true, l.Dim}, {"dv", g.DV, true, l.VDim},
	}); err != nil {
		return err
	}
	return p.checkMemory(op, b, a)
}

// checkRestore is checkForward of a call that has its output and saves its LSE apart.
func (p *Plan) checkRestore(b *Batch, a *Args) error {
	const op = "sp.Restore"
	if p.layer.NoBackward || a.Saved.IsNil() || a.SavedLSE.IsNil() {
		return status.Errorf(status.InvalidArgument, "%s: saved, or saved_lse, is missing: give both, the second as Forward left it", op)
	}
	return p.checkForward(b, a)
}

// checkNorm wants a norm's weights and room for its statistics.
func (p *Plan) checkNorm(op string, a *Args, x HeadNorm, w, rstd string, rows, heads int64) error {
	if x.W.IsNil() {
		return nil
	}
	if a.Cos.IsNil() {
		return status.Errorf(status.InvalidArgument, "%s: %s without cos and sin: normalize before the call", op, w)
	}
	if err := checkShape(op, w, x.W, p.layer.DType, p.layer.Dim); err != nil {
		return err
	}
	return checkTensor(op, rstd, x.RStd, tensor.F32, rows, heads)
}

// checkRotation wants tables for the rows of queries and keys, which are then the same.
func (p *Plan) checkRotation(op string, b *Batch, a *Args) error {
	if err := p.checkNorm(op, a, a.QNorm, "q_norm.w", "q_norm.rstd", b.spec.Batch*b.Rows(), p.layer.Heads); err != nil {
		return err
	}
	if err := p.checkNorm(op, a, a.KNorm, "k_norm.w", "k_norm.rstd", b.spec.Batch*b.KVRows(), p.layer.KVHeads); err != nil {
		return err
	}
	if a.Cos.IsNil() && a.Sin.IsNil() {
		return nil
	}
	if b.queries.n != b.keys.n {
		return status.Errorf(status.InvalidArgument, "%s: %d queries and %d keys have no table of angles in common: rotate them before the call", op, b.queries.n, b.keys.n)
	}
	half := a.Cos.Shape[1]
	for _, x := range [...]struct {
		name string
		t    tensor.Tensor
	}{{"cos", a.Cos}, {"sin", a.Sin}} {
		if err := checkShape(op, x.name, x.t, tensor.F32, b.spec.Batch*b.Rows(), half); err != nil {
			return err
		}
		if !x.t.Contiguous() || 2*half > p.layer.Dim {
			return status.Errorf(status.InvalidArgument, "%s: %s is %v: a dense table of at most %d angles a row is needed", op, x.name, x.t, p.layer.Dim/2)
		}
	}
	return nil
}

// checkBatch refuses a batch of other ranks.
func (p *Plan) checkBatch(op string, b *Batch) error {
	if b.rank != p.rank || b.size != p.size {
		return status.Errorf(status.InvalidArgument, "%s: a batch of rank %d of %d with a plan of rank %d of %d: make both on one communicator",
			op, b.rank, b.size, p.rank, p.size)
	}
	return nil
}

// checkTensor holds a tensor to a type, a shape and a dense last axis.
func checkTensor(op, name string, t tensor.Tensor, dtype tensor.DType, shape ...int64) error {
	if err := checkShape(op, name, t, dtype, shape...); err != nil {
		return err
	}
	if t.Dim(-1) > 1 && t.Stride[t.NDim-1] != 1 {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v: its last axis must be dense", op, name, t)
	}
	return nil
}

// checkShape holds a tensor to a type and a shape.
func checkShape(op, name string, t tensor.Tensor, dtype tensor.DType, shape ...int64) error {
	want := tensor.Of(nil, dtype, shape...)
	if t.DType != dtype || t.NDim != want.NDim || t.Shape != want.Shape {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v: it must be %v", op, name, t, want)
	}
	return nil
}

// checkBytes holds caller-owned memory to a size.
func checkBytes(op, name string, t tensor.Tensor, need int64) error {
	if t.IsNil() && need == 0 {
		return nil
	}
	if t.DType != tensor.U8 || t.Numel() < need {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v: it must be U8 of %d bytes or more, as the plan's sizes say", op, name, t, need)
	}
	return nil
}
