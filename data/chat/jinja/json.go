package jinja

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"
)

// toJSON is the filter tojson as transformers defines it: Python's json.dumps, with
// ensure_ascii=False.
func toJSON(c *call, v Value) Value {
	w := jsonWriter{c: c, item: ", ", key: ": ", ascii: truth(c.arg(0, "ensure_ascii", false)),
		sorted: truth(c.arg(3, "sort_keys", false))}
	switch x := c.arg(1, "indent", nil).(type) {
	case nil:
		w.flat = true
	case Text:
		w.indent, w.item = x.S, ","
	default:
		w.indent, w.item = strings.Repeat(" ", int(max(0, min(c.integer(1, "indent", 0), 64)))), ","
	}
	if s, ok := c.arg(2, "separators", nil).(*List); ok && len(s.Items) == 2 {
		w.item, w.key = c.textOf(s.Items[0]).S, c.textOf(s.Items[1]).S
	}
	w.value(v, 0)
	return c.made(w.out.text())
}

type jsonWriter struct {
	c             *call
	out           builder
	item, key     string // separators
	indent        string
	flat          bool // without indent
	ascii, sorted bool
}

func (w *jsonWriter) newline(depth int) {
	if !w.flat {
		w.out.addString("\n"+strings.Repeat(w.indent, depth), 0)
	}
}

func (w *jsonWriter) value(v Value, depth int) {
	c := w.c
	c.in.step(c.line)
	if depth > c.in.limits.Depth {
		fail(c.line, "tojson: more than %d nested lists and objects", c.in.limits.Depth)
	}
	switch v := v.(type) {
	case nil:
		w.out.addString("null", 0)
	case bool:
		w.out.addString(strconv.FormatBool(v), 0)
	case int64:
		w.out.addString(strconv.FormatInt(v, 10), 0)
	case Number:
		w.out.addString(string(v), 0)
	case float64:
		w.out.addString(jsonFloat(v), 0)
	case Text:
		w.text(v)
	case *List:
		if !v.isPlain() {
			fail(c.line, "tojson: %s cannot be written as JSON; add the filter list before it", typeName(v))
		}
		w.list("[", "]", len(v.Items), 0, depth, func(i int) { w.value(v.Items[i], depth+1) })
	case *Dict:
		order := make([]int, v.Len())
		for i := range order {
			order[i] = i
		}
		if w.sorted {
			sort.SliceStable(order, func(a, b int) bool {
				before, _ := c.in.less(c.line, v.keys[order[a]], v.keys[order[b]])
				return before
			})
		}
		w.list("{", "}", v.Len(), v.mark, depth, func(i int) {
			switch k := v.keys[order[i]].(type) {
			case Text:
				w.text(k)
			case nil:
				w.out.addString(`"null"`, 0)
			case bool:
				w.out.addString(strconv.Quote(strconv.FormatBool(k)), 0)
			default:
				c.in.visit(c.line, k)
				w.out.addString(`"`+Repr(k)+`"`, 0)
			}
			w.out.addString(w.key, 0)
			w.value(v.items[order[i]], depth+1)
		})
	default:
		fail(c.line, "tojson: %s cannot be written as JSON", typeName(v))
	}
}

// list writes n elements in brackets. If n is 0, the brackets have the mark, so that arguments {}
// of a tool call are found in the rendering.
func (w *jsonWriter) list(open, end string, n int, mark Mark, depth int, element func(i int)) {
	if n == 0 {
		w.out.addString(open+end, mark)
		return
	}
	w.out.addString(open, 0)
	each := len(w.item) + len(w.key) // separators and indent may be long texts
	if !w.flat {
		each += 1 + len(w.indent)*(depth+1)
	}
	w.c.in.count(w.c.line, n*each)
	for i := range n {
		if i > 0 {
			w.out.addString(w.item, 0)
		}
		w.newline(depth + 1)
		element(i)
	}
	w.newline(depth)
	w.out.addString(end, 0)
}

