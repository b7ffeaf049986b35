package data

import (
	"encoding/binary"
	"path/filepath"
	"sort"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// megatron is an indexed dataset of Megatron-LM (megatron/core/datasets/indexed_dataset.py): a .bin
// of token ids, and an .idx that says how they are cut into sequences and these into documents.
// Little-endian: "MMIDIDX\0\0", version 1 (u64), the type of an id (u8), the number of sequences n
// (u64), the number of entries m of the documents' list (u64), the sequences' lengths (i32 [n]),
// where they begin in the .bin (i64 [n], bytes), and the documents (i64 [m]): the first sequence of
// each, then n. Modes of sequences (i8 [n]) may follow.
type megatron struct {
	idx, bin             string
	kind                 idType
	sequences, documents int64 // n and m
	idxBytes, binBytes   int64
	step                 int64
}

// idType is a type of token ids in a .bin.
type idType struct {
	name  string
	width int64 // bytes
}

// idTypes are Megatron-LM's codes. Types that are no integers hold no ids.
var idTypes = map[byte]idType{1: {"uint8", 1}, 2: {"int8", 1}, 3: {"int16", 2}, 4: {"int32", 4}, 5: {"int64", 8}, 6: {"float64", 0}, 7: {"float32", 0}, 8: {"uint16", 2}}

const (
	idxMagic  = "MMIDIDX\x00\x00"
	idxHeader = int64(len(idxMagic) + 8 + 1 + 8 + 8)
)

// openMegatron reads the header and compares the sizes of the files with it. Either file names
// both.
func openMegatron(path string, step int64) (*megatron, error) {
	base := strings.TrimSuffix(path, filepath.Ext(path))
	m := &megatron{idx: base + ".idx", bin: base + ".bin", step: step}
	for _, x := range []struct {
		path  string
		bytes *int64
	}{{m.idx, &m.idxBytes}, {m.bin, &m.binBytes}} {
		info, err := input.Stat(x.path)
		if err != nil {
			return nil, status.Errorf(status.IO, "%s: a Megatron dataset is two files, %s and %s: %w", path, filepath.Base(m.bin), filepath.Base(m.idx), err)
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

// header checks the beginning of an .idx, and what can be seen from the sizes of both files.
func (m *megatron) header(b []byte) error {
	bad := func(format string, args ...any) error { return status.Errorf(status.InvalidConfig, format, args...) }
	if int64(len(b)) < idxHeader || string(b[:len(idxMagic)]) != idxMagic {
		return bad("not the index of a Megatron dataset: it does not begin with %q and %d bytes of header", idxMagic, idxHeader)
	}
	b = b[len(idxMagic):]
	if v := binary.LittleEndian.Uint64(b); v != 1 {
		return bad("version %d of Megatron's index: 1 is known", v)
	}
	kind, ok := idTypes[b[8]]
	if !ok {
		return bad("type code %d of its ids: 1 to 8 are known", b[8])
	}
	if kind.width == 0 {
		return bad("its ids are %s: integers are needed", kind.name)
	}
	m.kind = kind
	n, docs := binary.LittleEndian.Uint64(b[9:]), binary.LittleEndian.Uint64(b[17:])
	if most := uint64(m.idxBytes); n > most || docs > most {
		return bad("%d sequences and %d documents in a file of %d bytes: it is cut short or damaged", n, docs, m.idxBytes)
	}
	m.sequences, m.documents = int64(n), int64(docs)
	plain := idxHeader + 12*m.sequences + 8*m.documents
	if m.idxBytes != plain && m.idxBytes != plain+m.sequences { // with modes
		return bad("%d bytes, where %d sequences and %d documents take %d: it is cut short or damaged", m.idxBytes, n, docs, plain)
	}
	if m.documents < 1 {
		return bad("no list of documents: it is damaged")
	}
	if m.binBytes%m.kind.width != 0 {
		return bad("%s has %d bytes, which is no whole number of %s: it is cut short or belongs to another index", filepath.Base(m.bin), m.binBytes, m.kind.name)
	}
	return nil
}

// tokens is the number of ids in the .bin.
func (m *megatron) tokens() int64 { return m.binBytes / m.kind.width }

// column is one of the index's lists, read a window at a time.
type column struct {
	path   string
	offset int64
	width  int64
	n      int64
	lo     int64 // of the window
	window []byte
}

// columns are the lengths of the sequences, where they begin, and the documents.
func (m *megatron) columns() (lengths, begins, docs column) {
	lengths = column{path: m.idx, offset: idxHeader, width: 4, n: m.sequences}
	begins = column{path: m.idx, offset: lengths.offset + 4*m.sequences, width: 8, n: m.sequences}
	docs = column{path: m.idx, offset: begins.offset + 8*m.sequences, width: 8, n: m.documents}
	return lengths, begins, docs
}

// columnWindow is a window's bytes: a search jumps, a pass goes on.
const columnWindow = 2048

func (c *column) at(d *decoder, i int64) (v int64, err error) {
	if i < c.lo || i >= c.lo+int64(len(c.window))/c.width {
		c.lo = i - i%(columnWindow/c.width)
		if c.window, err = d.read(c.path, c.offset+c.lo*c.width, min(columnWindow, (c.n-c.lo)*c.width), c.window[:0]); err != nil {
			return 0, err
		}
	}
	b := c.window[(i-c.lo)*c.width:]
	if c.width == 4 {
		return int64(int32(binary.LittleEndian.Uint32(b))), nil
	}
	return int64(binary.LittleEndian.Uint64(b)), nil
}

// megatronIndex is the .idx as the opening pass checks it, ahead of its .bin: a unit is a number of
// entries.
type megatronIndex struct{ *megatron }

const entryWork = 20 // bytes of a sequence and of a document

func (m megatronIndex) path() string { return m.idx }
func (m megatronIndex) work() int64  { return entryWork * max(m.sequences, m.documents) }
func (m megatronIndex) unit() int64  { return m.step / entryWork * entryWork }

func (m megatronIndex) decode(*decoder, *block, []byte, *piece) error { return nil }

// scan checks that sequences follow one another from the .bin's first byte to its last, and
// documents from the first sequence to the last.
func (m megatronIndex) scan(d *decoder, lo, hi int64) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidConfig, m.idx+": "+format, args...)
	}
	lengths, begins, docs := m.columns()
	lo, hi = lo/entryWork, hi/entryWork
	if lo == 0 && m.sequences == 0 && m.binBytes != 0 {
		return bad("no sequences, and %s has %d bytes: it belongs to another index", filepath.Base(m.bin), m.binBytes)
	}
	for i := lo; i < min(hi, m.sequences); i++ {
		n, err := lengths.at(d, i)
		if err != nil {
			return err
		}
		from, err := begins.at(d, i)
		if err != nil {
			return err
		}
		end := m.binBytes
		if i+1 < m.sequences {
			if end, err = begins.at(d, i+1); err != nil {
				return err
			}
		}
		switch {
		case n < 0:
			return bad("sequence %d has %d tokens: it is damaged", i, n)
		case i == 0 && from != 0:
			return bad("sequence 0 begins at byte %d of %s: it is damaged", from, filepath.Base(m.bin))
		case from < 0 || from > m.binBytes || from+n*m.kind.width > m.binBytes:
			return bad("sequence %d, %d tokens of type %s from byte %d on, does not lie in %s, which has %d bytes: one of them is cut short, or they do not belong together",
				i, n, m.kind.name, from, filepath.Base(m.bin), m.binBytes)
		case from+n*m.kind.width != end && i+1 == m.sequences:
			return bad("%s goes on behind the last sequence, which ends at byte %d of %d: they do not belong together", filepath.Base(m.bin), from+n*m.kind.width, end)
		case from+n*m.kind.width != end:
			return bad("sequence %d ends at byte %d and the next begins at byte %d: sequences that do not follow one another are not read", i, from+n*m.kind.width, end)
		}
	}
	for i := lo; i < min(hi, m.documents); i++ {
		first, err := docs.at(d, i)
		if err != nil {
			return err
		}
		next := m.sequences
		if i+1 < m.documents {
			if next, err = docs.at(d, i+1); err != nil {
				return err
			}
		}
		switch {
		case i == 0 && first != 0:
			return bad("its first document begins with sequence %d: sequences before it belong to none", first)
		case i+1 == m.documents && first != m.sequences:
			return bad("its list of documents ends with sequence %d of %d: it is damaged", first, m.sequences)
		case first > next || first < 0:
			return bad("document %d begins with sequence %d and ends before sequence %d: it is damaged", i, first, next)
		}
	}
	return nil
}

// megatronTokens is the .bin: a block is a unit.
type megatronTokens struct{ *megatron }

func (m megatronTokens) path() string { return m.bin }
func (m megatronTokens) work() int64  { return m.binBytes }
func (m megatronTokens) unit() int64  { return m.step }

func (m megatronTokens) scan(d *decoder, lo, hi int64) (err error) {
	if d.raw, err = d.read(m.bin, lo, hi-lo, d.raw[:0]); err != nil {
		return err
	}
	_, begins, docs := m.columns()
	entry := sort.Search(int(m.documents), func(i int) bool {
		at, e := m.begin(d, &begins, &docs, int64(i))
		if e != nil {
			err = e
		}
		return at*m.kind.width >= lo
	})
	if err != nil {
		return err
	}
	return d.emit(m, block{offset: lo, entry: int64(entry)}, d.raw)
}

// begin is the token that an entry of the documents' list begins with.
func (m *megatron) begin(d *decoder, begins, docs *column, i int64) (int64, error) {
	first, err := docs.at(d, i)
	if err != nil || first < 0 || first >= m.sequences {
		return m.tokens(), err // the end; entries that are wrong have been refused, or will be
	}
	at, err := begins.at(d, first)
	return at / m.kind.width, err
}

func (m megatronTokens) decode(d *decoder, b *block, raw []byte, p *piece) error {
	_, begins, docs := m.columns()
	lo := b.offset / m.kind.width
	hi := lo + int64(len(raw))/m.kind.width
	for i := b.entry; i+1 < m.documents; i++ {
		at, err := m.begin(d, &begins, &docs, i)
		if err != nil {
			return err
		}
		if at >= hi {
			break
		}
		next, err := m.begin(d, &begins, &docs, i+1)
		if err != nil {
			return err
		}
		if next > at && at >= lo { // else it is empty
			p.starts = append(p.starts, at-lo)
		}
	}
	n := hi - lo
	p.ids = extend(p.ids, int(n))
	wrong := int64(-1)
	id := m.kind.reader()
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
	from := lo // of its document
	if k >= 0 {
		from += p.starts[k]
	} else if b.entry > 0 {
		var err error
		if from, err = m.begin(d, &begins, &docs, b.entry-1); err != nil {
			return err
		}
	}
	return &fault{Line: none, Doc: k, Code: status.InvalidConfig, Rest: outside(lo+wrong-from, id(raw, wrong), d.vocab)}
}

// reader gives the i-th id of a .bin's bytes.
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
