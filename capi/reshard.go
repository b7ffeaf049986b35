package main

import (
	"strconv"
	"unsafe"

	"ulysses/device"
	"ulysses/gdn"
	"ulysses/sp"
)

// maxReshard is the most tensors of one exchange, maxRequests the most exchanges of a context that
// are under way.
const maxReshard, maxRequests = 16, 16

// request is a reshard under way, or a free place for one.
type request struct {
	ctx     *context
	plan    *plan
	self    uintptr // 0 = free
	theirs  unsafe.Pointer
	wire    device.Buffer // see wireOf
	pending sp.Pending
}

func (r *request) end() {
	if r.self != 0 {
		forget(r.self)
		r.self = 0
	}
}

// readReshard reads the tensors of an exchange into the context's places. Without data, shapes
// alone count.
func (c *context) readReshard(op string, args unsafe.Pointer, toHeads, data bool) (a cReshardArgs, r *sp.Reshard, err error) {
	if a, err = read[cReshardArgs](op, "args", args); err != nil {
		return a, nil, err
	}
	switch {
	case a.n < 1 || a.n > maxReshard:
		return a, nil, invalid("%s: n is %d: 1 to %d tensors", op, a.n, maxReshard)
	case a.in == nil || a.out == nil:
		return a, nil, invalid("%s: in or out is NULL: give arrays of %d pointers to tensors", op, a.n)
	case a.sum_copies != 0 && a.sum_copies != 1 || a.reserved != 0:
		return a, nil, invalid("%s: sum_copies %d, reserved %d: 0 or 1, and 0", op, a.sum_copies, a.reserved)
	case a.sum_copies == 1 && toHeads:
		return a, nil, invalid("%s: sum_copies 1 is for the way back, ulysses_heads_to_seq", op)
	}
	c.shapesOnly = !data
	defer func() { c.shapesOnly = false }()
	t := tensors{c: c, op: op}
	ins, outs := &c.seq, &c.heads
	if !toHeads {
		ins, outs = outs, ins
	}
	n := int(a.n)
	c.must("n", int64(n))
	c.must("sum_copies", int64(a.sum_copies))
	for i := range n {
		t.get(&ins[i], inNames[i], at(a.in, i), 4, false)
		t.get(&outs[i], outNames[i], at(a.out, i), 4, true)
		if c.shared[i] = false; a.shared != nil {
			c.shared[i] = at(a.shared, i) != 0
		}
	}
	if t.err == nil {
		for i := range n {
			c.must(sharedNames[i], int64(b2i(c.shared[i])))
			c.must(widthNames[i], c.seq[i].Dim(-1))
		}
		c.must("the type of in[0], DLPack's code and bits", int64(at(a.in, 0).code)|int64(at(a.in, 0).bits)<<8)
	}
	c.reshard = sp.Reshard{Seq: c.seq[:n], Heads: c.heads[:n], Shared: c.shared[:n], SumCopies: a.sum_copies == 1}
	return a, &c.reshard, t.err
}

var (
	inNames, outNames       = numbered("in", ""), numbered("out", "")
	sharedNames, widthNames = numbered("shared", ""), numbered("in", "'s last extent")
)

// numbered names the tensors of a list: "in[3]".
func numbered(name, of string) (names [maxReshard]string) {
	for i := range names {
		names[i] = name + "[" + strconv.Itoa(i) + "]" + of
	}
	return names
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func reshard(ph, bh uintptr, args unsafe.Pointer, toHeads bool) error {
	op := reshardName(toHeads)
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.reshard(op, b, args, toHeads) })
}

func (p *plan) reshard(op string, whole *batch, args unsafe.Pointer, toHeads bool) error {
	c := p.ctx
	b, err := p.resharded(op, whole)
	if err != nil {
		return err
	}
	a, r, err := c.readReshard(op, args, toHeads, true)
	if err != nil {
		return err
	}
	need, err := p.sp.ReshardWorkspace(b, r)
	if err != nil {
		return err
	}
	t := tensors{c: c, op: op}
	if t.workspace(&r.Workspace, a.workspace, uint64(a.workspace_bytes), need); t.err != nil {
		return t.err
	}
	if err := c.overlaps(op); err != nil {
		return err
	}
	if err := c.join(op, a.stream); err != nil {
		return err
	}
	if toHeads {
		return c.part(p.sp.SeqToHeads(c.stream, b, r))
	}
	return c.part(p.sp.HeadsToSeq(c.stream, b, r))
}

