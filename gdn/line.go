package gdn

import (
	"slices"
	"sort"

	"ulysses/sp"
)

// line is the ranks that hold rows of a batch, in order: the places along which states travel. All
// batch rows are cut alike.
type line struct {
	batch, seq int64
	cu         []int64 // documents over batch·seq
	ranks      []int64 // of each place
	first      []int64 // first row of each place
	end        []int64 // and the one behind its last
}

func (l *line) fill(b *sp.Batch) {
	l.batch, l.seq = b.Batch(), b.Seq()
	l.cu, _ = b.Documents()
	l.ranks, l.first, l.end = l.ranks[:0], l.first[:0], l.end[:0]
	for r := range b.Size() {
		if lo, hi := b.RankRows(r); lo < hi {
			l.ranks, l.first, l.end = append(l.ranks, int64(r)), append(l.first, lo), append(l.end, hi)
		}
	}
}

// place is where a row lies.
func (l *line) place(row int64) int64 {
	return int64(sort.Search(len(l.first), func(i int) bool { return l.first[i] > row })) - 1
}

// placeOf is the place of a rank, -1 without rows.
func (l *line) placeOf(rank int64) int64 { return int64(slices.Index(l.ranks, rank)) }

// document is the one of batch row i that holds a row, and its bounds in the row.
func (l *line) document(i, row int64) (d, lo, hi int64) {
	next, _ := slices.BinarySearch(l.cu, i*l.seq+row+1) // the first start behind the row
	d = int64(next) - 1
	return d, l.cu[d] - i*l.seq, l.cu[next] - i*l.seq
}

// stretch is what one place holds of one batch row.
type stretch struct {
	doc, docs int64 // the first document and how many there are, parts counted
	// places before this one that hold rows of the first document, places behind it that hold rows
	// of the last
	up, down int64
}

func (l *line) stretch(i, at int64) (s stretch) {
	first, start, _ := l.document(i, l.first[at])
	last, _, end := l.document(i, l.end[at]-1)
	return stretch{doc: first, docs: last - first + 1, up: at - l.place(start), down: l.place(end-1) - at}
}

// passes reports that one document comes in, fills the stretch and goes on: what leaves depends on
// what came.
func (s *stretch) passes() bool { return s.docs == 1 && s.up > 0 && s.down > 0 }

// along is the places from which a state comes to this one, and to which one goes: forward from the
// documents' starts, backward from their ends.
func (s *stretch) along(backward bool) (from, to int64) {
	if backward {
		return s.down, s.up
	}
	return s.up, s.down
}

// depth is the largest number of places from which a state comes to any.
func (l *line) depth() (d int64) {
	for i := range l.batch {
		for at := range int64(len(l.ranks)) {
			_, start, _ := l.document(i, l.first[at])
			d = max(d, at-l.place(start))
		}
	}
	return d
}

// within counts the documents of batch row i that end, or with starts begin, at a place, and gives
// the first of them.
func (l *line) within(i, at int64, starts bool) (first, n int64) {
	lo, hi := i*l.seq+l.first[at], i*l.seq+l.end[at]
	if !starts {
		lo, hi = lo+1, hi+1
	}
	a, _ := slices.BinarySearch(l.cu, lo)
	z, _ := slices.BinarySearch(l.cu, hi)
	if !starts { // entry d+1 ends document d; entry 0 is never above lo
		a, z = a-1, z-1
	}
	return int64(a), int64(z - a)
}

// piece is the tokens that one device call takes: a batch row's with State, those of all rows with
// Heads.
type piece struct {
	stretch
	row int64   // of the batch; -1 = all
	cu  []int64 // documents, from 0; nil = any
}

// cut is a batch as this rank's calls take it.
type cut struct {
	batch  *sp.Batch
	n      int64 // local tokens a batch row
	at     int64 // this rank's place
	depth  int64
	line   line
	pieces []piece
	docs   int64 // documents of the batch
	most   int64 // documents of a piece at most
	starts int64 // documents that begin at this rank
	ends   int64 // documents that end at this rank
	marks  []int64
}

// cutOf is the cut of a batch: the last one if it was of the same batch.
func (p *Plan) cutOf(b *sp.Batch) *cut {
	if c := &p.cut; c.batch != b {
		p.fillCut(c, b)
	}
	return &p.cut
}

func (p *Plan) fillCut(c *cut, b *sp.Batch) {
	c.batch, c.pieces, c.marks = b, c.pieces[:0], c.marks[:0]
	c.line.fill(b)
	l := &c.line
	c.docs, c.most, c.starts, c.ends, c.depth = int64(len(l.cu)-1), 0, 0, 0, 0
	p.method.fillCut(c)
}
