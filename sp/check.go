package sp

import (
	"ulysses/internal/status"
	"ulysses/tensor"
)

// The checks of a call ensure memory safety. NewPlan and NewBatch check everything else.

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
	if err := p.checkOptions(op, b, a); err != nil {
		return err
	}
	return p.checkMemory(op, b, a)
}

// checkOptions checks the tensors of the layer's options.
func (p *Plan) checkOptions(op string, b *Batch, a *Args) error {
	l := &p.layer
	if err := checkOption(op, "sinks", "Sinks", a.Sinks, l.Sinks, true); err != nil {
		return err
	}
	if err := checkOption(op, "slopes", "ALiBi", a.Slopes, l.ALiBi, true); err != nil {
		return err
	}
	if err := checkOption(op, "block_mask", "BlockRows", a.BlockMask, l.BlockRows > 0, true); err != nil {
		return err
	}
	if l.Sinks {
		if err := checkTensor(op, "sinks", a.Sinks, tensor.F32, l.Heads); err != nil {
			return err
		}
	}
	if l.ALiBi {
		if err := checkTensor(op, "slopes", a.Slopes, tensor.F32, l.Heads); err != nil {
			return err
		}
	}
	if l.BlockRows == 0 {
		return nil
	}
	heads := int64(1)
	if a.BlockMask.NDim == 3 && a.BlockMask.Shape[0] != 1 {
		heads = l.Heads
	}
	if err := checkShape(op, "block_mask", a.BlockMask, tensor.U8, heads, ceil(b.queries.n, l.BlockRows),
		ceil(b.keys.n, l.BlockColumns)); err != nil {
		return err
	}
	if !a.BlockMask.Contiguous() {
		return status.Errorf(status.InvalidArgument, "%s: block_mask is %v; it must be dense", op, a.BlockMask)
	}
	return nil
}

// checkOption refuses a tensor without its option, because it would have no effect, and an option
// without its tensor if that is needed.
func checkOption(op, name, option string, t tensor.Tensor, set, needed bool) error {
	switch {
	case set && needed && t.IsNil():
		return status.Errorf(status.InvalidArgument, "%s: %s is missing, and the layer was planned with %s; give it",
			op, name, option)
	case !set && !t.IsNil():
		return status.Errorf(status.InvalidArgument,
			"%s: %s is given, and the layer was planned without %s; plan with it, or leave the tensor out", op,
			name, option)
	}
	return nil
}

// operand is a tensor of the layer's type in a call: [B, rows, heads, dim], with the rows and heads
// of keys or of queries.
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
	return CheckBytes(op, "workspace", a.Workspace, p.Sizes(b).Workspace)
}

// checkSaved checks the sizes of the memory for saved activations, if it is given.
func (p *Plan) checkSaved(op string, b *Batch, a *Args) error {
	if p.layer.NoBackward && !a.Saved.IsNil() {
		return status.Errorf(status.InvalidArgument, "%s: "+SavedUnused, op)
	}
	need := p.Sizes(b).Saved
	if !a.SavedLSE.IsNil() {
		if a.Saved.IsNil() {
			return status.Errorf(status.InvalidArgument, "%s: saved_lse is given without saved; give both or neither",
				op)
		}
		saved, lse := p.SeparateSizes(b)
		if err := CheckBytes(op, "saved_lse", a.SavedLSE, lse); err != nil {
			return err
		}
		need = saved
	}
	if a.Saved.IsNil() {
		return nil
	}
	return CheckBytes(op, "saved", a.Saved, need)
}

// NoSaved is the text of an error of a backward pass.
const NoSaved = "saved is missing, or the plan was made without a backward pass; plan with one, and give the same saved to the forward and the backward call"

// SavedUnused is the text of an error of a forward pass.
const SavedUnused = "saved is given, and the plan was made without a backward pass; leave it out, or plan with a backward pass"

func (p *Plan) checkBackward(b *Batch, a *Args, g *Grads) error {
	const op = "sp.Backward"
	if err := p.checkBatch(op, b); err != nil {
		return err
	}
	if p.layer.NoBackward || a.Saved.IsNil() {
		return status.Errorf(status.InvalidArgument, "%s: "+NoSaved, op)
	}
	l := &p.layer
	if err := p.checkOptions(op, b, a); err != nil {
		return err
	}
	if err := checkOption(op, "dsinks", "Sinks", g.DSinks, l.Sinks, false); err != nil {
		return err
	}
	if err := checkOption(op, "dslopes", "ALiBi", g.DSlopes, l.ALiBi, false); err != nil {
		return err
	}
	for _, t := range [...]tensor.Tensor{g.DSinks, g.DSlopes} {
		if !t.IsNil() {
			if err := checkTensor(op, "dsinks and dslopes", t, tensor.F32, l.Heads); err != nil {
				return err
			}
		}
	}
	if err := p.checkOperands(op, b, [4]operand{
		{"dout", g.DOut, false, l.VDim}, {"dq", g.DQ, false, l.Dim}, {"dk", g.DK, true, l.Dim},
		{"dv", g.DV, true, l.VDim},
	}); err != nil {
		return err
	}
	return p.checkMemory(op, b, a)
}

