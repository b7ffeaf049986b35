package gdn

import (
	"slices"
	"sort"

	"ulysses/sp"
	"ulysses/tensor"
)

// tokenShards are the ranks that have tokens of a batch, in the order of the tokens. The index of a
// rank in this order is its position. All sequences of a batch are sharded alike.
type tokenShards struct {
	batch, seq int64
	cu         []int64 // boundaries of the documents over batch·seq tokens
	ranks      []int64 // rank at each position
	first, end []int64 // tokens [first, end) of a sequence at each position
}

func (t *tokenShards) fill(b *sp.Batch) {
	t.batch, t.seq = b.Batch(), b.Seq()
	t.cu, _ = b.Documents()
	t.ranks, t.first, t.end = t.ranks[:0], t.first[:0], t.end[:0]
	for r := range b.Size() {
		if lo, hi := b.RankRows(r); lo < hi {
			t.ranks, t.first, t.end = append(t.ranks, int64(r)), append(t.first, lo), append(t.end, hi)
		}
	}
}

// positionOf returns the position that has a token.
func (t *tokenShards) positionOf(token int64) int64 {
	return int64(sort.Search(len(t.first), func(i int) bool { return t.first[i] > token })) - 1
}

// positionOfRank returns the position of a rank, or -1 if it has no tokens.
func (t *tokenShards) positionOfRank(rank int64) int64 { return int64(slices.Index(t.ranks, rank)) }

// document returns the document d of a sequence that has a token, and the document's range [lo, hi)
// in the sequence.
func (t *tokenShards) document(sequence, token int64) (d, lo, hi int64) {
	// the first boundary after the token
	next, _ := slices.BinarySearch(t.cu, sequence*t.seq+token+1)
	d = int64(next) - 1
	return d, t.cu[d] - sequence*t.seq, t.cu[next] - sequence*t.seq
}

// segment is the tokens that a device call processes: with State the tokens of a sequence on a
// rank, with Heads the tokens of the whole batch.
type segment struct {
	sequence int64 // -1 = all sequences of the batch
	// first document, and number of documents, of which the ends may be on other ranks
	doc, docs int64
	// number of positions before this one that have tokens of the first document, and of positions
	// after it that have tokens of the last document
	before, after int64
	cu            []int64 // boundaries of the documents in the segment, from 0; nil = unknown
}

// segment returns the segment of a sequence at a position, without cu.
func (t *tokenShards) segment(sequence, position int64) segment {
	first, start, _ := t.document(sequence, t.first[position])
	last, _, end := t.document(sequence, t.end[position]-1)
	return segment{sequence: sequence, doc: first, docs: last - first + 1,
		before: position - t.positionOf(start), after: t.positionOf(end-1) - position}
}

// interior reports whether one document begins before the segment and ends after it. Then the state
// after the segment depends on the state before it.
func (x *segment) interior() bool { return x.docs == 1 && x.before > 0 && x.after > 0 }

// peers returns the number of positions that send a state to the segment's position, and the number
// of positions to which it sends one. Forward, states go from the start of a document to its end;
// backward, their gradients go the other way.
func (x *segment) peers(backward bool) (sources, targets int64) {
	if backward {
		return x.after, x.before
	}
	return x.before, x.after
}

// view returns the tokens of a segment in [B, n, …], as [T, …]. A nil tensor stays nil.
func (x *segment) view(t tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		return t
	}
	if x.sequence < 0 {
		return t.Flatten(0, 1)
	}
	return t.Select(0, x.sequence)
}

// maxSources returns the largest number of positions that send a state to the same position.
func (t *tokenShards) maxSources() (n int64) {
	for i := range t.batch {
		for position := range int64(len(t.ranks)) {
			_, start, _ := t.document(i, t.first[position])
			n = max(n, position-t.positionOf(start))
		}
	}
	return n
}

// documentsAt returns the first of the documents of a sequence that end at a position, and their
// number; with starts, of the documents that begin there.
func (t *tokenShards) documentsAt(sequence, position int64, starts bool) (first, n int64) {
	lo, hi := sequence*t.seq+t.first[position], sequence*t.seq+t.end[position]
	if !starts {
		lo, hi = lo+1, hi+1
	}
	a, _ := slices.BinarySearch(t.cu, lo)
	z, _ := slices.BinarySearch(t.cu, hi)
	if !starts { // entry d+1 is the end of document d; entry 0 is never above lo
		a, z = a-1, z-1
	}
	return int64(a), int64(z - a)
}

// layout is how the calls of this rank process a batch.
type layout struct {
	batch    *sp.Batch
	oneGroup *sp.Batch // batch without a ring, for strategy heads
	shards   tokenShards
	position int64 // of this rank; -1 = it has no tokens
	tokens   int64 // tokens of a sequence in the local tensors
	segments []segment
	docs     int64 // documents of the batch
	maxDocs  int64 // largest number of documents of a segment
	starts   int64 // documents that begin on this rank
	ends     int64 // documents that end on this rank
	// largest number of positions that send a state to the same position; 0 = no state is sent
	maxSources int64
	offsets    []int64 // memory of the segments' cu
}

// reset prepares the layout of a batch, without segments.
func (l *layout) reset(b *sp.Batch) {
	l.batch, l.segments, l.offsets = b, l.segments[:0], l.offsets[:0]
	l.shards.fill(b)
	l.docs, l.maxDocs, l.starts, l.ends, l.maxSources = int64(len(l.shards.cu)-1), 0, 0, 0, 0
}

// ahead returns how many positions a position is ahead of this rank's, in the direction in which
// states go.
func (l *layout) ahead(position int64, backward bool) int64 {
	if backward {
		return l.position - position
	}
	return position - l.position
}

// rankAhead returns the rank that is so many positions ahead of this rank's, in the direction in
// which states go.
func (l *layout) rankAhead(positions int64, backward bool) int64 {
	if backward {
		positions = -positions
	}
	return l.shards.ranks[l.position+positions]
}
