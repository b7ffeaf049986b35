package data

import "slices"

// txtBytes is a .txt file, one document, where a byte is a token: a block is a unit.
type txtBytes struct {
	name       string
	size, step int64
}

func (f *txtBytes) path() string { return f.name }
func (f *txtBytes) work() int64  { return f.size }
func (f *txtBytes) unit() int64  { return f.step }

func (f *txtBytes) scan(d *decoder, lo, hi int64) (err error) {
	if d.raw, err = d.read(f.name, lo, hi-lo, d.raw[:0]); err != nil {
		return err
	}
	return d.emit(f, block{offset: lo}, d.raw)
}

func (f *txtBytes) decode(d *decoder, b *block, raw []byte, p *piece) (err error) {
	doc := int64(-1)
	if b.offset == 0 {
		p.starts, doc = append(p.starts, 0), 0
	}
	d.before = b.offset
	p.ids, err = d.encode(p.ids, textAt(b.offset, raw), none, doc)
	d.before = 0
	return err
}

// txtTokens is a .txt file, one document, with a tokenizer. What the tokens of a piece are may
// depend on what surrounds it, so the opening pass has the whole file encoded. Then it looks for
// cuts behind newlines that change nothing: those where the pieces alone give the tokens that they
// have in the whole. Where there are such cuts, pieces between them are blocks; else the file is
// one, held while it is read.
type txtTokens struct {
	name       string
	size, step int64
}

func (f *txtTokens) path() string { return f.name }
func (f *txtTokens) work() int64  { return f.size }
func (f *txtTokens) unit() int64  { return f.size }

func (f *txtTokens) scan(d *decoder, _, _ int64) (err error) {
	if d.raw, err = d.read(f.name, 0, f.size, d.raw[:0]); err != nil {
		return err
	}
	whole, err := d.encode(nil, textAt(0, d.raw), none, 0)
	if err != nil || len(whole) == 0 {
		return err
	}
	before := len(d.blocks)
	at, left := int64(0), whole
	for at < f.size {
		end, err := f.piece(d, at, left)
		if err != nil {
			return err
		}
		if end == at { // nothing fits here: the file is one block
			d.blocks = d.blocks[:before]
			d.piece.reset()
			d.piece.ids = append(d.piece.ids, whole...)
			at, left, end = 0, whole, f.size
		}
		left = left[len(d.piece.ids):]
		f.finish(d, at, end, &d.piece)
		d.note(block{offset: at}, d.raw[at:end], &d.piece)
		at = end
	}
	return nil
}

// piece decodes a piece of the text from a place on, whose tokens are the first of those that are
// left. It returns its end, or the place itself if no such piece was found soon.
func (f *txtTokens) piece(d *decoder, at int64, left []int32) (end int64, err error) {
	p := &d.piece
	for step := f.step; step <= 8*f.step; step *= 2 {
		end = cutText(d.raw, at, step)
		p.reset()
		if p.ids, err = d.encode(p.ids, textAt(at, d.raw[at:end]), none, 0); err != nil {
			return at, err
		}
		n := len(p.ids)
		if n <= len(left) && slices.Equal(p.ids, left[:n]) && (end < f.size || n == len(left)) {
			return end, nil
		}
		if end == f.size {
			break
		}
	}
	return at, nil
}

// cutText is the place behind the last newline of a step of the text that no further space follows,
// or the end of the text.
func cutText(text []byte, at, step int64) int64 {
	if at+step >= int64(len(text)) {
		return int64(len(text))
	}
	for i := at + step - 1; i > at; i-- {
		if text[i-1] == '\n' && text[i] > ' ' {
			return i
		}
	}
	return int64(len(text))
}

func (f *txtTokens) decode(d *decoder, b *block, raw []byte, p *piece) (err error) {
	p.ids, err = d.encode(p.ids, textAt(b.offset, raw), none, 0)
	f.finish(d, b.offset, b.offset+int64(len(raw)), p)
	return err
}

// finish says where the document starts, and ends it.
func (f *txtTokens) finish(d *decoder, at, end int64, p *piece) {
	if at == 0 {
		p.starts = append(p.starts, 0)
	}
	if end == f.size {
		p.ids = d.end(p.ids)
	}
}
