package main

/*
#include <stdlib.h>
#include "thread.h"
#include "ulysses.h"

// call_local calls the host's attention with the host's signal mask.
static int32_t call_local(void *f, uintptr_t user, const ulysses_local_call *a) {
	sigset_t mask;
	uly_enter_host(&mask);
	int32_t code = ((ulysses_local_attention)f)((void *)user, a);
	uly_leave_host(&mask);
	return code;
}
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// headShards are the tensors of this rank's heads with all tokens: q and out [B, S, h, D], k and v
// [B, kvS, hkv, D].
type headShards struct{ q, k, v, out tensor.Tensor }

// localTensors are the tensors of a call with the caller's own attention. The context owns them.
type localTensors struct {
	heads   headShards // q, k, v and out, in saved memory or in the workspace
	grads   headShards // dq, dk, dv and dout, in the workspace
	seq     [3]tensor.Tensor
	byHeads [3]tensor.Tensor
	shared  [3]bool
	reshard sp.Reshard    // of seq and byHeads
	c       *callbackArgs // in C memory
}

// callbackArgs are the arguments of the callback: the struct, and its tensors with shapes and
// strides.
type callbackArgs struct {
	call    cLocalCall
	tensors [8]cTensor
	shape   [8][4]int64
	strides [8][4]int64
}

func newCallbackArgs() *callbackArgs {
	return (*callbackArgs)(C.calloc(1, C.size_t(unsafe.Sizeof(callbackArgs{}))))
}
func freeCallbackArgs(m *callbackArgs) { C.free(unsafe.Pointer(m)) }

// allocateHeads allocates the head shards of a batch.
func (p *plan) allocateHeads(a *device.Allocator, b *sp.Batch) headShards {
	l := p.sp.Layer()
	lo, hi, klo, khi := p.sp.Heads()
	return headShards{q: a.Take(l.DType, b.Batch(), b.Seq(), hi-lo, l.Dim),
		k:   a.Take(l.DType, b.Batch(), b.KVSeq(), khi-klo, l.Dim),
		v:   a.Take(l.DType, b.Batch(), b.KVSeq(), khi-klo, l.VDim),
		out: a.Take(l.DType, b.Batch(), b.Seq(), hi-lo, l.VDim)}
}

// reshardQKV sets the reshard of three tensors sharded by tokens, and q, k and v of head shards.
func (x *localTensors) reshardQKV(q, k, v tensor.Tensor, h headShards) *sp.Reshard {
	x.seq, x.byHeads, x.shared = [3]tensor.Tensor{q, k, v}, [3]tensor.Tensor{h.q, h.k, h.v}, [3]bool{false, true, true}
	x.reshard = sp.Reshard{Seq: x.seq[:], Heads: x.byHeads[:], Shared: x.shared[:]}
	return &x.reshard
}

// reshardOut sets the reshard of one tensor sharded by tokens, and out of head shards.
func (x *localTensors) reshardOut(out tensor.Tensor, h headShards) *sp.Reshard {
	x.seq[0], x.byHeads[0] = out, h.out
	x.reshard = sp.Reshard{Seq: x.seq[:1], Heads: x.byHeads[:1]}
	return &x.reshard
}

// localSizes returns the bytes of saved and workspace. In either pass the workspace has room for
// head shards, or their gradients, and for the larger reshard.
func (p *plan) localSizes(b *sp.Batch) (s sp.Sizes, err error) {
	x, l := &p.ctx.local, p.sp.Layer()
	a := device.Allocator{Align: p.ctx.dev.Info().Align}
	shape := p.allocateHeads(&a, b)
	q := tensor.Of(nil, l.DType, b.Batch(), b.Rows(), l.Heads, l.Dim)
	k := tensor.Of(nil, l.DType, b.Batch(), b.KVRows(), l.KVHeads, l.Dim)
	v := tensor.Of(nil, l.DType, b.Batch(), b.KVRows(), l.KVHeads, l.VDim)
	in, err := p.sp.ReshardWorkspace(b, x.reshardQKV(q, k, v, shape))
	if err != nil {
		return s, err
	}
	out, err := p.sp.ReshardWorkspace(b,
		x.reshardOut(tensor.Of(nil, l.DType, b.Batch(), b.Rows(), l.Heads, l.VDim), shape))
	if err != nil {
		return s, err
	}
	s.Workspace = a.Padded() + max(in, out)
	if !l.NoBackward {
		// not 0 on a rank without heads, where NULL would mean that no backward pass follows
		s.Saved = max(a.Used, p.ctx.dev.Info().Align)
	}
	return s, nil
}

func localSizesQuery(ph, bh uintptr, out unsafe.Pointer) error {
	const op = "ulysses_local_sizes"
	p, b, err := enterAttentionPair(op, ph, bh)
	if err != nil {
		return err
	}
	defer p.ctx.leave()
	if err := p.checkOneGroup(op); err != nil {
		return err
	}
	s, err := p.localSizes(b)
	if err != nil {
		return err
	}
	return p.writeSizes(op, s, out)
}

// localCall is a call with the caller's own attention whose arguments were read.
type localCall struct {
	p         *plan
	b         *sp.Batch
	op        string
	f         unsafe.Pointer
	user      uintptr
	stream    uintptr
	backward  bool
	workspace device.Allocator
}

// localMemory reads and checks saved and workspace, and allocates the head shards in saved memory,
// or in the workspace if there is none.
func (p *plan) localMemory(r *reader, both *batch, a *cAttentionArgs, call *localCall) error {
	c, b := p.ctx, call.b
	size, err := p.localSizes(b)
	if err != nil {
		return err
	}
	r.saved(&c.args.Saved, a.saved, a.saved_bytes, !call.backward)
	r.workspace(&c.args.Workspace, a.workspace, a.workspace_bytes, size.Workspace)
	if err := r.finish(localSaved, p, both, 0, call.backward); err != nil {
		return err
	}
	if err := checkSize(r.op, "workspace", c.args.Workspace, size.Workspace); err != nil {
		return err
	}
	call.workspace = device.Allocator{Mem: c.args.Workspace, Align: c.dev.Info().Align}
	if c.args.Saved.IsNil() {
		c.local.heads = p.allocateHeads(&call.workspace, b)
		return nil
	}
	if err := c.checkSavedSize(r.op, c.args.Saved, size.Saved); err != nil {
		return err
	}
	c.local.heads = p.allocateHeads(&device.Allocator{Mem: c.args.Saved, Align: c.dev.Info().Align}, b)
	return nil
}

func localForward(ph, bh uintptr, args, f unsafe.Pointer, user uintptr) error {
	const op = "ulysses_local_forward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.localForward(op, b, args, f, user) })
}

func (p *plan) localForward(op string, both *batch, args, f unsafe.Pointer, user uintptr) error {
	c := p.ctx
	b, a, err := p.attentionArgs(op, both, args, false)
	if err != nil {
		return err
	}
	if f == nil {
		return invalid("%s: the callback is NULL; give a function", op)
	}
	if a.lse != nil {
		return unsupported(
			"%s: lse is given, and the library does not know the statistics of the caller's attention; leave lse NULL",
			op)
	}
	call := localCall{p: p, b: b, op: op, f: f, user: user, stream: a.stream}
	r := reader{c: c, op: op}
	x := &c.local
	r.attentionTensors(&a)
	if err := p.localMemory(&r, both, &a, &call); err != nil {
		return err
	}
	// before the ranks agree, which is in toHeads
	if _, err := p.sp.ReshardWorkspace(b, x.reshardOut(c.args.Out, x.heads)); err != nil {
		return err
	}
	in := x.reshardQKV(c.args.Q, c.args.K, c.args.V, x.heads)
	if err := call.toHeads(in); err != nil {
		return err
	}
	failed := call.run()
	return c.writeTag(call.toSeq(x.reshardOut(c.args.Out, x.heads), failed))
}

func localBackward(ph, bh uintptr, args, grads, f unsafe.Pointer, user uintptr) error {
	const op = "ulysses_local_backward"
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.localBackward(op, b, args, grads, f, user) })
}

func (p *plan) localBackward(op string, both *batch, args, grads, f unsafe.Pointer, user uintptr) error {
	c := p.ctx
	b, a, err := p.attentionArgs(op, both, args, false)
	if err != nil {
		return err
	}
	g, err := readAttentionGrads(op, grads)
	if err != nil {
		return err
	}
	switch {
	case f == nil:
		return invalid("%s: the callback is NULL; give a function", op)
	case g.dsinks != nil || g.dalibi != nil:
		return invalid("%s: dsinks or dalibi is given, and the callback does not get it; leave them NULL", op)
	}
	if p.sp.Layer().NoBackward || a.saved == nil {
		return noSaved(op)
	}
	call := localCall{p: p, b: b, op: op, f: f, user: user, stream: a.stream, backward: true}
	r := reader{c: c, op: op}
	x := &c.local
	c.args = sp.Args{}
	r.attentionGradients(&g)
	if err := p.localMemory(&r, both, &a, &call); err != nil {
		return err
	}
	x.grads = p.allocateHeads(&call.workspace, b)
	// before the ranks agree, which is in toHeads
	if _, err := p.sp.ReshardWorkspace(b, x.reshardQKV(c.grads.DQ, c.grads.DK, c.grads.DV, x.grads)); err != nil {
		return err
	}
	if err := call.toHeads(x.reshardOut(c.grads.DOut, x.grads)); err != nil {
		return err
	}
	failed := call.run()
	back := x.reshardQKV(c.grads.DQ, c.grads.DK, c.grads.DV, x.grads)
	back.SumCopies = true
	return call.toSeq(back, failed)
}

// noSaved returns the error for a backward pass without saved memory.
func noSaved(op string) error {
	return invalid("%s: there is no saved memory: saved is NULL, or the plan has ULYSSES_NO_BACKWARD; give the forward call memory for saved, and this call the same",
		op)
}

// toHeads runs the all-to-all before the callback. What the callback enqueues on the caller's
// stream runs after it.
func (x *localCall) toHeads(r *sp.Reshard) error {
	c := x.p.ctx
	r.Workspace = x.workspace.Rest()
	return c.enqueue(x.op, x.stream, func() error { return x.p.sp.SeqToHeads(c.stream, x.b, r) })
}

// toSeq runs the all-to-all after what the callback has enqueued. Then it returns failed, the error
// of the callback: peers wait for the all-to-all even if a callback has failed.
func (x *localCall) toSeq(r *sp.Reshard, failed error) error {
	c := x.p.ctx
	r.Workspace = x.workspace.Rest()
	if err := c.enqueue(x.op, x.stream, func() error { return x.p.sp.HeadsToSeq(c.stream, x.b, r) }); err != nil {
		return err
	}
	return failed
}

// run calls the callback with this rank's head shards. A rank without heads does not call it.
func (x *localCall) run() error {
	c, m := x.p.ctx, x.p.ctx.local.c
	h, g := &c.local.heads, &c.local.grads
	if h.q.Numel() == 0 {
		return nil
	}
	lo, hi, klo, khi := x.p.sp.Heads()
	m.call = cLocalCall{struct_size: uint32(unsafe.Sizeof(m.call)), head_lo: lo, head_hi: hi,
		kv_head_lo: klo, kv_head_hi: khi, stream: x.stream}
	m.call.q, m.call.k, m.call.v, m.call.out = c.tensorOut(0, h.q), c.tensorOut(1, h.k), c.tensorOut(2, h.v),
		c.tensorOut(3, h.out)
	if x.backward {
		m.call.backward = 1
		m.call.dq, m.call.dk, m.call.dv, m.call.dout = c.tensorOut(4, g.q), c.tensorOut(5, g.k), c.tensorOut(6, g.v),
			c.tensorOut(7, g.out)
	}
	if code := C.call_local(x.f, C.uintptr_t(x.user), (*C.ulysses_local_call)(unsafe.Pointer(&m.call))); code != 0 {
		return status.Errorf(status.Code(code), "%s: the callback returned status %d (%v)", x.op, int32(code),
			status.Code(code))
	}
	return nil
}

// tensorOut writes tensor i of the callback's arguments.
func (c *context) tensorOut(i int, t tensor.Tensor) *cTensor {
	m := c.local.c
	d := &m.tensors[i]
	*d = cTensor{data: t.Data, device: c.deviceType, ordinal: c.ordinal, ndim: 4, lanes: 1, shape: &m.shape[i][0],
		strides: &m.strides[i][0]}
	d.code, d.bits = 2, 32
	if t.DType == tensor.BF16 {
		d.code, d.bits = 4, 16
	}
	for k := range 4 {
		m.shape[i][k], m.strides[i][k] = t.Shape[k], t.Stride[k]
	}
	return d
}
