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

// maxLine is the largest line of a .jsonl file in bytes. A worker holds the whole line, its text
// and its tokens, about ten times as much, and a file of another kind may have no newline.
const maxLine = 32 << 20

// jsonl is a file with one document per line. Blank lines are skipped. A block is the lines that
// start in a unit.
type jsonl struct {
	name       string
	size, step int64
	field      string
	limit      int64 // bytes of a line
}

func (f *jsonl) path() string { return f.name }
func (f *jsonl) work() int64  { return f.size }
func (f *jsonl) unit() int64  { return f.step }

func (f *jsonl) scan(d *decoder, lo, hi int64) (err error) {
	from := max(lo-1, 0) // a line starts behind a newline, which may be the byte before
	if d.raw, err = d.read(f.name, from, hi-from, d.raw[:0]); err != nil {
		return err
	}
	skip := int64(0)
	if lo > 0 {
		n := bytes.IndexByte(d.raw, '\n') + 1
		if n == 0 || n == len(d.raw) {
			return nil // the unit is the middle of a line, or its end
		}
		skip = int64(n)
	}
	// The last line goes on behind the unit. What is read to find its end grows, so that a line of
	// any length costs about its length.
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
	return d.emit(f, block{offset: from + skip}, d.raw[skip:])
}

func (f *jsonl) decode(d *decoder, b *block, raw []byte, p *piece) error {
	for len(raw) > 0 {
		n := bytes.IndexByte(raw, '\n') + 1
		ended := n > 0
		if !ended {
			n = len(raw)
		}
		if int64(n) > f.limit {
			return &fault{Line: p.lines, Doc: none, Code: status.InvalidConfig,
				Rest: fmt.Sprintf(": a line longer than %d bytes: a .jsonl file has one JSON object a line; write a longer document as a .txt file of its own, or as tokens in a .bin file", f.limit)}
		}
		// A byte order mark is in the middle where files were put one behind another.
		if doc := bytes.TrimSpace(input.TrimBOM(raw[:n])); len(doc) > 0 {
			text, ok := quickField(d.side[:0], doc, f.field)
			if d.side = text[:0]; !ok {
				s, err := textField(doc, f.field)
				if err != nil {
					return &fault{Line: p.lines, Doc: none, Code: status.InvalidConfig, Rest: ": " + err.Error()}
				}
				text = []byte(s)
			}
			if err := d.add(p, text, p.lines); err != nil {
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
		return "", fmt.Errorf("no field %q among %s: set data.text_field", field, strings.Join(names[:min(len(names), 12)], ", "))
	}
	if !utf8.Valid(raw) { // encoding/json would put U+FFFD in its place
		return "", fmt.Errorf("field %q is not UTF-8, as JSON must be: convert the file", field)
	}
	var s *string
	if err := json.Unmarshal(raw, &s); err != nil || s == nil {
		return "", fmt.Errorf("field %q is not a string: set data.text_field to the one that holds the text", field)
	}
	return *s, nil
}
