package gdn

import (
	"slices"

	"ulysses/device"
	"ulysses/tensor"
)

// chain sends recurrent states along the positions of a batch: forward from the start of a document
// on, backward (their gradients) from its end on. The tokens of a position map the state x that
// comes in to M·x + e, with e [Hv, Dk, Dv] and M [Hv, Dk, Dk]. Where the document starts, the map
// is e alone. There are two algorithms. Gather (gather.go): each position sends its map to all
// positions that need it, and each receiver applies the maps one after the other. Scan (scan.go):
// maps of growing ranges of positions are composed in log2(positions) rounds; it sends fewer bytes
// over many ranks and has more rounds.
type chain struct {
	*base
	scan       bool
	send, recv []int64         // elements to and from each rank
	running    []tensor.Tensor // of each segment: the state that the maps applied so far have given
	fold       device.DeltaFold
	transfer
}

// transfer has the arguments of one pass of states.
type transfer struct {
	stream   device.Stream
	layout   *layout
	scratch  tensor.Tensor
	backward bool
	// maps of this rank's tokens: e [B, Hv, Dk, Dv], and M [B, Hv, Dk, Dk] where one is sent
	own, transition tensor.Tensor
	into            tensor.Tensor // [B, Hv, Dk, Dv]: the states that come to this rank's segments
}

// newChain chooses the algorithm by the bytes that all ranks send for a document over all ranks.
func newChain(p *base, t *tokenShards) chain {
	c := chain{base: p, send: make([]int64, p.size), recv: make([]int64, p.size)}
	var gather, scan int64
	for position := range int64(len(t.ranks)) {
		gather += c.elementsSent(t, position, false, false)
		scan += c.elementsSent(t, position, true, false)
	}
	c.scan = gather >= 2*scan && scan > 0
	return c
}

// mapElements returns the elements of e and of M.
func (c *chain) mapElements() (e, m int64) {
	l := &c.layer
	return l.ValueHeads * l.KeyDim * l.ValueDim, l.ValueHeads * l.KeyDim * l.KeyDim
}

// blockElements returns the elements of a map as it is sent, with M or without.
func (c *chain) blockElements(withM bool) int64 {
	e, m := c.mapElements()
	if withM {
		return e + m
	}
	return e
}

// gatherElements returns the elements that a position sends and receives for a segment by gather.
func (c *chain) gatherElements(x *segment, backward bool) (send, recv int64) {
	sources, targets := x.peers(backward)
	e, m := c.mapElements()
	return targets * c.blockElements(x.interior()), sources*e + max(0, sources-1)*m
}

// scanElements returns the elements that a position sends for a segment by scan.
func (c *chain) scanElements(x *segment, backward bool) (send int64) {
	sources, targets := x.peers(backward)
	for step := int64(1); step <= targets; step *= 2 {
		send += c.blockElements(x.interior() && sources >= step)
	}
	return send
}

// elementsSent returns the elements of states that the rank at a position sends.
func (c *chain) elementsSent(t *tokenShards, position int64, scan, backward bool) (sent int64) {
	if position < 0 {
		return 0
	}
	for i := range t.batch {
		x := t.segment(i, position)
		if scan {
			sent += c.scanElements(&x, backward)
		} else {
			send, _ := c.gatherElements(&x, backward)
			sent += send
		}
	}
	return sent
}

// scratchBytes returns the memory of one pass of states.
func (c *chain) scratchBytes(l *layout, backward bool) (bytes int64) {
	if l.maxSources == 0 {
		return 0
	}
	for i := range l.segments {
		if c.scan { // a map sent, a map received, and two M
			e, m := c.mapElements()
			bytes += 2*e + 4*m
			continue
		}
		send, recv := c.gatherElements(&l.segments[i], backward)
		bytes += send + recv
	}
	return bytes * tensor.F32.Size()
}

// begin prepares a transfer.
func (c *chain) begin(t transfer) {
	c.transfer = t
	c.running = slices.Grow(c.running[:0], len(t.layout.segments))[:len(t.layout.segments)]
}

// block returns the map that is sent or received at an element of wire.
func (c *chain) block(wire tensor.Tensor, at int64, withM bool) (e, m tensor.Tensor) {
	l, size := &c.layer, tensor.F32.Size()
	e = wire.At(at*size, tensor.F32, l.ValueHeads, l.KeyDim, l.ValueDim)
	if withM {
		m = wire.At(at*size+e.Bytes(), tensor.F32, l.ValueHeads, l.KeyDim, l.KeyDim)
	}
	return e, m
}

// pack copies the map of a segment to an element of wire.
func (c *chain) pack(wire tensor.Tensor, at int64, x *segment, withM bool) error {
	toE, toM := c.block(wire, at, withM)
	if err := c.dev.Copy(c.stream, toE, c.own.Select(0, x.sequence)); err != nil || !withM {
		return err
	}
	return c.dev.Copy(c.stream, toM, c.transition.Select(0, x.sequence))
}

// apply computes y = M·x + e, or y = Mᵀ·x + e in a backward transfer.
func (c *chain) apply(m, x, e, y tensor.Tensor) error {
	return c.multiply(c.stream, m, x, e, y, c.backward)
}

// multiply computes y = M·x + e, or with transpose y = Mᵀ·x + e.
func (c *chain) multiply(s device.Stream, m, x, e, y tensor.Tensor, transpose bool) error {
	c.fold = device.DeltaFold{M: m, X: x, E: e, Y: y, Transpose: transpose}
	return c.dev.DeltaFold(s, &c.fold)
}

// allToAll sends the elements at the start of wire and receives others behind them. It returns the
// number of elements sent, where the received elements begin.
func (c *chain) allToAll(wire tensor.Tensor) (sent int64, err error) {
	var received int64
	for r := range c.send {
		sent, received = sent+c.send[r], received+c.recv[r]
	}
	src, dst := wire.At(0, tensor.F32, sent), wire.At(sent*tensor.F32.Size(), tensor.F32, received)
	return sent, c.comm.AllToAll(c.stream, dst, src, c.recv, c.send)
}
