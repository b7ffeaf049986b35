package main

/*
#include <stdlib.h>
#include "ulysses.h"
*/
import "C"

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"unsafe"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// plan is a kind of layer on a context.
type plan struct {
	ctx   *context
	self  uintptr
	sp    *sp.Plan  // of the gated delta rule too: its reshards
	gdn   *gdn.Plan // nil = attention
	cross bool
	max   int64 // tokens to reserve for
	json  *C.char
	// calls of the gated delta rule may bring states
	states   bool
	rows     map[string]string // of kernels, where the device has several for attention
	number   int64             // among the plans and batches of the context: the same on all ranks
	identity identity          // of what it is
	unserved error             // why no kernel of the device serves the layer's attention
}

// Limits keep sizes in bytes far below 2^63.
const (
	maxHeads, maxDim = 1 << 16, 1 << 16
	maxTokens        = int64(1) << 40
	maxWork          = int64(1) << 52 // tokens × heads × features
)

// describe checks a description and makes it a layer.
func (c *context) describe(op string, desc unsafe.Pointer) (d cAttentionDesc, l sp.Layer, err error) {
	if d, err = read[cAttentionDesc](op, "desc", desc); err != nil {
		return d, l, err
	}
	known := int32(flagCausal | flagWindow | flagCross | flagSinks | flagAlibi | flagBlockMask |
		flagDeterministic | flagSaveLess | flagNoBackward)
	if d.flags&^known != 0 {
		return d, l, invalid("%s: flags %#x: attention does not know %#x", op, d.flags, d.flags&^known)
	}
	for _, f := range []struct {
		on   bool
		name string
		what *notbuilt.Feature
	}{{d.flags&flagSinks != 0, "ULYSSES_SINKS", notbuilt.Sinks}, {d.flags&flagAlibi != 0, "ULYSSES_ALIBI", notbuilt.ALiBi},
		{d.flags&flagBlockMask != 0, "ULYSSES_BLOCK_MASK", notbuilt.BlockMasks}, {d.flags&flagSaveLess != 0, "ULYSSES_SAVE_LESS", notbuilt.SaveLess},
		{d.softcap != 0, "softcap", notbuilt.SoftCaps}, {d.dropout != 0, "dropout", notbuilt.Dropout}} {
		if f.on {
			return d, l, unbuilt("%s: %s: %s", op, f.name, f.what.Text("plan without it"))
		}
	}
	if d.block_q != 0 || d.block_k != 0 {
		return d, l, invalid("%s: block_q %d, block_k %d without ULYSSES_BLOCK_MASK: leave them 0", op, d.block_q, d.block_k)
	}
	l = sp.Layer{Heads: d.heads, KVHeads: d.kv_heads, Dim: d.head_dim, VDim: d.v_dim, Causal: d.flags&flagCausal != 0,
		Scale: float64(d.scale), NoBackward: d.flags&flagNoBackward != 0, Deterministic: d.flags&flagDeterministic != 0}
	if l.KVHeads == 0 {
		l.KVHeads = l.Heads
	}
	if l.VDim == 0 {
		l.VDim = l.Dim
	}
	if l.Heads < 1 || l.KVHeads < 1 || l.Heads > maxHeads || l.KVHeads > maxHeads || l.Dim < 1 || l.VDim < 1 || l.Dim > maxDim || l.VDim > maxDim {
		return d, l, invalid("%s: heads %d, kv_heads %d, head_dim %d, v_dim %d: heads and features of a head are 1 to %d", op, d.heads, d.kv_heads, d.head_dim, d.v_dim, maxHeads)
	}
	dtype, ok := dtypes[uint16(d.dtype)]
	if !ok || d.dtype>>16 != 0 {
		return d, l, invalid("%s: dtype %#x: use ULYSSES_F32 or ULYSSES_BF16", op, d.dtype)
	}
	l.DType = dtype
	info := c.dev.Info()
	switch {
	case !slices.Contains(info.Compute, dtype):
		return d, l, unbuilt("%s: dtype is %v: the device %s computes in %v: use one of these", op, dtype, info.Kind, info.Compute)
	case l.Heads%l.KVHeads != 0:
		return d, l, invalid("%s: heads is %d and kv_heads %d: heads must be a multiple of kv_heads", op, l.Heads, l.KVHeads)
	case info.AttentionHead > 0 && max(l.Dim, l.VDim) > info.AttentionHead:
		return d, l, unbuilt("%s: head_dim is %d and v_dim %d: the device %s has attention for heads of %d features at most: use narrower heads, or ULYSSES_CPU", op, l.Dim, l.VDim,
			info.Kind, info.AttentionHead)
	case math.IsNaN(l.Scale) || math.IsInf(l.Scale, 0):
		return d, l, invalid("%s: scale is %v: give a finite number, or 0 for 1/sqrt(head_dim)", op, d.scale)
	}
	if d.flags&flagWindow != 0 {
		if d.window_left < -1 || d.window_right < -1 {
			return d, l, invalid("%s: window %d, %d: 0 or more, or -1 for unbounded", op, d.window_left, d.window_right)
		}
		if d.window_left == 0 && d.window_right == 0 {
			return d, l, invalid("%s: ULYSSES_WINDOW is set and window_left and window_right are both 0, so that a query would see its own key alone: set window_left, "+
				"or leave the flag out; -1 is unbounded", op)
		}
		l.Window = &device.Window{Left: d.window_left, Right: d.window_right}
	} else if d.window_left != 0 || d.window_right != 0 {
		return d, l, invalid("%s: window %d, %d without ULYSSES_WINDOW: set the flag, or leave them 0", op, d.window_left, d.window_right)
	}
	if d.max_tokens < 0 || d.max_tokens > maxTokens || d.max_tokens*max(l.Heads, 1) > maxWork/max(l.Dim, l.VDim) {
		return d, l, invalid("%s: max_tokens %d: 0 or more, and times heads and features below 2^52", op, d.max_tokens)
	}
	return d, l, nil
}