// checkRestore checks the arguments of Restore. In addition to Forward, it needs Saved and
// SavedLSE.
func (p *Plan) checkRestore(b *Batch, a *Args) error {
	const op = "sp.Restore"
	if p.layer.NoBackward || a.Saved.IsNil() || a.SavedLSE.IsNil() {
		return status.Errorf(status.InvalidArgument,
			"%s: saved or saved_lse is missing; give both, with saved_lse as Forward left it", op)
	}
	return p.checkForward(b, a)
}

// checkNorm checks a norm's weights and the memory for its statistics.
func (p *Plan) checkNorm(op string, a *Args, x HeadNorm, w, rstd string, rows, heads int64) error {
	if x.W.IsNil() {
		return nil
	}
	if a.Cos.IsNil() {
		return status.Errorf(status.InvalidArgument,
			"%s: %s is given without cos and sin; give them, or normalize before the call", op, w)
	}
	if err := checkShape(op, w, x.W, p.layer.DType, p.layer.Dim); err != nil {
		return err
	}
	return checkTensor(op, rstd, x.RStd, tensor.F32, rows, heads)
}

// checkRotation checks the norms and the tables of angles. Queries and keys have one table, or two
// of one shape.
func (p *Plan) checkRotation(op string, b *Batch, a *Args) error {
	if err := p.checkNorm(op, a, a.QNorm, "q_norm.w", "q_norm.rstd", b.spec.Batch*b.Rows(), p.layer.Heads); err != nil {
		return err
	}
	if err := p.checkNorm(op, a, a.KNorm, "k_norm.w", "k_norm.rstd", b.spec.Batch*b.KVRows(),
		p.layer.KVHeads); err != nil {
		return err
	}
	qCos, qSin := a.queryTable()
	if a.Cos.IsNil() && a.Sin.IsNil() && qCos.IsNil() && qSin.IsNil() {
		return nil
	}
	if b.queries.n != b.keys.n {
		return status.Errorf(status.InvalidArgument,
			"%s: %d queries and %d keys cannot share one table of angles; rotate them before the call", op, b.queries.n,
			b.keys.n)
	}
	half := a.Cos.Shape[1]
	for _, x := range [...]struct {
		name string
		t    tensor.Tensor
	}{{"cos", a.Cos}, {"sin", a.Sin}, {"q_cos", qCos}, {"q_sin", qSin}} {
		if err := checkShape(op, x.name, x.t, tensor.F32, b.spec.Batch*b.Rows(), half); err != nil {
			return err
		}
		if !x.t.Contiguous() || 2*half > p.layer.Dim {
			return status.Errorf(status.InvalidArgument,
				"%s: %s is %v; give a dense table of at most %d angles in each row", op, x.name, x.t, p.layer.Dim/2)
		}
	}
	return nil
}

// checkBatch returns an error for a batch that was made for another rank or number of ranks.
func (p *Plan) checkBatch(op string, b *Batch) error {
	if b.rank != p.rank || b.size != p.size {
		return status.Errorf(status.InvalidArgument,
			"%s: the batch is for rank %d of %d, the plan for rank %d of %d; make both on one communicator",
			op, b.rank, b.size, p.rank, p.size)
	}
	if b.spec.Ring != p.ring {
		return status.Errorf(status.InvalidArgument,
			"%s: the batch has a ring of %d, the plan of %d; make both with one ring", op, b.spec.Ring, p.ring)
	}
	return nil
}

// CheckRows returns an error for a batch with more queries or keys than the device's attention
// supports in a call (Unsupported). Not collective.
func (p *Plan) CheckRows(b *Batch) error {
	sch := p.placed(b)
	q, k, n := rows(sch.queries.attention[sch.group]), rows(sch.keys.attention[sch.group]), b.spec.Batch
	if p.ring > 1 {
		n = 1 // a call for each sequence
	}
	info := p.dev.Info()
	if most := info.AttentionRows; most > 0 && max(q, k) > most/n {
		return status.Errorf(status.Unsupported,
			"sp.CheckRows: %d queries and %d keys of each of %d sequences are in a call of attention; device %s supports at most %d in all; use shorter sequences, or more groups of a ring",
			q, k, n, info.Kind, most)
	}
	return nil
}

// checkTensor checks the type, the shape and the dense last axis of a tensor.
func checkTensor(op, name string, t tensor.Tensor, dtype tensor.DType, shape ...int64) error {
	if err := checkShape(op, name, t, dtype, shape...); err != nil {
		return err
	}
	if t.Dim(-1) > 1 && t.Stride[t.NDim-1] != 1 {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v; its last axis must be dense", op, name, t)
	}
	return nil
}

// checkShape checks the type and the shape of a tensor.
func checkShape(op, name string, t tensor.Tensor, dtype tensor.DType, shape ...int64) error {
	want := tensor.Of(nil, dtype, shape...)
	if t.DType != dtype || t.NDim != want.NDim || t.Shape != want.Shape {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v; it must be %v", op, name, t, want)
	}
	return nil
}

// CheckBytes checks that memory of the caller has at least the given number of bytes.
func CheckBytes(op, name string, t tensor.Tensor, need int64) error {
	have := int64(0)
	if !t.IsNil() {
		if t.DType != tensor.U8 || !t.Contiguous() {
			return status.Errorf(status.InvalidArgument, "%s: %s is %v; it must be dense and U8", op, name, t)
		}
		have = t.Numel()
	}
	if have < need {
		return status.Errorf(status.InvalidArgument,
			"%s: %s has %d bytes and %d are needed; ask for the size before the call", op, name, have, need)
	}
	return nil
}
