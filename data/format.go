package data

import "ulysses/internal/input"

// format is a file of documents: txtBytes, txtTokens, jsonl, megatronIndex or megatronTokens.
//
// When the file is opened, a scan divides the bytes of the file into units and finds the blocks
// that begin in each unit. The blocks do not depend on the rank and the goroutine that scan a unit.
// When sequences are read, the blocks are decoded again.
type format interface {
	path() string
	work() int64 // bytes that a scan processes
	unit() int64 // bytes of a unit
	// scan finds the blocks of unit [lo, hi) and calls d.scanBlock or d.record for each. A fault in
	// the data is a *fault whose line and document count from the start of the unit.
	scan(d *decoder, lo, hi int64) error
	// decode stores the tokens of a block with bytes raw, and the positions where documents start,
	// in p.
	decode(d *decoder, b *block, raw []byte, p *decodedBlock) error
}

// scanBlock decodes a block of a file for the first time and records it.
func (d *decoder) scanBlock(f format, b block, raw []byte) error {
	p := &d.decoded
	p.reset()
	if err := f.decode(d, &b, raw, p); err != nil {
		return err
	}
	d.record(b, raw, p)
	return nil
}

// textAt returns the text of bytes that begin at an offset of a file. A byte order mark at the
// start of the file is not text.
func textAt(offset int64, raw []byte) []byte {
	if offset == 0 {
		return input.TrimBOM(raw)
	}
	return raw
}
