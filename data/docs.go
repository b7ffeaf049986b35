package data

import (
	"sort"

	"ulysses/internal/status"
)

// documents is a part of the documents of an index: all, or those before or behind a cut. Packed,
// rows are cut from the whole; else each document is a row, cut at sequence.
type documents struct {
	*index
	lo, hi     int64 // tokens of the index
	doc, count int64 // the first document, and how many there are
	sequence   int64
	pack       bool

	sum, most int64 // tokens in all rows, and in the longest one
}

// measure counts the rows' tokens.
func (d *documents) measure() error {
	if d.sum, d.most = d.hi-d.lo, min(d.sequence, d.hi-d.lo); d.pack || d.count == 0 {
		return nil
	}
	d.sum, d.most = 0, 0
	last := d.doc + d.count
	for b := range d.blocks {
		from, until := d.blocks[b].doc, d.docsUntil(b)
		if d.count > 1 && from >= d.doc && until <= last {
			d.sum += d.blocks[b].cut
			d.most = max(d.most, d.blocks[b].longest)
			continue
		}
		// the part begins or ends in this block
		for i := max(from, d.doc); i < min(until, last); i++ {
			lo, hi, err := d.span(i - d.doc)
			if err != nil {
				return err
			}
			d.sum += hi - lo
			d.most = max(d.most, hi-lo)
		}
	}
	return nil
}

func (d *documents) units() int64   { return d.count }
func (d *documents) tokens() int64  { return d.sum }
func (d *documents) longest() int64 { return d.most }

func (d *documents) checksum() uint32 {
	sums := make([]uint32, len(d.blocks))
	for i := range d.blocks {
		sums[i] = d.blocks[i].crc
	}
	return checksum(sums)
}

func (d *documents) rows() int64 {
	if !d.pack {
		return d.count
	}
	return (d.hi - d.lo + d.sequence - 1) / d.sequence
}

// span is the tokens [lo, hi) of a row. The last packed row may be shorter; a document longer than
// a row is cut when not packed.
func (d *documents) span(r int64) (lo, hi int64, err error) {
	if d.pack {
		lo = d.lo + r*d.sequence
		return lo, min(lo+d.sequence, d.hi), nil
	}
	if lo, err = d.start(d.doc + r); err != nil {
		return 0, 0, err
	}
	if hi, err = d.start(d.doc + r + 1); err != nil {
		return 0, 0, err
	}
	lo = max(lo, d.lo)
	return lo, min(hi, d.hi, lo+d.sequence), nil
}

// length is the number of tokens of a row.
func (d *documents) length(r int64) (int64, error) {
	lo, hi, err := d.span(r)
	return hi - lo, err
}

func (d *documents) appendRow(m *MicroBatch, r int64) error {
	lo, hi, err := d.span(r)
	if err != nil {
		return err
	}
	base, first := int64(len(m.IDs)), len(m.CuSeqlens)
	ids, targets, positions := m.grow(hi - lo)
	for at, b := lo, d.find(lo); at < hi; b++ {
		p, err := d.reader.piece(d.index, b)
		if err != nil {
			return err
		}
		off := d.blocks[b].token
		end := min(off+int64(len(p.ids)), hi)
		copy(ids[at-lo:end-lo], p.ids[at-off:])
		for _, s := range p.starts[sort.Search(len(p.starts), func(i int) bool { return p.starts[i] > lo-off }):] {
			if off+s >= hi {
				break
			}
			m.CuSeqlens = append(m.CuSeqlens, base+off+s-lo)
		}
		at = end
	}
	m.CuSeqlens = append(m.CuSeqlens, base+hi-lo)
	at := int64(0)
	for _, end := range m.CuSeqlens[first:] {
		for end -= base; at < end; {
			from := at
			for ; at < end; at++ {
				positions[at] = int32(at - from)
				if targets[at] = Ignore; at+1 < end {
					targets[at] = ids[at+1]
				}
			}
		}
	}
	return nil
}

// part is the tokens [lo, hi) with count documents from doc on.
func (d *documents) part(lo, hi, doc, count int64) (source, error) {
	p := *d
	p.lo, p.hi, p.doc, p.count = lo, hi, doc, count
	return &p, p.measure()
}

func (d *documents) split(unit int64) (before, after source, err error) {
	at, err := d.start(d.doc + unit)
	if err != nil {
		return nil, nil, err
	}
	if before, err = d.part(d.lo, at, d.doc, unit); err == nil {
		after, err = d.part(at, d.hi, d.doc+unit, d.count-unit)
	}
	return before, after, err
}

func (d *documents) cut(at func(int64) int64) (head, tail source, err error) {
	n := d.hi - d.lo
	if n < 2 {
		return nil, nil, status.Errorf(status.InvalidConfig, "eval.split: a single document of %d token cannot be split: give eval.path, or more text", n)
	}
	k := d.lo + at(n)
	if head, err = d.part(d.lo, k, d.doc, 1); err == nil {
		tail, err = d.part(k, d.hi, d.doc, 1)
	}
	return head, tail, err
}
