package gdn

import (
	"slices"

	"ulysses/device"
	"ulysses/tensor"
)

// States travel along the places of a line, forward from where a document starts, backward (their
// gradients) from where it ends. What a place does to the state that comes to it is a map x → M·x +
// e, with e [Hv, Dk, Dv] and M [Hv, Dk, Dk]; of a place where a document starts it is e alone. Two
// forms: each place sends its own map to all that need it, and these apply one after the other
// (gather), or maps of growing stretches are put together in log2 of the places' number of rounds
// (scan), which sends less and waits longer.

// chain is an exchange of states under way.
type chain struct {
	send, recv []int64         // elements to and from each rank
	running    []tensor.Tensor // of each piece: what has been put together so far
	fold       device.DeltaFold
}

// elements are those of e and of M.
func (p *stateMethod) elements() (e, m int64) {
	l := p.layer
	return l.ValueHeads * l.KeyDim * l.ValueDim, l.ValueHeads * l.KeyDim * l.KeyDim
}

// block is the elements of a map on the wire: M where it is asked for.
func (p *stateMethod) block(open bool) int64 {
	e, m := p.elements()
	if open {
		return e + m
	}
	return e
}

// gatherRow is what a place sends and receives for one batch row in the first form, scanRow in the
// second.
func (p *stateMethod) gatherRow(s *stretch, backward bool) (send, recv int64) {
	from, to := s.along(backward)
	e, m := p.elements()
	return to * p.block(s.passes()), from*e + max(0, from-1)*m
}

func (p *stateMethod) scanRow(s *stretch, backward bool) (send, recv int64) {
	from, to := s.along(backward)
	for step := int64(1); step <= max(from, to); step *= 2 {
		if to >= step {
			send += p.block(s.passes() && from >= step)
		}
		if from >= step {
			recv += p.block(from >= 2*step)
		}
	}
	return send, recv
}

// chainSent is the elements of states that the rank at a place sends.
func (p *stateMethod) chainSent(l *line, at int64, scan, backward bool) (sent int64) {
	if at < 0 {
		return 0
	}
	for i := range l.batch {
		s, send := l.stretch(i, at), int64(0)
		if scan {
			send, _ = p.scanRow(&s, backward)
		} else {
			send, _ = p.gatherRow(&s, backward)
		}
		sent += send
	}
	return sent
}

// chainBytes is the memory that an exchange needs.
func (p *stateMethod) chainBytes(c *cut, backward bool) (bytes int64) {
	if c.depth == 0 {
		return 0
	}
	for i := range c.pieces {
		x := &c.pieces[i]
		if p.scan { // a block each way, and two M
			e, m := p.elements()
			bytes += 2*e + 4*m
			continue
		}
		send, recv := p.gatherRow(&x.stretch, backward)
		bytes += send + recv
	}
	return bytes * tensor.F32.Size()
}

// chainPass brings each piece the state that comes to it, into [B, Hv, Dk, Dv], where one does; own
// are the maps of those from which one goes, M where they pass one on. Collective.
func (p *stateMethod) chainPass(s device.Stream, c *cut, scratch, own, transition, into tensor.Tensor, backward bool) error {
	if c.depth == 0 {
		return nil // no rank has one to send
	}
	p.chain.running = slices.Grow(p.chain.running[:0], len(c.pieces))[:len(c.pieces)]
	if p.scan {
		return p.scanStates(s, c, scratch, own, transition, into, backward)
	}
	return p.gatherStates(s, c, scratch, own, transition, into, backward)
}

// wireBlock is a map on the wire, from an element on.
func (p *stateMethod) wireBlock(wire tensor.Tensor, at int64, open bool) (e, m tensor.Tensor) {
	l, size := p.layer, tensor.F32.Size()
	e = wire.At(at*size, tensor.F32, l.ValueHeads, l.KeyDim, l.ValueDim)
	if open {
		m = wire.At(at*size+e.Bytes(), tensor.F32, l.ValueHeads, l.KeyDim, l.KeyDim)
	}
	return e, m
}

