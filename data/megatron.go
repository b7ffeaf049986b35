package data

import (
	"encoding/binary"
	"path/filepath"
	"sort"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// megatron is an indexed dataset of Megatron-LM (megatron/core/datasets/indexed_dataset.py). A .bin
// has the token ids, and an .idx the bounds of sequences and documents. In this file, a sequence is
// what the format calls so: a part of a document. A set makes its own sequences of the documents.
//
// The .idx is little-endian: "MMIDIDX\0\0", version 1 (u64), the type of an id (u8), the number of
// sequences n (u64), the number of entries m of the list of documents (u64), the lengths of the
// sequences (i32 [n]), their offsets in the .bin (i64 [n], bytes), and the list of documents (i64
// [m]): the first sequence of each, then n. Modes of sequences (i8 [n]) may follow; all must be 0.
type megatron struct {
	idx, bin           string // paths
	idType             idType
	sequences, entries int64 // n and m
	idxBytes, binBytes int64
	unitBytes          int64
}

// idType is a type of token ids in a .bin.
type idType struct {
	name  string
	width int64 // bytes
}

// idTypes maps Megatron-LM's codes to types. Floating-point types have no width, because they are
// refused.
var idTypes = map[byte]idType{1: {"uint8", 1}, 2: {"int8", 1}, 3: {"int16", 2}, 4: {"int32", 4}, 5: {"int64", 8},
	6: {"float64", 0}, 7: {"float32", 0}, 8: {"uint16", 2}}

const (
	idxMagic  = "MMIDIDX\x00\x00"
	idxHeader = int64(len(idxMagic) + 8 + 1 + 8 + 8)
)

// megatronFiles returns the paths of both files of a dataset. path is that of either file.
func megatronFiles(path string) (idx, bin string) {
	base := strings.TrimSuffix(path, filepath.Ext(path))
	return base + ".idx", base + ".bin"
}

// openMegatron reads the header and checks the sizes of both files. path is that of either file.
func openMegatron(path string, unitBytes int64) (*megatron, error) {
	m := &megatron{unitBytes: unitBytes}
	m.idx, m.bin = megatronFiles(path)
	for _, x := range []struct {
		path  string
		bytes *int64
	}{{m.idx, &m.idxBytes}, {m.bin, &m.binBytes}} {
		info, err := input.StatContent(x.path)
		if err != nil {
			return nil, status.Errorf(status.IO, "%s: a Megatron dataset needs both files, %s and %s: %w", path,
				filepath.Base(m.bin), filepath.Base(m.idx), err)
		}
		*x.bytes = info.Size()
	}
	f, _, err := input.Open(m.idx)
	if err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be opened: %w", m.idx, err)
	}
	defer f.Close()
	head := make([]byte, min(idxHeader, m.idxBytes))
	if _, err := f.ReadAt(head, 0); err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be read: %w", m.idx, err)
	}
	if err := m.header(head); err != nil {
		return nil, status.Errorf(status.Of(err), "%s: %w", m.idx, err)
	}
	return m, nil
}

