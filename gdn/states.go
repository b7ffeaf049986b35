package gdn

import (
	"fmt"

	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// stateMethod leaves tokens on their ranks. Each rank computes the map of its part of a document:
// the state after it as a function of the state before it. The chain sends maps, so that each rank
// gets the state before its first token, and the rule starts from this state.
type stateMethod struct {
	*base
	chain   chain
	buffers stateBuffers
	halo    sp.Halo // of the convolution
	// documents whose states the current call has written to buffers.docs.out; backward, the first
	// document whose gradient it has written to buffers.docs.din
	written        int64
	counts         []int64          // elements of each rank in gatherDocs
	shapes         device.Allocator // allocator without memory, of inputs that are not kept
	deltaState     device.DeltaState
	deltaStateGrad device.DeltaStateGrad
}

// stateBuffers are the recurrent states of the sequences of a call on this rank.
type stateBuffers struct {
	// kept for the backward pass: the state before the first token, if its document began on
	// another rank [B, Hv, Dk, Dv]; the transition matrix of the rank's tokens, if one document has
	// them all [B, Hv, Dk, Dk]
	state, transition tensor.Tensor

	own      tensor.Tensor // [B, Hv, Dk, Dv]: e of the map that this rank sends
	incoming tensor.Tensor // [B, Hv, Dk, Dv]: the gradient of the state after the last token
	// [Hv, Dk, Dv] and [Hv, Dk, Dk]: the map of a document that ends on this rank and has a
	// gradient of its final state
	endState, endTransition tensor.Tensor
}

func newStateMethod(p *base, t *tokenShards) *stateMethod {
	return &stateMethod{base: p, chain: newChain(p, t), counts: make([]int64, p.size)}
}

func (m *stateMethod) heads(int64) headRange { return m.layer.allHeads() }

// divide makes a segment of each sequence.
func (m *stateMethod) divide(l *layout) {
	t := &l.shards
	l.tokens, l.position, l.maxSources = l.batch.Rows(), t.positionOfRank(m.rank), t.maxSources()
	if l.tokens == 0 {
		return
	}
	for i := range t.batch {
		x := t.segment(i, l.position)
		start := len(l.offsets)
		l.offsets = append(l.offsets, 0)
		for d := x.doc; d < x.doc+x.docs; d++ {
			l.offsets = append(l.offsets, min(t.cu[d+1]-i*t.seq, t.end[l.position])-t.first[l.position])
		}
		x.cu = l.offsets[start:len(l.offsets):len(l.offsets)] // stays valid when offsets grows
		l.segments = append(l.segments, x)
		l.maxDocs = max(l.maxDocs, x.docs)
		_, n := t.documentsAt(i, l.position, true)
		l.starts += n
		_, n = t.documentsAt(i, l.position, false)
		l.ends += n
	}
}

func (m *stateMethod) allocate(c *call) {
	l, n := &m.layer, m.localSizes(c.layout, m.layer.allHeads())
	f, x, keep, ws := &c.buffers, &m.buffers, c.kept(), &c.workspace
	states := func(a *device.Allocator, last int64) tensor.Tensor {
		return a.Take(tensor.F32, n.batch, l.ValueHeads, l.KeyDim, last)
	}
	*x = stateBuffers{}
	inputs := keep
	if !c.keep { // the call reads the caller's tensors; only shapes are needed
		m.shapes = device.Allocator{Align: m.align}
		inputs = &m.shapes
	}
	m.allocateInputs(c, n, inputs)
	if c.layer && l.ConvWidth > 1 {
		f.halo = keep.Take(l.DType, n.batch, l.ConvWidth-1, n.channels)
	}
	chained := m.size > 1 && c.layout.tokens > 0
	if chained {
		x.state, x.transition = states(keep, l.ValueDim), states(keep, l.KeyDim)
		x.own = states(ws, l.ValueDim)
	}
	if c.backward && c.layer {
		m.allocateConvGrads(c, n)
	}
	if c.backward && chained {
		x.incoming = states(ws, l.ValueDim)
	}
	if c.backward && c.layer && l.ConvWidth > 1 {
		f.dhalo = ws.Take(l.DType, n.batch, l.ConvWidth-1, n.channels)
	}
	if c.withStates && m.size > 1 {
		x.endState = ws.Take(tensor.F32, l.ValueHeads, l.KeyDim, l.ValueDim)
		x.endTransition = ws.Take(tensor.F32, l.ValueHeads, l.KeyDim, l.KeyDim)
		// One more document at the end, or backward at the beginning: the state of a document that
		// continues on another rank is written there and not used.
		m.allocateDocs(c, l.ValueHeads, c.layout.maxDocs, c.layout.maxDocs, c.layout.starts+1, c.layout.ends+1)
	}
}

func (m *stateMethod) scratchBytes(l *layout, kind callKind, rule device.DeltaSizes) int64 {
	return max(rule.State, m.chain.scratchBytes(l, kind.backward), m.haloBytes(l, kind))
}

// haloBytes is the memory of the convolution's halo: W−1 tokens are received; tokens are sent to
// the following ranks that begin less than W tokens later, most if these ranks have one token each.
func (m *stateMethod) haloBytes(l *layout, kind callKind) int64 {
	width := m.layer.ConvWidth
	if !kind.layer || width < 2 {
		return 0
	}
	tokens := width - 1
	for d := int64(1); d < min(width, m.size); d++ {
		tokens += min(l.tokens, width-d)
	}
	return tokens * m.layer.Channels() * l.shards.batch * m.layer.DType.Size()
}

func (m *stateMethod) bytesSent(l *layout, rank int64, kind callKind) int64 {
	if kind.recompute {
		return 0 // the incoming state is saved
	}
	bytes := m.chain.elementsSent(&l.shards, l.shards.positionOfRank(rank), m.chain.scan,
		kind.backward) * tensor.F32.Size()
	if kind.layer && m.layer.ConvWidth > 1 {
		send, recv := l.batch.HaloElements(int(rank), m.layer.ConvWidth-1, m.layer.Channels())
		if kind.backward {
			send = recv
		}
		bytes += send * m.layer.DType.Size()
	}
	return bytes
}

func (m *stateMethod) describe(sent int64) (details, traffic string) {
	if m.chain.scan {
		details = " (prefix scan)"
	}
	return details, fmt.Sprintf("%d bytes per document that all ranks share", sent)
}

// enter copies inputs that are kept, and receives the tokens before this rank's first that the
// convolution reads.
func (m *stateMethod) enter(c *call) error {
	f := &c.buffers
	switch {
	case !c.backward:
		f.out = c.out()
		if c.recompute {
			return nil
		}
	case c.layer:
		g := &c.layerGrads
		f.dout, f.da, f.db, f.dx = g.DOut, g.DA, g.DB, g.DQKV
		return nil
	default:
		g := &c.grads
		f.dout, f.dq, f.dk, f.dv, f.dg, f.dbeta = g.DOut, g.DQ, g.DK, g.DV, g.DG, g.DBeta
		return nil
	}
	if c.layer {
		return m.enterLayer(c)
	}
	a := &c.args
	if !c.keep {
		f.q, f.k, f.v, f.g, f.beta = a.Q, a.K, a.V, a.G, a.Beta
		return nil
	}
	for _, t := range [...][2]tensor.Tensor{{f.q, a.Q}, {f.k, a.K}, {f.v, a.V}, {f.g, a.G}, {f.beta, a.Beta}} {
		if err := m.copyTokens(c.stream, t[0], t[1]); err != nil {
			return err
		}
	}
	return nil
}

func (m *stateMethod) enterLayer(c *call) error {
	f, a := &c.buffers, &c.layerArgs
	if !c.keep {
		f.x, f.a, f.b = a.QKV, a.A, a.B
	} else {
		for _, t := range [...][2]tensor.Tensor{{f.x, a.QKV}, {f.a, a.A}, {f.b, a.B}} {
			if err := m.copyTokens(c.stream, t[0], t[1]); err != nil {
				return err
			}
		}
	}
	if h := m.haloOf(f.x, f.halo, c.scratch); h != nil {
		return h.Forward(m.dev, m.comm, c.stream, c.layout.batch)
	}
	return nil
}

// haloOf returns the communication of the tokens before this rank's first; nil if the convolution
// reads none.
func (m *stateMethod) haloOf(x, halo, scratch tensor.Tensor) *sp.Halo {
	if m.size == 1 || m.layer.ConvWidth < 2 {
		return nil
	}
	h := &m.halo
	h.N, h.X, h.Rows, h.Workspace = m.layer.ConvWidth-1, x, halo, scratch
	return h
}

func (m *stateMethod) leave(c *call) error {
	if !c.backward || !c.layer {
		return nil // the device's operations wrote the caller's tensors
	}
	if h := m.haloOf(c.layerGrads.DQKV, c.buffers.dhalo, c.scratch); h != nil {
		return h.Backward(m.dev, m.comm, c.stream, c.layout.batch)
	}
	return nil
}

// passStates computes the maps of this rank's segments and fills buffers.state, or backward
// buffers.incoming, for the segments that receive a state.
func (m *stateMethod) passStates(c *call) error {
	m.written = 0
	if c.backward { // gradients are written from the end on
		m.written = c.layout.starts + 1
	}
	if m.size == 1 || c.recompute { // the incoming state is saved
		return nil
	}
	into := m.buffers.state
	if c.backward {
		into = m.buffers.incoming
	}
	for i := range c.layout.segments {
		x := &c.layout.segments[i]
		var err error
		if _, targets := x.peers(c.backward); targets == 0 {
			continue
		}
		if c.backward {
			err = m.computeGradMap(c, x)
		} else {
			err = m.computeMap(c, x)
		}
		if err != nil {
			return err
		}
	}
	if c.layout.maxSources == 0 {
		return nil // no rank sends a state
	}
	m.chain.begin(transfer{stream: c.stream, layout: c.layout, scratch: c.scratch, backward: c.backward,
		own: m.buffers.own, transition: m.buffers.transition, into: into})
	if m.chain.scan {
		return m.chain.scanStates()
	}
	return m.chain.gatherStates()
}

// computeMap computes the map of a segment's last document, which continues on the next rank. If
// the document starts in the segment from a state that the caller gave, the map is the state after
// it.
func (m *stateMethod) computeMap(c *call, x *segment) error {
	last := x.docs - 1
	e, transition := m.buffers.own.Select(0, x.sequence), m.buffers.transition.Select(0, x.sequence)
	given := !x.interior() && !c.states.in.IsNil()
	if !x.interior() && !given {
		transition = tensor.Tensor{}
	}
	if err := m.computeState(c, x, last, e, transition); err != nil || !given {
		return err
	}
	return m.chain.multiply(c.stream, transition, c.states.in.Select(0, x.doc+last), e, e, false)
}

// computeState computes the map of the segment's tokens of one of its documents.
func (m *stateMethod) computeState(c *call, x *segment, doc int64, e, transition tensor.Tensor) error {
	l, f := &m.layer, &c.buffers
	lo, hi := x.cu[doc], x.cu[doc+1]
	m.deltaState = device.DeltaState{
		K: x.view(f.k).Slice(0, lo, hi), V: x.view(f.v).Slice(0, lo, hi),
		G: x.view(f.g).Slice(0, lo, hi), Beta: x.view(f.beta).Slice(0, lo, hi),
		KeyHead: m.keyHead, L2Norm: l.L2Norm, Chunk: l.Chunk, Panel: l.Panel, State: e, Transition: transition,
		Workspace: c.scratch,
	}
	return m.dev.DeltaState(c.stream, &m.deltaState)
}

// computeGradMap computes the map of the gradient of the state after a segment's first document,
// which began on another rank, to the gradient of the state before the segment. The transition
// matrix of the forward pass is saved.
func (m *stateMethod) computeGradMap(c *call, x *segment) error {
	l, f := &m.layer, &c.buffers
	e, hi := m.buffers.own.Select(0, x.sequence), x.cu[1]
	m.deltaStateGrad = device.DeltaStateGrad{
		Q: x.view(f.q).Slice(0, 0, hi), K: x.view(f.k).Slice(0, 0, hi),
		G: x.view(f.g).Slice(0, 0, hi), Beta: x.view(f.beta).Slice(0, 0, hi), DOut: x.view(f.dout).Slice(0, 0, hi),
		KeyHead: m.keyHead, L2Norm: l.L2Norm, Scale: l.Scale, Chunk: l.Chunk, Panel: l.Panel, DState: e,
		Workspace: c.scratch,
	}
	if err := m.dev.DeltaStateGrad(c.stream, &m.deltaStateGrad); err != nil || x.interior() || c.states.dout.IsNil() {
		return err
	}
	// The document ends here, and the caller gave a gradient of its final state.
	if err := m.computeState(c, x, 0, m.buffers.endState, m.buffers.endTransition); err != nil {
		return err
	}
	return m.chain.multiply(c.stream, m.buffers.endTransition, c.states.dout.Select(0, x.doc), e, e, true)
}

func (m *stateMethod) segmentStates(c *call, x *segment) (s documentStates, err error) {
	if s.in, err = m.statesBefore(c, x); err != nil {
		return s, err
	}
	if !c.backward {
		if !c.states.out.IsNil() {
			s.out = m.statesAfter(c, x)
		}
		return s, nil
	}
	if s.dout, err = m.gradsAfter(c, x); err == nil && !c.states.din.IsNil() {
		s.din = m.gradsBefore(c, x)
	}
	return s, err
}

// statesBefore returns the states before a segment's documents: the caller's, and the state that
// was received for a document that began on another rank.
func (m *stateMethod) statesBefore(c *call, x *segment) (tensor.Tensor, error) {
	in := c.states.in
	switch {
	case x.before == 0 && in.IsNil():
		return in, nil
	case x.before == 0:
		return in.Slice(0, x.doc, x.doc+x.docs), nil
	case in.IsNil() || x.docs == 1:
		return m.buffers.state.Slice(0, x.sequence, x.sequence+1), nil
	}
	to := c.buffers.docs.in.Slice(0, 0, x.docs)
	if err := m.dev.Copy(c.stream, to.Select(0, 0), m.buffers.state.Select(0, x.sequence)); err != nil {
		return to, err
	}
	return to, m.dev.Copy(c.stream, to.Slice(0, 1, x.docs), in.Slice(0, x.doc+1, x.doc+x.docs))
}

// gradsAfter returns the gradients of the states after a segment's documents: the caller's, and the
// gradient that was received for a document that ends on another rank.
func (m *stateMethod) gradsAfter(c *call, x *segment) (tensor.Tensor, error) {
	dout := c.states.dout
	switch {
	case x.after == 0 && dout.IsNil():
		return dout, nil
	case x.after == 0:
		return dout.Slice(0, x.doc, x.doc+x.docs), nil
	case dout.IsNil() || x.docs == 1:
		return m.buffers.incoming.Slice(0, x.sequence, x.sequence+1), nil
	}
	to, last := c.buffers.docs.dout.Slice(0, 0, x.docs), x.docs-1
	if err := m.dev.Copy(c.stream, to.Slice(0, 0, last), dout.Slice(0, x.doc, x.doc+last)); err != nil {
		return to, err
	}
	return to, m.dev.Copy(c.stream, to.Select(0, last), m.buffers.incoming.Select(0, x.sequence))
}

// statesAfter returns the memory for the states after a segment's documents. The state of a
// document that ends on another rank is not used: the next segment overwrites it.
func (m *stateMethod) statesAfter(c *call, x *segment) tensor.Tensor {
	if m.size == 1 {
		return c.states.out.Slice(0, x.doc, x.doc+x.docs)
	}
	to := c.buffers.docs.out.Slice(0, m.written, m.written+x.docs)
	if m.written += x.docs; x.after > 0 {
		m.written--
	}
	return to
}

// gradsBefore returns the memory for the gradients of the states before a segment's documents, from
// the end on. The gradient of a document that began on another rank is overwritten in the same way.
func (m *stateMethod) gradsBefore(c *call, x *segment) tensor.Tensor {
	if m.size == 1 {
		return c.states.din.Slice(0, x.doc, x.doc+x.docs)
	}
	to := c.buffers.docs.din.Slice(0, m.written-x.docs, m.written)
	if m.written -= x.docs; x.before > 0 {
		m.written++
	}
	return to
}

func (m *stateMethod) gatherDocs(c *call, local, to tensor.Tensor, starts bool) error {
	if m.size == 1 {
		return nil // the device's operation wrote the caller's tensor
	}
	t, each := &c.layout.shards, m.layer.ValueHeads*m.layer.KeyDim*m.layer.ValueDim
	clear(m.counts)
	for position, r := range t.ranks {
		for i := range t.batch {
			_, n := t.documentsAt(i, int64(position), starts)
			m.counts[r] += n * each
		}
	}
	local = local.Flatten(0, 3)
	if starts { // after the gradient that is not used
		local = local.Slice(0, each, local.Shape[0])
	}
	gathered := c.buffers.gathered
	if err := m.comm.AllGather(c.stream, gathered, local.Slice(0, 0, m.counts[m.rank]), m.counts); err != nil {
		return err
	}
	at := int64(0)
	for position := range t.ranks {
		for i := range t.batch {
			first, docs := t.documentsAt(i, int64(position), starts)
			if docs == 0 {
				continue
			}
			from := m.statesAt(gathered, at, docs, m.layer.ValueHeads)
			if err := m.dev.Copy(c.stream, to.Slice(0, first, first+docs), from); err != nil {
				return err
			}
			at += from.Numel()
		}
	}
	return nil
}
