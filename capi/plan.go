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

// plan is one kind of layer on a context, which owns it.
type plan struct {
	ctx       *context
	handle    uintptr
	sp        *sp.Plan  // attention, or the reshards of the gated delta rule
	gdn       *gdn.Plan // nil for attention
	cross     bool      // ULYSSES_CROSS
	states    bool      // ULYSSES_STATES
	overlap   bool      // ULYSSES_OVERLAP
	maxTokens int64     // to reserve memory for
	json      *C.char   // the result of ulysses_plan_json
	kernels   map[string]string
	noKernel  error    // why the device has no kernel for the attention of the plan
	number    int64    // among the plans and batches of the context, equal on all ranks
	identity  identity // a hash of the description
}

// Limits of attention. With them, sizes in bytes cannot overflow.
const (
	maxHeads, maxDim = 1 << 16, 1 << 16
	maxTokens        = int64(1) << 40
	maxWork          = int64(1) << 52 // tokens × heads × features
)

// readAttentionDesc reads and checks a description of attention and returns its layer.
func (c *context) readAttentionDesc(op string, desc unsafe.Pointer) (d cAttentionDesc, l sp.Layer, err error) {
	if d, err = readStruct[cAttentionDesc](op, "desc", desc); err != nil {
		return d, l, err
	}
	if err = checkAttentionFlags(op, &d); err != nil {
		return d, l, err
	}
	l = sp.Layer{Heads: d.heads, KVHeads: d.kv_heads, Dim: d.head_dim, VDim: d.v_dim, Causal: d.flags&flagCausal != 0,
		Scale: float64(d.scale), NoBackward: d.flags&flagNoBackward != 0, Deterministic: d.flags&flagDeterministic != 0,
		Ring: c.ring, Gather: d.flags&flagGatherKeys != 0, Overlapped: d.flags&flagOverlap != 0}
	if l.KVHeads == 0 {
		l.KVHeads = l.Heads
	}
	if l.VDim == 0 {
		l.VDim = l.Dim
	}
	if l.Heads < 1 || l.KVHeads < 1 || l.Heads > maxHeads || l.KVHeads > maxHeads || l.Dim < 1 || l.VDim < 1 ||
		l.Dim > maxDim || l.VDim > maxDim {
		return d, l, invalid(
			"%s: heads is %d, kv_heads %d, head_dim %d and v_dim %d; give 1 to %d heads and features of a head", op,
			d.heads, d.kv_heads, d.head_dim, d.v_dim, maxHeads)
	}
	dtype, ok := dtypes[uint16(d.dtype)]
	if !ok || d.dtype>>16 != 0 {
		return d, l, invalid("%s: dtype is %#x; use ULYSSES_F32 or ULYSSES_BF16", op, d.dtype)
	}
	l.DType = dtype
	info := c.dev.Info()
	switch {
	case !slices.Contains(info.Compute, dtype):
		return d, l, unsupported("%s: dtype is %v; the device %s computes in %v", op, dtype, info.Kind, info.Compute)
	case l.Heads%l.KVHeads != 0:
		return d, l, invalid("%s: heads is %d and kv_heads %d; heads must be a multiple of kv_heads", op, l.Heads,
			l.KVHeads)
	case info.AttentionHead > 0 && max(l.Dim, l.VDim) > info.AttentionHead:
		return d, l, unsupported(
			"%s: head_dim is %d and v_dim %d; on the device %s attention has heads of %d features at most: use smaller heads, or ULYSSES_CPU",
			op, l.Dim, l.VDim,
			info.Kind, info.AttentionHead)
	case math.IsNaN(l.Scale) || math.IsInf(l.Scale, 0):
		return d, l, invalid("%s: scale is %v; give a finite number, or 0 for 1/sqrt(head_dim)", op, d.scale)
	case d.max_tokens < 0 || d.max_tokens > maxTokens || d.max_tokens*max(l.Heads, 1) > maxWork/max(l.Dim, l.VDim):
		return d, l, invalid("%s: max_tokens is %d; give 0 or more, and a product with heads and features below 2^52",
			op, d.max_tokens)
	}
	if err = optionsOf(op, &d, &l); err == nil {
		l.Window, err = windowOf(op, &d)
	}
	return d, l, err
}

// checkAttentionFlags refuses flags and fields that are unknown or not implemented.
func checkAttentionFlags(op string, d *cAttentionDesc) error {
	known := int32(flagCausal | flagWindow | flagCross | flagSinks | flagAlibi | flagBlockMask |
		flagDeterministic | flagSaveLess | flagNoBackward | flagGatherKeys | flagOverlap)
	if d.flags&^known != 0 {
		return invalid("%s: flags is %#x; attention has no flag %#x", op, d.flags, d.flags&^known)
	}
	if d.flags&flagSaveLess != 0 {
		return unsupported("%s: ULYSSES_SAVE_LESS: %s", op, notbuilt.SaveLess.Text("plan without it"))
	}
	return nil
}

