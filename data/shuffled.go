package data

import (
	"sort"

	"ulysses/internal/splitmix"
	"ulysses/internal/status"
)

// shuffledRange is the documents of a packed documentRange in an order drawn from the seed. The
// documents are packed in this order, which is the same in all epochs. It is a function of the
// files and the seed, not of the ranks.
type shuffledRange struct {
	*documentRange
	ends []int64 // tokens of the documents up to the end of each, in the order
	seed uint64
}

// documentOrder distinguishes the order of documents from the orders of sequences.
const documentOrder = 0x646f63756d656e74

func newShuffledRange(d *documentRange, seed uint64) *shuffledRange {
	s := &shuffledRange{documentRange: d, ends: make([]int64, d.count), seed: splitmix.Mix(seed ^ documentOrder)}
	total := int64(0)
	for k := range s.ends {
		lo, hi := s.bounds(int64(k))
		total += hi - lo
		s.ends[k] = total
	}
	return s
}

// bounds returns the tokens [lo, hi) of the index that are the k-th document of the order.
func (s *shuffledRange) bounds(k int64) (lo, hi int64) {
	doc := s.first + permute(k, s.count, s.seed, 0)
	lo, hi = s.starts[doc], s.tokensOfIndex()
	if doc+1 < int64(len(s.starts)) {
		hi = s.starts[doc+1]
	}
	return max(lo, s.lo), min(hi, s.hi)
}

func (s *shuffledRange) tokensOfIndex() int64 { return s.index.tokens }

func (s *shuffledRange) appendSequence(m *MicroBatch, sequence int64) error {
	lo, hi, err := s.span(sequence)
	if err != nil {
		return err
	}
	lo, hi = lo-s.documentRange.lo, hi-s.documentRange.lo
	base, first := int64(len(m.IDs)), len(m.CuSeqlens)
	ids, targets, positions := m.grow(hi - lo)
	labels := s.labelsOf(m, ids)
	for at := lo; at < hi; {
		k := int64(sort.Search(len(s.ends), func(k int) bool { return s.ends[k] > at }))
		from, until := s.bounds(k)
		before := s.ends[k] - (until - from) // tokens before the document
		from += at - before
		n := min(until-from, hi-at)
		if err := s.copyTokens(from, from+n, ids[at-lo:], labels[at-lo:], nil); err != nil {
			return err
		}
		at += n
		m.CuSeqlens = append(m.CuSeqlens, base+at-lo)
	}
	setTargets(m.CuSeqlens[first:], base, labels, targets, positions)
	return nil
}

func (s *shuffledRange) split(int64) (before, after source, err error) {
	return nil, nil, status.Errorf(status.Internal, "data: shuffled documents cannot be split")
}

func (s *shuffledRange) splitDocument(func(int64) int64) (head, tail source, err error) {
	return s.split(0)
}
