package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// format is a file of documents. The opening pass cuts the file's work into units and finds the
// blocks that begin in each, whatever rank and worker takes it; reading rows decodes these blocks
// again.
type format interface {
	path() string
	work() int64 // bytes that the opening pass has to look at
	unit() int64 // bytes of a unit of it
	// scan finds the blocks of unit [lo, hi) of the work and hands each to d.emit. A fault in the
	// data is a *fault, whose line and document are counted from the unit's first.
	scan(d *decoder, lo, hi int64) error
	// decode fills p with the tokens of a block, whose bytes are raw, and where documents start in
	// it.
	decode(d *decoder, b *block, raw []byte, p *piece) error
}

// block is what is kept in memory of a piece of a file: enough to find it and to read it again, and
// no other data instead.
type block struct {
	offset, size int64 // bytes of the file
	token        int64 // tokens before it; in found, tokens in it
	doc          int64 // documents that start before it; in found, those that start in it
	// tokens in the rows of the documents that start here, when each is a row of at most sequence
	cut     int64
	longest int64 // the longest of these rows
	// of a Megatron file: the first entry of its documents that starts in it or behind it
	entry int64
	file  int32
	crc   uint32 // CRC-32C of the bytes and of where documents start
}

// found is a block as the opening pass sees it, with what it takes to put blocks together.
type found struct {
	block
	lines int64 // newlines in it
	// tokens before the first document that starts in it: they go on with an earlier one
	head int64
	last int64 // where the last document that starts in it does
}

// piece is a decoded block.
type piece struct {
	ids    []int32
	starts []int64 // where documents start, counted from its first token
	lines  int64
	crc    uint32
}

func (p *piece) reset() { p.ids, p.starts, p.lines, p.crc = p.ids[:0], p.starts[:0], 0, 0 }

func (p *piece) bytes() int64 { return 4*int64(cap(p.ids)) + 8*int64(cap(p.starts)) }

// castagnoli is the polynomial that processors have an instruction for.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sum is the checksum of a block: its bytes, and the starts, which for a Megatron file lie in
// another file.
func (p *piece) sum(raw []byte) {
	p.crc = crc32.Update(0, castagnoli, raw)
	var b [8]byte
	for _, s := range p.starts {
		for i := range b {
			b[i] = byte(s >> (8 * i))
		}
		p.crc = crc32.Update(p.crc, castagnoli, b[:])
	}
}

// checksum is one for many, in order.
func checksum(sums []uint32) (crc uint32) {
	for _, x := range sums {
		crc = crc32.Update(crc, castagnoli, binary.LittleEndian.AppendUint32(nil, x))
	}
	return crc
}

// decoder is the open files and buffers of one worker.
type decoder struct {
	encoder  Tokenizer // nil = bytes
	addEOS   bool
	vocab    int64
	sequence int64
	before   int64 // tokens of the document before the text that is encoded, for errors
	raw      []byte
	side     []byte // the text of a document
	piece    piece
	blocks   []found
	open     map[string]*os.File
}

// maxOpen bounds the files a decoder keeps open.
const maxOpen = 16

func (d *decoder) file(path string) (*os.File, error) {
	if f := d.open[path]; f != nil {
		return f, nil
	}
	f, _, err := input.Open(path)
	if err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be opened: %w", path, err)
	}
	if len(d.open) >= maxOpen {
		d.close()
	}
	if d.open == nil {
		d.open = map[string]*os.File{}
	}
	d.open[path] = f
	return f, nil
}

// close closes the files; they are opened again when they are needed.
func (d *decoder) close() {
	for _, f := range d.open {
		f.Close()
	}
	clear(d.open)
}