// windowOf returns the window of attention; nil = none.
func windowOf(op string, d *cAttentionDesc) (*device.Window, error) {
	left, right := d.window_left, d.window_right
	switch {
	case d.flags&flagWindow == 0 && (left != 0 || right != 0):
		return nil, invalid(
			"%s: window_left is %d and window_right %d without ULYSSES_WINDOW; set the flag, or leave them 0", op,
			left, right)
	case d.flags&flagWindow == 0:
		return nil, nil
	case left < -1 || right < -1:
		return nil, invalid("%s: window_left is %d and window_right %d; give 0 or more, or -1 for unbounded", op,
			left, right)
	case left == 0 && right == 0:
		return nil, invalid(
			"%s: ULYSSES_WINDOW is set and window_left and window_right are both 0, so that a query would see only its own key; set window_left, "+
				"or leave the flag out; -1 is unbounded; for this window set ULYSSES_CAUSAL and window_right -1", op)
	}
	return &device.Window{Left: left, Right: right}, nil
}

func newPlan(h uintptr, desc, out unsafe.Pointer) error {
	const op = "ulysses_attention_plan"
	return onContext(op, h, func(c *context) error { return c.createPlan(op, desc, out) })
}

// clearOut sets the handle at out to NULL.
func clearOut(op string, out unsafe.Pointer) error {
	if out == nil {
		return invalid("%s: out is NULL; give the address of a pointer", op)
	}
	*(*uintptr)(out) = 0
	return nil
}

func (c *context) createPlan(op string, desc, out unsafe.Pointer) error {
	d, l, err := c.readAttentionDesc(op, desc)
	if err = c.agreeAlways(cmp.Or(clearOut(op, out), err)); err != nil {
		return err
	}
	if err := comm.Same(c.comm, op, attentionFields(&d)...); err != nil {
		return err
	}
	p := &plan{ctx: c, cross: d.flags&flagCross != 0, overlap: d.flags&flagOverlap != 0, maxTokens: d.max_tokens,
		identity: identity(1).withText(fmt.Sprint(d))}
	if p.sp, err = sp.NewPlan(c.dev, c.comm, l); err != nil {
		return err
	}
	p.sp.Admit = c.admit
	// Reshards and the caller's own attention need no kernel, so a missing kernel is an error of
	// the plan only if the plan asks for something that only some kernels have.
	forward, backward, err := p.sp.Kernels()
	switch p.noKernel = err; {
	case err == nil:
	case l.Deterministic:
		err = status.Errorf(status.Of(err),
			"%s: ULYSSES_DETERMINISTIC: %w; leave the flag out, or use heads and a type that such a kernel supports",
			op, err)
	case l.NeedsKernels():
		err = status.Errorf(status.Of(err), "%s: %w; plan without the option, or use ULYSSES_CPU", op, err)
	default:
		err = nil
	}
	if err := comm.Agree(c.comm, err); err != nil {
		return err
	}
	p.kernels = map[string]string{"forward": forward, "backward": backward}
	return p.publish(op, out, "ulysses", p.sp.String())
}

// attentionFields returns the fields of a description, which must be equal on all ranks, with the
// header's names.
func attentionFields(d *cAttentionDesc) []comm.Field {
	return append(intFields(
		namedInt{"dtype", int64(d.dtype)}, namedInt{"heads", d.heads}, namedInt{"kv_heads", d.kv_heads},
		namedInt{"head_dim", d.head_dim}, namedInt{"v_dim", d.v_dim}, namedInt{"window_left", d.window_left},
		namedInt{"window_right", d.window_right}, namedInt{"max_tokens", d.max_tokens},
		namedInt{"block_q", int64(d.block_q)},
		namedInt{"block_k", int64(d.block_k)}),
		append(flagFields(d.flags), floatField("scale", d.scale), floatField("softcap", d.softcap),
			floatField("dropout", d.dropout))...)
}

// flagFields returns the flags of a plan, which must be equal on all ranks, with their names.
func flagFields(flags int32) (fields []comm.Field) {
	for _, f := range [...]struct {
		name string
		bit  int32
	}{{"ULYSSES_CAUSAL", flagCausal}, {"ULYSSES_WINDOW", flagWindow}, {"ULYSSES_CROSS", flagCross},
		{"ULYSSES_QK_L2NORM", flagL2Norm}, {"ULYSSES_DETERMINISTIC", flagDeterministic},
		{"ULYSSES_NO_BACKWARD", flagNoBackward}, {"ULYSSES_STATES", flagStates}, {"ULYSSES_SINKS", flagSinks},
		{"ULYSSES_ALIBI", flagAlibi}, {"ULYSSES_BLOCK_MASK", flagBlockMask},
		{"ULYSSES_GATHER_KEYS", flagGatherKeys}, {"ULYSSES_OVERLAP", flagOverlap},
		{"ULYSSES_GATED_NORM", flagGatedNorm}} {
		fields = append(fields,
			comm.Field{Name: f.name, Value: map[bool]string{false: "not set", true: "set"}[flags&f.bit != 0]})
	}
	return fields
}