func newPlan(h uintptr, desc, out unsafe.Pointer) error {
	const op = "ulysses_attention_plan"
	c, err := togetherOn(op, h)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return c.makePlan(op, desc, out) })
}

// cleared sets a caller's handle to NULL if the pointer to it is not NULL.
func cleared(op string, out unsafe.Pointer) error {
	if out == nil {
		return invalid("%s: out is NULL: give the address of a pointer", op)
	}
	*(*uintptr)(out) = 0
	return nil
}

func (c *context) makePlan(op string, desc, out unsafe.Pointer) error {
	d, l, err := c.describe(op, desc)
	if err = c.settle(cmp.Or(cleared(op, out), err)); err != nil {
		return err
	}
	if err := comm.Same(c.comm, op, attentionFields(&d)...); err != nil {
		return err
	}
	p := &plan{ctx: c, cross: d.flags&flagCross != 0, max: d.max_tokens, identity: identity(1).withText(fmt.Sprint(d))}
	if p.sp, err = sp.NewPlan(c.dev, c.comm, l); err != nil {
		return err
	}
	p.sp.Admit = c.admit
	// A plan whose attention is the caller's own, or that serves reshards, needs no kernel; one
	// that must repeat does.
	forward, backward, err := p.sp.Kernels()
	if p.unserved = err; err != nil && l.Deterministic {
		err = status.Errorf(status.Of(err), "%s: ULYSSES_DETERMINISTIC: %w: plan without it, or with heads and a type that such a kernel serves", op, err)
	} else {
		err = nil
	}
	if err := comm.Agree(c.comm, err); err != nil {
		return err
	}
	p.rows = map[string]string{"forward": forward, "backward": backward}
	return p.admit(op, out, "ulysses", p.sp.String())
}

// attentionFields are the fields that must be equal on all ranks, by the header's names.
func attentionFields(d *cAttentionDesc) []comm.Field {
	return append(integers(
		named{"dtype", int64(d.dtype)}, named{"heads", d.heads}, named{"kv_heads", d.kv_heads}, named{"head_dim", d.head_dim},
		named{"v_dim", d.v_dim}, named{"window_left", d.window_left}, named{"window_right", d.window_right}, named{"max_tokens", d.max_tokens}), append(flagFields(d.flags), real("scale", d.scale))...)
}

