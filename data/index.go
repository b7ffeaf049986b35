package data

import (
	"sort"

	"ulysses/internal/status"
)

// index locates the blocks of consecutive files. The documents of all files form one list of
// tokens, in the order of the files.
type index struct {
	files  []format
	blocks []block // each has at least one token
	tokens int64
	docs   int64
	cache  *blockCache
	// some documents have labels of their own; some are of conversations
	labelled, chat bool
	// first tokens of the documents; only if Config.needsStarts
	starts []int64
}

// newIndex makes an index of the blocks that a scan found, in their order. sequence is
// data.sequence. starts are the positions in the blocks where documents start; nil = not gathered.
func newIndex(files []format, found []foundBlock, starts []uint32, sequence int64, cache *blockCache) *index {
	x := &index{files: files, cache: cache}
	n := 0
	for _, f := range found {
		if f.token > 0 {
			n++
		}
	}
	x.blocks = make([]block, 0, n)
	// the block in which the current document starts, -1 = none, and the document's tokens so far
	first, length := -1, int64(0)
	end := func() {
		if first >= 0 {
			b := &x.blocks[first]
			b.unpacked += min(length, sequence)
			b.longest = max(b.longest, min(length, sequence))
		}
	}
	for _, f := range found {
		if f.token == 0 {
			continue
		}
		length += f.head
		if f.doc > 0 {
			end()
			first, length = len(x.blocks), f.token-f.last
		}
		if starts != nil {
			for _, s := range starts[:f.doc] {
				x.starts = append(x.starts, x.tokens+int64(s))
			}
			starts = starts[f.doc:]
		}
		b := f.block
		b.token, b.doc = x.tokens, x.docs
		x.blocks = append(x.blocks, b)
		x.chat, x.labelled = x.chat || f.chat, x.labelled || f.labelled
		x.tokens += f.token
		x.docs += f.doc
	}
	end()
	return x
}

// find returns the block that contains a token.
func (x *index) find(token int64) int {
	return sort.Search(len(x.blocks), func(i int) bool { return x.blocks[i].token > token }) - 1
}

// tokensUntil returns the number of tokens before the end of a block.
func (x *index) tokensUntil(b int) int64 {
	if b+1 < len(x.blocks) {
		return x.blocks[b+1].token
	}
	return x.tokens
}

// docsUntil returns the number of documents that start before the end of a block.
func (x *index) docsUntil(b int) int64 {
	if b+1 < len(x.blocks) {
		return x.blocks[b+1].doc
	}
	return x.docs
}

// start returns the first token of a document, or the number of tokens if doc is the number of
// documents.
func (x *index) start(doc int64) (int64, error) {
	if doc >= x.docs {
		return x.tokens, nil
	}
	// A block in which no document starts has the number of the next document. So the document
	// starts in the last block whose number is not greater.
	b := sort.Search(len(x.blocks), func(i int) bool { return x.blocks[i].doc > doc }) - 1
	p, err := x.decoded(b)
	if err != nil {
		return 0, err
	}
	return x.blocks[b].token + p.starts[doc-x.blocks[b].doc], nil
}

// decoded returns the content of a block, which is valid until the next call.
func (x *index) decoded(b int) (*decodedBlock, error) {
	return x.cache.get(&x.blocks[b], func(d *decoder, p *decodedBlock) error { return x.load(d, b, p) })
}

// load decodes a block again. It returns an error if the content has changed since the scan.
func (x *index) load(d *decoder, b int, p *decodedBlock) error {
	at := &x.blocks[b]
	f := x.files[at.file]
	var err error
	if d.raw, err = d.read(f.path(), at.offset, at.size, d.raw[:0]); err != nil {
		return err
	}
	p.reset()
	err = f.decode(d, at, d.raw, p)
	p.sum(d.raw)
	d.releaseLarge()
	if err != nil || p.crc != at.crc || int64(len(p.ids)) != x.tokensUntil(b)-at.token ||
		int64(len(p.starts)) != x.docsUntil(b)-at.doc {
		return status.Errorf(status.IO,
			"%s: bytes %d to %d have changed since the job began; start the job again, and do not change the files of data.path and eval.path while a job runs",
			f.path(), at.offset, at.offset+at.size)
	}
	return nil
}