// namedInt is a field of a C struct with its name.
type namedInt struct {
	name  string
	value int64
}

func intFields(all ...namedInt) (fields []comm.Field) {
	for _, f := range all {
		fields = append(fields, comm.Field{Name: f.name, Value: strconv.FormatInt(f.value, 10)})
	}
	return fields
}

func floatField(name string, x float32) comm.Field {
	return comm.Field{Name: name, Value: strconv.FormatFloat(float64(x), 'g', -1, 32)}
}

// publish reserves the memory of a new plan, writes the text of ulysses_plan_json, registers the
// plan and writes its handle to out. Collective.
func (p *plan) publish(op string, out unsafe.Pointer, strategy, why string) error {
	c := p.ctx
	err := p.reserveAll()
	if err == nil {
		p.handle, err = register(planKind, p)
	}
	if err = comm.Agree(c.comm, err); err != nil {
		if p.handle != 0 {
			unregister(p.handle)
		}
		return err
	}
	c.agreement.created++
	p.number = c.agreement.created
	lo, hi, klo, khi := p.heads()
	description := map[string]any{"strategy": strategy, "text": why, "heads": []int64{lo, hi},
		"kv_heads": []int64{klo, khi},
		"device":   c.dev.Info().Kind, "kernels": c.dev.Info().Kernels, "dtype": p.sp.Layer().DType.String()}
	if p.kernels["forward"] != "" {
		description["attention"] = p.kernels
	}
	if p.gdn == nil {
		if err := p.describeRing(description); err != nil {
			return err
		}
	}
	text, err := json.Marshal(description)
	if err != nil {
		return err
	}
	p.json = C.CString(string(text))
	c.plans[p] = true
	*(*uintptr)(out) = p.handle
	return nil
}

// describeRing adds the form of a plan of attention, and the bytes that it sends for max_tokens
// tokens in one sequence.
func (p *plan) describeRing(description map[string]any) error {
	l, c := p.sp.Layer(), p.ctx.comm
	form := "all-to-all"
	if l.Ring > 1 {
		form = map[bool]string{false: "ring", true: "all-gather"}[l.Gather]
	}
	description["ring"], description["ulysses"], description["form"] = l.Ring, int64(c.Size())/l.Ring, form
	if p.maxTokens == 0 {
		return nil
	}
	b, err := sp.SketchBatch(c.Rank(), c.Size(), sp.BatchSpec{Batch: 1, Seq: p.maxTokens, Ring: l.Ring})
	if err != nil {
		return err
	}
	forward, backward := p.sp.BytesSent(b)
	description["bytes_sent"] = map[string]int64{"forward": forward, "backward": backward}
	return nil
}

// heads returns the heads that this rank computes, and their key heads.
func (p *plan) heads() (lo, hi, keyLo, keyHi int64) {
	if p.gdn != nil {
		return p.gdn.Heads()
	}
	return p.sp.Heads()
}

// batchOf returns the lengths of a batch for the plan: with ULYSSES_CROSS, queries and keys have
// different lengths.
func (p *plan) batchOf(op string, b *batch) (*sp.Batch, error) {
	if b.ctx != p.ctx {
		return nil, invalid("%s: the batch and the plan belong to different contexts; create both on one", op)
	}
	x := b.selfBatch
	if p.gdn != nil {
		if x = b.flatBatch; x == nil {
			return nil, unsupported(
				"%s: the batch has ULYSSES_ZIGZAG, and the gated delta rule needs consecutive rows of each rank; make the batch without the flag",
				op)
		}
	}
	if p.cross {
		if x = b.crossBatch; x == nil {
			return nil, invalid(
				"%s: the plan has ULYSSES_CROSS and the batch has no lengths of keys; set kv_seq or kv_rows of the batch",
				op)
		}
	}
	l := p.sp.Layer()
	limit := maxWork
	if p.gdn != nil {
		limit = maxGDNWork
	}
	if tokens := x.Batch() * max(x.Seq(), x.KVSeq()); tokens > limit/(l.Heads*max(l.Dim, l.VDim)) {
		return nil, invalid("%s: the batch has %d tokens of %d heads of %d features; their product must be below %d",
			op, tokens, l.Heads, max(l.Dim, l.VDim), limit)
	}
	return x, nil
}

