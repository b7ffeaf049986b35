package train

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sort"
	"strings"

	"ulysses/internal/status"
)

// text is documents of bytes, one behind the other; a byte is a token. Packed, rows are cut from the whole; else each document is a row.
type text struct {
	bytes    []byte
	ends     []int64 // [documents] strictly increasing, counted from the first byte
	sequence int64
	pack     bool
}

// maxLine bounds a line of a .jsonl file: a file of another kind may have no newline at all.
const maxLine = 1 << 30

func (t *text) readTxt(path string, vocab int64) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return status.Errorf(status.IO, "%s: cannot be read: %w", path, err)
	}
	return t.add(b, vocab, func() string { return path })
}

func (t *text) readJSONL(path, field string, vocab int64) error {
	f, err := os.Open(path)
	if err != nil {
		return status.Errorf(status.IO, "%s: cannot be opened: %w", path, err)
	}
	defer f.Close()
	return t.readLines(f, path, field, vocab, maxLine)
}

// readLines adds one document a line. Blank lines are none.
func (t *text) readLines(r io.Reader, path, field string, vocab int64, limit int) error {
	in := bufio.NewReaderSize(r, 1<<16)
	var line []byte
	for n := 1; ; n++ {
		line = line[:0]
		var err error
		for {
			var piece []byte
			piece, err = in.ReadSlice('\n')
			if line = append(line, piece...); len(line) > limit {
				return status.Errorf(status.InvalidConfig, "%s:%d: a line longer than %d bytes: a .jsonl file has one JSON object a line; is it another kind of file?", path, n, limit)
			}
			if !errors.Is(err, bufio.ErrBufferFull) {
				break
			}
		}
		if err != nil && err != io.EOF {
			return status.Errorf(status.IO, "%s:%d: cannot be read: %w", path, n, err)
		}
		if doc := bytes.TrimSpace(line); len(doc) > 0 {
			s, ferr := textField(doc, field)
			if ferr != nil {
				return status.Errorf(status.InvalidConfig, "%s:%d: %w", path, n, ferr)
			}
			if err := t.add([]byte(s), vocab, func() string { return fmt.Sprintf("%s:%d", path, n) }); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
	}
}

// textField is the text of a JSON object.
func textField(doc []byte, field string) (string, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(doc, &object); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return "", fmt.Errorf("not JSON at byte %d of the line: %w", syntax.Offset, err)
		}
		return "", errors.New("not a JSON object: a .jsonl file has one object a line")
	}
	raw, ok := object[field]
	if !ok {
		var names []string
		for name := range object {
			names = append(names, fmt.Sprintf("%q", name))
		}
		sort.Strings(names)
		return "", fmt.Errorf("no field %q among %s: set data.text_field", field, strings.Join(names[:min(len(names), 12)], ", "))
	}
	var s *string
	if err := json.Unmarshal(raw, &s); err != nil || s == nil {
		return "", fmt.Errorf("field %q is not a string: set data.text_field to the one that holds the text", field)
	}
	return *s, nil
}

// add appends a document unless it is empty.
func (t *text) add(doc []byte, vocab int64, name func() string) error {
	if len(doc) == 0 {
		return nil
	}
	if vocab < 256 {
		for i, b := range doc {
			if int64(b) >= vocab {
				return outside(fmt.Sprintf("%s (document %d)", name(), len(t.ends)), int64(i), int64(b), vocab)
			}
		}
	}
	if t.bytes == nil {
		t.bytes = slices.Clip(doc)
	} else {
		t.bytes = append(t.bytes, doc...)
	}
	t.ends = append(t.ends, int64(len(t.bytes)))
	return nil
}

func (t *text) units() int64 { return int64(len(t.ends)) }

func (t *text) tokens() int64 {
	if t.pack {
		return int64(len(t.bytes))
	}
	sum := int64(0)
	for r := range t.rows() {
		lo, hi := t.row(r)
		sum += hi - lo
	}
	return sum
}

func (t *text) rows() int64 {
	if !t.pack {
		return int64(len(t.ends))
	}
	return (int64(len(t.bytes)) + t.sequence - 1) / t.sequence
}

func (t *text) longest() int64 {
	n := int64(0)
	if t.pack {
		return min(t.sequence, int64(len(t.bytes)))
	}
	for r := range t.rows() {
		lo, hi := t.row(r)
		n = max(n, hi-lo)
	}
	return n
}

// row is the bytes [lo, hi) of a row. The last packed row may be shorter; a document longer than a row is cut when not packed.
func (t *text) row(r int64) (lo, hi int64) {
	if t.pack {
		return r * t.sequence, min((r+1)*t.sequence, int64(len(t.bytes)))
	}
	if r > 0 {
		lo = t.ends[r-1]
	}
	return lo, min(t.ends[r], lo+t.sequence)
}

// document is the one that holds byte i.
func (t *text) document(i int64) int {
	return sort.Search(len(t.ends), func(k int) bool { return t.ends[k] > i })
}

func (t *text) appendRow(m *Micro, r int64) error {
	lo, hi := t.row(r)
	start := int64(len(m.IDs))
	ids, targets, positions := m.grow(hi - lo)
	k := t.document(lo)
	for at := lo; at < hi; k++ {
		end := min(t.ends[k], hi)
		for i := at; i < end; i++ {
			ids[i-lo] = int32(t.bytes[i])
			positions[i-lo] = int32(i - at)
			targets[i-lo] = Ignore
			if i+1 < end {
				targets[i-lo] = int32(t.bytes[i+1])
			}
		}
		m.CuSeqlens = append(m.CuSeqlens, start+end-lo)
		at = end
	}
	return nil
}

func (t *text) split(unit int64) (before, after source) {
	at := t.ends[unit-1]
	a, b := *t, *t
	a.bytes, b.bytes = t.bytes[:at:at], t.bytes[at:]
	a.ends, b.ends = t.ends[:unit:unit], nil
	for _, e := range t.ends[unit:] {
		b.ends = append(b.ends, e-at)
	}
	return &a, &b
}

func (t *text) cut(at func(int64) int64) (head, tail source, _ error) {
	n := int64(len(t.bytes))
	if n < 2 {
		return nil, nil, status.Errorf(status.InvalidConfig, "eval.split: a single document of %d byte cannot be split: give eval.path, or more text", n)
	}
	k := at(n)
	t.ends = []int64{k, n}
	head, tail = t.split(1)
	return head, tail, nil
}
