package sp

import (
	"slices"
	"sort"
)

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

// schedule says what a rank does with a batch: the placement of rows, and the steps of a ring.
type schedule struct {
	batch         *Batch
	group         int64 // of this rank
	queries, keys *placement
	steps         []ringStep // the first has the group's own keys
	// the most rows of a call
	callQueries, callKeys int64
	// bytes of the workspace of calls, forward and backward; 0 = not computed yet
	workspaces [2]int64
}

// ringStep is what one step sends and computes. The own keys are not sent.
type ringStep struct {
	from, to []peer
	// elements of keys and values to and from each rank; the gradients return as many
	send, recv []int64
	sent, got  int64 // their sums
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

// scheduleOf returns the schedule of a batch, which is kept until another batch is scheduled.
func (p *Plan) scheduleOf(b *Batch) *schedule {
	if p.schedule.batch != b {
		p.schedule = p.newSchedule(b)
	}
	return &p.schedule
}

func (p *Plan) newSchedule(b *Batch) schedule {
	sch := schedule{batch: b, group: p.rank / (p.size / p.ring), queries: &b.queries.inOrder, keys: &b.keys.inOrder}
	if p.ring == 1 {
		return sch
	}
	if b.placement == inZigzag || b.placement == chosen && p.prefersZigzag(b) {
		sch.queries, sch.keys = &b.queries.zigzag, &b.keys.zigzag
	}
	sch.steps = append(sch.steps, ringStep{from: []peer{sch.receive(p, b, sch.group)}})
	for t := int64(1); t < p.ring; t++ {
		from, to := (sch.group-t+p.ring)%p.ring, (sch.group+t)%p.ring
		if t == 1 || !p.layer.Gather {
			sch.steps = append(sch.steps, ringStep{send: make([]int64, p.size), recv: make([]int64, p.size)})
		}
		s := &sch.steps[len(sch.steps)-1]
		s.from = append(s.from, sch.receive(p, b, from))
		s.to = append(s.to, peer{to, sch.visible(p, b, to, sch.group)})
	}
	for i := range sch.steps[1:] {
		sch.steps[1+i].count(p, b)
	}
	return sch
}

// count sets the elements of a step, and puts peers in the order of their ranks, which is the order
// of their blocks in an all-to-all.
func (s *ringStep) count(p *Plan, b *Batch) {
	byGroup := func(a, b peer) int { return int(a.group - b.group) }
	slices.SortFunc(s.from, byGroup)
	slices.SortFunc(s.to, byGroup)
	each, row := p.size/p.ring, b.spec.Batch*p.key[p.rank].n()*(p.layer.Dim+p.layer.VDim)
	for _, x := range s.from {
		s.recv[x.group*each+p.rank%each] = x.rows() * row
		s.got += x.rows() * row
	}
	for _, x := range s.to {
		s.send[x.group*each+p.rank%each] = x.rows() * row
		s.sent += x.rows() * row
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

// visible returns the ranges of the keys of a group that the queries of another group see, without
// empty ones.
func (s *schedule) visible(p *Plan, b *Batch, queries, keys int64) (blocks []ringBlock) {
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

// receive returns the blocks of a group's keys that this rank's group sees, with their calls.
func (s *schedule) receive(p *Plan, b *Batch, from int64) peer {
	x := peer{from, s.visible(p, b, s.group, from)}
	for i := range x.blocks {
		block := &x.blocks[i]
		// The block is part of one range, so its keys follow each other in the sequence.
		k := slice(s.keys.attention[from], block.rows)[0]
		at := int64(0)
		for _, q := range s.queries.attention[s.group] {
			for n := range b.spec.Batch {
				if p.sees(b, n, q).and(k).n() > 0 {
					block.calls = append(block.calls, b.call(n, span{at, at + q.n()}, q, k))
				}
			}
			s.callQueries, s.callKeys = max(s.callQueries, q.n()), max(s.callKeys, k.n())
			at += q.n()
		}
	}
	return x
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
