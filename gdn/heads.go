package gdn

import (
	"fmt"

	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// headsMethod is Ulysses (arXiv:2309.14509): an all-to-all gives each rank all tokens of a shard of
// the heads, with their gates. A second one restores token sharding.
type headsMethod struct {
	*base
	ulysses    *sp.Plan // of the all-to-alls
	allKeys    int64    // the sum of the key heads of all ranks
	sharedKeys bool     // the value heads of a key head are on several ranks
	reshard    reshard
	perHead    perHeadBuffers
}

// perHeadBuffers are used where the value heads of a key head are on several ranks: dq and dk of
// each value head go back to its tokens, and are summed there.
type perHeadBuffers struct {
	dq, dk    tensor.Tensor // [B, rank's tokens, Hv, Dk]
	sum, term tensor.Tensor // [B, rank's tokens, Hk, Dk] F32; allocated if dq and dk are BF16
}

func newHeadsMethod(p *base) *headsMethod {
	m := &headsMethod{base: p}
	group := p.layer.ValueHeads / p.layer.KeyHeads
	for r := range p.size {
		h := m.heads(r)
		m.allKeys += h.keys()
		m.sharedKeys = m.sharedKeys || h.values() > 0 && h.lo%group > 0
	}
	return m
}

// open makes the plan of the all-to-alls. Collective.
func (m *headsMethod) open() (err error) {
	l, own := &m.layer, m.heads(m.rank)
	group := l.ValueHeads / l.KeyHeads
	for h := own.lo; h < own.hi; h++ {
		m.keyHead = append(m.keyHead, h/group-own.keyLo)
	}
	m.ulysses, err = sp.NewPlan(m.dev, m.comm, sp.Layer{Heads: l.ValueHeads, KVHeads: l.KeyHeads, Dim: l.KeyDim,
		VDim: l.ValueDim, DType: l.DType, NoBackward: true})
	return err
}

func (m *headsMethod) heads(rank int64) headRange { return m.layer.headShard(m.size, rank) }

// divide makes one segment of all tokens of the batch.
func (m *headsMethod) divide(l *layout) {
	l.oneGroup = l.batch.OneGroup() // linear attention has no ring: all ranks share the heads
	l.tokens, l.position = l.batch.Seq(), 0
	l.maxDocs, l.starts, l.ends = l.docs, l.docs, l.docs
	if m.heads(m.rank).values() > 0 {
		l.segments = append(l.segments, segment{sequence: -1, cu: l.shards.cu, docs: l.docs})
	}
}

func (m *headsMethod) allocate(c *call) {
	l, f, ws, h := &m.layer, &c.buffers, &c.workspace, m.heads(m.rank)
	n := m.localSizes(c.layout, h)
	m.allocateInputs(c, n, c.kept())
	switch {
	case !c.backward:
		f.out = m.allocateHeads(ws, l.DType, n.batch, n.tokens, n.values, l.ValueDim)
	case c.layer:
		m.allocateConvGrads(c, n)
		f.dout = m.allocateHeads(ws, l.DType, n.batch, n.tokens, n.values, l.ValueDim)
		f.da, f.db = ws.Take(l.DType, n.batch, n.tokens, n.values), ws.Take(l.DType, n.batch, n.tokens, n.values)
	default:
		m.allocateGrads(c, n)
	}
	if c.withStates && m.size > 1 { // each rank has its heads of all documents
		docs := c.layout.docs
		m.allocateDocs(c, n.values, docs, docs, docs, docs)
	}
}

// allocateGrads allocates the gradients of the core.
func (m *headsMethod) allocateGrads(c *call, n localSizes) {
	l, f, ws := &m.layer, &c.buffers, &c.workspace
	f.dout = m.allocateHeads(ws, l.DType, n.batch, n.tokens, n.values, l.ValueDim)
	f.perValueHead = m.sharedKeys
	keys := n.keys
	if m.sharedKeys {
		keys = n.values
		tokens, x := c.layout.batch.Rows(), &m.perHead
		*x = perHeadBuffers{}
		x.dq = m.allocateHeads(ws, l.DType, n.batch, tokens, l.ValueHeads, l.KeyDim)
		x.dk = m.allocateHeads(ws, l.DType, n.batch, tokens, l.ValueHeads, l.KeyDim)
		if l.DType != tensor.F32 {
			x.sum = ws.Take(tensor.F32, n.batch, tokens, l.KeyHeads, l.KeyDim)
			x.term = ws.Take(tensor.F32, n.batch, tokens, l.KeyHeads, l.KeyDim)
		}
	}
	f.dq = m.allocateHeads(ws, l.DType, n.batch, n.tokens, keys, l.KeyDim)
	f.dk = m.allocateHeads(ws, l.DType, n.batch, n.tokens, keys, l.KeyDim)
	f.dv = m.allocateHeads(ws, l.DType, n.batch, n.tokens, n.values, l.ValueDim)
	f.dg, f.dbeta = m.allocateGate(ws, n.batch, n.tokens, n.values), m.allocateGate(ws, n.batch, n.tokens, n.values)
}

// scratchBytes is the memory of the larger all-to-all of a call: what is sent and what is received.
func (m *headsMethod) scratchBytes(l *layout, kind callKind, _ device.DeltaSizes) int64 {
	send, recv := m.allToAllElements(l.batch, m.rank, m.entering(kind))
	toHeads := send + recv
	send, recv = m.allToAllElements(l.batch, m.rank, m.leaving(kind))
	return max(toHeads, send+recv) * m.layer.DType.Size()
}

func (m *headsMethod) bytesSent(l *layout, rank int64, kind callKind) (sent int64) {
	if !kind.recompute {
		sent, _ = m.allToAllElements(l.batch, rank, m.entering(kind))
	}
	_, back := m.allToAllElements(l.batch, rank, m.leaving(kind))
	return (sent + back) * m.layer.DType.Size()
}

func (m *headsMethod) describe(sent int64) (details, traffic string) {
	values, keys := make([]int64, m.size), make([]int64, m.size)
	for r := range m.size {
		h := m.heads(r)
		values[r], keys[r] = h.values(), h.keys()
	}
	return ", value heads " + sp.Counts(values) + ", key heads " + sp.Counts(keys),
		fmt.Sprintf("%d bytes per token", sent/m.size)
}

func (m *headsMethod) enter(c *call) error {
	f, x := &c.buffers, &m.reshard
	switch {
	case c.recompute:
		return nil
	case c.backward:
		f.dx = f.dy
		x.add(m.layer.DType, c.dout(), f.dout, false)
	case c.layer:
		a, own := &c.layerArgs, m.heads(m.rank)
		toQ, toK, toV := m.splitHeads(f.x, own.keys(), own.values())
		m.addLayer([5]tensor.Tensor{toQ, toK, toV, f.a, f.b}, a.QKV, a.A, a.B)
	default:
		a := &c.args
		m.addCore([5]tensor.Tensor{f.q, f.k, f.v, f.g, f.beta}, [5]tensor.Tensor{a.Q, a.K, a.V, a.G, a.Beta}, true)
	}
	return m.toHeads(c)
}

// passStates copies the states of this rank's heads. No state is sent: each head has the whole
// sequence on one rank.
func (m *headsMethod) passStates(c *call) error {
	h := m.heads(m.rank)
	if m.size == 1 || h.values() == 0 {
		return nil
	}
	if !c.states.in.IsNil() {
		if err := m.dev.Copy(c.stream, c.buffers.docs.in, c.states.in.Slice(1, h.lo, h.hi)); err != nil {
			return err
		}
	}
	if c.states.dout.IsNil() {
		return nil
	}
	return m.dev.Copy(c.stream, c.buffers.docs.dout, c.states.dout.Slice(1, h.lo, h.hi))
}

// segmentStates returns the rank's buffers for the states that the caller gave, or the caller's own
// states if one rank has all heads.
func (m *headsMethod) segmentStates(c *call, _ *segment) (documentStates, error) {
	if m.size == 1 {
		return c.states, nil
	}
	local := func(callers, buffer tensor.Tensor) tensor.Tensor {
		if callers.IsNil() {
			return callers
		}
		return buffer
	}
	x, docs := &c.states, &c.buffers.docs
	return documentStates{in: local(x.in, docs.in), out: local(x.out, docs.out), dout: local(x.dout, docs.dout),
		din: local(x.din, docs.din)}, nil
}

func (m *headsMethod) leave(c *call) error {
	f := &c.buffers
	switch {
	case !c.backward:
		m.reshard.add(m.layer.DType, c.out(), f.out, false)
		return m.toTokens(c, false)
	case c.layer:
		g := &c.layerGrads
		m.addLayer([5]tensor.Tensor{f.dq, f.dk, f.dv, f.da, f.db}, g.DQKV, g.DA, g.DB)
		return m.toTokens(c, m.sharedKeys)
	case !m.sharedKeys:
		g := &c.grads
		m.addCore([5]tensor.Tensor{f.dq, f.dk, f.dv, f.dg, f.dbeta}, [5]tensor.Tensor{g.DQ, g.DK, g.DV, g.DG, g.DBeta},
			true)
		return m.toTokens(c, false)
	}
	g, x := &c.grads, &m.perHead
	m.addCore([5]tensor.Tensor{f.dq, f.dk, f.dv, f.dg, f.dbeta}, [5]tensor.Tensor{x.dq, x.dk, g.DV, g.DG, g.DBeta},
		false)
	if err := m.toTokens(c, false); err != nil || c.layout.batch.Rows() == 0 {
		return err
	}
	if err := m.sumPerHead(c.stream, g.DQ, x.dq); err != nil {
		return err
	}
	return m.sumPerHead(c.stream, g.DK, x.dk)
}

// sumPerHead writes the sum over the value heads of each key head, all [B, n, Hv, Dk], to dst
// [B, n, Hk, Dk]. As in the device's operation, heads are added in index order and in F32.
func (m *headsMethod) sumPerHead(s device.Stream, dst, all tensor.Tensor) error {
	l := &m.layer
	groups := all.Split(2, l.KeyHeads) // [B, n, Hk, Hv/Hk, Dk]
	sum := dst
	if l.DType != tensor.F32 {
		sum = m.perHead.sum
	}
	if err := m.dev.Copy(s, sum, groups.Select(3, 0)); err != nil {
		return err
	}
	for i := int64(1); i < l.ValueHeads/l.KeyHeads; i++ {
		term := groups.Select(3, i)
		if l.DType != tensor.F32 {
			if err := m.dev.Copy(s, m.perHead.term, term); err != nil {
				return err
			}
			term = m.perHead.term
		}
		if err := m.dev.Add(s, sum, sum, term); err != nil {
			return err
		}
	}
	if l.DType == tensor.F32 {
		return nil
	}
	return m.dev.Copy(s, dst, sum)
}

func (m *headsMethod) gatherDocs(c *call, local, to tensor.Tensor, _ bool) error {
	if m.size == 1 {
		return nil // the device's operation wrote the caller's tensor
	}
	counts, docs := m.reshard.counts[:0], c.layout.docs
	for r := range m.size {
		counts = append(counts, docs*m.heads(r).values()*m.layer.KeyDim*m.layer.ValueDim)
	}
	m.reshard.counts = counts
	gathered := c.buffers.gathered
	if err := m.comm.AllGather(c.stream, gathered, local.Flatten(0, 3).Slice(0, 0, counts[m.rank]),
		counts); err != nil {
		return err
	}
	at := int64(0)
	for r := range m.size {
		h := m.heads(r)
		if h.values() == 0 {
			continue
		}
		if err := m.dev.Copy(c.stream, to.Slice(1, h.lo, h.hi),
			m.statesAt(gathered, at, docs, h.values())); err != nil {
			return err
		}
		at += counts[r]
	}
	return nil
}

// reshard has the tensors of one all-to-all between tokens and heads, in both layouts.
type reshard struct {
	args   sp.Reshard
	seq    [5]tensor.Tensor // [B, rank's tokens, H, ·]
	heads  [5]tensor.Tensor // [B, S, h, ·]
	shared [5]bool          // the heads are key heads
	n      int
	counts []int64 // elements of each rank in gatherDocs
}

// add adds a tensor in both layouts to the next all-to-all.
func (x *reshard) add(dtype tensor.DType, seq, heads tensor.Tensor, keys bool) {
	x.seq[x.n], x.heads[x.n], x.shared[x.n] = as4D(seq, dtype), as4D(heads, dtype), keys
	x.n++
}

// addCore adds q, k, v and the gates, or their gradients. keys is false if q and k have value
// heads.
func (m *headsMethod) addCore(heads, seq [5]tensor.Tensor, keys bool) {
	for i := range seq {
		m.reshard.add(m.layer.DType, seq[i], heads[i], keys && i < 2)
	}
}

// addLayer adds q, k, v, a and b of a layer, or their gradients.
func (m *headsMethod) addLayer(heads [5]tensor.Tensor, qkv, a, b tensor.Tensor) {
	q, k, v := m.splitHeads(qkv, m.layer.KeyHeads, m.layer.ValueHeads)
	m.addCore(heads, [5]tensor.Tensor{q, k, v, a, b}, true)
}

// as4D returns a view [B, n, H, 1] of [B, n, H]; F32 in an all-to-all of BF16 becomes two BF16
// elements. [B, n, H, D] is returned as it is.
func as4D(t tensor.Tensor, dtype tensor.DType) tensor.Tensor {
	if t.NDim == 4 {
		return t
	}
	t.NDim, t.Shape[3], t.Stride[3] = 4, 1, 1
	if ratio := t.DType.Size() / dtype.Size(); ratio > 1 {
		for i := range 3 {
			t.Stride[i] *= ratio
		}
		t.DType, t.Shape[3] = dtype, ratio
	}
	return t
}

// toHeads reshards the added tensors from tokens to heads, and removes them from the list.
func (m *headsMethod) toHeads(c *call) error {
	return m.ulysses.SeqToHeads(c.stream, c.layout.oneGroup, m.reshard.take(c.scratch, false))
}

// toTokens reshards the added tensors from heads to tokens, and removes them from the list. With
// sum, the copies of a key head on several ranks are added in rank order.
func (m *headsMethod) toTokens(c *call, sum bool) error {
	return m.ulysses.HeadsToSeq(c.stream, c.layout.oneGroup, m.reshard.take(c.scratch, sum))
}

// take returns the arguments of the all-to-all of the added tensors, and empties the list.
func (x *reshard) take(scratch tensor.Tensor, sum bool) *sp.Reshard {
	x.args = sp.Reshard{Seq: x.seq[:x.n], Heads: x.heads[:x.n], Shared: x.shared[:x.n], SumCopies: sum,
		Workspace: scratch}
	x.n = 0
	return &x.args
}

// tokenElements is the number of elements of the layer's type that an all-to-all sends for a token
// and a key head, and for a token and a value head.
type tokenElements struct{ key, value int64 }

// entering are the elements of the all-to-all to heads.
func (m *headsMethod) entering(kind callKind) tokenElements {
	if kind.backward {
		return tokenElements{0, m.layer.ValueDim} // dout
	}
	return tokenElements{2 * m.layer.KeyDim, m.layer.ValueDim + m.gateElements(kind)}
}

// leaving are the elements of the all-to-all to tokens.
func (m *headsMethod) leaving(kind callKind) tokenElements {
	l := &m.layer
	switch {
	case !kind.backward:
		return tokenElements{0, l.ValueDim}
	case m.sharedKeys && !kind.layer:
		// dq and dk of each value head
		return tokenElements{0, 2*l.KeyDim + l.ValueDim + m.gateElements(kind)}
	}
	return tokenElements{2 * l.KeyDim, l.ValueDim + m.gateElements(kind)}
}

// gateElements is the number of elements of a head's two gates: a and b of the layer's type, or g
// and beta in F32.
func (m *headsMethod) gateElements(kind callKind) int64 {
	if kind.layer {
		return 2
	}
	return 2 * tensor.F32.Size() / m.layer.DType.Size()
}

// allToAllElements returns the elements that a rank sends and receives in an all-to-all to heads.
// In an all-to-all to tokens it sends and receives them the other way round.
func (m *headsMethod) allToAllElements(b *sp.Batch, rank int64, n tokenElements) (send, recv int64) {
	lo, hi := b.RankRows(int(rank))
	tokens, h := (hi-lo)*b.Batch(), m.heads(rank)
	width := h.keys()*n.key + h.values()*n.value
	return tokens * (m.allKeys*n.key + m.layer.ValueHeads*n.value - width), (b.Seq()*b.Batch() - tokens) * width
}
