package data

import (
	"slices"
	"sort"

	"ulysses/internal/status"
)

// documentRange is a range of the documents of an index. With packing, the tokens of the range are
// divided into sequences of maxLength tokens. Without packing, each document is one sequence, and
// its tokens after the first maxLength are left out.
type documentRange struct {
	*index
	lo, hi       int64 // tokens of the index
	first, count int64 // documents [first, first+count)
	maxLength    int64 // data.sequence
	pack         bool

	sum, most int64 // tokens in all sequences, and in the longest one
}

// measure sets sum and most.
func (d *documentRange) measure() error {
	if d.sum, d.most = d.hi-d.lo, min(d.maxLength, d.hi-d.lo); d.pack || d.count == 0 {
		return nil
	}
	d.sum, d.most = 0, 0
	last := d.first + d.count
	for b := range d.blocks {
		from, until := d.blocks[b].doc, d.docsUntil(b)
		if d.count > 1 && from >= d.first && until <= last {
			d.sum += d.blocks[b].unpacked
			d.most = max(d.most, d.blocks[b].longest)
			continue
		}
		// The range begins or ends in this block.
		for i := max(from, d.first); i < min(until, last); i++ {
			lo, hi, err := d.span(i - d.first)
			if err != nil {
				return err
			}
			d.sum += hi - lo
			d.most = max(d.most, hi-lo)
		}
	}
	return nil
}

func (d *documentRange) documents() int64 { return d.count }
func (d *documentRange) tokens() int64    { return d.sum }
func (d *documentRange) longest() int64   { return d.most }
func (d *documentRange) cut() int64       { return d.hi - d.lo - d.sum }

func (d *documentRange) checksum() uint32 {
	sums := make([]uint32, len(d.blocks))
	for i := range d.blocks {
		sums[i] = d.blocks[i].crc
	}
	return checksum(sums)
}

func (d *documentRange) sequences() int64 {
	if !d.pack {
		return d.count
	}
	return (d.hi - d.lo + d.maxLength - 1) / d.maxLength
}

// span returns the tokens [lo, hi) of the index that make a sequence. The last packed sequence may
// be shorter than the others.
func (d *documentRange) span(sequence int64) (lo, hi int64, err error) {
	if d.pack {
		lo = d.lo + sequence*d.maxLength
		return lo, min(lo+d.maxLength, d.hi), nil
	}
	if lo, err = d.start(d.first + sequence); err != nil {
		return 0, 0, err
	}
	if hi, err = d.start(d.first + sequence + 1); err != nil {
		return 0, 0, err
	}
	lo = max(lo, d.lo)
	return lo, min(hi, d.hi, lo+d.maxLength), nil
}

func (d *documentRange) length(sequence int64) (int64, error) {
	lo, hi, err := d.span(sequence)
	return hi - lo, err
}

func (d *documentRange) appendSequence(m *MicroBatch, sequence int64) error {
	lo, hi, err := d.span(sequence)
	if err != nil {
		return err
	}
	base, first := int64(len(m.IDs)), len(m.CuSeqlens)
	ids, targets, positions := m.grow(hi - lo)
	labels := d.labelsOf(m, ids)
	err = d.copyTokens(lo, hi, ids, labels, func(start int64) { m.CuSeqlens = append(m.CuSeqlens, base+start-lo) })
	if err != nil {
		return err
	}
	m.CuSeqlens = append(m.CuSeqlens, base+hi-lo)
	setTargets(m.CuSeqlens[first:], base, labels, targets, positions)
	return nil
}

// labelsOf returns the memory for the labels of a sequence: ids if each token is its own label.
func (x *index) labelsOf(m *MicroBatch, ids []int32) []int32 {
	if !x.labelled {
		return ids
	}
	m.labels = slices.Grow(m.labels[:0], len(ids))[:len(ids)]
	return m.labels
}

// copyTokens copies tokens [lo, hi) of the index and their labels. It calls start for each token
// after the first at which a document starts; nil = it does not.
func (x *index) copyTokens(lo, hi int64, ids, labels []int32, start func(token int64)) error {
	for at, b := lo, x.find(lo); at < hi; b++ {
		p, err := x.decoded(b)
		if err != nil {
			return err
		}
		off := x.blocks[b].token
		end := min(off+int64(len(p.ids)), hi)
		copy(ids[at-lo:end-lo], p.ids[at-off:])
		if x.labelled {
			of := p.labels
			if len(of) == 0 {
				of = p.ids
			}
			copy(labels[at-lo:end-lo], of[at-off:])
		}
		at = end
		if start == nil {
			continue
		}
		for _, s := range p.starts[sort.Search(len(p.starts), func(i int) bool { return p.starts[i] > lo-off }):] {
			if off+s >= hi {
				break
			}
			start(off + s)
		}
	}
	return nil
}

// setTargets sets the targets and positions of a sequence whose first token is token base of the
// micro-batch. ends has the ends of its documents in the micro-batch.
func setTargets(ends []int64, base int64, labels, targets, positions []int32) {
	at := int64(0)
	for _, end := range ends {
		for end -= base; at < end; {
			from := at
			for ; at < end; at++ {
				positions[at] = int32(at - from)
				if targets[at] = Ignore; at+1 < end {
					targets[at] = labels[at+1]
				}
			}
		}
	}
}

// sub returns the range of tokens [lo, hi) of the index with documents [first, first+count).
func (d *documentRange) sub(lo, hi, first, count int64) (source, error) {
	p := *d
	p.lo, p.hi, p.first, p.count = lo, hi, first, count
	return &p, p.measure()
}

func (d *documentRange) split(document int64) (before, after source, err error) {
	at, err := d.start(d.first + document)
	if err != nil {
		return nil, nil, err
	}
	if before, err = d.sub(d.lo, at, d.first, document); err == nil {
		after, err = d.sub(at, d.hi, d.first+document, d.count-document)
	}
	return before, after, err
}

func (d *documentRange) splitDocument(at func(int64) int64) (head, tail source, err error) {
	n := d.hi - d.lo
	if n < 2 {
		return nil, nil,
			status.Errorf(status.InvalidConfig,
				"eval.split: the only document has %d token and cannot be split; name other files with eval.path", n)
	}
	k := d.lo + at(n)
	if head, err = d.sub(d.lo, k, d.first, 1); err == nil {
		tail, err = d.sub(k, d.hi, d.first, 1)
	}
	return head, tail, err
}