func jsonFloat(x float64) string {
	switch {
	case math.IsNaN(x):
		return "NaN"
	case math.IsInf(x, 1):
		return "Infinity"
	case math.IsInf(x, -1):
		return "-Infinity"
	}
	return floatText(x)
}

var jsonEscapes = map[rune]string{'"': `\"`, '\\': `\\`, '\n': `\n`, '\r': `\r`, '\t': `\t`, '\b': `\b`, '\f': `\f`}

// text writes a string. The quotes and escapes have the marks of the text.
func (w *jsonWriter) text(t Text) {
	w.c.in.count(w.c.line, len(t.S))
	var first, last Mark
	for i, r := range t.runs {
		if i == 0 {
			first = r.mark
		}
		last = r.mark
	}
	w.out.addString(`"`, first)
	t.Runs(func(lo, hi int, mark Mark) {
		from := lo
		for i, r := range t.S[lo:hi] {
			e, ok := jsonEscapes[r]
			switch {
			case ok:
			case r < 0x20 || w.ascii && r >= 0x7f && r < 0x10000:
				e = `\u` + hex(r, 4)
			case w.ascii && r >= 0x10000:
				r -= 0x10000
				e = `\u` + hex(0xd800+r>>10, 4) + `\u` + hex(0xdc00+r&0x3ff, 4)
			default:
				continue
			}
			w.out.addString(t.S[from:lo+i], mark)
			w.out.addString(e, mark)
			_, n := utf8.DecodeRuneInString(t.S[lo+i:])
			from = lo + i + n
		}
		w.out.addString(t.S[from:hi], mark)
	})
	w.out.addString(`"`, last)
}

// FromJSON decodes a JSON value. Strings, keys of objects and empty objects have the mark. Whole
// numbers are int64 or Number, others float64, and objects keep the order of their keys; a key that
// is twice in an object is an error. Lists and objects may be nested depth deep.
func FromJSON(text []byte, mark Mark, depth int) (Value, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	v, err := decodeValue(d, mark, depth)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF { // d.More takes a closing bracket for the end
		return nil, errors.New("there is more text behind the value")
	}
	return v, nil
}

func decodeValue(d *json.Decoder, mark Mark, depth int) (Value, error) {
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t := t.(type) {
	case string:
		return NewText(t, mark), nil
	case bool:
		return t, nil
	case json.Number:
		return decodeNumber(t)
	case json.Delim:
		if depth == 0 {
			return nil, errors.New("the lists and objects are nested too deep")
		}
		if t == '[' {
			l := &List{}
			for d.More() {
				x, err := decodeValue(d, mark, depth-1)
				if err != nil {
					return nil, err
				}
				l.Items = append(l.Items, x)
			}
			_, err := d.Token()
			return l, err
		}
		o := NewDict()
		o.mark = mark
		for d.More() {
			k, err := d.Token()
			if err != nil {
				return nil, err
			}
			name, _ := k.(string)
			x, err := decodeValue(d, mark, depth-1)
			if err != nil {
				return nil, err
			}
			if _, twice := o.Get(name); twice {
				return nil, fmt.Errorf("the key %q is twice in an object", name)
			}
			o.put(NewText(name, mark), x)
		}
		_, err := d.Token()
		return o, err
	}
	return nil, nil // null
}

// maxDigits limits whole numbers, as Python does.
const maxDigits = 4000

func decodeNumber(n json.Number) (Value, error) {
	s := n.String()
	if !strings.ContainsAny(s, ".eE") {
		if i, err := strconv.ParseInt(s, 10, 64); err == nil {
			return i, nil
		}
		if len(s) > maxDigits {
			return nil, fmt.Errorf("a number has more than %d digits", maxDigits)
		}
		return Number(s), nil
	}
	x, err := strconv.ParseFloat(s, 64)
	if err != nil && !math.IsInf(x, 0) {
		return nil, fmt.Errorf("the number %s cannot be read", s)
	}
	return x, nil
}