// enterAttentionPair finds a plan of attention and a batch, and enters their context for a query.
// The caller must leave the context.
func enterAttentionPair(op string, ph, bh uintptr) (p *plan, b *sp.Batch, err error) {
	if p, b, err = enterPair(op, ph, bh); err == nil {
		if err = p.checkIsAttention(op); err != nil {
			p.ctx.leave()
		}
	}
	return p, b, err
}

// checkIsAttention returns an error for a plan of another kind.
func (p *plan) checkIsAttention(op string) error {
	if p.gdn != nil {
		return invalid("%s: the plan is of the gated delta rule; give a plan of ulysses_attention_plan", op)
	}
	return nil
}

// checkOneGroup returns an error for the caller's own attention on a context with a ring.
func (p *plan) checkOneGroup(op string) error {
	if ring := p.sp.Layer().Ring; ring > 1 {
		return unsupported(
			"%s: the context has ring %d, where a rank has only some rows of its heads, and the caller's own attention needs all; use ring 1",
			op, ring)
	}
	return nil
}

// enterPair is enterAttentionPair for plans of any kind.
func enterPair(op string, ph, bh uintptr) (p *plan, b *sp.Batch, err error) {
	if p, err = find[plan](op, planKind, ph); err != nil {
		return nil, nil, err
	}
	both, err := find[batch](op, batchKind, bh)
	if err != nil {
		return nil, nil, err
	}
	if err = p.ctx.enter(op); err != nil {
		return nil, nil, err
	}
	if b, err = p.batchOf(op, both); err != nil {
		p.ctx.leave()
		return nil, nil, err
	}
	return p, b, nil
}

// attentionBatch returns the lengths of a collective call on a plan of attention. device is true if
// the call runs the device's attention instead of the caller's.
func (p *plan) attentionBatch(op string, b *batch, device bool) (*sp.Batch, error) {
	if err := p.checkIsAttention(op); err != nil {
		return nil, err
	}
	if device && p.noKernel != nil {
		return nil, p.noKernel
	}
	if !device {
		if err := p.checkOneGroup(op); err != nil {
			return nil, err
		}
	}
	return p.batchOf(op, b)
}

func planSizes(ph, bh uintptr, out unsafe.Pointer) error {
	const op = "ulysses_plan_sizes"
	p, err := find[plan](op, planKind, ph)
	if err != nil {
		return err
	}
	var s sp.Sizes
	if bh == 0 {
		if err := p.ctx.enter(op); err != nil {
			return err
		}
		defer p.ctx.leave()
		if p.maxTokens == 0 {
			return invalid("%s: batch is NULL and the plan has no max_tokens; give a batch, or plan with max_tokens",
				op)
		}
		if s, err = p.maxSizes(); err != nil {
			return err
		}
	} else {
		_, b, err := enterPair(op, ph, bh)
		if err != nil {
			return err
		}
		defer p.ctx.leave()
		s = p.sizesOf(b)
	}
	return p.writeSizes(op, s, out)
}

// writeSizes writes the result of a query for sizes.
func (p *plan) writeSizes(op string, s sp.Sizes, out unsafe.Pointer) error {
	if err := p.ctx.reserveQueried(s.Workspace); err != nil {
		return err
	}
	lo, hi, klo, khi := p.heads()
	return writeStruct(op, "out", out,
		&cSizes{saved: uint64(p.ctx.withTag(s.Saved)), workspace: uint64(s.Workspace), head_lo: lo, head_hi: hi,
			shared_lo: klo, shared_hi: khi})
}

// planJSON returns the text of a plan, which is valid until the plan is destroyed.
func planJSON(ph uintptr) (*C.char, error) {
	p, err := find[plan]("ulysses_plan_json", planKind, ph)
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
	p, err := find[plan](op, planKind, ph)
	if err != nil {
		return err
	}
	if !p.ctx.mu.TryLock() {
		return invalid("%s: the context is in a call; destroy the plan after it", op)
	}
	defer p.ctx.mu.Unlock() // enter has not stored the current GPU
	for _, r := range p.ctx.requests {
		if r.plan == p && r.handle != 0 {
			return invalid("%s: a request of the plan is in progress; wait for it first", op)
		}
	}
	for _, x := range p.ctx.passes {
		if x.plan == p && x.handle != 0 {
			return invalid("%s: a pass of the plan is in progress; complete or cancel it first", op)
		}
	}
	delete(p.ctx.plans, p)
	p.release()
	return nil
}

func (p *plan) release() {
	unregister(p.handle)
	C.free(unsafe.Pointer(p.json))
	p.json = nil
}

// checkSize refuses memory that is too small.
func checkSize(op, name string, t tensor.Tensor, need int64) error {
	have := int64(0)
	if !t.IsNil() {
		have = t.Numel()
	}
	if have < need {
		return tooSmall(op, name, have, need)
	}
	return nil
}