// flagFields are the flags of a plan by name.
func flagFields(flags int32) (fields []comm.Field) {
	for _, f := range [...]struct {
		name string
		bit  int32
	}{{"ULYSSES_CAUSAL", flagCausal}, {"ULYSSES_WINDOW", flagWindow}, {"ULYSSES_CROSS", flagCross}, {"ULYSSES_QK_L2NORM", flagL2Norm}, {"ULYSSES_DETERMINISTIC", flagDeterministic},
		{"ULYSSES_NO_BACKWARD", flagNoBackward}, {"ULYSSES_STATES", flagStates}} {
		fields = append(fields, comm.Field{Name: f.name, Value: map[bool]string{false: "not set", true: "set"}[flags&f.bit != 0]})
	}
	return fields
}

// named is a field of a C struct with its name.
type named struct {
	name  string
	value int64
}

func integers(all ...named) (fields []comm.Field) {
	for _, f := range all {
		fields = append(fields, comm.Field{Name: f.name, Value: strconv.FormatInt(f.value, 10)})
	}
	return fields
}

func real(name string, x float32) comm.Field {
	return comm.Field{Name: name, Value: strconv.FormatFloat(float64(x), 'g', -1, 32)}
}

// admit makes room for a plan that was settled, writes its text and gives it out. Collective.
func (p *plan) admit(op string, out unsafe.Pointer, strategy, why string) error {
	c := p.ctx
	err := p.reserveAll()
	if err == nil {
		p.self, err = register(aPlan, p)
	}
	if err = comm.Agree(c.comm, err); err != nil {
		if p.self != 0 {
			forget(p.self)
		}
		return err
	}
	c.ballot.made++
	p.number = c.ballot.made
	lo, hi, klo, khi := p.heads()
	told := map[string]any{"strategy": strategy, "text": why, "heads": []int64{lo, hi}, "kv_heads": []int64{klo, khi},
		"device": c.dev.Info().Kind, "kernels": c.dev.Info().Kernels, "dtype": p.sp.Layer().DType.String()}
	if p.rows["forward"] != "" {
		told["attention"] = p.rows
	}
	text, err := json.Marshal(told)
	if err != nil {
		return err
	}
	p.json = C.CString(string(text))
	c.plans[p] = true
	*(*uintptr)(out) = p.self
	return nil
}

// heads are those that this rank computes, and the key heads under them.
func (p *plan) heads() (lo, hi, keyLo, keyHi int64) {
	if p.gdn != nil {
		return p.gdn.Heads()
	}
	return p.sp.Heads()
}

// batchOf is the lengths that count for the plan: those with the keys' own for cross-attention.
func (p *plan) batchOf(op string, b *batch) (*sp.Batch, error) {
	if b.ctx != p.ctx {
		return nil, invalid("%s: the batch was made on another context than the plan", op)
	}
	x := b.own
	if p.cross {
		if x = b.crossed; x == nil {
			return nil, invalid("%s: the plan is ULYSSES_CROSS and the batch has no kv_seq: give the keys' lengths", op)
		}
	}
	l := p.sp.Layer()
	most := maxWork
	if p.gdn != nil {
		most = maxDeltaWork
	}
	if tokens := x.Batch() * max(x.Seq(), x.KVSeq()); tokens > most/(l.Heads*max(l.Dim, l.VDim)) {
		return nil, invalid("%s: %d tokens of %d heads of %d features: their product must stay below %d", op, tokens, l.Heads, max(l.Dim, l.VDim), most)
	}
	return x, nil
}

// pair finds a plan of attention and a batch and enters their context for a query. The caller
// leaves the context.
func pair(op string, ph, bh uintptr) (p *plan, b *sp.Batch, err error) {
	if p, b, err = anyPair(op, ph, bh); err == nil {
		if err = p.ofAttention(op); err != nil {
			p.ctx.leave()
		}
	}
	return p, b, err
}

