package sp

import "sort"

// A ring divides the sequence among groups during attention. Each group has the queries and keys of
// its rows. Its queries also see keys of other groups, so these are sent to it, one group in each
// step, while the step before computes (Liu et al. 2023, arXiv:2310.01889). Keys are sent straight
// from their group, and only the ranges that the receiver's queries see: a causal mask, a window or
// a document that ends make them smaller or empty. The gradients of keys return the same way.

// The placements of rows in the groups of a ring.
const (
	chosen   = iota // the plan chooses, by the work of the slowest group
	inOrder         // each group computes the rows of its ranks
	inZigzag        // chunks of a zigzag
)

// schedule says what a rank does with a batch: the placement of rows, and the steps of a ring. The
// steps and their calls are computed when they are needed: sizes need no calls, and some need no
// steps.
type schedule struct {
	batch         *Batch
	group         int64 // of this rank
	queries, keys *placement
	steps         []ringStep // the first has the group's own keys; nil = not computed yet
	called        bool       // the steps have calls
	// the most rows of a call
	callQueries, callKeys int64
	// bytes of the workspace of calls, forward and backward; 0 = not computed yet
	workspaces [2]int64
}

// ringStep is what one step sends and computes. The own keys are not sent.
type ringStep struct {
	from, to []peer // in the order of their ranks, which is that of their blocks in an all-to-all
	// elements of keys and values to and from all of them; the gradients return as many
	sent, got int64
}

// peer is another group, or this one, and the blocks of keys that move between the two.
type peer struct {
	group  int64
	blocks []ringBlock
}

// ringBlock is a range of keys.
type ringBlock struct {
	rows  span       // among the rows of the owner's group
	calls []ringCall // of the receiver
}

// ringCall is one call of the attention operation, of queries of one sequence and all keys of a
// block.
type ringCall struct {
	sequence        int64
	q               span // among the rows of this rank's group
	cuQ, cuK, shift []int64
	queryAt, keyAt  int64 // numbers of the first query and key in the batch
}

// placed returns the schedule of a batch, maybe without steps. It is kept until another batch is
// scheduled.
func (p *Plan) placed(b *Batch) *schedule {
	if p.schedule.batch == b {
		return &p.schedule
	}
	p.schedule = schedule{batch: b, group: p.rank / (p.size / p.ring), queries: &b.queries.inOrder,
		keys: &b.keys.inOrder}
	if p.ring > 1 && (b.placement == inZigzag || b.placement == chosen && p.prefersZigzag(b)) {
		p.schedule.queries, p.schedule.keys = &b.queries.zigzag, &b.keys.zigzag
	}
	return &p.schedule
}

// moves returns the schedule of a batch with the rows that each step moves, maybe without calls.
func (p *Plan) moves(b *Batch) *schedule {
	sch := p.placed(b)
	if p.ring > 1 && sch.steps == nil {
		sch.setSteps(p, b)
	}
	return sch
}

// scheduleOf returns the complete schedule of a batch.
func (p *Plan) scheduleOf(b *Batch) *schedule {
	sch := p.moves(b)
	if sch.called {
		return sch
	}
	for i := range sch.steps {
		for f := range sch.steps[i].from {
			sch.setCalls(p, b, &sch.steps[i].from[f])
		}
	}
	sch.called = true
	return sch
}

