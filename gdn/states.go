package gdn

import (
	"fmt"

	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// stateMethod leaves tokens on their ranks. Each rank computes what its slice of a document does to
// a recurrent state, the chain brings the state before its first token to each rank, and each
// starts from there.
type stateMethod struct {
	*Plan
	scan  bool // states travel by a prefix scan
	chain chain
	halo  sp.Halo // of the convolution
	// allocator without memory, of inputs that are not kept
	shapes device.Allocator
}

// newStateMethod chooses the form of the chain by the bytes of all ranks for a document over the
// ranks of a line.
func newStateMethod(p *Plan, l *line) *stateMethod {
	m := &stateMethod{Plan: p, chain: chain{send: make([]int64, p.size), recv: make([]int64, p.size)}}
	var gather, scan int64
	for at := range int64(len(l.ranks)) {
		gather += m.chainSent(l, at, false, false)
		scan += m.chainSent(l, at, true, false)
	}
	m.scan = gather >= 2*scan && scan > 0
	return m
}

func (p *stateMethod) headRange(int64) (lo, hi, keyLo, keyHi int64) {
	return 0, p.layer.ValueHeads, 0, p.layer.KeyHeads
}

func (p *stateMethod) fillCut(c *cut) {
	l := &c.line
	c.n, c.at, c.depth = c.batch.Rows(), l.placeOf(p.rank), l.depth()
	if c.n == 0 {
		return
	}
	for i := range l.batch {
		x := piece{row: i, stretch: l.stretch(i, c.at)}
		start := len(c.marks)
		c.marks = append(c.marks, 0)
		for d := x.doc; d < x.doc+x.docs; d++ {
			c.marks = append(c.marks, min(l.cu[d+1]-i*l.seq, l.end[c.at])-l.first[c.at])
		}
		x.cu = c.marks[start:len(c.marks):len(c.marks)] // stays where it is if marks grows
		c.pieces = append(c.pieces, x)
		c.most = max(c.most, x.docs)
		_, n := l.within(i, c.at, true)
		c.starts += n
		_, n = l.within(i, c.at, false)
		c.ends += n
	}
}

// layInputs: a forward call that keeps nothing reads the caller's tensors, of which only the shapes
// are laid out.
func (p *stateMethod) layInputs(kind call, keep *device.Allocator) *device.Allocator {
	if kind.keep {
		return keep
	}
	p.shapes = device.Allocator{Align: p.align}
	return &p.shapes
}

func (p *stateMethod) layForward(f *frame, c *cut, kind call, keep, ws *device.Allocator) {
	l, batch, x := p.layer, c.line.batch, &f.chain
	if kind.layer && l.ConvWidth > 1 {
		x.before = keep.Take(l.DType, batch, l.ConvWidth-1, l.channels())
	}
	if p.size > 1 && c.n > 0 {
		x.state, x.transition = keep.Take(tensor.F32, batch, l.ValueHeads, l.KeyDim, l.ValueDim), keep.Take(tensor.F32, batch, l.ValueHeads, l.KeyDim, l.KeyDim)
		x.own = ws.Take(tensor.F32, batch, l.ValueHeads, l.KeyDim, l.ValueDim)
	}
}

func (p *stateMethod) layBackward(f *frame, c *cut, kind call, ws *device.Allocator) {
	l, batch, x := p.layer, c.line.batch, &f.chain
	if p.size > 1 && c.n > 0 {
		x.incoming = ws.Take(tensor.F32, batch, l.ValueHeads, l.KeyDim, l.ValueDim)
	}
	if kind.layer && l.ConvWidth > 1 {
		x.dbefore = ws.Take(l.DType, batch, l.ConvWidth-1, l.channels())
	}
}

// layDocs: a rank has all heads of its documents, and one more document at the end or the
// beginning, for the state of a document that goes on, which is written and not used.
func (p *stateMethod) layDocs(f *frame, c *cut, ws *device.Allocator) (in, out, starts, ends int64) {
	l := p.layer
	f.chain.spareState = ws.Take(tensor.F32, l.ValueHeads, l.KeyDim, l.ValueDim)
	f.chain.spareTransition = ws.Take(tensor.F32, l.ValueHeads, l.KeyDim, l.KeyDim)
	return c.most, c.most, c.starts + 1, c.ends + 1
}

func (p *stateMethod) scratch(c *cut, kind call, most device.DeltaSizes) int64 {
	return max(most.State, p.chainBytes(c, kind.backward), p.haloBytes(c, kind))
}

func (p *stateMethod) sent(c *cut, rank int64, kind call) int64 {
	l := p.layer
	bytes := p.chainSent(&c.line, c.line.placeOf(rank), p.scan, kind.backward) * tensor.F32.Size()
	if kind.layer && l.ConvWidth > 1 {
		send, recv := c.batch.HaloElements(int(rank), l.ConvWidth-1, l.channels())
		if kind.backward {
			send = recv
		}
		bytes += send * l.DType.Size()
	}
	return bytes
}

// recomputeSent: the state that came is kept.
func (p *stateMethod) recomputeSent(*sp.Batch) int64 { return 0 }

func (p *stateMethod) docSent(c *cut) int64 {
	if c.n == 0 {
		return 0
	}
	e, _ := p.elements()
	return (p.size - 1) * e * tensor.F32.Size()
}

func (p *stateMethod) describe() string {
	if p.scan {
		return " (prefix scan)"
	}
	return ""
}

func (p *stateMethod) describeSent(all int64) string {
	return fmt.Sprintf("sends %d bytes a document over all ranks", all)
}

func (p *stateMethod) enter(s device.Stream, _ *cut, f *frame, a *Args, kind call, _ tensor.Tensor) error {
	if !kind.keep {
		f.q, f.k, f.v, f.g, f.beta = a.Q, a.K, a.V, a.G, a.Beta
		return nil
	}
	for _, t := range [...][2]tensor.Tensor{{f.q, a.Q}, {f.k, a.K}, {f.v, a.V}, {f.g, a.G}, {f.beta, a.Beta}} {
		if err := p.keep(s, t[0], t[1]); err != nil {
			return err
		}
	}
	return nil
}

// keep copies a caller's tensor for the backward pass.
func (p *stateMethod) keep(s device.Stream, to, from tensor.Tensor) error {
	if to.Numel() == 0 {
		return nil
	}
	return p.dev.Copy(s, to, from)
}

func (p *stateMethod) enterGrads(_ device.Stream, _ *cut, f *frame, g *Grads, _ tensor.Tensor) error {
	f.dout, f.dq, f.dk, f.dv, f.dg, f.dbeta = g.DOut, g.DQ, g.DK, g.DV, g.DG, g.DBeta
	return nil
}

func (p *stateMethod) leaveGrads(device.Stream, *cut, *frame, *Grads, tensor.Tensor) error {
	return nil
}

// enterLayer also brings the rows before this rank's first, which the convolution reads.
func (p *stateMethod) enterLayer(s device.Stream, c *cut, f *frame, a *LayerArgs, kind call, scratch tensor.Tensor) error {
	if !kind.keep {
		f.x, f.a, f.b = a.QKV, a.A, a.B
	} else {
		for _, t := range [...][2]tensor.Tensor{{f.x, a.QKV}, {f.a, a.A}, {f.b, a.B}} {
			if err := p.keep(s, t[0], t[1]); err != nil {
				return err
			}
		}
	}
	if h := p.haloOf(f.x, f.chain.before, scratch); h != nil {
		return h.Forward(p.dev, p.comm, s, c.batch)
	}
	return nil
}

func (p *stateMethod) enterLayerGrads(_ device.Stream, _ *cut, f *frame, g *LayerGrads, _ tensor.Tensor) error {
	f.dout, f.da, f.db, f.dx = g.DOut, g.DA, g.DB, g.DQKV
	return nil
}

func (p *stateMethod) leaveLayerGrads(s device.Stream, c *cut, f *frame, g *LayerGrads, scratch tensor.Tensor) error {
	if h := p.haloOf(g.DQKV, f.chain.dbefore, scratch); h != nil {
		return h.Backward(p.dev, p.comm, s, c.batch)
	}
	return nil
}

// haloOf is the rows across the cut of a call with State; nil where the convolution does not look
// at any.
func (p *stateMethod) haloOf(x, rows, wire tensor.Tensor) *sp.Halo {
	if p.size == 1 || p.layer.ConvWidth < 2 {
		return nil
	}
	h := &p.halo
	h.N, h.X, h.Rows, h.Workspace = p.layer.ConvWidth-1, x, rows, wire
	return h
}

func (p *stateMethod) beginOutput(_ device.Stream, f *frame, out tensor.Tensor, _ *states) error {
	f.out = out
	return nil
}

func (p *stateMethod) endOutput(device.Stream, *cut, *frame, tensor.Tensor, tensor.Tensor) error {
	return nil
}

func (p *stateMethod) perHead() bool { return false }

// sumUp has each rank whose last document goes on send what its stretch of it does to a state, and
// fills f.chain.state where one comes in. Collective with State; with Heads there is nothing to do.
func (p *stateMethod) pass(s device.Stream, c *cut, f *frame, scratch tensor.Tensor, x *states) error {
	if p.size == 1 {
		return nil
	}
	for i := range c.pieces {
		piece := &c.pieces[i]
		if piece.down == 0 {
			continue
		}
		last := piece.docs - 1
		e, m := f.chain.own.Select(0, piece.row), f.chain.transition.Select(0, piece.row)
		starts := !piece.passes() && !x.in.IsNil()
		wanted := m
		if !piece.passes() && !starts {
			wanted = tensor.Tensor{}
		}
		if err := p.stretchState(s, f, piece, last, e, wanted, scratch); err != nil {
			return err
		}
		if starts {
			if err := p.apply(s, m, x.in.Select(0, piece.doc+last), e, e, false); err != nil {
				return err
			}
		}
	}
	return p.chainPass(s, c, scratch, f.chain.own, f.chain.transition, f.chain.state, false)
}

// stretchState is what a piece's tokens of one of its documents do to a state.
func (p *stateMethod) stretchState(s device.Stream, f *frame, x *piece, doc int64, e, m, scratch tensor.Tensor) error {
	l := &p.layer
	lo, hi := x.cu[doc], x.cu[doc+1]
	p.deltaState = device.DeltaState{K: of(f.k, x).Slice(0, lo, hi), V: of(f.v, x).Slice(0, lo, hi), G: of(f.g, x).Slice(0, lo, hi),
		Beta: of(f.beta, x).Slice(0, lo, hi), KeyHead: p.keyHead, L2Norm: l.L2Norm, Chunk: l.Chunk, State: e, Transition: m, Workspace: scratch}
	return p.dev.DeltaState(s, &p.deltaState)
}

// sumUpGradient is sumUp the other way: each rank whose first document began before it sends what
// its stretch does to a gradient, and f.chain.incoming is filled where one comes in.
func (p *stateMethod) passGrad(s device.Stream, c *cut, f *frame, scratch tensor.Tensor, x *states) error {
	if p.size == 1 {
		return nil
	}
	l := &p.layer
	for i := range c.pieces {
		piece := &c.pieces[i]
		if piece.up == 0 {
			continue
		}
		e, hi := f.chain.own.Select(0, piece.row), piece.cu[1]
		p.deltaStateGrad = device.DeltaStateGrad{Q: of(f.q, piece).Slice(0, 0, hi), K: of(f.k, piece).Slice(0, 0, hi), G: of(f.g, piece).Slice(0, 0, hi),
			Beta: of(f.beta, piece).Slice(0, 0, hi), DOut: of(f.dout, piece).Slice(0, 0, hi), KeyHead: p.keyHead, L2Norm: l.L2Norm,
			Scale: l.Scale, Chunk: l.Chunk, DState: e, Workspace: scratch}
		if err := p.dev.DeltaStateGrad(s, &p.deltaStateGrad); err != nil {
			return err
		}
		if piece.passes() || x.dout.IsNil() {
			continue
		}
		// The document ends here, with a gradient of its own: that passes the stretch too.
		if err := p.stretchState(s, f, piece, 0, f.chain.spareState, f.chain.spareTransition, scratch); err != nil {
			return err
		}
		if err := p.apply(s, f.chain.spareTransition, x.dout.Select(0, piece.doc), e, e, true); err != nil {
			return err
		}
	}
	return p.chainPass(s, c, scratch, f.chain.own, f.chain.transition, f.chain.incoming, true)
}

// stateBefore returns the caller's states, but for a document that began on another rank.
func (p *stateMethod) stateBefore(s device.Stream, f *frame, x *piece, in tensor.Tensor) (tensor.Tensor, error) {
	switch {
	case x.up == 0 && in.IsNil():
		return in, nil
	case x.up == 0:
		return in.Slice(0, x.doc, x.doc+x.docs), nil
	case in.IsNil() || x.docs == 1:
		return f.chain.state.Slice(0, x.row, x.row+1), nil
	}
	to := f.docs.in.Slice(0, 0, x.docs)
	if err := p.dev.Copy(s, to.Select(0, 0), f.chain.state.Select(0, x.row)); err != nil {
		return to, err
	}
	return to, p.dev.Copy(s, to.Slice(0, 1, x.docs), in.Slice(0, x.doc+1, x.doc+x.docs))
}

// gradBehind is the gradients of the states behind a piece's documents: the caller's, but for a
// document that goes on at another rank.
func (p *stateMethod) gradBehind(s device.Stream, f *frame, x *piece, dout tensor.Tensor) (tensor.Tensor, error) {
	switch {
	case x.down == 0 && dout.IsNil():
		return dout, nil
	case x.down == 0:
		return dout.Slice(0, x.doc, x.doc+x.docs), nil
	case dout.IsNil() || x.docs == 1:
		return f.chain.incoming.Slice(0, x.row, x.row+1), nil
	}
	to, last := f.docs.dout.Slice(0, 0, x.docs), x.docs-1
	if err := p.dev.Copy(s, to.Slice(0, 0, last), dout.Slice(0, x.doc, x.doc+last)); err != nil {
		return to, err
	}
	return to, p.dev.Copy(s, to.Select(0, last), f.chain.incoming.Select(0, x.row))
}

// stateBehind is where the states behind a piece's documents are written, at documents being there
// already. The last is not wanted where its document goes on: the next piece writes over it.
func (p *stateMethod) stateBehind(f *frame, x *piece, out tensor.Tensor, at *int64) tensor.Tensor {
	if p.size == 1 {
		return out.Slice(0, x.doc, x.doc+x.docs)
	}
	to := f.docs.out.Slice(0, *at, *at+x.docs)
	if *at += x.docs; x.down > 0 {
		*at--
	}
	return to
}

// gradBefore is the mirror image for the gradients of the states before a piece's documents, which
// are written from the end on.
func (p *stateMethod) gradBefore(f *frame, x *piece, din tensor.Tensor, at *int64) tensor.Tensor {
	if p.size == 1 {
		return din.Slice(0, x.doc, x.doc+x.docs)
	}
	to := f.docs.din.Slice(0, *at-x.docs, *at)
	if *at -= x.docs; x.up > 0 {
		*at++
	}
	return to
}

func (p *stateMethod) docElements(c *cut, rows []int64, local tensor.Tensor, starts bool) tensor.Tensor {
	l := p.layer
	each := l.ValueHeads * l.KeyDim * l.ValueDim
	for at, r := range c.line.ranks {
		for i := range c.line.batch {
			_, n := c.line.within(i, int64(at), starts)
			rows[r] += n * each
		}
	}
	if starts { // behind the one that is not used
		local = local.Slice(0, each, local.Shape[0])
	}
	return local
}

func (p *stateMethod) scatterDocs(s device.Stream, c *cut, gathered, to tensor.Tensor, starts bool) error {
	at := int64(0)
	for place := range c.line.ranks {
		for i := range c.line.batch {
			first, docs := c.line.within(i, int64(place), starts)
			if docs == 0 {
				continue
			}
			from := p.statesAt(gathered, at, docs, p.layer.ValueHeads)
			if err := p.dev.Copy(s, to.Slice(0, first, first+docs), from); err != nil {
				return err
			}
			at += from.Numel()
		}
	}
	return nil
}

// haloBytes is the wire of the convolution's halo: W−1 rows come; n rows go to the ranks behind
// that begin less than W rows after them, which are most where those have a row each.
func (p *stateMethod) haloBytes(c *cut, kind call) int64 {
	l := p.layer
	if !kind.layer || l.ConvWidth < 2 {
		return 0
	}
	rows := l.ConvWidth - 1
	for d := int64(1); d < min(l.ConvWidth, p.size); d++ {
		rows += min(c.n, l.ConvWidth-d)
	}
	return rows * l.channels() * c.line.batch * l.DType.Size()
}