// read appends the bytes [offset, offset+n) of a file to buf, all of them or an error.
func (d *decoder) read(path string, offset, n int64, buf []byte) ([]byte, error) {
	f, err := d.file(path)
	if err != nil {
		return buf, err
	}
	at := len(buf)
	buf = extend(buf, int(n))
	if _, err := f.ReadAt(buf[at:], offset); err == io.EOF {
		return buf[:at], status.Errorf(status.IO, "%s: it ends before byte %d: it became shorter while it was read", path, offset+n)
	} else if err != nil {
		return buf[:at], status.Errorf(status.IO, "%s: cannot be read at byte %d: %w", path, offset, err)
	}
	return buf, nil
}

// textAt is a piece of a file of text from a place on: a byte order mark is no part of it.
func textAt(offset int64, raw []byte) []byte {
	if offset == 0 {
		return input.TrimBOM(raw)
	}
	return raw
}

// extend makes a slice n elements longer. A large slice gets little spare capacity, so that a block
// as large as a file does not cost twice its size.
func extend[T any](s []T, n int) []T {
	if need := len(s) + n; need > cap(s) {
		t := make([]T, len(s), max(need, min(2*cap(s), need+need/8+1<<20)))
		copy(t, s)
		s = t
	}
	return s[:len(s)+n]
}

// large is the size of a buffer that is not kept for the next block.
const large = 8 << 20

// shrink gives large buffers back.
func (d *decoder) shrink() {
	if cap(d.raw) > large {
		d.raw = nil
	}
	if cap(d.side) > large {
		d.side = nil
	}
	if d.piece.bytes() > large {
		d.piece = piece{}
	}
}

// emit decodes a block of a file for the first time and notes what is found.
func (d *decoder) emit(f format, b block, raw []byte) error {
	p := &d.piece
	p.reset()
	if err := f.decode(d, &b, raw, p); err != nil {
		return err
	}
	d.note(b, raw, p)
	return nil
}

// note measures a decoded block.
func (d *decoder) note(b block, raw []byte, p *piece) {
	p.sum(raw)
	n := int64(len(p.ids))
	x := found{block: b, lines: p.lines, head: n}
	x.token, x.doc, x.crc, x.size = n, int64(len(p.starts)), p.crc, int64(len(raw))
	for i, s := range p.starts {
		if i == 0 {
			x.head = s
		} else {
			length := min(s-x.last, d.sequence)
			x.cut += length
			x.longest = max(x.longest, length)
		}
		x.last = s
	}
	if n > 0 || x.lines > 0 {
		d.blocks = append(d.blocks, x)
	}
}

// fault is an error in the data. Its line and document are known once everything before it has been
// counted.
type fault struct {
	File int
	// counted from the unit's first, or none; document -1 is the one that goes on from before the
	// unit
	Line, Doc int64
	Code      status.Code
	Rest      string // of the sentence
}

// none is no line, or no document.
const none = math.MinInt64

func (f *fault) Error() string { return f.Rest }

// faultOf makes an error of a scan into a fault that travels between ranks.
func faultOf(err error, file int) *fault {
	var f *fault
	if !errors.As(err, &f) {
		f = &fault{Line: none, Doc: none, Code: status.Of(err), Rest: err.Error()}
	}
	f.File = file
	return f
}

// at is the error, with the lines and documents that lie before the fault's unit.
func (f *fault) at(path string, lines, docs int64) error {
	where := path
	if f.Line == none && f.Doc == none {
		return &status.Error{Code: f.Code, Text: f.Rest}
	}
	if f.Line != none {
		where += fmt.Sprintf(":%d", lines+f.Line+1)
	}
	if f.Doc != none {
		where += fmt.Sprintf(" (document %d)", docs+f.Doc)
	}
	return &status.Error{Code: f.Code, Text: where + f.Rest}
}

// outside is the rest of the sentence about an id that no model can embed.
func outside(position, id, vocab int64) string {
	return fmt.Sprintf(", position %d: token id %d is outside the model's vocabulary of %d (ids 0 to %d): the tokens belong to another model, or vocab_size is too small",
		position, id, vocab, vocab-1)
}
