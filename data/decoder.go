package data

import (
	"fmt"
	"io"
	"os"

	"ulysses/data/chat"
	"ulysses/data/tokenizer"
	"ulysses/internal/input"
	"ulysses/internal/status"
)

// decoder reads and decodes blocks. It has the open files and the buffers of one goroutine.
type decoder struct {
	tokenizer Tokenizer // nil = each byte is a token
	chat      *chat.Reader
	begin     []int32 // ids that begin a document of text
	addEOS    bool
	vocab     int64
	sequence  int64 // data.sequence
	// tokens of the document before the text that is being encoded; errors count from there
	tokensBefore int64
	raw          []byte   // bytes of a block
	text         []byte   // text of one document
	mask         []bool   // of the tokens of a document
	spans        [][2]int // of the tokens of a document: bytes of its text
	decoded      decodedBlock
	blocks       []foundBlock // found in the current unit
	keepStarts   bool         // Config.needsStarts
	starts       []uint32     // positions in the blocks of the unit where documents start
	files        map[string]*os.File
	expanded     map[string]*os.File // temporary files, which the opener has opened; see unpack
}

// maxFiles limits the open files of a decoder.
const maxFiles = 16

func (d *decoder) file(path string) (*os.File, error) {
	if f := d.files[path]; f != nil {
		return f, nil
	}
	if f := d.expanded[path]; f != nil {
		return f, nil
	}
	f, _, err := input.Open(path)
	if err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be opened: %w", path, err)
	}
	if len(d.files) >= maxFiles {
		d.close()
	}
	if d.files == nil {
		d.files = map[string]*os.File{}
	}
	d.files[path] = f
	return f, nil
}

// close closes the files. The next read opens them again.
func (d *decoder) close() {
	for _, f := range d.files {
		f.Close()
	}
	clear(d.files)
}

// read appends bytes [offset, offset+n) of a file to buf. It returns all of them or an error.
func (d *decoder) read(path string, offset, n int64, buf []byte) ([]byte, error) {
	f, err := d.file(path)
	if err != nil {
		return buf, err
	}
	at := len(buf)
	buf = extend(buf, int(n))
	if _, err := f.ReadAt(buf[at:], offset); err == io.EOF {
		return buf[:at],
			status.Errorf(status.IO,
				"%s: the file ends before byte %d: it became shorter while the job read it; start the job again, and do not change the file while a job runs",
				path, offset+n)
	} else if err != nil {
		return buf[:at], status.Errorf(status.IO, "%s: cannot be read at byte %d: %w", path, offset, err)
	}
	return buf, nil
}

// extend makes a slice n elements longer. A large slice gets at most an eighth of its size as spare
// capacity, so that a block of the size of its file does not use twice the file's size.
func extend[T any](s []T, n int) []T {
	if need := len(s) + n; need > cap(s) {
		t := make([]T, len(s), max(need, min(2*cap(s), need+need/8+1<<20)))
		copy(t, s)
		s = t
	}
	return s[:len(s)+n]
}

// maxKept is the largest buffer, in bytes, that is kept for the next block.
const maxKept = 8 << 20

// releaseLarge releases buffers larger than maxKept.
func (d *decoder) releaseLarge() {
	if cap(d.raw) > maxKept {
		d.raw = nil
	}
	if cap(d.text) > maxKept {
		d.text = nil
	}
	if d.decoded.bytes() > maxKept {
		d.decoded = decodedBlock{}
	}
}

// record appends a decoded block with the given bytes to d.blocks.
func (d *decoder) record(b block, raw []byte, p *decodedBlock) {
	p.sum(raw)
	n := int64(len(p.ids))
	x := foundBlock{block: b, lines: p.lines, head: n}
	x.chat, x.labelled = p.chat, len(p.labels) > 0
	x.token, x.doc, x.crc, x.size = n, int64(len(p.starts)), p.crc, int64(len(raw))
	for i, s := range p.starts {
		if i == 0 {
			x.head = s
		} else {
			length := min(s-x.last, d.sequence)
			x.unpacked += length
			x.longest = max(x.longest, length)
		}
		x.last = s
	}
	if n > 0 || x.lines > 0 {
		d.blocks = append(d.blocks, x)
		for _, s := range p.starts {
			if d.keepStarts {
				d.starts = append(d.starts, uint32(s))
			}
		}
	}
}

// appendDocument encodes a document and appends it to a block. A document without tokens is left
// out. The line and document of a fault count from the start of the block.
func (d *decoder) appendDocument(p *decodedBlock, text []byte, line int64) error {
	at := len(p.ids)
	var err error
	if p.ids, err = d.encode(p.ids, text, line, int64(len(p.starts))); err != nil || len(p.ids) == at {
		return err
	}
	p.starts = append(p.starts, int64(at))
	p.ids = d.appendEOS(tokenizer.InsertBegin(p.ids, at, d.begin))
	if len(p.labels) > 0 {
		p.labels = append(p.labels, p.ids[at:]...)
	}
	return nil
}

// appendEOS appends the id that ends a document, if data.add_eos is set, the tokenizer has one, and
// the document does not end with it already.
func (d *decoder) appendEOS(ids []int32) []int32 {
	if d.tokenizer != nil && d.addEOS {
		if id, ok := d.tokenizer.EOS(); ok && (len(ids) == 0 || ids[len(ids)-1] != id) {
			return append(ids, id)
		}
	}
	return ids
}

// encode appends the ids of a text and returns a *fault if one is outside the vocabulary.
func (d *decoder) encode(ids []int32, text []byte, line, doc int64) ([]int32, error) {
	at := len(ids)
	if d.tokenizer != nil {
		var err error
		if ids, err = d.tokenizer.Encode(ids, text); err != nil {
			return ids, &fault{Line: line, Doc: doc, Code: status.Of(err), Text: ": data.tokenizer: " + err.Error()}
		}
	} else {
		ids = extend(ids, len(text))
		for i, b := range text {
			ids[at+i] = int32(b)
		}
		if d.vocab >= 256 {
			return ids, nil
		}
	}
	for i, id := range ids[at:] {
		if int64(id) >= d.vocab || id < 0 {
			text := outsideVocabulary(d.tokensBefore+int64(i), int64(id), d.vocab)
			if d.tokenizer != nil && int64(id) >= d.tokenizer.Words() {
				text = fmt.Sprintf(
					": data.tokenizer: the added token with the id %d is outside the model's vocabulary of %d; remove it from the text",
					id, d.vocab)
			}
			return ids, &fault{Line: line, Doc: doc, Code: status.InvalidConfig, Text: text}
		}
	}
	return ids, nil
}
