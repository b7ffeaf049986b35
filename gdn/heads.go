package gdn

import (
	"fmt"

	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// headsMethod is Ulysses (arXiv:2309.14509): one all-to-all gives each rank all tokens of a slice
// of the heads, with their gates, and a second one gives the tokens back.
type headsMethod struct {
	*Plan
	ulysses *sp.Plan // tokens against heads
	keysCut bool     // the value heads of a key head are on several ranks
	reshard reshard
}

func newHeadsMethod(p *Plan) *headsMethod {
	m := &headsMethod{Plan: p}
	group := p.layer.ValueHeads / p.layer.KeyHeads
	for r := range p.size {
		lo, hi, _, _ := headsOf(p.layer, p.size, r)
		m.keysCut = m.keysCut || lo < hi && lo%group > 0
	}
	return m
}

// open makes the plan of the all-to-alls. Collective.
func (m *headsMethod) open() (err error) {
	l := m.layer
	group := l.ValueHeads / l.KeyHeads
	lo, hi, keyLo, _ := m.headRange(m.rank)
	for h := lo; h < hi; h++ {
		m.keyHead = append(m.keyHead, h/group-keyLo)
	}
	m.ulysses, err = sp.NewPlan(m.dev, m.comm, sp.Layer{Heads: l.ValueHeads, KVHeads: l.KeyHeads, Dim: l.KeyDim, VDim: l.ValueDim, DType: l.DType, NoBackward: true})
	return err
}

func (m *headsMethod) headRange(rank int64) (lo, hi, keyLo, keyHi int64) {
	return headsOf(m.layer, m.size, rank)
}

func (m *headsMethod) fillCut(c *cut) {
	c.n, c.at = c.batch.Seq(), 0
	c.most, c.starts, c.ends = c.docs, c.docs, c.docs
	if lo, hi, _, _ := m.Heads(); lo < hi {
		c.pieces = append(c.pieces, piece{row: -1, cu: c.line.cu, stretch: stretch{docs: c.docs}})
	}
}

func (m *headsMethod) layInputs(_ call, keep *device.Allocator) *device.Allocator { return keep }

func (m *headsMethod) layForward(f *frame, c *cut, kind call, _, ws *device.Allocator) {
	if !kind.backward {
		lo, hi, _, _ := m.Heads()
		f.out = m.take(ws, m.layer.DType, c.line.batch, c.n, hi-lo, m.layer.ValueDim)
	}
}

func (m *headsMethod) layBackward(f *frame, c *cut, kind call, ws *device.Allocator) {
	l := m.layer
	lo, hi, keyLo, keyHi := m.Heads()
	batch, n, h, k := c.line.batch, c.n, hi-lo, keyHi-keyLo
	f.dout = m.take(ws, l.DType, batch, n, h, l.ValueDim)
	if kind.layer {
		f.da, f.db = ws.Take(l.DType, batch, n, h), ws.Take(l.DType, batch, n, h)
		return
	}
	if m.keysCut {
		k = h
		rows, x := c.batch.Rows(), &f.perHead
		x.dq = m.take(ws, l.DType, batch, rows, l.ValueHeads, l.KeyDim)
		x.dk = m.take(ws, l.DType, batch, rows, l.ValueHeads, l.KeyDim)
		if l.DType != tensor.F32 {
			x.sum, x.term = ws.Take(tensor.F32, batch, rows, l.KeyHeads, l.KeyDim), ws.Take(tensor.F32, batch, rows, l.KeyHeads, l.KeyDim)
		}
	}
	f.dq, f.dk = m.take(ws, l.DType, batch, n, k, l.KeyDim), m.take(ws, l.DType, batch, n, k, l.KeyDim)
	f.dv = m.take(ws, l.DType, batch, n, h, l.ValueDim)
	f.dg, f.dbeta = m.take(ws, tensor.F32, batch, n, h, 1).Select(3, 0), m.take(ws, tensor.F32, batch, n, h, 1).Select(3, 0)
}

// layDocs: each rank has its heads of all documents.
func (m *headsMethod) layDocs(_ *frame, c *cut, _ *device.Allocator) (in, out, starts, ends int64) {
	return c.docs, c.docs, c.docs, c.docs
}

func (m *headsMethod) scratch(c *cut, kind call, _ device.DeltaSizes) int64 { return m.wire(c, kind) }

func (m *headsMethod) sent(c *cut, rank int64, kind call) int64 {
	key, value := m.enters(kind)
	in, _ := m.exchanged(c.batch, rank, key, value)
	key, value = m.leaves(kind)
	_, out := m.exchanged(c.batch, rank, key, value)
	return (in + out) * m.layer.DType.Size()
}

func (m *headsMethod) recomputeSent(b *sp.Batch) int64 {
	_, sent := m.exchanged(b, m.rank, 0, m.layer.ValueDim)
	return sent * m.layer.DType.Size()
}

func (m *headsMethod) docSent(*cut) int64 {
	lo, hi, _, _ := m.Heads()
	return (m.size - 1) * (hi - lo) * m.layer.KeyDim * m.layer.ValueDim * tensor.F32.Size()
}

func (m *headsMethod) describe() string {
	value, key := make([]int64, m.size), make([]int64, m.size)
	for r := range m.size {
		lo, hi, keyLo, keyHi := m.headRange(r)
		value[r], key[r] = hi-lo, keyHi-keyLo
	}
	return ", value heads " + sp.Counts(value) + ", key heads " + sp.Counts(key)
}

func (m *headsMethod) describeSent(all int64) string {
	return fmt.Sprintf("sends %d bytes a token", all/m.size)
}

func (m *headsMethod) enter(s device.Stream, c *cut, f *frame, a *Args, _ call, scratch tensor.Tensor) error {
	e := &m.reshard
	e.add(m.layer.DType, a.Q, f.q, true)
	e.add(m.layer.DType, a.K, f.k, true)
	e.add(m.layer.DType, a.V, f.v, false)
	e.add(m.layer.DType, a.G, f.g, false)
	e.add(m.layer.DType, a.Beta, f.beta, false)
	return m.toHeads(s, c, scratch)
}

func (m *headsMethod) enterGrads(s device.Stream, c *cut, f *frame, g *Grads, scratch tensor.Tensor) error {
	m.reshard.add(m.layer.DType, g.DOut, f.dout, false)
	return m.toHeads(s, c, scratch)
}

func (m *headsMethod) leaveGrads(s device.Stream, c *cut, f *frame, g *Grads, scratch tensor.Tensor) error {
	e, t := &m.reshard, m.layer.DType
	dq, dk := g.DQ, g.DK
	if m.keysCut {
		dq, dk = f.perHead.dq, f.perHead.dk
	}
	e.add(t, dq, f.dq, !m.keysCut)
	e.add(t, dk, f.dk, !m.keysCut)
	e.add(t, g.DV, f.dv, false)
	e.add(t, g.DG, f.dg, false)
	e.add(t, g.DBeta, f.dbeta, false)
	if err := m.toTokens(s, c, scratch, false); err != nil || !m.keysCut || c.batch.Rows() == 0 {
		return err
	}
	if err := m.sumHeads(s, f, g.DQ, dq); err != nil {
		return err
	}
	return m.sumHeads(s, f, g.DK, dk)
}

func (m *headsMethod) enterLayer(s device.Stream, c *cut, f *frame, a *LayerArgs, _ call, scratch tensor.Tensor) error {
	e, l := &m.reshard, &m.layer
	q, k, v := m.heads(a.QKV, l.KeyHeads, l.ValueHeads)
	lo, hi, keyLo, keyHi := m.Heads()
	toQ, toK, toV := m.heads(f.x, keyHi-keyLo, hi-lo)
	e.add(l.DType, q, toQ, true)
	e.add(l.DType, k, toK, true)
	e.add(l.DType, v, toV, false)
	e.add(l.DType, a.A, f.a, false)
	e.add(l.DType, a.B, f.b, false)
	return m.toHeads(s, c, scratch)
}

func (m *headsMethod) enterLayerGrads(s device.Stream, c *cut, f *frame, g *LayerGrads, scratch tensor.Tensor) error {
	f.dx = f.dy
	m.reshard.add(m.layer.DType, g.DOut, f.dout, false)
	return m.toHeads(s, c, scratch)
}

func (m *headsMethod) leaveLayerGrads(s device.Stream, c *cut, f *frame, g *LayerGrads, scratch tensor.Tensor) error {
	e, l := &m.reshard, &m.layer
	q, k, v := m.heads(g.DQKV, l.KeyHeads, l.ValueHeads)
	e.add(l.DType, q, f.dq, true)
	e.add(l.DType, k, f.dk, true)
	e.add(l.DType, v, f.dv, false)
	e.add(l.DType, g.DA, f.da, false)
	e.add(l.DType, g.DB, f.db, false)
	return m.toTokens(s, c, scratch, m.keysCut)
}

// No state passes between ranks: each head sees the whole sequence on one rank.
func (m *headsMethod) pass(device.Stream, *cut, *frame, tensor.Tensor, *states) error { return nil }

func (m *headsMethod) passGrad(s device.Stream, _ *cut, f *frame, _ tensor.Tensor, x *states) error {
	return m.ownDocs(s, f, x)
}

func (m *headsMethod) beginOutput(s device.Stream, f *frame, _ tensor.Tensor, x *states) error {
	return m.ownDocs(s, f, x)
}

func (m *headsMethod) endOutput(s device.Stream, c *cut, f *frame, scratch, out tensor.Tensor) error {
	m.reshard.add(m.layer.DType, out, f.out, false)
	return m.toTokens(s, c, scratch, false)
}

func (m *headsMethod) perHead() bool { return m.keysCut }

// ownDocs copies the caller's states of this rank's heads.
func (m *headsMethod) ownDocs(s device.Stream, f *frame, x *states) error {
	lo, hi, _, _ := m.Heads()
	if m.size == 1 || lo == hi {
		return nil
	}
	if !x.in.IsNil() {
		if err := m.dev.Copy(s, f.docs.in, x.in.Slice(1, lo, hi)); err != nil {
			return err
		}
	}
	if x.dout.IsNil() {
		return nil
	}
	return m.dev.Copy(s, f.docs.dout, x.dout.Slice(1, lo, hi))
}

// own returns the rank's memory for states of documents, or the caller's own where one rank has all
// heads or there are no states.
func (m *headsMethod) own(callers, ranks tensor.Tensor) tensor.Tensor {
	if callers.IsNil() || m.size == 1 {
		return callers
	}
	return ranks
}

func (m *headsMethod) stateBefore(_ device.Stream, f *frame, _ *piece, in tensor.Tensor) (tensor.Tensor, error) {
	return m.own(in, f.docs.in), nil
}

func (m *headsMethod) gradBehind(_ device.Stream, f *frame, _ *piece, dout tensor.Tensor) (tensor.Tensor, error) {
	return m.own(dout, f.docs.dout), nil
}

func (m *headsMethod) stateBehind(f *frame, _ *piece, out tensor.Tensor, _ *int64) tensor.Tensor {
	return m.own(out, f.docs.out)
}

func (m *headsMethod) gradBefore(f *frame, _ *piece, din tensor.Tensor, _ *int64) tensor.Tensor {
	return m.own(din, f.docs.din)
}

func (m *headsMethod) docElements(c *cut, rows []int64, local tensor.Tensor, _ bool) tensor.Tensor {
	for r := range m.size {
		lo, hi, _, _ := m.headRange(r)
		rows[r] = c.docs * (hi - lo) * m.layer.KeyDim * m.layer.ValueDim
	}
	return local
}

func (m *headsMethod) scatterDocs(s device.Stream, c *cut, gathered, to tensor.Tensor, _ bool) error {
	at := int64(0)
	for r := range m.size {
		lo, hi, _, _ := m.headRange(r)
		if hi == lo {
			continue
		}
		from := m.statesAt(gathered, at, c.docs, hi-lo)
		if err := m.dev.Copy(s, to.Slice(1, lo, hi), from); err != nil {
			return err
		}
		at += from.Numel()
	}
	return nil
}

// reshard is the tensors of one all-to-all between tokens and heads, in both layouts.
type reshard struct {
	r      sp.Reshard
	seq    [5]tensor.Tensor // [B, rows, H, ·]
	heads  [5]tensor.Tensor // [B, S, h, ·]
	shared [5]bool          // heads are those of keys
	n      int
}

// add is a tensor of the reshard; gates without a last axis and of another type travel as words of
// the layer's.
func (e *reshard) add(dtype tensor.DType, seq, heads tensor.Tensor, keys bool) {
	e.seq[e.n], e.heads[e.n], e.shared[e.n] = words(seq, dtype), words(heads, dtype), keys
	e.n++
}

// words views [B, n, H] as [B, n, H, 1], and an F32 among BF16 as two of those; [B, n, H, D] stays.
func words(t tensor.Tensor, dtype tensor.DType) tensor.Tensor {
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

// toHeads re-shards the tensors that were added from tokens to heads, and forgets them. Collective.
func (m *headsMethod) toHeads(s device.Stream, c *cut, wire tensor.Tensor) error {
	e := &m.reshard
	e.lay(wire, false)
	return m.ulysses.SeqToHeads(s, c.batch, &e.r)
}

// toTokens is the way back. With sum, the copies of a key head are added in rank order. Collective.
func (m *headsMethod) toTokens(s device.Stream, c *cut, wire tensor.Tensor, sum bool) error {
	e := &m.reshard
	e.lay(wire, sum)
	return m.ulysses.HeadsToSeq(s, c.batch, &e.r)
}

// lay describes the all-to-all of the tensors that were added.
func (e *reshard) lay(wire tensor.Tensor, sum bool) {
	e.r = sp.Reshard{Seq: e.seq[:e.n], Heads: e.heads[:e.n], Shared: e.shared[:e.n], SumCopies: sum, Workspace: wire}
	e.n = 0
}

// Elements of the layer's type that one token has on the wire, by key and by value head: what
// enters the heads' side, and what leaves it.

func (m *headsMethod) enters(kind call) (key, value int64) {
	l := m.layer
	if kind.backward {
		return 0, l.ValueDim // dout
	}
	return 2 * l.KeyDim, l.ValueDim + m.gateWords(kind)
}

func (m *headsMethod) leaves(kind call) (key, value int64) {
	l := m.layer
	switch {
	case !kind.backward:
		return 0, l.ValueDim
	case m.keysCut && !kind.layer:
		return 0, 2*l.KeyDim + l.ValueDim + m.gateWords(kind) // each value head's own dq and dk
	}
	return 2 * l.KeyDim, l.ValueDim + m.gateWords(kind)
}

// gateWords is the words of two gates of a head: a and b of the layer's type, or g and beta in F32.
func (m *headsMethod) gateWords(kind call) int64 {
	if kind.layer {
		return 2
	}
	return 2 * tensor.F32.Size() / m.layer.DType.Size()
}

// exchanged is the elements that a rank sends and receives in one exchange to heads; the way back
// is the mirror image.
func (m *headsMethod) exchanged(b *sp.Batch, rank, key, value int64) (send, recv int64) {
	width := func(r int64) int64 {
		lo, hi, keyLo, keyHi := headsOf(m.layer, m.size, r)
		return (keyHi-keyLo)*key + (hi-lo)*value
	}
	rows := func(r int64) int64 {
		lo, hi := b.RankRows(int(r))
		return (hi - lo) * b.Batch()
	}
	for r := range m.size {
		if r != rank {
			send += rows(rank) * width(r)
			recv += rows(r) * width(rank)
		}
	}
	return send, recv
}

// wire is the bytes of the larger exchange of a call.
func (m *headsMethod) wire(c *cut, kind call) int64 {
	key, value := m.enters(kind)
	inSend, inRecv := m.exchanged(c.batch, m.rank, key, value)
	key, value = m.leaves(kind)
	outRecv, outSend := m.exchanged(c.batch, m.rank, key, value)
	return max(inSend+inRecv, outSend+outRecv) * m.layer.DType.Size()
}

// sumHeads writes into dst [B, rows, Hk, Dk] the sum of each value head's own gradient all [B,
// rows, Hv, Dk], in index order and, as the device does, in F32.
func (m *headsMethod) sumHeads(s device.Stream, f *frame, dst, all tensor.Tensor) error {
	l := m.layer
	each := all.Split(2, l.KeyHeads) // [B, rows, Hk, group, Dk]
	sum := dst
	if l.DType != tensor.F32 {
		sum = f.perHead.sum
	}
	if err := m.dev.Copy(s, sum, each.Select(3, 0)); err != nil {
		return err
	}
	for i := int64(1); i < l.ValueHeads/l.KeyHeads; i++ {
		term := each.Select(3, i)
		if l.DType != tensor.F32 {
			if err := m.dev.Copy(s, f.perHead.term, term); err != nil {
				return err
			}
			term = f.perHead.term
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