// setSteps sets the steps of a ring. They share few slices, because a plan for many ranks computes
// the steps of each of them.
func (s *schedule) setSteps(p *Plan, b *Batch) {
	others := p.ring - 1
	peers, ranges := make([]peer, 1+2*others), len(s.keys.attention[s.group])
	blocks := make([]ringBlock, 0, int(1+2*others)*max(1, ranges))
	s.steps = make([]ringStep, 1, p.ring)
	visible := func(queries, keys, of int64) peer {
		n := len(blocks)
		blocks = s.visible(blocks, p, b, queries, keys)
		return peer{of, blocks[n:len(blocks):len(blocks)]}
	}
	peers[0] = visible(s.group, s.group, s.group)
	s.steps[0].from = peers[:1]
	from, to := peers[1:1+others], peers[1+others:]
	for t := range others {
		before, after := (s.group-t-1+p.ring)%p.ring, (s.group+t+1)%p.ring
		if p.layer.Gather { // in the order of groups
			before = t
			if before >= s.group {
				before++
			}
			after = before
		} else {
			s.steps = append(s.steps, ringStep{from: from[t : t+1], to: to[t : t+1]})
		}
		from[t], to[t] = visible(s.group, before, before), visible(after, s.group, after)
	}
	if p.layer.Gather {
		s.steps = append(s.steps, ringStep{from: from, to: to})
	}
	row := p.ringRow(b)
	for i := range s.steps[1:] {
		step := &s.steps[1+i]
		for j := range step.from {
			step.got += step.from[j].rows() * row
			step.sent += step.to[j].rows() * row
		}
	}
	for _, x := range peers[:1+others] { // of which this group receives
		for _, block := range x.blocks {
			s.callKeys = max(s.callKeys, block.rows.n())
		}
	}
	if s.callKeys > 0 {
		for _, q := range s.queries.attention[s.group] {
			s.callQueries = max(s.callQueries, q.n())
		}
	}
}

// ringRow returns the elements of a row of keys and values that this rank sends to another group.
func (p *Plan) ringRow(b *Batch) int64 {
	return b.spec.Batch * p.key[p.rank].n() * (p.layer.Dim + p.layer.VDim)
}

// ringCounts are the elements of an all-to-all of keys and values to and from each rank. A ring has
// two of them in progress.
type ringCounts struct{ send, recv []int64 }

// set sets the counts of a step.
func (c *ringCounts) set(p *Plan, b *Batch, s *ringStep) {
	each, row := p.size/p.ring, p.ringRow(b)
	clear(c.send)
	clear(c.recv)
	for i := range s.from {
		c.recv[s.from[i].group*each+p.rank%each] = s.from[i].rows() * row
		c.send[s.to[i].group*each+p.rank%each] = s.to[i].rows() * row
	}
}

func (x *peer) rows() (n int64) {
	for _, b := range x.blocks {
		n += b.rows.n()
	}
	return n
}

// rowsMoved returns how many rows of keys this rank sends, and of how many rows of other groups it
// returns gradients.
func (s *schedule) rowsMoved() (sent, returned int64) {
	for i := range s.steps {
		if i == 0 {
			continue // its own keys
		}
		for _, x := range s.steps[i].to {
			sent += x.rows()
		}
		for _, x := range s.steps[i].from {
			returned += x.rows()
		}
	}
	return sent, returned
}

// visible appends the ranges of the keys of a group that the queries of another group see, without
// empty ones.
func (s *schedule) visible(blocks []ringBlock, p *Plan, b *Batch, queries, keys int64) []ringBlock {
	at := int64(0)
	for _, k := range s.keys.attention[keys] {
		seen := span{k.hi, k.lo} // over all sequences and ranges of queries
		for _, q := range s.queries.attention[queries] {
			for n := range b.spec.Batch {
				if v := p.sees(b, n, q).and(k); v.n() > 0 {
					seen = span{min(seen.lo, v.lo), max(seen.hi, v.hi)}
				}
			}
		}
		if seen.n() > 0 {
			blocks = append(blocks, ringBlock{rows: span{at + seen.lo - k.lo, at + seen.hi - k.lo}})
		}
		at += k.n()
	}
	return blocks
}

// setCalls sets the calls of the blocks that this rank's group sees of a group's keys.
func (s *schedule) setCalls(p *Plan, b *Batch, x *peer) {
	for i := range x.blocks {
		block := &x.blocks[i]
		// The block is part of one range, so its keys follow each other in the sequence.
		k := slice(s.keys.attention[x.group], block.rows)[0]
		at := int64(0)
		for _, q := range s.queries.attention[s.group] {
			for n := range b.spec.Batch {
				if p.sees(b, n, q).and(k).n() > 0 {
					block.calls = append(block.calls, b.call(n, span{at, at + q.n()}, q, k))
				}
			}
			at += q.n()
		}
	}
}

// and returns the range that a and b have in common, empty if hi <= lo.
func (a span) and(b span) span { return span{max(a.lo, b.lo), min(a.hi, b.hi)} }

