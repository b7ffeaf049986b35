package main

import (
	"unsafe"

	"ulysses/tensor"
)

// reader reads the tensors and the memory of a call into fields of the context. After the first
// error it reads nothing more and keeps the error. It also records each operand, so that finish can
// find overlaps.
type reader struct {
	c   *context
	op  string
	err error
}

// get reads a tensor that must be given. axes is the number of axes, see tensorIn; out is true if
// the call writes the tensor.
func (r *reader) get(dst *tensor.Tensor, name string, p *cTensor, axes int, out bool) {
	*dst = tensor.Tensor{}
	if r.err != nil {
		return
	}
	if *dst, r.err = r.c.tensorIn(r.op, name, p, axes); r.err == nil {
		r.c.addOperand(name, *dst, out)
	}
}

// optional is get for a tensor that may be NULL.
func (r *reader) optional(dst *tensor.Tensor, name string, p *cTensor, axes int, out bool) {
	*dst = tensor.Tensor{}
	if p != nil {
		r.get(dst, name, p, axes, out)
	}
}

// dense checks that a tensor that was read has a type and a shape, and is row-major.
func (r *reader) dense(name string, t tensor.Tensor, dtype tensor.DType, shape ...int64) {
	want := tensor.Of(nil, dtype, shape...)
	if r.err == nil && (t.DType != dtype || t.NDim != want.NDim || t.Shape != want.Shape || !t.Contiguous()) {
		r.err = invalid("%s: %s is %v; give a row-major tensor %v", r.op, name, t, want)
	}
}

// saved reads the saved memory, without its tag. out is true in a forward pass.
func (r *reader) saved(dst *tensor.Tensor, p unsafe.Pointer, bytes uint64, out bool) {
	*dst = tensor.Tensor{}
	if r.err == nil {
		if *dst, r.err = r.c.rawMemory(r.op, "saved", p, bytes); r.err == nil {
			r.c.addOperand("saved", *dst, out)
			*dst, r.err = r.c.splitTag(r.op, *dst)
		}
	}
}

// workspace reads the caller's workspace, or takes the context's own, which grows to need bytes.
func (r *reader) workspace(dst *tensor.Tensor, p unsafe.Pointer, bytes uint64, need int64) {
	*dst = tensor.Tensor{}
	if r.err == nil {
		if *dst, r.err = r.c.workspace(r.op, p, bytes, need); r.err == nil {
			r.c.addOperand("workspace", *dst, true)
		}
	}
}

// ownWorkspace is workspace for a call whose workspace stays in use when the call returns: it takes
// other memory than the context's own.
func (r *reader) ownWorkspace(dst *tensor.Tensor, m *ownMemory, p unsafe.Pointer, bytes uint64, need int64) {
	*dst = tensor.Tensor{}
	if r.err != nil {
		return
	}
	if *dst, r.err = r.c.rawMemory(r.op, "workspace", p, bytes); r.err == nil {
		*dst, r.err = r.c.workspaceOf(r.op, m, *dst, need)
		r.c.addOperand("workspace", *dst, true)
	}
}

// finish ends the reading of a call that has saved memory. It returns the first error. An output
// that overlaps another operand is an error. In a backward pass, saved memory is an error if no
// forward pass of the same kind, plan, batch and variant has written it; in a forward pass, if the
// plan has no backward pass.
func (r *reader) finish(kind savedKind, p *plan, b *batch, variant int64, backward bool) error {
	if r.err == nil {
		r.err = r.c.checkOverlaps(r.op)
	}
	r.c.identifySaved(kind, p, b, variant)
	switch {
	case r.err != nil:
	case backward:
		r.err = r.c.checkTag(r.op)
	case r.c.saved.given && p.noBackward():
		r.err = invalid(
			"%s: saved is given, and the plan has ULYSSES_NO_BACKWARD; leave it NULL, or create the plan without the flag",
			r.op)
	}
	return r.err
}

// noBackward reports whether the plan has ULYSSES_NO_BACKWARD.
func (p *plan) noBackward() bool {
	if p.gdn != nil {
		return p.gdn.Layer().NoBackward
	}
	return p.sp.Layer().NoBackward
}
