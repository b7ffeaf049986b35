package sp

import "ulysses/comm"

// Rows of a sequence are laid out twice. In the layout of tokens, each rank has the rows of its
// tensors: a range, or two ranges if the batch is zigzag. In the layout of attention, each group of
// a ring has the rows for which it computes attention, with the heads divided among its ranks. An
// all-to-all moves rows from one to the other. Without a ring there is one group, with all rows.
//
// A layout has the ranges of each rank or group, ascending, without empty ranges.
type layout [][]span

// newLayout returns an empty layout. It has room for the two ranges that a rank has in a zigzag:
// a plan for many ranks makes the layouts of each of them.
func newLayout(ranks int64) layout {
	l, room := make(layout, ranks), make([]span, 2*ranks)
	for i := range l {
		l[i] = room[2*i : 2*i : 2*i+2]
	}
	return l
}

// rows returns the number of rows in some ranges.
func rows(ranges []span) (n int64) {
	for _, s := range ranges {
		n += s.n()
	}
	return n
}

// most returns the largest number of rows of a rank or group.
func (l layout) most() (most int64) {
	for _, ranges := range l {
		most = max(most, rows(ranges))
	}
	return most
}

// contiguous returns the layout of one range for each rank.
func contiguous(ranges []span) layout {
	l := make(layout, len(ranges))
	for i, s := range ranges {
		if s.n() > 0 {
			l[i] = ranges[i : i+1 : i+1]
		}
	}
	return l
}

// zigzagChunks returns the layout in which group r of a ring has the chunks r and 2·ring-1-r of
// 2·ring chunks. With a causal mask, each group then has the same number of visible pairs.
func zigzagChunks(n, ring int64) layout {
	l := newLayout(ring)
	for r := range l {
		lo, hi := comm.Shard(n, 2*ring, int64(r))
		l[r] = appendRange(l[r], span{lo, hi})
		lo, hi = comm.Shard(n, 2*ring, 2*ring-1-int64(r))
		l[r] = appendRange(l[r], span{lo, hi})
	}
	return l
}

// zigzagTokens returns the layout of tokens that belongs to zigzagChunks: the rows of each group
// are divided evenly among its ranks, in order.
func zigzagTokens(n, ring, ranks int64) layout {
	each := ranks / ring
	l := newLayout(ranks)
	for g, chunks := range zigzagChunks(n, ring) {
		for u := range each {
			lo, hi := comm.Shard(rows(chunks), each, u)
			l[int64(g)*each+u] = appendSlice(l[int64(g)*each+u], chunks, span{lo, hi})
		}
	}
	return l
}

// grouped returns the layout in which each group of a ring has the rows of its ranks.
func (l layout) grouped(ring int64) layout {
	each := len(l) / int(ring)
	g := newLayout(ring)
	for i, ranges := range l {
		for _, s := range ranges {
			g[i/each] = appendRange(g[i/each], s)
		}
	}
	return g
}

// appendRange appends a range, joined to the last one if it continues there.
func appendRange(ranges []span, s span) []span {
	if n := len(ranges); s.n() == 0 {
		return ranges
	} else if n > 0 && ranges[n-1].hi == s.lo {
		ranges[n-1].hi = s.hi
		return ranges
	}
	return append(ranges, s)
}

// slice returns rows [part.lo, part.hi) of the concatenated ranges.
func slice(ranges []span, part span) (out []span) { return appendSlice(nil, ranges, part) }

// appendSlice appends the ranges of slice.
func appendSlice(out, ranges []span, part span) []span {
	at := int64(0)
	for _, s := range ranges {
		lo, hi := max(part.lo, at), min(part.hi, at+s.n())
		if lo < hi {
			out = append(out, span{s.lo + lo - at, s.lo + hi - at})
		}
		at += s.n()
	}
	return out
}

// exchange has the rows that a rank exchanges with each rank between the two layouts, as ranges of
// local rows. Rank j has the row of both ends in the same order.
type exchange struct {
	seq, heads         [][]span // by rank: rows of this rank's tokens; rows of its group's attention
	seqRows, headsRows []int64  // their numbers
}

// newExchange returns the exchange of a rank between the layouts of tokens and of attention.
func newExchange(tokens, attention layout, rank int64) *exchange {
	size, each := int64(len(tokens)), int64(len(tokens)/len(attention))
	x := &exchange{seq: make([][]span, size), heads: make([][]span, size), seqRows: make([]int64, size),
		headsRows: make([]int64, size)}
	for j := range size {
		x.seq[j], _ = common(tokens[rank], attention[j/each])
		_, x.heads[j] = common(tokens[j], attention[rank/each])
		x.seqRows[j], x.headsRows[j] = rows(x.seq[j]), rows(x.heads[j])
	}
	return x
}

// common returns the rows that are in both a and b, as rows of the concatenated ranges of a, and as
// rows of the concatenated ranges of b.
func common(a, b []span) (inA, inB []span) {
	atA := int64(0)
	for _, s := range a {
		atB := int64(0)
		for _, t := range b {
			if lo, hi := max(s.lo, t.lo), min(s.hi, t.hi); lo < hi {
				inA = append(inA, span{atA + lo - s.lo, atA + hi - s.lo})
				inB = append(inB, span{atB + lo - t.lo, atB + hi - t.lo})
			}
			atB += t.n()
		}
		atA += s.n()
	}
	return inA, inB
}