// ofAttention returns an error for a plan of another kind.
func (p *plan) ofAttention(op string) error {
	if p.gdn != nil {
		return invalid("%s: the plan is of the gated delta rule: give one of ulysses_attention_plan", op)
	}
	return nil
}

// anyPair is pair for plans of any kind.
func anyPair(op string, ph, bh uintptr) (p *plan, b *sp.Batch, err error) {
	if p, err = find[plan](op, aPlan, ph); err != nil {
		return nil, nil, err
	}
	whole, err := find[batch](op, aBatch, bh)
	if err != nil {
		return nil, nil, err
	}
	if err = p.ctx.enter(op); err != nil {
		return nil, nil, err
	}
	if b, err = p.batchOf(op, whole); err != nil {
		p.ctx.leave()
		return nil, nil, err
	}
	return p, b, nil
}

// attentionOf returns the batch of a collective call on a plan of attention. device is true if the
// call runs the device's attention instead of the caller's.
func (p *plan) attentionOf(op string, b *batch, device bool) (*sp.Batch, error) {
	if err := p.ofAttention(op); err != nil {
		return nil, err
	}
	if device && p.unserved != nil {
		return nil, p.unserved
	}
	return p.batchOf(op, b)
}

func planSizes(ph, bh uintptr, out unsafe.Pointer) error {
	const op = "ulysses_plan_sizes"
	p, err := find[plan](op, aPlan, ph)
	if err != nil {
		return err
	}
	var s sp.Sizes
	if bh == 0 {
		if err := p.ctx.enter(op); err != nil {
			return err
		}
		defer p.ctx.leave()
		if p.max == 0 {
			return invalid("%s: batch is NULL and the plan has no max_tokens: give one of the two", op)
		}
		if s, err = p.maxSizes(); err != nil {
			return err
		}
	} else {
		_, b, err := anyPair(op, ph, bh)
		if err != nil {
			return err
		}
		defer p.ctx.leave()
		s = p.sizesOf(b)
	}
	return p.writeSizes(op, s, out)
}

func (p *plan) writeSizes(op string, s sp.Sizes, out unsafe.Pointer) error {
	if err := p.ctx.asked(s.Workspace); err != nil {
		return err
	}
	lo, hi, klo, khi := p.heads()
	return write(op, "out", out, &cSizes{saved: uint64(p.ctx.tagged(s.Saved)), workspace: uint64(s.Workspace), head_lo: lo, head_hi: hi, shared_lo: klo, shared_hi: khi})
}

// planJSON is the plan's text, which lives with it; nil for what is no plan.
func planJSON(ph uintptr) (*C.char, error) {
	p, err := find[plan]("ulysses_plan_json", aPlan, ph)
	if err != nil {
		return nil, err
	}
	return p.json, nil
}

func planDestroy(ph uintptr) error {
	const op = "ulysses_plan_destroy"
	if ph == 0 {
		return nil
	}
	p, err := find[plan](op, aPlan, ph)
	if err != nil {
		return err
	}
	if !p.ctx.mu.TryLock() {
		return invalid("%s: the context is in a call", op)
	}
	defer p.ctx.leave()
	for _, r := range p.ctx.requests {
		if r.plan == p && r.self != 0 {
			return invalid("%s: a request of the plan is under way: wait for it first", op)
		}
	}
	delete(p.ctx.plans, p)
	p.end()
	return nil
}

func (p *plan) end() {
	forget(p.self)
	C.free(unsafe.Pointer(p.json))
	p.json = nil
}

// sizeOf reports memory that is too small.
func sizeOf(op, name string, t tensor.Tensor, need int64) error {
	have := int64(0)
	if !t.IsNil() {
		have = t.Numel()
	}
	if have < need {
		return status.Errorf(status.InvalidArgument, "%s: %s has %d bytes, %d are needed: the query of sizes says so beforehand", op, name, have, need)
	}
	return nil
}