// header decodes the header of an .idx and checks it against the sizes of both files.
func (m *megatron) header(b []byte) error {
	bad := func(format string, args ...any) error { return status.Errorf(status.InvalidConfig, format, args...) }
	if int64(len(b)) < idxHeader || string(b[:len(idxMagic)]) != idxMagic {
		return bad("the file is not the index of a Megatron dataset (it does not begin with %q and %d bytes of header); write it with Megatron-LM's IndexedDatasetBuilder",
			idxMagic, idxHeader)
	}
	b = b[len(idxMagic):]
	if v := binary.LittleEndian.Uint64(b); v != 1 {
		return bad("version %d of the index format is not supported; write it in version 1", v)
	}
	kind, ok := idTypes[b[8]]
	if !ok {
		return bad("the type code %d of the ids is unknown; use a code from 1 to 8", b[8])
	}
	if kind.width == 0 {
		return bad("the ids are %s; write them as integers", kind.name)
	}
	m.idType = kind
	n, docs := binary.LittleEndian.Uint64(b[9:]), binary.LittleEndian.Uint64(b[17:])
	if most := uint64(m.idxBytes); n > most || docs > most {
		return bad("the header has %d sequences and %d documents, but the file has only %d bytes: it is truncated or damaged; write it again",
			n, docs, m.idxBytes)
	}
	m.sequences, m.entries = int64(n), int64(docs)
	plain := m.plainBytes()
	if m.idxBytes != plain && m.idxBytes != plain+m.sequences { // with modes
		return bad("the file has %d bytes, %d sequences and %d documents need %d: it is truncated or damaged; write it again",
			m.idxBytes, n, docs, plain)
	}
	if m.entries < 1 {
		return bad("the list of documents is empty; write the file again")
	}
	if m.binBytes%m.idType.width != 0 {
		return bad("%s has %d bytes, which is not a multiple of the size of %s: it is truncated or belongs to another index; write both files again",
			filepath.Base(m.bin), m.binBytes, m.idType.name)
	}
	return nil
}

// plainBytes returns the size of the .idx without modes.
func (m *megatron) plainBytes() int64 { return idxHeader + 12*m.sequences + 8*m.entries }

// tokens returns the number of ids in the .bin.
func (m *megatron) tokens() int64 { return m.binBytes / m.idType.width }

// column is one of the lists in an .idx. It is read by windows.
type column struct {
	path   string
	offset int64 // of the list in the file
	width  int64 // bytes of an entry
	n      int64 // entries
	lo     int64 // first entry of the window
	window []byte
}

// columns returns the lengths of the sequences, their offsets in the .bin, and the list of
// documents.
func (m *megatron) columns() (lengths, offsets, docs column) {
	lengths = column{path: m.idx, offset: idxHeader, width: 4, n: m.sequences}
	offsets = column{path: m.idx, offset: lengths.offset + 4*m.sequences, width: 8, n: m.sequences}
	docs = column{path: m.idx, offset: offsets.offset + 8*m.sequences, width: 8, n: m.entries}
	return lengths, offsets, docs
}

// columnWindow is the size of a window in bytes. A binary search reads few entries of a window, a
// scan reads all.
const columnWindow = 2048

// at returns entry i.
func (c *column) at(d *decoder, i int64) (v int64, err error) {
	if i < c.lo || i >= c.lo+int64(len(c.window))/c.width {
		c.lo = i - i%(columnWindow/c.width)
		if c.window, err = d.read(c.path, c.offset+c.lo*c.width, min(columnWindow, (c.n-c.lo)*c.width),
			c.window[:0]); err != nil {
			return 0, err
		}
	}
	b := c.window[(i-c.lo)*c.width:]
	switch c.width {
	case 1:
		return int64(int8(b[0])), nil
	case 4:
		return int64(int32(binary.LittleEndian.Uint32(b))), nil
	}
	return int64(binary.LittleEndian.Uint64(b)), nil
}

// megatronIndex is the .idx. Its scan checks it, before the scan of the .bin, and finds no blocks.
type megatronIndex struct{ *megatron }

const entryWork = 20 // bytes of the entries of a sequence and of a document

func (m megatronIndex) path() string { return m.idx }
func (m megatronIndex) work() int64  { return entryWork * max(m.sequences, m.entries) }
func (m megatronIndex) unit() int64  { return m.unitBytes / entryWork * entryWork }

func (m megatronIndex) decode(*decoder, *block, []byte, *decodedBlock) error { return nil }

