package data

import (
	"encoding/binary"
	"hash/crc32"
)

// block is a byte range of a file. A block is small in memory: it has what is needed to find the
// bytes, to decode them again and to detect that they have changed.
type block struct {
	offset, size int64 // bytes of the file
	// tokens of the index before this block; in a foundBlock, tokens in this block
	token int64
	// documents that start before this block; in a foundBlock, documents that start in it
	doc int64
	// Without packing each document is one sequence of at most data.sequence tokens. These are the
	// tokens of all sequences that start in this block, and of the longest one.
	unpacked, longest int64
	// of a Megatron file: the first entry of the list of documents that starts in or after the
	// block
	entry int64
	file  int32  // index in index.files
	crc   uint32 // CRC-32C of the bytes and of the positions where documents start
	chat  bool   // a document is of a conversation
	// some labels are not the ids
	labelled bool
}

// foundBlock is a block as a scan finds it, with the values that newIndex needs.
type foundBlock struct {
	block
	lines int64 // newlines in the block
	head  int64 // tokens before the first start of a document; they belong to an earlier document
	last  int64 // position at which the last document of the block starts
}

// decodedBlock is the content of a block.
type decodedBlock struct {
	ids    []int32
	labels []int32 // [len(ids)] ids, or Ignore, or other ids; empty = ids
	starts []int64 // positions in ids where documents start
	lines  int64   // newlines so far
	crc    uint32
	chat   bool // a document is of a conversation
}

func (p *decodedBlock) reset() {
	p.ids, p.labels, p.starts, p.lines, p.crc, p.chat = p.ids[:0], p.labels[:0], p.starts[:0], 0, 0, false
}

// bytes returns the size of the memory.
func (p *decodedBlock) bytes() int64 {
	return 4*int64(cap(p.ids)+cap(p.labels)) + 8*int64(cap(p.starts))
}

// sum sets the checksum of a block with the given bytes. It covers the starts as well, because the
// starts of a Megatron file are in another file.
func (p *decodedBlock) sum(raw []byte) {
	p.crc = crc32.Update(0, castagnoli, raw)
	var b [8]byte
	for _, s := range p.starts {
		for i := range b {
			b[i] = byte(s >> (8 * i))
		}
		p.crc = crc32.Update(p.crc, castagnoli, b[:])
	}
}

// castagnoli is the polynomial for which x86 and ARM have an instruction.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum returns the CRC-32C of a list of checksums.
func checksum(sums []uint32) (crc uint32) {
	for _, x := range sums {
		crc = crc32.Update(crc, castagnoli, binary.LittleEndian.AppendUint32(nil, x))
	}
	return crc
}
