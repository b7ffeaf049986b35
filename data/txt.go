package data

import (
	"fmt"
	"slices"
	"unicode/utf8"

	"ulysses/data/tokenizer"
	"ulysses/internal/status"
)

// txtBytes is a .txt file without a tokenizer. The file is one document, each byte is a token, and
// each unit is a block.
type txtBytes struct {
	name       string
	size       int64 // bytes of the file
	blockBytes int64
}

func (f *txtBytes) path() string { return f.name }
func (f *txtBytes) work() int64  { return f.size }
func (f *txtBytes) unit() int64  { return f.blockBytes }

func (f *txtBytes) scan(d *decoder, lo, hi int64) (err error) {
	if d.raw, err = d.read(f.name, lo, hi-lo, d.raw[:0]); err != nil {
		return err
	}
	return d.scanBlock(f, block{offset: lo}, d.raw)
}

func (f *txtBytes) decode(d *decoder, b *block, raw []byte, p *decodedBlock) (err error) {
	doc := int64(-1)
	if b.offset == 0 {
		p.starts, doc = append(p.starts, 0), 0
	}
	d.tokensBefore = b.offset
	p.ids, err = d.encode(p.ids, textAt(b.offset, raw), none, doc)
	d.tokensBefore = 0
	return err
}

// txtTokens is a .txt file with a tokenizer. The file is one document and one unit.
//
// The tokens of a part of a text may depend on the text around it. So scan encodes the whole file,
// and then divides it after newlines into blocks which, encoded alone, give the same tokens. If
// there is no such division, the whole file is one block.
type txtTokens struct {
	name       string
	size       int64 // bytes of the file
	blockBytes int64 // smallest limit of a block
}

func (f *txtTokens) path() string { return f.name }
func (f *txtTokens) work() int64  { return f.size }
func (f *txtTokens) unit() int64  { return f.size }

func (f *txtTokens) scan(d *decoder, _, _ int64) (err error) {
	if d.raw, err = d.read(f.name, 0, f.size, d.raw[:0]); err != nil {
		return err
	}
	if at := notUTF8(d.raw); at >= 0 {
		return &fault{Line: none, Doc: 0, Code: status.InvalidConfig,
			Text: fmt.Sprintf(", byte %d: the text is not UTF-8; convert the file to UTF-8", at)}
	}
	whole, err := d.encode(nil, textAt(0, d.raw), none, 0)
	if err != nil || len(whole) == 0 {
		return err
	}
	before, starts := len(d.blocks), len(d.starts)
	at, rest := int64(0), whole
	for at < f.size {
		end, err := f.decodeNext(d, at, rest)
		if err != nil {
			return err
		}
		if end == at { // no division is possible: the file is one block
			d.blocks, d.starts = d.blocks[:before], d.starts[:starts]
			d.decoded.reset()
			d.decoded.ids = append(d.decoded.ids, whole...)
			at, rest, end = 0, whole, f.size
		}
		rest = rest[len(d.decoded.ids):]
		f.markDocument(d, at, end, &d.decoded)
		d.record(block{offset: at}, d.raw[at:end], &d.decoded)
		at = end
	}
	return nil
}

// decodeNext decodes the block that starts at an offset of the text, and returns its end. rest is
// the tokens of the text from there on; the block's tokens are the first of them. It returns at if
// no block with a limit of at most 8·blockBytes has these tokens.
func (f *txtTokens) decodeNext(d *decoder, at int64, rest []int32) (end int64, err error) {
	p := &d.decoded
	for limit := f.blockBytes; limit <= 8*f.blockBytes; limit *= 2 {
		end = blockEnd(d.raw, at, limit)
		p.reset()
		if p.ids, err = d.encode(p.ids, textAt(at, d.raw[at:end]), none, 0); err != nil {
			return at, err
		}
		n := len(p.ids)
		if n <= len(rest) && slices.Equal(p.ids, rest[:n]) && (end < f.size || n == len(rest)) {
			return end, nil
		}
		if end == f.size {
			break
		}
	}
	return at, nil
}

// blockEnd returns the position after the last newline in text[at:at+limit] that is not followed by
// whitespace. If a long line has none, it returns the position after the next such newline, or the
// end of the text.
func blockEnd(text []byte, at, limit int64) int64 {
	n := int64(len(text))
	if at+limit >= n {
		return n
	}
	isEnd := func(i int64) bool { return text[i-1] == '\n' && text[i] > ' ' }
	for i := at + limit - 1; i > at; i-- {
		if isEnd(i) {
			return i
		}
	}
	for i := at + limit; i < n; i++ {
		if isEnd(i) {
			return i
		}
	}
	return n
}

func (f *txtTokens) decode(d *decoder, b *block, raw []byte, p *decodedBlock) (err error) {
	p.ids, err = d.encode(p.ids, textAt(b.offset, raw), none, 0)
	f.markDocument(d, b.offset, b.offset+int64(len(raw)), p)
	return err
}

// markDocument records the start of the document in the first block, to which it adds the ids that
// begin a document, and appends the EOS id to the last block.
func (f *txtTokens) markDocument(d *decoder, at, end int64, p *decodedBlock) {
	if at == 0 {
		p.starts = append(p.starts, 0)
		p.ids = tokenizer.InsertBegin(p.ids, 0, d.begin)
	}
	if end == f.size {
		p.ids = d.appendEOS(p.ids)
	}
}

// notUTF8 returns the position of the first byte that is not UTF-8, or -1. A tokenizer replaces
// such bytes by U+FFFD, so a text in another encoding would be trained without its letters.
func notUTF8(text []byte) int {
	if utf8.Valid(text) {
		return -1
	}
	at := 0
	for {
		r, n := utf8.DecodeRune(text[at:])
		if r == utf8.RuneError && n == 1 {
			return at
		}
		at += n
	}
}