// scan checks that the sequences are adjacent and cover the whole .bin, and that the documents are
// adjacent and cover all sequences.
func (m megatronIndex) scan(d *decoder, lo, hi int64) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidConfig, m.idx+": "+format, args...)
	}
	lengths, offsets, docs := m.columns()
	lo, hi = lo/entryWork, hi/entryWork
	if lo == 0 && m.sequences == 0 && m.binBytes != 0 {
		return bad("there are no sequences, but %s has %d bytes: it belongs to another index; use files of one dataset",
			filepath.Base(m.bin), m.binBytes)
	}
	if err := m.checkSequences(d, lo, min(hi, m.sequences), &lengths, &offsets, bad); err != nil {
		return err
	}
	if err := m.checkModes(d, lo, min(hi, m.sequences), bad); err != nil {
		return err
	}
	return m.checkDocuments(d, lo, min(hi, m.entries), &docs, bad)
}

// checkSequences checks entries [lo, hi) of the lists of sequences.
func (m megatronIndex) checkSequences(d *decoder, lo, hi int64, lengths, offsets *column,
	bad func(string, ...any) error) error {
	for i := lo; i < hi; i++ {
		n, err := lengths.at(d, i)
		if err != nil {
			return err
		}
		from, err := offsets.at(d, i)
		if err != nil {
			return err
		}
		end := m.binBytes
		if i+1 < m.sequences {
			if end, err = offsets.at(d, i+1); err != nil {
				return err
			}
		}
		switch {
		case n < 0:
			return bad("sequence %d has %d tokens: the file is damaged; write it again", i, n)
		case i == 0 && from != 0:
			return bad("sequence 0 begins at byte %d of %s: the file is damaged; write it again", from,
				filepath.Base(m.bin))
		case from < 0 || from > m.binBytes || from+n*m.idType.width > m.binBytes:
			return bad("sequence %d, %d tokens of type %s from byte %d on, is not in %s, which has %d bytes: a file is truncated, or the files are of different datasets; use files of one dataset",
				i, n, m.idType.name, from, filepath.Base(m.bin), m.binBytes)
		case from+n*m.idType.width != end && i+1 == m.sequences:
			return bad("%s has data after the last sequence, which ends at byte %d of %d: the files are of different datasets; use files of one dataset",
				filepath.Base(m.bin), from+n*m.idType.width, end)
		case from+n*m.idType.width != end:
			return bad("sequence %d ends at byte %d and the next begins at byte %d, but only adjacent sequences are supported; write the dataset again",
				i, from+n*m.idType.width, end)
		}
	}
	return nil
}

// checkModes checks entries [lo, hi) of the list of modes, if there is one. Multimodal datasets of
// Megatron-LM give sequences that are not text, such as images, another mode than 0.
func (m megatronIndex) checkModes(d *decoder, lo, hi int64, bad func(string, ...any) error) error {
	modes := column{path: m.idx, offset: m.plainBytes(), width: 1, n: m.idxBytes - m.plainBytes()}
	for i := lo; i < min(hi, modes.n); i++ {
		mode, err := modes.at(d, i)
		if err != nil {
			return err
		}
		if mode != 0 {
			return bad("sequence %d has the mode %d, and only text (mode 0) is supported; write a dataset of the text",
				i, mode)
		}
	}
	return nil
}

// checkDocuments checks entries [lo, hi) of the list of documents.
func (m megatronIndex) checkDocuments(d *decoder, lo, hi int64, docs *column, bad func(string, ...any) error) error {
	for i := lo; i < hi; i++ {
		first, err := docs.at(d, i)
		if err != nil {
			return err
		}
		next := m.sequences
		if i+1 < m.entries {
			if next, err = docs.at(d, i+1); err != nil {
				return err
			}
		}
		switch {
		case i == 0 && first != 0:
			return bad("the first document begins with sequence %d, but it must begin with sequence 0; write the file again",
				first)
		case i+1 == m.entries && first != m.sequences:
			return bad("the list of documents ends with sequence %d of %d: the file is damaged; write it again", first,
				m.sequences)
		case first > next || first < 0:
			return bad("document %d begins with sequence %d and ends before sequence %d: the file is damaged; write it again",
				i, first, next)
		}
	}
	return nil
}

