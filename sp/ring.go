package sp

import (
	"math"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// ringPass has the memory of a pass through a ring. Sums over steps are in F32: the output and its
// LSE, which each step continues (device.Attention.Carry), and the gradients.
type ringPass struct {
	out       tensor.Tensor    // [hq, B, n, Dv] F32
	send      tensor.Tensor    // U8: keys and values of this rank's group
	recv      [2]tensor.Tensor // U8: keys and values of other groups, by turns
	workspace tensor.Tensor    // of the device's operation

	// of backward: sums over steps, and the results of one call
	dq, dk, dv          tensor.Tensor    // [h, B, n, ·] F32
	callQ, callK, callV tensor.Tensor    // U8
	callSlopes          tensor.Tensor    // [hq] F32
	returned            [2]tensor.Tensor // U8: gradients for other groups, by turns
	received            tensor.Tensor    // U8: gradients from other groups
	fetching, returning comm.Request
	returningStep       int // whose gradients are being returned; 0 = none
}

// ringBuffers allocates the memory of a pass from c. Without memory, it computes its size.
func (p *Plan) ringBuffers(b *Batch, x *local, c *device.Allocator, backward bool) {
	sch, r, l := p.moves(b), &p.ringPass, &p.layer
	hq, hkv, n := x.q.Shape[0], x.k.Shape[0], b.spec.Batch
	*r = ringPass{}
	var sent int64
	var got [2]int64
	for i := range sch.steps {
		s := &sch.steps[i]
		sent, got[i%2] = max(sent, s.sent), max(got[i%2], s.got)
	}
	bytes := func(elements int64, t tensor.DType) tensor.Tensor { return c.Take(tensor.U8, elements*t.Size()) }
	f32 := tensor.F32
	r.send = bytes(sent, l.DType)
	for i := range r.recv {
		r.recv[i] = bytes(got[i], l.DType)
	}
	if !backward {
		if r.out = x.out; l.DType != f32 {
			r.out = p.alloc(c, f32, hq, n, x.out.Shape[2], l.VDim)
		}
	} else {
		r.dq = p.alloc(c, f32, hq, n, x.q.Shape[2], l.Dim)
		r.dk = p.alloc(c, f32, hkv, n, x.k.Shape[2], l.Dim)
		r.dv = p.alloc(c, f32, hkv, n, x.k.Shape[2], l.VDim)
		r.callQ = bytes(hq*sch.callQueries*l.Dim, f32)
		r.callK, r.callV = bytes(hkv*sch.callKeys*l.Dim, f32), bytes(hkv*sch.callKeys*l.VDim, f32)
		r.callSlopes = c.Take(f32, hq)
		for i := range r.returned {
			r.returned[i] = bytes(got[i], f32)
		}
		r.received = bytes(sent, f32)
	}
	w := &sch.workspaces[0]
	if backward {
		w = &sch.workspaces[1]
	}
	if *w == 0 {
		*w = max(1, p.callWorkspace(b, hq, hkv, sch.callQueries, sch.callKeys, backward))
		if backward && l.Sinks {
			*w = max(*w, p.callWorkspace(b, hq, hkv, x.q.Shape[2], 0, true)) // backSinks
		}
	}
	r.workspace = c.Take(tensor.U8, *w)
}

// callWorkspace returns the workspace of calls with at most so many queries and keys.
func (p *Plan) callWorkspace(b *Batch, hq, hkv, queries, keys int64, backward bool) int64 {
	l, of := &p.layer, p.sketch
	a := p.options(b, nil)
	if backward && l.Sinks {
		a.Sinks = of(tensor.F32, hq)
	}
	a.Shift = []int64{}               // any shifts
	a.QueryAt = max(0, l.BlockRows-1) // from there, queries are in the most rows of a block mask
	a.Q, a.K, a.V = of(l.DType, queries, hq, l.Dim), of(l.DType, keys, hkv, l.Dim), of(l.DType, keys, hkv, l.VDim)
	a.Out, a.LSE = of(l.DType, queries, hq, l.VDim), of(tensor.F32, queries, hq)
	if a.Carry = !backward; a.Carry {
		a.Out.DType = tensor.F32
	}
	return p.dev.AttentionWorkspace(&a, backward)
}

// ringWireBytes returns the bytes, sent and received, of the largest step.
func (p *Plan) ringWireBytes(b *Batch) (most int64) {
	size := p.layer.DType.Size()
	if !p.layer.NoBackward {
		size = tensor.F32.Size() // gradients
	}
	for _, s := range p.moves(b).steps {
		most = max(most, (s.sent+s.got)*size)
	}
	return most
}

// keysIn views a block of keys and values of some rows, from an element of a buffer on. It returns
// the element after the block.
func (p *Plan) keysIn(buffer tensor.Tensor, t tensor.DType, at int64, b *Batch, rows int64) (k, v tensor.Tensor,
	end int64) {
	c := device.Allocator{Mem: buffer, Align: 1, Used: at * t.Size()}
	heads := p.key[p.rank].n()
	k = p.alloc(&c, t, heads, b.spec.Batch, rows, p.layer.Dim)
	v = p.alloc(&c, t, heads, b.spec.Batch, rows, p.layer.VDim)
	return k, v, c.Used / t.Size()
}

// fetch starts to send this rank's keys, and to receive the keys of step i.
func (p *Plan) fetch(s device.Stream, b *Batch, x *local, i int) (err error) {
	step, r, at := &p.schedule.steps[i], &p.ringPass, int64(0)
	for _, to := range step.to {
		for _, block := range to.blocks {
			var k, v tensor.Tensor
			k, v, at = p.keysIn(r.send, p.layer.DType, at, b, block.rows.n())
			if err := p.copy(s, k, x.k.Slice(2, block.rows.lo, block.rows.hi)); err != nil {
				return err
			}
			if err := p.copy(s, v, x.v.Slice(2, block.rows.lo, block.rows.hi)); err != nil {
				return err
			}
		}
	}
	c := &p.fetchCounts
	c.set(p, b, step)
	r.fetching, err = p.comm.AllToAllStart(s, r.recv[i%2].At(0, p.layer.DType, step.got),
		r.send.At(0, p.layer.DType, step.sent), c.recv, c.send)
	return err
}

// begin waits for the keys of step i, and starts to send the keys of the next one.
func (p *Plan) begin(s device.Stream, b *Batch, x *local, i int) error {
	if i > 0 {
		if err := p.ringPass.fetching.Wait(); err != nil {
			return err
		}
	}
	if i+1 == len(p.schedule.steps) {
		return nil
	}
	return p.fetch(s, b, x, i+1)
}

// keysOf returns the keys and values of a block of step i, which starts at an element of the step's
// buffers, and the element at which the next block starts.
func (p *Plan) keysOf(b *Batch, x *local, i int, at int64, block *ringBlock) (k, v tensor.Tensor, end int64) {
	if i == 0 {
		return x.k.Slice(2, block.rows.lo, block.rows.hi), x.v.Slice(2, block.rows.lo, block.rows.hi), at
	}
	return p.keysIn(p.ringPass.recv[i%2], p.layer.DType, at, b, block.rows.n())
}

// sequenceRows views some rows of one sequence of [h, B, n, D] as the [n, h, D] of the device's
// operations.
func sequenceRows(t tensor.Tensor, sequence int64, rows span) tensor.Tensor {
	return t.Select(1, sequence).Slice(1, rows.lo, rows.hi).Permute(1, 0, 2)
}

// describeCall sets the arguments of the device's operation for one call.
func (p *Plan) describeCall(b *Batch, a *Args, x *local, c *ringCall, k, v, out tensor.Tensor) {
	p.attention = p.options(b, a)
	o, keys := &p.attention, span{0, k.Shape[2]}
	o.Q, o.Out, o.LSE = sequenceRows(x.q, c.sequence, c.q), sequenceRows(out, c.sequence, c.q),
		sequenceRows(x.lse, c.sequence, c.q).Select(2, 0)
	o.K, o.V = sequenceRows(k, c.sequence, keys), sequenceRows(v, c.sequence, keys)
	o.CuQ, o.CuK, o.Shift, o.QueryAt, o.KeyAt = c.cuQ, c.cuK, c.shift, c.queryAt, c.keyAt
	o.Workspace = p.ringPass.workspace
}

// ringForward computes out and lse of x.
func (p *Plan) ringForward(s device.Stream, b *Batch, a *Args, x *local, scratch tensor.Tensor) error {
	p.ringBuffers(b, x, &device.Allocator{Mem: scratch, Align: p.align}, false)
	out, none := p.ringPass.out, x.q.Shape[0]*x.q.Shape[1]*x.q.Shape[2] == 0
	if !none {
		if err := p.dev.Fill(s, out, 0); err != nil {
			return err
		}
		if err := p.startLSE(s, a, x.lse); err != nil {
			return err
		}
	}
	for i := range p.scheduleOf(b).steps {
		if err := p.begin(s, b, x, i); err != nil {
			return err
		}
		if none {
			continue
		}
		if err := p.forwardStep(s, b, a, x, i); err != nil {
			return err
		}
	}
	if none || p.layer.DType == tensor.F32 {
		return nil
	}
	return p.dev.Copy(s, x.out, out)
}

// forwardStep continues the softmax with the keys of step i.
func (p *Plan) forwardStep(s device.Stream, b *Batch, a *Args, x *local, i int) error {
	step, at := &p.schedule.steps[i], int64(0)
	for f := range step.from {
		for j := range step.from[f].blocks {
			block := &step.from[f].blocks[j]
			k, v, end := p.keysOf(b, x, i, at, block)
			at = end
			for c := range block.calls {
				p.describeCall(b, a, x, &block.calls[c], k, v, p.ringPass.out)
				p.attention.Carry = true
				if err := p.dev.AttentionForward(s, &p.attention); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// startLSE sets the LSE to that before the first key: -inf, or the sink, which enters once.
func (p *Plan) startLSE(s device.Stream, a *Args, lse tensor.Tensor) error {
	if !p.layer.Sinks {
		return p.dev.Fill(s, lse, math.Inf(-1))
	}
	for h := range lse.Shape[0] { // one head at a time, as an element for all of its queries
		sink := p.ofHeads(a.Sinks).Slice(0, h, h+1)
		all := lse.Slice(0, h, h+1)
		sink.NDim, sink.Shape, sink.Stride = all.NDim, all.Shape, [tensor.MaxDims]int64{}
		if err := p.dev.Copy(s, all, sink); err != nil {
			return err
		}
	}
	return nil
}

// ringBackward computes q, k and v of d, the gradients of q, k and v of x. Each step computes the
// terms of one group's keys. They return to the group while the next step computes, and are added
// there in the order of the steps.
func (p *Plan) ringBackward(s device.Stream, b *Batch, a *Args, g *Grads, x, d *local, scratch tensor.Tensor) error {
	p.ringBuffers(b, x, &device.Allocator{Mem: scratch, Align: p.align}, true)
	r := &p.ringPass
	for _, t := range [...]tensor.Tensor{r.dq, r.dk, r.dv} {
		if err := p.fillZero(s, t); err != nil {
			return err
		}
	}
	if err := p.backSinks(s, b, a, g, x, d); err != nil {
		return err
	}
	for i := range p.scheduleOf(b).steps {
		if err := p.begin(s, b, x, i); err != nil {
			return err
		}
		if err := p.backStep(s, b, a, g, x, d, i); err != nil {
			return err
		}
	}
	if err := p.addReturned(s, b); err != nil {
		return err
	}
	for _, t := range [...]struct{ to, from tensor.Tensor }{{d.q, r.dq}, {d.k, r.dk}, {d.v, r.dv}} {
		if err := p.copy(s, t.to, t.from); err != nil {
			return err
		}
	}
	return nil
}

// backSinks computes the gradient of the sinks: a call for each sequence, with all queries and no
// keys.
func (p *Plan) backSinks(s device.Stream, b *Batch, a *Args, g *Grads, x, d *local) error {
	r, all := &p.ringPass, span{0, x.q.Shape[2]}
	if g.DSinks.IsNil() || x.q.Numel() == 0 {
		return nil
	}
	k, v := x.k.Slice(2, 0, 0), x.v.Slice(2, 0, 0)
	for n := range b.spec.Batch {
		c := ringCall{sequence: n, q: all, cuQ: []int64{0, all.hi}, cuK: []int64{0, 0}, shift: []int64{0}}
		p.describeCall(b, a, x, &c, k, v, x.out)
		p.attention.Sinks, p.attention.BlockMask = p.ofHeads(a.Sinks), tensor.Tensor{}
		p.gradient = device.AttentionGrad{Attention: p.attention, DOut: sequenceRows(d.out, n, all),
			DQ: sequenceRows(r.dq, n, all), DK: sequenceRows(r.dk.Slice(2, 0, 0), n, span{}),
			DV:     sequenceRows(r.dv.Slice(2, 0, 0), n, span{}),
			DSinks: p.ofHeads(g.DSinks)}
		if n > 0 {
			p.gradient.DSinks = r.callSlopes
		}
		if err := p.dev.AttentionBackward(s, &p.gradient); err != nil {
			return err
		}
		if n > 0 {
			if err := p.add(s, p.ofHeads(g.DSinks), r.callSlopes); err != nil {
				return err
			}
		}
	}
	return nil
}

// add adds x to sum.
func (p *Plan) add(s device.Stream, sum, x tensor.Tensor) error {
	if sum.Numel() == 0 {
		return nil
	}
	return p.dev.Add(s, sum, sum, x)
}

// backStep computes the gradients of step i, and starts to return the gradients of its keys.
func (p *Plan) backStep(s device.Stream, b *Batch, a *Args, g *Grads, x, d *local, i int) error {
	r := &p.ringPass
	if i > 0 {
		if err := p.fillZero(s, r.returned[i%2].At(0, tensor.F32, p.schedule.steps[i].got)); err != nil {
			return err
		}
	}
	step, at := &p.schedule.steps[i], int64(0)
	for f := range step.from {
		for j := range step.from[f].blocks {
			block := &step.from[f].blocks[j]
			k, v, end := p.keysOf(b, x, i, at, block)
			var dk, dv tensor.Tensor
			if i == 0 {
				dk, dv = r.dk.Slice(2, block.rows.lo, block.rows.hi), r.dv.Slice(2, block.rows.lo, block.rows.hi)
			} else {
				dk, dv, _ = p.keysIn(r.returned[i%2], tensor.F32, at, b, block.rows.n())
			}
			at = end
			for c := range block.calls {
				if err := p.backCall(s, b, a, g, x, d, &block.calls[c], k, v, dk, dv); err != nil {
					return err
				}
			}
		}
	}
	if i == 0 {
		return nil
	}
	var err error
	if err := p.addReturned(s, b); err != nil {
		return err
	}
	r.returningStep = i
	c := &p.returnCounts
	c.set(p, b, step)
	r.returning, err = p.comm.AllToAllStart(s, r.received.At(0, tensor.F32, step.sent),
		r.returned[i%2].At(0, tensor.F32, step.got), c.send, c.recv)
	return err
}

// fillZero fills a tensor with zeros.
func (p *Plan) fillZero(s device.Stream, t tensor.Tensor) error {
	if t.Numel() == 0 {
		return nil
	}
	return p.dev.Fill(s, t, 0)
}

// backCall adds the gradients of one call to their sums.
func (p *Plan) backCall(s device.Stream, b *Batch, a *Args, g *Grads, x, d *local, c *ringCall, k, v, dk,
	dv tensor.Tensor) error {
	r, l := &p.ringPass, &p.layer
	hq, hkv, keys := x.q.Shape[0], x.k.Shape[0], span{0, k.Shape[2]}
	if hq == 0 {
		return nil
	}
	dense := func(buffer tensor.Tensor, heads, rows, dim int64) tensor.Tensor { // [rows, heads, dim]
		m := device.Allocator{Mem: buffer, Align: 1}
		return p.alloc(&m, tensor.F32, heads, 1, rows, dim).Select(1, 0).Permute(1, 0, 2)
	}
	p.describeCall(b, a, x, c, k, v, x.out)
	p.gradient = device.AttentionGrad{Attention: p.attention, DOut: sequenceRows(d.out, c.sequence, c.q),
		DQ: dense(r.callQ, hq, c.q.n(), l.Dim), DK: dense(r.callK, hkv, keys.n(), l.Dim),
		DV: dense(r.callV, hkv, keys.n(), l.VDim)}
	if !g.DSlopes.IsNil() {
		p.gradient.DSlopes = r.callSlopes
	}
	if err := p.dev.AttentionBackward(s, &p.gradient); err != nil {
		return err
	}
	for _, t := range [...]struct{ sum, x tensor.Tensor }{
		{sequenceRows(r.dq, c.sequence, c.q), p.gradient.DQ},
		{sequenceRows(dk, c.sequence, keys), p.gradient.DK},
		{sequenceRows(dv, c.sequence, keys), p.gradient.DV},
	} {
		if err := p.add(s, t.sum, t.x); err != nil {
			return err
		}
	}
	if g.DSlopes.IsNil() {
		return nil
	}
	return p.add(s, p.ofHeads(g.DSlopes), r.callSlopes)
}

// addReturned waits for the gradients that other groups return, and adds them.
func (p *Plan) addReturned(s device.Stream, b *Batch) error {
	r, at := &p.ringPass, int64(0)
	if r.returningStep == 0 {
		return nil
	}
	if err := r.returning.Wait(); err != nil {
		return err
	}
	step := &p.schedule.steps[r.returningStep]
	r.returningStep = 0
	for _, from := range step.to {
		for _, block := range from.blocks {
			var k, v tensor.Tensor
			k, v, at = p.keysIn(r.received, tensor.F32, at, b, block.rows.n())
			if err := p.add(s, r.dk.Slice(2, block.rows.lo, block.rows.hi), k); err != nil {
				return err
			}
			if err := p.add(s, r.dv.Slice(2, block.rows.lo, block.rows.hi), v); err != nil {
				return err
			}
		}
	}
	return nil
}