// put writes a map to the wire.
func (p *stateMethod) put(s device.Stream, wire tensor.Tensor, at int64, e, m tensor.Tensor, open bool) error {
	toE, toM := p.wireBlock(wire, at, open)
	if err := p.dev.Copy(s, toE, e); err != nil || !open {
		return err
	}
	return p.dev.Copy(s, toM, m)
}

// apply is y = M·x + e, or Mᵀ·x + e on the way back.
func (p *stateMethod) apply(s device.Stream, m, x, e, y tensor.Tensor, transpose bool) error {
	p.chain.fold = device.DeltaFold{M: m, X: x, E: e, Y: y, Transpose: transpose}
	return p.dev.DeltaFold(s, &p.chain.fold)
}

// swap exchanges the first elements of the wire, behind which come what others sent.
func (p *stateMethod) swap(s device.Stream, wire tensor.Tensor) (sent int64, err error) {
	x, received := &p.chain, int64(0)
	for r := range x.send {
		sent, received = sent+x.send[r], received+x.recv[r]
	}
	src, dst := wire.At(0, tensor.F32, sent), wire.At(sent*tensor.F32.Size(), tensor.F32, received)
	return sent, p.comm.AllToAll(s, dst, src, x.recv, x.send)
}

// gatherStates is the first form: one exchange.
func (p *stateMethod) gatherStates(s device.Stream, c *cut, wire, own, transition, into tensor.Tensor, backward bool) error {
	x, at := &p.chain, int64(0)
	clear(x.send)
	clear(x.recv)
	for place, rank := range c.line.ranks {
		ahead := c.ahead(int64(place), backward)
		start := at
		for i := range c.pieces {
			piece := &c.pieces[i]
			from, to := piece.along(backward)
			if ahead > 0 && ahead <= to {
				open := piece.passes()
				if err := p.put(s, wire, at, own.Select(0, piece.row), transition.Select(0, piece.row), open); err != nil {
					return err
				}
				at += p.block(open)
			}
			if -ahead > 0 && -ahead <= from {
				x.recv[rank] += p.block(-ahead < from)
			}
		}
		x.send[rank] = at - start
	}
	at, err := p.swap(s, wire)
	if err != nil {
		return err
	}
	// Maps apply from the farthest place on: in the order of the wire, or against it.
	places, total := int64(len(c.line.ranks)), at
	for _, n := range x.recv {
		total += n
	}
	if backward {
		at = total
	}
	for j := range places {
		place := j
		if backward {
			place = places - 1 - j
		}
		if at, err = p.foldFrom(s, c, wire, at, place, into, backward); err != nil {
			return err
		}
	}
	return nil
}

// foldFrom applies the maps of one place to what came from those beyond it.
func (p *stateMethod) foldFrom(s device.Stream, c *cut, wire tensor.Tensor, at, place int64, into tensor.Tensor, backward bool) (int64, error) {
	behind := -c.ahead(place, backward)
	for j := range c.pieces {
		i := j
		if backward {
			i = len(c.pieces) - 1 - j
		}
		piece := &c.pieces[i]
		from, _ := piece.along(backward)
		if behind <= 0 || behind > from {
			continue
		}
		open := behind < from
		if backward {
			at -= p.block(open)
		}
		e, m := p.wireBlock(wire, at, open)
		if !backward {
			at += p.block(open)
		}
		y := e
		if behind == 1 {
			y = into.Select(0, piece.row)
		}
		var err error
		if open {
			err = p.apply(s, m, p.chain.running[i], e, y, backward)
		} else if behind == 1 {
			err = p.dev.Copy(s, y, e)
		}
		if err != nil {
			return at, err
		}
		p.chain.running[i] = y
	}
	return at, nil
}

// ahead is how far a place lies ahead in the direction in which states travel.
func (c *cut) ahead(place int64, backward bool) int64 {
	if backward {
		return c.at - place
	}
	return place - c.at
}
