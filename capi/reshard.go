package main

import (
	"strconv"
	"unsafe"

	"ulysses/gdn"
	"ulysses/sp"
)

const (
	maxReshard  = 16 // tensors of a reshard
	maxRequests = 16 // requests of a context that are in progress at the same time
)

// request is a reshard in progress, or a free slot for one. The context owns it.
type request struct {
	ctx          *context
	plan         *plan
	handle       uintptr // 0 = free
	number       int64   // the same on every rank
	callerStream uintptr
	memory       ownMemory
	pending      sp.Pending
}

// release makes a request free.
func (r *request) release() {
	if r.handle != 0 {
		unregister(r.handle)
		r.handle = 0
	}
}

// readReshard reads the tensors of a reshard into fields of the context. With data false it reads
// shapes only.
func (c *context) readReshard(op string, args unsafe.Pointer, toHeads, data bool) (a cReshardArgs, r *sp.Reshard,
	err error) {
	if a, err = readStruct[cReshardArgs](op, "args", args); err != nil {
		return a, nil, err
	}
	switch {
	case a.n < 1 || a.n > maxReshard:
		return a, nil, invalid("%s: n is %d; give 1 to %d tensors", op, a.n, maxReshard)
	case a.in == nil || a.out == nil:
		return a, nil, invalid("%s: in or out is NULL; give arrays of %d pointers to tensors", op, a.n)
	case a.sum_copies != 0 && a.sum_copies != 1 || a.reserved != 0:
		return a, nil, invalid(
			"%s: sum_copies is %d and args.reserved %d; give 0 or 1 for sum_copies, and 0 for reserved", op,
			a.sum_copies, a.reserved)
	case a.sum_copies == 1 && toHeads:
		return a, nil, invalid("%s: sum_copies is 1; only ulysses_heads_to_seq has copies to add", op)
	}
	c.shapesOnly = !data
	defer func() { c.shapesOnly = false }()
	t := reader{c: c, op: op}
	ins, outs := &c.seq, &c.heads
	if !toHeads {
		ins, outs = outs, ins
	}
	n := int(a.n)
	c.requireEqual("n", int64(n))
	c.requireEqual("sum_copies", int64(a.sum_copies))
	for i := range n {
		t.get(&ins[i], inNames[i], element(a.in, i), 4, false)
		t.get(&outs[i], outNames[i], element(a.out, i), 4, true)
		shared := int32(0)
		if a.shared != nil {
			shared = element(a.shared, i)
		}
		if shared&^1 != 0 && t.err == nil {
			t.err = invalid("%s: %s is %d; give 1 for shared heads, else 0", op, sharedNames[i], shared)
		}
		c.shared[i] = shared == 1
	}
	if t.err == nil {
		for i := range n {
			c.requireEqual(sharedNames[i], int64(b2i(c.shared[i])))
			c.requireEqual(widthNames[i], c.seq[i].Dim(-1))
		}
		c.requireEqual("the type of in[0] (DLPack's code and bits)",
			int64(element(a.in, 0).code)|int64(element(a.in, 0).bits)<<8)
	}
	c.reshard = sp.Reshard{Seq: c.seq[:n], Heads: c.heads[:n], Shared: c.shared[:n], SumCopies: a.sum_copies == 1}
	return a, &c.reshard, t.err
}

var (
	inNames, outNames       = numbered("in", ""), numbered("out", "")
	sharedNames, widthNames = numbered("shared", ""), numbered("in", "'s last extent")
)

// numbered returns the names of list elements, such as "in[3]", with a suffix.
func numbered(name, suffix string) (names [maxReshard]string) {
	for i := range names {
		names[i] = name + "[" + strconv.Itoa(i) + "]" + suffix
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
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.reshard(op, b, args, toHeads) })
}

// reshardArgs returns the lengths, the arguments and the tensors of a reshard, and the bytes of its
// workspace.
func (p *plan) reshardArgs(op string, both *batch, args unsafe.Pointer, toHeads bool) (b *sp.Batch, a cReshardArgs,
	r *sp.Reshard, need int64, err error) {
	if b, err = p.reshardBatch(op, both); err != nil {
		return b, a, r, 0, err
	}
	if a, r, err = p.ctx.readReshard(op, args, toHeads, true); err != nil {
		return b, a, r, 0, err
	}
	need, err = p.sp.ReshardWorkspace(b, r)
	return b, a, r, need, err
}

