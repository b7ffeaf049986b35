package data

import (
	"ulysses/internal/splitmix"
	"ulysses/internal/status"
)

// span is tokens [lo, hi) of an index: a document, or the part of one that is in a sequence.
type span struct{ lo, hi int64 }

// packedRange is a packed documentRange whose sequences are lists of spans: documents in a drawn
// order (data.shuffle_documents), or packed by best fit (data.packing). The sequences are the same
// in all epochs. They are a function of the files, the seed and data.sequence, not of the ranks.
type packedRange struct {
	*documentRange
	spans []span  // of all sequences, in their order
	ends  []int64 // [sequences] number of spans up to the end of each sequence
}

// documentOrder distinguishes the order of documents from the orders of sequences.
const documentOrder = 0x646f63756d656e74

// arrange returns the sources with their documents packed as data.packing says, in a drawn order if
// shuffle is set. Sources of whole sequences stay as they are.
func (o *opener) arrange(all []source, shuffle bool) []source {
	c := &o.config
	if !c.Pack || !shuffle && c.Packing != BestFit {
		return all
	}
	for i, s := range all {
		d, ok := s.(*documentRange)
		if !ok {
			continue
		}
		order := func(k int64) int64 { return k }
		if shuffle {
			seed := splitmix.Mix(o.Seed ^ documentOrder)
			order = func(k int64) int64 { return permute(k, d.count, seed, 0) }
		}
		// Each document has at most one span more than it fills sequences.
		p := &packedRange{documentRange: d, spans: make([]span, 0, d.count+d.sequences()),
			ends: make([]int64, 0, d.sequences())}
		if c.Packing == BestFit {
			p.packBestFit(order)
		} else {
			p.packInOrder(order)
		}
		all[i] = p
	}
	return all
}

// document returns the tokens of document k of the range.
func (d *documentRange) document(k int64) span {
	doc := d.first + k
	lo, hi := d.starts[doc], d.index.tokens
	if doc+1 < int64(len(d.starts)) {
		hi = d.starts[doc+1]
	}
	return span{max(lo, d.lo), min(hi, d.hi)}
}

// packInOrder places the documents one after another and splits them into sequences of maxLength
// tokens.
func (p *packedRange) packInOrder(order func(k int64) int64) {
	room := p.maxLength
	for k := range p.count {
		for s := p.document(order(k)); s.lo < s.hi; {
			n := min(room, s.hi-s.lo)
			p.spans = append(p.spans, span{s.lo, s.lo + n})
			s.lo += n
			if room -= n; room == 0 {
				p.ends, room = append(p.ends, int64(len(p.spans))), p.maxLength
			}
		}
	}
	if room < p.maxLength {
		p.ends = append(p.ends, int64(len(p.spans)))
	}
}

// of returns the spans of a sequence.
func (p *packedRange) of(sequence int64) []span {
	first := int64(0)
	if sequence > 0 {
		first = p.ends[sequence-1]
	}
	return p.spans[first:p.ends[sequence]]
}

func (p *packedRange) sequences() int64 { return int64(len(p.ends)) }

func (p *packedRange) length(sequence int64) (n int64, _ error) {
	for _, s := range p.of(sequence) {
		n += s.hi - s.lo
	}
	return n, nil
}

func (p *packedRange) appendSequence(m *MicroBatch, sequence int64) error {
	base, first := int64(len(m.IDs)), len(m.CuSeqlens)
	n, _ := p.length(sequence)
	ids, targets, positions := m.grow(n)
	labels := p.labelsOf(m, ids)
	at := int64(0)
	for _, s := range p.of(sequence) {
		if err := p.copyTokens(s.lo, s.hi, ids[at:], labels[at:], nil); err != nil {
			return err
		}
		at += s.hi - s.lo
		m.CuSeqlens = append(m.CuSeqlens, base+at)
	}
	setTargets(m.CuSeqlens[first:], base, labels, targets, positions)
	return nil
}

func (p *packedRange) split(int64) (before, after source, err error) {
	return nil, nil, status.Errorf(status.Internal, "data: packed documents cannot be split")
}

func (p *packedRange) splitDocument(func(int64) int64) (head, tail source, err error) {
	return p.split(0)
}
