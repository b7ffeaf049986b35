package main

/*
#include <stdlib.h>
#include "thread.h"
#include "ulysses.h"

static int32_t call_local(void *f, void *user, const ulysses_local_call *a) {
	sigset_t inside;
	uly_enter_host(&inside);
	int32_t code = ((ulysses_local_attention)f)(user, a);
	uly_leave_host(&inside);
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

// gathered is all rows of this rank's heads, [B, S, h, D] each.
type gathered struct{ q, k, v, out tensor.Tensor }

// localPlaces is what a call with the caller's own attention works on. It lies in C memory where C
// reads it.
type localPlaces struct {
	keep, grad gathered
	seq, heads [3]tensor.Tensor
	shared     [3]bool
	exchange   sp.Reshard
	c          *localC
}

// localC is the callback's arguments: eight tensors with their shapes and strides.
type localC struct {
	call    cLocalCall
	tensors [8]cTensor
	shape   [8][4]int64
	strides [8][4]int64
}

func newLocalC() *localC   { return (*localC)(C.calloc(1, C.size_t(unsafe.Sizeof(localC{})))) }
func freeLocalC(m *localC) { C.free(unsafe.Pointer(m)) }

// gather carves what a rank has after the exchange.
func (p *plan) gather(c *device.Allocator, b *sp.Batch) gathered {
	l := p.sp.Layer()
	lo, hi, klo, khi := p.sp.Heads()
	return gathered{q: c.Take(l.DType, b.Batch(), b.Seq(), hi-lo, l.Dim), k: c.Take(l.DType, b.Batch(), b.KVSeq(), khi-klo, l.Dim),
		v: c.Take(l.DType, b.Batch(), b.KVSeq(), khi-klo, l.VDim), out: c.Take(l.DType, b.Batch(), b.Seq(), hi-lo, l.VDim)}
}

// localSizes is the bytes of saved and workspace.
func (p *plan) localSizes(b *sp.Batch) (s sp.Sizes, err error) {
	x, l := &p.ctx.local, p.sp.Layer()
	c := device.Allocator{Align: p.ctx.dev.Info().Align}
	x.keep = p.gather(&c, b)
	x.seq[0] = tensor.Of(nil, l.DType, b.Batch(), b.Rows(), l.Heads, l.Dim)
	x.seq[1] = tensor.Of(nil, l.DType, b.Batch(), b.KVRows(), l.KVHeads, l.Dim)
	x.seq[2] = tensor.Of(nil, l.DType, b.Batch(), b.KVRows(), l.KVHeads, l.VDim)
	x.heads = [3]tensor.Tensor{x.keep.q, x.keep.k, x.keep.v}
	x.shared = [3]bool{false, true, true}
	x.exchange = sp.Reshard{Seq: x.seq[:], Heads: x.heads[:], Shared: x.shared[:]}
	in, err := p.sp.ReshardWorkspace(b, &x.exchange)
	if err != nil {
		return s, err
	}
	x.seq[0] = tensor.Of(nil, l.DType, b.Batch(), b.Rows(), l.Heads, l.VDim)
	x.heads[0] = x.keep.out
	x.exchange = sp.Reshard{Seq: x.seq[:1], Heads: x.heads[:1]}
	out, err := p.sp.ReshardWorkspace(b, &x.exchange)
	if err != nil {
		return s, err
	}
	s.Workspace = c.Padded() + max(in, out) // in either pass: what is gathered, or its gradients
	if !l.NoBackward {
		s.Saved = c.Used
	}
	return s, nil
}

func localSizesOf(ph, bh uintptr, out unsafe.Pointer) error {
	const op = "ulysses_local_sizes"
	p, b, err := pair(op, ph, bh)
	if err != nil {
		return err
	}
	defer p.ctx.leave()
	s, err := p.localSizes(b)
	if err != nil {
		return err
	}
	return p.writeSizes(op, s, out)
}

// localMemory reads and sizes saved and workspace.
func (p *plan) localMemory(r *tensors, b *sp.Batch, a *cAttentionArgs, forward bool) {
	c := p.ctx
	size, err := p.localSizes(b)
	if r.err == nil {
		r.err = err
	}
	r.saved(&c.args.Saved, a.saved, uint64(a.saved_bytes), forward)
	r.workspace(&c.args.Workspace, a.workspace, uint64(a.workspace_bytes), size.Workspace)
	if r.err != nil {
		return
	}
	if r.err = c.overlaps(r.op); r.err != nil {
		return
	}
	if r.err = sizeOf(r.op, "workspace", c.args.Workspace, size.Workspace); r.err == nil && !c.args.Saved.IsNil() {
		r.err = c.savedSize(r.op, c.args.Saved, size.Saved)
	}
}

func localForward(ph, bh uintptr, args, f, user unsafe.Pointer) error {
	const op = "ulysses_local_forward"
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.forwardLocal(op, b, args, f, user) })
}

func (p *plan) forwardLocal(op string, whole *batch, args, f, user unsafe.Pointer) error {
	c := p.ctx
	b, err := p.attentionOf(op, whole, false)
	if err != nil {
		return err
	}
	a, err := readArgs(op, args)
	if err != nil {
		return err
	}
	if f == nil {
		return invalid("%s: the callback is NULL", op)
	}
	if a.lse != nil {
		return unbuilt("%s: lse: the callback's own statistics stay with it: leave lse NULL", op)
	}
	r := tensors{c: c, op: op}
	x := &c.local
	r.forward(&a)
	if p.localMemory(&r, b, &a, true); r.err != nil {
		return r.err
	}
	c.saves(savesLocal, p, whole, 0)
	ws := device.Allocator{Mem: c.args.Workspace, Align: c.dev.Info().Align}
	keep := &ws
	if !c.args.Saved.IsNil() {
		keep = &device.Allocator{Mem: c.args.Saved, Align: c.dev.Info().Align}
	}
	x.keep = p.gather(keep, b)
	x.seq, x.heads = [3]tensor.Tensor{c.args.Q, c.args.K, c.args.V}, [3]tensor.Tensor{x.keep.q, x.keep.k, x.keep.v}
	x.exchange = sp.Reshard{Seq: x.seq[:], Heads: x.heads[:], Shared: x.shared[:], Workspace: ws.Rest()}
	if err := p.gatherFor(op, b, a.stream); err != nil {
		return err
	}
	called := p.call(op, f, user, a.stream, false)
	x.seq[0], x.heads[0] = c.args.Out, x.keep.out
	x.exchange = sp.Reshard{Seq: x.seq[:1], Heads: x.heads[:1], Workspace: ws.Rest()}
	return c.seal(p.scatterAfter(op, b, a.stream, called))
}

// gatherFor runs the exchange before the callback, whose work on the caller's stream comes behind
// it.
func (p *plan) gatherFor(op string, b *sp.Batch, stream unsafe.Pointer) error {
	c := p.ctx
	if err := c.join(op, stream); err != nil {
		return err
	}
	return c.part(p.sp.SeqToHeads(c.stream, b, &c.local.exchange))
}

// scatterAfter runs the exchange behind what the callback has enqueued; a callback's failure is
// told when peers need wait no more.
func (p *plan) scatterAfter(op string, b *sp.Batch, stream unsafe.Pointer, called error) error {
	c := p.ctx
	if err := c.join(op, stream); err != nil {
		return err
	}
	if err := c.part(p.sp.HeadsToSeq(c.stream, b, &c.local.exchange)); err != nil {
		return err
	}
	return called
}

func localBackward(ph, bh uintptr, args, grads, f, user unsafe.Pointer) error {
	const op = "ulysses_local_backward"
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.backwardLocal(op, b, args, grads, f, user) })
}

func (p *plan) backwardLocal(op string, whole *batch, args, grads, f, user unsafe.Pointer) error {
	c := p.ctx
	b, err := p.attentionOf(op, whole, false)
	if err != nil {
		return err
	}
	a, err := readArgs(op, args)
	if err != nil {
		return err
	}
	g, err := readGrads(op, grads)
	if err != nil {
		return err
	}
	if f == nil {
		return invalid("%s: the callback is NULL", op)
	}
	if p.sp.Layer().NoBackward || a.saved == nil {
		return invalid("%s: the layer was planned, or its forward called, without a backward: keep what it saves", op)
	}
	r := tensors{c: c, op: op}
	x := &c.local
	c.args = sp.Args{}
	r.backward(&g)
	if p.localMemory(&r, b, &a, false); r.err != nil {
		return r.err
	}
	c.saves(savesLocal, p, whole, 0)
	if err := c.sealed(op); err != nil {
		return err
	}
	ws := device.Allocator{Mem: c.args.Workspace, Align: c.dev.Info().Align}
	keep := device.Allocator{Mem: c.args.Saved, Align: c.dev.Info().Align}
	x.keep, x.grad = p.gather(&keep, b), p.gather(&ws, b)
	x.seq[0], x.heads[0] = c.grads.DOut, x.grad.out
	x.exchange = sp.Reshard{Seq: x.seq[:1], Heads: x.heads[:1], Workspace: ws.Rest()}
	if err := p.gatherFor(op, b, a.stream); err != nil {
		return err
	}
	called := p.call(op, f, user, a.stream, true)
	x.seq, x.heads = [3]tensor.Tensor{c.grads.DQ, c.grads.DK, c.grads.DV}, [3]tensor.Tensor{x.grad.q, x.grad.k, x.grad.v}
	x.exchange = sp.Reshard{Seq: x.seq[:], Heads: x.heads[:], Shared: x.shared[:], SumCopies: true, Workspace: ws.Rest()}
	return p.scatterAfter(op, b, a.stream, called)
}

// call runs the callback on what this rank has gathered. A rank without heads has nothing to do.
func (p *plan) call(op string, f, user, stream unsafe.Pointer, backward bool) error {
	x := &p.ctx.local
	if x.keep.q.Numel() == 0 {
		return nil
	}
	m := x.c
	lo, hi, klo, khi := p.sp.Heads()
	m.call = cLocalCall{struct_size: uint32(unsafe.Sizeof(m.call)), head_lo: lo, head_hi: hi,
		kv_head_lo: klo, kv_head_hi: khi, stream: stream}
	m.call.q, m.call.k, m.call.v, m.call.out = p.shown(0, x.keep.q), p.shown(1, x.keep.k), p.shown(2, x.keep.v), p.shown(3, x.keep.out)
	if backward {
		m.call.backward = 1
		m.call.dq, m.call.dk, m.call.dv, m.call.dout = p.shown(4, x.grad.q), p.shown(5, x.grad.k), p.shown(6, x.grad.v), p.shown(7, x.grad.out)
	}
	if code := C.call_local(f, user, (*C.ulysses_local_call)(unsafe.Pointer(&m.call))); code != 0 {
		return status.Errorf(status.Code(code), "%s: the callback returned status %d (%v)", op, int32(code), status.Code(code))
	}
	return nil
}

// shown is a tensor as C sees it, in C memory.
func (p *plan) shown(i int, t tensor.Tensor) *cTensor {
	m, c := p.ctx.local.c, p.ctx
	d := &m.tensors[i]
	*d = cTensor{data: t.Data, device: c.place, ordinal: c.ordinal, ndim: 4, lanes: 1, shape: &m.shape[i][0], strides: &m.strides[i][0]}
	d.code, d.bits = 2, 32
	if t.DType == tensor.BF16 {
		d.code, d.bits = 4, 16
	}
	for k := range 4 {
		m.shape[i][k], m.strides[i][k] = t.Shape[k], t.Stride[k]
	}
	return d
}