func (p *plan) reshard(op string, both *batch, args unsafe.Pointer, toHeads bool) error {
	c := p.ctx
	b, a, r, need, err := p.reshardArgs(op, both, args, toHeads)
	if err != nil {
		return err
	}
	t := reader{c: c, op: op}
	if t.workspace(&r.Workspace, a.workspace, a.workspace_bytes, need); t.err != nil {
		return t.err
	}
	if err := c.checkOverlaps(op); err != nil {
		return err
	}
	return c.enqueue(op, a.stream, func() error {
		if toHeads {
			return p.sp.SeqToHeads(c.stream, b, r)
		}
		return p.sp.HeadsToSeq(c.stream, b, r)
	})
}

// checkShardsHeads returns an error for a plan in which every rank keeps all heads.
func (p *plan) checkShardsHeads(op string) error {
	if p.gdn != nil && p.gdn.Strategy() == gdn.State {
		return invalid("%s: the plan passes states from rank to rank (ULYSSES_GDN_STATE), so every rank keeps its rows of all heads; plan with ULYSSES_GDN_HEADS",
			op)
	}
	return nil
}

// reshardBatch returns the lengths of a reshard.
func (p *plan) reshardBatch(op string, b *batch) (*sp.Batch, error) {
	if err := p.checkShardsHeads(op); err != nil {
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

func reshardWorkspace(ph, bh uintptr, args unsafe.Pointer, toHeads int32, out unsafe.Pointer) error {
	const op = "ulysses_reshard_workspace"
	if toHeads&^1 != 0 {
		return invalid("%s: to_heads is %d; give 1 for ulysses_seq_to_heads, or 0 for ulysses_heads_to_seq",
			op, toHeads)
	}
	p, b, err := enterPair(op, ph, bh)
	if err != nil {
		return err
	}
	defer p.ctx.leave()
	if err := p.checkShardsHeads(op); err != nil {
		return err
	}
	_, r, err := p.ctx.readReshard(op, args, toHeads == 1, false)
	if err != nil {
		return err
	}
	n, err := p.sp.ReshardWorkspace(b, r)
	if err != nil {
		return err
	}
	return p.ctx.writeWorkspace(op, n, out)
}

func reshardStart(ph, bh uintptr, args unsafe.Pointer, toHeads bool, out unsafe.Pointer) error {
	op := startName(toHeads)
	return onPlan(op, ph, bh, func(p *plan, b *batch) error { return p.startReshard(op, b, args, toHeads, out) })
}

// startReshard packs and sends the tensors. The caller's stream does not wait for it: requestWait
// does this.
func (p *plan) startReshard(op string, both *batch, args unsafe.Pointer, toHeads bool, out unsafe.Pointer) error {
	c := p.ctx
	if err := clearOut(op, out); err != nil {
		return err
	}
	b, a, r, need, err := p.reshardArgs(op, both, args, toHeads)
	if err != nil {
		return err
	}
	q, err := c.freeRequest(op)
	if err != nil {
		return err
	}
	t := reader{c: c, op: op}
	if t.ownWorkspace(&r.Workspace, &q.memory, a.workspace, a.workspace_bytes, need); t.err != nil {
		return t.err
	}
	if err := c.checkOverlaps(op); err != nil {
		return err
	}
	if err := c.waitForCaller(op, a.stream); err != nil {
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
	q.plan, q.callerStream = p, a.stream
	if q.handle, err = register(requestKind, q); err != nil {
		return err
	}
	c.agreement.created++
	q.number = c.agreement.created
	*(*uintptr)(out) = q.handle
	return nil
}

// freeRequest returns a free request.
func (c *context) freeRequest(op string) (*request, error) {
	for _, r := range c.requests {
		if r.handle == 0 {
			return r, nil
		}
	}
	if len(c.requests) == maxRequests {
		return nil, invalid("%s: %d requests are in progress, which is the maximum; wait for one", op, maxRequests)
	}
	r := &request{ctx: c}
	c.requests = append(c.requests, r)
	return r, nil
}

// requestWait receives and unpacks the tensors of a request and lets the caller's stream of the
// start wait for them. If a rank refuses the call, the request stays in progress. Collective.
func requestWait(h uintptr) error {
	const op = "ulysses_request_wait"
	r, err := find[request](op, requestKind, h)
	c := onlyContext()
	if err == nil {
		c = r.ctx
	}
	return c.collective(op, err, func() error {
		c.requireEqual("the number of the request", r.number)
		if err := c.agree(nil); err != nil {
			return err
		}
		r.release()
		if c.gpu != nil {
			c.gpu.callerStream = r.callerStream
		}
		return c.callerWaits(r.pending.Wait())
	})
}