// call returns the call for queries q and keys k of a sequence. local are the rows of q in the
// group.
func (b *Batch) call(sequence int64, local, q, k span) ringCall {
	q0, k0 := sequence*b.queries.n, sequence*b.keys.n // the sequence's first tokens
	c := ringCall{sequence: sequence, q: local, queryAt: q0 + q.lo, keyAt: k0 + k.lo, cuQ: []int64{0}, cuK: []int64{0}}
	cuQ, cuK := b.queries.cu, b.keys.cu
	first := min(documentAt(cuQ, q0+q.lo), documentAt(cuK, k0+k.lo))
	for d := first; d+1 < len(cuQ) && (cuQ[d] < q0+q.hi || cuK[d] < k0+k.hi); d++ {
		c.cuQ = append(c.cuQ, min(max(cuQ[d+1]-q0, q.lo), q.hi)-q.lo)
		c.cuK = append(c.cuK, min(max(cuK[d+1]-k0, k.lo), k.hi)-k.lo)
		c.shift = append(c.shift, q.lo-k.lo+(cuK[d+1]-k0)-(cuQ[d+1]-q0))
	}
	return c
}

// documentAt returns the document of a token.
func documentAt(cu []int64, token int64) int {
	return sort.Search(len(cu), func(i int) bool { return cu[i] > token }) - 1
}

// sees returns the range of keys of a sequence that queries [q.lo, q.hi) of it see, from the first
// key of the first query to the last key of the last query.
func (p *Plan) sees(b *Batch, sequence int64, q span) span {
	if b.unknownDocuments && b.queries.n != b.keys.n {
		return span{0, b.keys.n}
	}
	lo, _ := p.layer.seenBy(b, sequence, q.lo)
	_, hi := p.layer.seenBy(b, sequence, q.hi-1)
	return span{lo, hi}
}

// seenBy returns the keys [lo, hi) of a sequence that its query i sees.
func (l *Layer) seenBy(b *Batch, sequence, i int64) (lo, hi int64) {
	q0, k0 := sequence*b.queries.n, sequence*b.keys.n
	d := documentAt(b.queries.cu, q0+i)
	lo, hi = b.keys.cu[d]-k0, b.keys.cu[d+1]-k0
	aligned := i + hi - (b.queries.cu[d+1] - q0)
	left, right := l.Window.Sides(l.Causal)
	lo, hi = max(lo, min(hi, aligned-left)), min(hi, max(lo, aligned+right+1))
	return lo, max(lo, hi)
}

// prefersZigzag reports whether the slowest group has less work with chunks of a zigzag than with
// the rows of its ranks, by more than the all-to-alls across groups are worth.
func (p *Plan) prefersZigzag(b *Batch) bool {
	most := func(x layout) (most float64) {
		for _, ranges := range x {
			pairs := 0.0
			for _, q := range ranges {
				for n := range b.spec.Batch {
					pairs += p.layer.pairs(b, n, q)
				}
			}
			most = max(most, pairs)
		}
		return most
	}
	return most(b.queries.zigzag.attention) < 0.9*most(b.queries.inOrder.attention)
}

// pairs returns how many pairs of a query in q and a key are visible.
func (l *Layer) pairs(b *Batch, sequence int64, q span) (pairs float64) {
	q0 := sequence * b.queries.n
	left, right := l.Window.Sides(l.Causal)
	for d := documentAt(b.queries.cu, q0+q.lo); d+1 < len(b.queries.cu) && b.queries.cu[d] < q0+q.hi; d++ {
		part := q.and(span{b.queries.cu[d] - q0, b.queries.cu[d+1] - q0})
		keys := b.keys.cu[d+1] - b.keys.cu[d]
		// the key in the document that is aligned with the first query
		at := part.lo + q0 - b.queries.cu[d+1] + keys
		pairs += clampedSum(at+right+1, part.n(), keys) - clampedSum(at-left, part.n(), keys)
	}
	return pairs
}

// clampedSum returns Σ_{i<n} min(max(from+i, 0), top).
func clampedSum(from, n, top int64) float64 {
	rising := span{from, from + n}.and(span{0, top})
	full := max(0, min(n, from+n-top))
	sum := float64(full) * float64(top)
	if rising.n() > 0 {
		sum += float64(rising.n()) * float64(rising.lo+rising.hi-1) / 2
	}
	return sum
}