// reshardPair is pair for plans that cut by heads.
func reshardPair(op string, ph, bh uintptr) (p *plan, b *sp.Batch, err error) {
	if p, b, err = anyPair(op, ph, bh); err == nil {
		if err = p.cutsHeads(op); err != nil {
			p.ctx.leave()
		}
	}
	return p, b, err
}

// cutsHeads returns an error for a plan in which every rank keeps all heads.
func (p *plan) cutsHeads(op string) error {
	if p.gdn != nil && p.gdn.Strategy() == gdn.State {
		return invalid("%s: the plan hands states from rank to rank, and every rank keeps its rows of all heads: plan with ULYSSES_GDN_HEADS", op)
	}
	return nil
}

// resharded returns the batch of a collective reshard.
func (p *plan) resharded(op string, b *batch) (*sp.Batch, error) {
	if err := p.cutsHeads(op); err != nil {
		return nil, err
	}
	return p.batchOf(op, b)
}

func reshardName(toHeads bool) string {
	if toHeads {
		return "ulysses_seq_to_heads"
	}
	return "ulysses_heads_to_seq"
}

func startName(toHeads bool) string {
	if toHeads {
		return "ulysses_seq_to_heads_start"
	}
	return "ulysses_heads_to_seq_start"
}

func reshardWorkspace(ph, bh uintptr, args unsafe.Pointer, toHeads bool, out unsafe.Pointer) error {
	const op = "ulysses_reshard_workspace"
	p, b, err := reshardPair(op, ph, bh)
	if err != nil {
		return err
	}
	defer p.ctx.leave()
	_, r, err := p.ctx.readReshard(op, args, toHeads, false)
	if err != nil {
		return err
	}
	if out == nil {
		return invalid("%s: bytes is NULL", op)
	}
	n, err := p.sp.ReshardWorkspace(b, r)
	if err != nil {
		return err
	}
	*(*uint64)(out) = uint64(n)
	return p.ctx.asked(n)
}

func reshardStart(ph, bh uintptr, args unsafe.Pointer, toHeads bool, out unsafe.Pointer) error {
	op := startName(toHeads)
	c, p, b, err := together(op, ph, bh)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return p.startReshard(op, b, args, toHeads, out) })
}

func (p *plan) startReshard(op string, whole *batch, args unsafe.Pointer, toHeads bool, out unsafe.Pointer) error {
	c := p.ctx
	if err := cleared(op, out); err != nil {
		return err
	}
	b, err := p.resharded(op, whole)
	if err != nil {
		return err
	}
	a, r, err := c.readReshard(op, args, toHeads, true)
	if err != nil {
		return err
	}
	need, err := p.sp.ReshardWorkspace(b, r)
	if err != nil {
		return err
	}
	if r.Workspace, err = c.block(op, "workspace", a.workspace, uint64(a.workspace_bytes)); err != nil {
		return err
	}
	c.note("workspace", r.Workspace, true)
	if err := c.overlaps(op); err != nil {
		return err
	}
	q, err := c.request(op)
	if err != nil {
		return err
	}
	// no part: the caller's stream goes on beside the exchange
	if err := c.join(op, a.stream); err != nil {
		return err
	}
	if r.Workspace, err = c.wireOf(op, q, r.Workspace, need); err != nil {
		return err
	}
	if toHeads {
		err = p.sp.StartSeqToHeads(c.stream, b, r, &q.pending)
	} else {
		err = p.sp.StartHeadsToSeq(c.stream, b, r, &q.pending)
	}
	if err != nil {
		return err
	}
	q.plan, q.theirs = p, a.stream
	if q.self, err = register(aRequest, q); err != nil {
		return err
	}
	*(*uintptr)(out) = q.self
	return nil
}

// request is a free place.
func (c *context) request(op string) (*request, error) {
	for _, r := range c.requests {
		if r.self == 0 {
			return r, nil
		}
	}
	if len(c.requests) == maxRequests {
		return nil, invalid("%s: %d requests are under way: wait for one", op, maxRequests)
	}
	r := &request{ctx: c}
	c.requests = append(c.requests, r)
	return r, nil
}

func requestWait(h uintptr) error {
	const op = "ulysses_request_wait"
	r, err := find[request](op, aRequest, h)
	if err != nil {
		return err
	}
	if err := r.ctx.enter(op); err != nil {
		return err
	}
	defer r.ctx.leave()
	r.end()
	if r.ctx.gpu != nil {
		r.ctx.gpu.theirs = uintptr(r.theirs)
	}
	return r.ctx.part(r.pending.Wait())
}