// megatronTokens is the .bin. Each unit is a block.
type megatronTokens struct{ *megatron }

func (m megatronTokens) path() string { return m.bin }
func (m megatronTokens) work() int64  { return m.binBytes }
func (m megatronTokens) unit() int64  { return m.unitBytes }

func (m megatronTokens) scan(d *decoder, lo, hi int64) (err error) {
	if d.raw, err = d.read(m.bin, lo, hi-lo, d.raw[:0]); err != nil {
		return err
	}
	_, offsets, docs := m.columns()
	entry := sort.Search(int(m.entries), func(i int) bool {
		at, e := m.firstToken(d, &offsets, &docs, int64(i))
		if e != nil {
			err = e
		}
		return at*m.idType.width >= lo
	})
	if err != nil {
		return err
	}
	return d.scanBlock(m, block{offset: lo, entry: int64(entry)}, d.raw)
}

// firstToken returns the first token of entry i of the list of documents, or the number of tokens
// for the last entry.
func (m *megatron) firstToken(d *decoder, offsets, docs *column, i int64) (int64, error) {
	first, err := docs.at(d, i)
	if err != nil || first < 0 || first >= m.sequences {
		return m.tokens(), err // an entry that is out of range is refused by the scan of the .idx
	}
	at, err := offsets.at(d, first)
	return at / m.idType.width, err
}

func (m megatronTokens) decode(d *decoder, b *block, raw []byte, p *decodedBlock) error {
	_, offsets, docs := m.columns()
	lo := b.offset / m.idType.width
	hi := lo + int64(len(raw))/m.idType.width
	for i := b.entry; i+1 < m.entries; i++ {
		at, err := m.firstToken(d, &offsets, &docs, i)
		if err != nil {
			return err
		}
		if at >= hi {
			break
		}
		next, err := m.firstToken(d, &offsets, &docs, i+1)
		if err != nil {
			return err
		}
		if next > at && at >= lo { // the document is not empty
			p.starts = append(p.starts, at-lo)
		}
	}
	n := hi - lo
	p.ids = extend(p.ids, int(n))
	wrong := int64(-1)
	id := m.idType.reader()
	for i := range n {
		v := id(raw, i)
		if wrong < 0 && (v < 0 || v >= d.vocab) {
			wrong = i
		}
		p.ids[i] = int32(v)
	}
	if wrong < 0 {
		return nil
	}
	k := int64(sort.Search(len(p.starts), func(i int) bool { return p.starts[i] > wrong })) - 1
	from := lo // first token of the document
	if k >= 0 {
		from += p.starts[k]
	} else if b.entry > 0 {
		var err error
		if from, err = m.firstToken(d, &offsets, &docs, b.entry-1); err != nil {
			return err
		}
	}
	return &fault{Line: none, Doc: k, Code: status.InvalidConfig,
		Text: outsideVocabulary(lo+wrong-from, id(raw, wrong), d.vocab)}
}

// reader returns a function that returns the i-th id in bytes of a .bin.
func (t idType) reader() func(raw []byte, i int64) int64 {
	switch t.name {
	case "uint8":
		return func(b []byte, i int64) int64 { return int64(b[i]) }
	case "int8":
		return func(b []byte, i int64) int64 { return int64(int8(b[i])) }
	case "uint16":
		return func(b []byte, i int64) int64 { return int64(binary.LittleEndian.Uint16(b[2*i:])) }
	case "int16":
		return func(b []byte, i int64) int64 { return int64(int16(binary.LittleEndian.Uint16(b[2*i:]))) }
	case "int32":
		return func(b []byte, i int64) int64 { return int64(int32(binary.LittleEndian.Uint32(b[4*i:]))) }
	}
	return func(b []byte, i int64) int64 { return int64(binary.LittleEndian.Uint64(b[8*i:])) }
}
