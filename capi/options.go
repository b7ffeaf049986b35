package main

import (
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// optionTensors are the tensors of a plan's options in a call: sinks, then slopes. The context owns
// them.
type optionTensors struct {
	given, grads [2]tensor.Tensor // of the caller; the gradients are optional
	// in F32: the caller's tensors, or copies in the workspace
	values, sums [2]tensor.Tensor
	added        bool // gradients are added to the caller's
}

// optionsOf sets the options of a layer from a description and checks them.
func optionsOf(op string, d *cAttentionDesc, l *sp.Layer) error {
	blocks := d.flags&flagBlockMask != 0
	switch {
	case !device.IsSoftcap(float64(d.softcap)):
		return invalid("%s: softcap is %v; give a number from %v to %v, or 0 for none", op, d.softcap,
			device.MinSoftcap, device.MaxSoftcap)
	case !(d.dropout >= 0 && d.dropout < 1):
		return invalid("%s: dropout is %v; give a probability of at least 0 and below 1", op, d.dropout)
	case blocks && (d.block_q < 1 || d.block_k < 1):
		return invalid("%s: ULYSSES_BLOCK_MASK is set, block_q is %d and block_k %d; give the queries and keys of a block, 1 or more",
			op, d.block_q, d.block_k)
	case !blocks && (d.block_q != 0 || d.block_k != 0):
		return invalid("%s: block_q is %d and block_k %d without ULYSSES_BLOCK_MASK; set the flag, or leave them 0", op,
			d.block_q, d.block_k)
	}
	l.Softcap, l.Dropout = float64(d.softcap), float64(d.dropout)
	l.Sinks, l.ALiBi = d.flags&flagSinks != 0, d.flags&flagAlibi != 0
	l.BlockRows, l.BlockColumns = int64(d.block_q), int64(d.block_k)
	return nil
}

// optionBytes returns the workspace of the options: sinks, slopes and their gradients in F32.
func (p *plan) optionBytes() int64 {
	a, l := device.Allocator{Align: p.ctx.dev.Info().Align}, p.sp.Layer()
	for _, used := range [...]bool{l.Sinks, l.ALiBi} {
		if used {
			a.Take(tensor.F32, l.Heads)
			a.Take(tensor.F32, l.Heads)
		}
	}
	return a.Padded()
}

// options reads the tensors and the seed of the plan's options into c.options and c.args.
func (r *reader) options(p *plan, b *sp.Batch, sinks, alibi, mask *cTensor, seed uint64) {
	x, l := &r.c.options, p.sp.Layer()
	*x = optionTensors{}
	r.option(&x.given[0], "sinks", "ULYSSES_SINKS", sinks, 0, l.Sinks)
	r.option(&x.given[1], "alibi", "ULYSSES_ALIBI", alibi, 0, l.ALiBi)
	for i, name := range [...]string{"sinks", "alibi"} {
		r.perHead(name, x.given[i], l)
	}
	r.option(&r.c.args.BlockMask, "block_mask", "ULYSSES_BLOCK_MASK", mask, 0, l.BlockRows > 0)
	if m := r.c.args.BlockMask; !m.IsNil() {
		heads := l.Heads
		if m.NDim > 0 && m.Shape[0] == 1 {
			heads = 1
		}
		r.dense("block_mask", m, tensor.U8, heads, (b.Seq()+l.BlockRows-1)/l.BlockRows,
			(b.KVSeq()+l.BlockColumns-1)/l.BlockColumns)
	}
	if r.c.args.Seed = int64(seed); l.Dropout > 0 {
		r.c.requireEqual("dropout_seed", r.c.args.Seed)
	}
}

// option reads a tensor that must be given if the plan has its flag, and must be NULL otherwise.
func (r *reader) option(dst *tensor.Tensor, name, flag string, p *cTensor, axes int, set bool) {
	*dst = tensor.Tensor{}
	switch {
	case r.err != nil:
	case set && p == nil:
		r.err = invalid("%s: %s is NULL and the plan has %s; give it, also in the backward call", r.op, name, flag)
	case !set && p != nil:
		r.err = invalid("%s: %s is given and the plan has no %s; plan with the flag, or leave it NULL", r.op,
			name, flag)
	case set:
		r.get(dst, name, p, axes, false)
	}
}

// perHead checks a tensor [H] in F32 or in the type of the plan, unless it is absent.
func (r *reader) perHead(name string, t tensor.Tensor, l sp.Layer) {
	if r.err == nil && !t.IsNil() &&
		(t.DType != tensor.F32 && t.DType != l.DType || t.NDim != 1 || t.Shape[0] != l.Heads || !t.Contiguous()) {
		r.err = invalid("%s: %s is %v; give a dense tensor [%d] of F32 or %v", r.op, name, t, l.Heads, l.DType)
	}
}

// optionGrads reads the gradients of sinks and slopes, which may be NULL. They have the type of
// their tensor, or F32 if they are added.
func (r *reader) optionGrads(p *plan, dsinks, dalibi *cTensor, added bool) {
	x, l := &r.c.options, p.sp.Layer()
	x.added = added
	for i, g := range [...]struct {
		name, of, flag string
		p              *cTensor
		set            bool
	}{{"dsinks", "sinks", "ULYSSES_SINKS", dsinks, l.Sinks}, {"dalibi", "alibi", "ULYSSES_ALIBI", dalibi, l.ALiBi}} {
		if g.p == nil || r.err != nil {
			continue
		}
		if !g.set {
			r.err = invalid("%s: %s is given and the plan has no %s; leave it NULL", r.op, g.name, g.flag)
			return
		}
		r.get(&x.grads[i], g.name, g.p, 0, true)
		want := x.given[i].DType
		if added {
			want = tensor.F32
		}
		r.dense(g.name, x.grads[i], want, l.Heads)
	}
}

// allocate takes the memory of the options from a workspace and returns the rest.
func (x *optionTensors) allocate(workspace tensor.Tensor, align int64) tensor.Tensor {
	a := device.Allocator{Mem: workspace, Align: align}
	for i, t := range x.given {
		if x.values[i] = t; !t.IsNil() && t.DType != tensor.F32 {
			x.values[i] = a.Take(tensor.F32, t.Shape[0])
		}
		if x.sums[i] = x.grads[i]; !x.sums[i].IsNil() && (x.added || x.sums[i].DType != tensor.F32) {
			x.sums[i] = a.Take(tensor.F32, t.Shape[0])
		}
	}
	return a.Rest()
}

// beginOptions allocates the options of a call in c.args.Workspace and sets them in c.args and
// c.grads.
func (c *context) beginOptions(op string, p *plan, b *sp.Batch) error {
	x := &c.options
	if p.optionBytes() > 0 {
		if err := checkSize(op, "workspace", c.args.Workspace, p.sizesOf(b).Workspace); err != nil {
			return err
		}
		c.args.Workspace = x.allocate(c.args.Workspace, c.dev.Info().Align)
	}
	c.args.Sinks, c.args.Slopes = x.values[0], x.values[1]
	c.grads.DSinks, c.grads.DSlopes = x.sums[0], x.sums[1]
	return nil
}

// widenOptions enqueues the copies of narrower sinks and slopes to F32.
func (c *context) widenOptions() error {
	for i, t := range c.options.given {
		if t.IsNil() || t.DType == tensor.F32 {
			continue
		}
		if err := c.dev.Copy(c.stream, c.options.values[i], t); err != nil {
			return err
		}
	}
	return nil
}

// endOptions enqueues what moves the gradients of the options to the caller's tensors.
func (c *context) endOptions() error {
	x := &c.options
	for i, g := range x.grads {
		var err error
		switch {
		case g.IsNil():
		case x.added:
			err = c.dev.Add(c.stream, g, g, x.sums[i])
		case g.DType != tensor.F32:
			err = c.dev.Copy(c.stream, g, x.sums[i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}
