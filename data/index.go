package data

import (
	"sort"

	"ulysses/internal/status"
)

// index is documents one behind the other, in files that follow one another: what is held in memory
// is where their blocks are.
type index struct {
	files  []format
	blocks []block // each with a token
	tokens int64
	docs   int64
	reader *reader
}

// newIndex puts blocks together that were found in this order.
func newIndex(files []format, blocks []found, sequence int64, r *reader) *index {
	x := &index{files: files, reader: r}
	n := 0
	for _, f := range blocks {
		if f.token > 0 {
			n++
		}
	}
	x.blocks = make([]block, 0, n)
	// the block where the document starts that is open, and its tokens so far
	starter, length := -1, int64(0)
	end := func() {
		if starter >= 0 {
			b := &x.blocks[starter]
			b.cut += min(length, sequence)
			b.longest = max(b.longest, min(length, sequence))
		}
	}
	for _, f := range blocks {
		if f.token == 0 {
			continue
		}
		length += f.head
		if f.doc > 0 {
			end()
			starter, length = len(x.blocks), f.token-f.last
		}
		b := f.block
		b.token, b.doc = x.tokens, x.docs
		x.blocks = append(x.blocks, b)
		x.tokens += f.token
		x.docs += f.doc
	}
	end()
	return x
}

// find is the block that holds a token.
func (x *index) find(token int64) int {
	return sort.Search(len(x.blocks), func(i int) bool { return x.blocks[i].token > token }) - 1
}

// until is the number of tokens before the end of a block.
func (x *index) until(b int) int64 {
	if b+1 < len(x.blocks) {
		return x.blocks[b+1].token
	}
	return x.tokens
}

// docsUntil is the number of documents that start before the end of a block.
func (x *index) docsUntil(b int) int64 {
	if b+1 < len(x.blocks) {
		return x.blocks[b+1].doc
	}
	return x.docs
}

// start is the first token of a document, or the end of the last one.
func (x *index) start(doc int64) (int64, error) {
	if doc >= x.docs {
		return x.tokens, nil
	}
	// Blocks in which no document starts have the number of the next one, so it starts in the last
	// block that does not lie behind it.
	b := sort.Search(len(x.blocks), func(i int) bool { return x.blocks[i].doc > doc }) - 1
	p, err := x.reader.piece(x, b)
	if err != nil {
		return 0, err
	}
	return x.blocks[b].token + p.starts[doc-x.blocks[b].doc], nil
}

// load reads a block again and refuses other data than the opening pass has seen.
func (x *index) load(d *decoder, b int, p *piece) error {
	at := &x.blocks[b]
	f := x.files[at.file]
	var err error
	if d.raw, err = d.read(f.path(), at.offset, at.size, d.raw[:0]); err != nil {
		return err
	}
	p.reset()
	err = f.decode(d, at, d.raw, p)
	p.sum(d.raw)
	d.shrink()
	if err != nil || p.crc != at.crc || int64(len(p.ids)) != x.until(b)-at.token || int64(len(p.starts)) != x.docsUntil(b)-at.doc {
		return status.Errorf(status.IO, "%s: bytes %d to %d are not those that were there when the job began: leave the files of data.path and eval.path alone while a job runs; start it again",
			f.path(), at.offset, at.offset+at.size)
	}
	return nil
}
