package data

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strings"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// maxLine is the largest line of a .jsonl file, in bytes. A goroutine has the line, its text and
// its tokens in memory, which together are about ten times as large. A file of another kind may
// have no newline.
const maxLine = 32 << 20

// jsonl is a .jsonl file: each line is a JSON object with a document in one of its fields. Blank
// lines are skipped. The lines that start in a unit are a block.
type jsonl struct {
	name      string
	size      int64 // bytes of the file
	unitBytes int64
	field     string // data.text_field
	limit     int64  // bytes of a line
}

func (f *jsonl) path() string { return f.name }
func (f *jsonl) work() int64  { return f.size }
func (f *jsonl) unit() int64  { return f.unitBytes }

func (f *jsonl) scan(d *decoder, lo, hi int64) (err error) {
	from := max(lo-1, 0) // the byte before the unit may be the newline before a line
	if d.raw, err = d.read(f.name, from, hi-from, d.raw[:0]); err != nil {
		return err
	}
	skip := int64(0)
	if lo > 0 {
		n := bytes.IndexByte(d.raw, '\n') + 1
		if n == 0 || n == len(d.raw) {
			return nil // no line starts in the unit
		}
		skip = int64(n)
	}
	// The last line may end after the unit. The size of the reads that look for its end doubles, so
	// that they take time proportional to the length of the line.
	open := int64(len(d.raw) - 1 - bytes.LastIndexByte(d.raw, '\n'))
	for more := int64(1 << 12); open > 0 && open <= f.limit && from+int64(len(d.raw)) < f.size; more *= 2 {
		at := len(d.raw)
		more = min(more, f.size-from-int64(at))
		if d.raw, err = d.read(f.name, from+int64(at), more, d.raw); err != nil {
			return err
		}
		if n := bytes.IndexByte(d.raw[at:], '\n'); n >= 0 {
			d.raw, open = d.raw[:at+n+1], 0
		} else {
			open += more
		}
	}
	return d.scanBlock(f, block{offset: from + skip}, d.raw[skip:])
}

func (f *jsonl) decode(d *decoder, b *block, raw []byte, p *decodedBlock) error {
	for len(raw) > 0 {
		n := bytes.IndexByte(raw, '\n') + 1
		ended := n > 0
		if !ended {
			n = len(raw)
		}
		if int64(n) > f.limit {
			return &fault{Line: p.lines, Doc: none, Code: status.InvalidConfig,
				Text: fmt.Sprintf(": the line is longer than %d bytes; write the document to a .txt file of its own", f.limit)}
		}
		// Concatenated files may have a byte order mark on any line.
		if doc := bytes.TrimSpace(input.TrimBOM(raw[:n])); len(doc) > 0 {
			text, ok := fastTextField(d.text[:0], doc, f.field)
			if d.text = text[:0]; !ok {
				s, err := textField(doc, f.field)
				if err != nil {
					return &fault{Line: p.lines, Doc: none, Code: status.InvalidConfig, Text: ": " + err.Error()}
				}
				text = []byte(s)
			}
			if err := d.appendDocument(p, text, p.lines); err != nil {
				return err
			}
		}
		if ended {
			p.lines++
		}
		raw = raw[n:]
	}
	return nil
}

// textField returns the value of a field of a JSON object, which must be a string.
func textField(doc []byte, field string) (string, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(doc, &object); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return "", fmt.Errorf("the line is not JSON at byte %d: %w", syntax.Offset, err)
		}
		return "", errors.New("the line is not a JSON object; write each document as an object on a line of its own")
	}
	if err := input.Once(doc); err != nil {
		return "", err
	}
	raw, ok := object[field]
	for _, name := range []string{"messages", "conversations", field} {
		if chat := object[name]; (!ok || name == field) && len(chat) > 0 && chat[0] == '[' {
			return "", fmt.Errorf("field %q is a list, and %s", name, notbuilt.ChatData.Text("write each conversation as text (tokenizer.apply_chat_template) and set data.text_field to its field"))
		}
	}
	if !ok {
		var names []string
		for name := range object {
			names = append(names, input.Quote(name))
		}
		sort.Strings(names)
		return "", fmt.Errorf("there is no field %q among %s; set data.text_field", field, strings.Join(names[:min(len(names), 12)], ", "))
	}
	if !utf8.Valid(raw) { // encoding/json would replace the invalid bytes by U+FFFD
		return "", fmt.Errorf("field %q is not UTF-8; convert the file to UTF-8", field)
	}
	var s *string
	if err := json.Unmarshal(raw, &s); err != nil || s == nil {
		return "", fmt.Errorf("field %q is not a string; set data.text_field to the field that has the text", field)
	}
	return *s, nil
}
