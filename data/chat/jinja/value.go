package jinja

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Value is a value of a template: nil (None), bool, int64, float64, Text, *List, *Dict, Number,
// and inside of a rendering undefined, *function and *namespace.
type Value any

// List is a Python list or tuple, or what some filters and methods return instead of a list.
type List struct {
	Items     []Value
	tuple     bool
	unindexed unindexed
	span      *span // of a range, whose Items are its numbers
}

// span is what a range was made from.
type span struct{ start, stop, step int64 }

// isPlain reports whether the value is a list or a tuple.
func (l *List) isPlain() bool { return l.unindexed == 0 && l.span == nil }

// unindexed is the kind of a List that has no positions: [0] is undefined, and tojson refuses it.
// 0 = a list, a tuple or a range.
type unindexed uint8

const (
	isKeys unindexed = iota + 1 // views of a dict
	isValues
	isItems
	isIterator // elements that can be visited once; always true
)

// Number is an integer that an int64 cannot have, in decimal. Templates only show it.
type Number string

// Dict is a Python dict: keys in the order in which they were added.
type Dict struct {
	keys  []Value
	index map[any]int
	items []Value
	mark  Mark // of FromJSON; if the dict is empty, no text in it has the mark
}

// NewDict returns an empty Dict.
func NewDict() *Dict { return &Dict{index: map[any]int{}} }

// hashOf returns what a key of a dict is compared by. 1, 1.0 and True are the same key, also inside
// of tuples.
func hashOf(key Value) (any, bool) { return hashBelow(key, 0) }

// tupleHash has the hashes of the elements of a tuple, each with its type and length.
type tupleHash string

func hashBelow(key Value, depth int) (any, bool) {
	switch k := key.(type) {
	case nil:
		return nil, true
	case Text:
		return k.S, true
	case bool:
		if k {
			return int64(1), true
		}
		return int64(0), true
	case int64:
		return k, true
	case float64:
		if k == math.Trunc(k) && math.Abs(k) < 1<<62 {
			return int64(k), true
		}
		return k, true
	case Number:
		return k, true
	case *List:
		if !k.tuple || depth > maxNesting {
			return nil, false
		}
		var b strings.Builder
		for _, x := range k.Items {
			h, ok := hashBelow(x, depth+1)
			if !ok {
				return nil, false
			}
			text := fmt.Sprint(h)
			fmt.Fprintf(&b, "%T %d %s", h, len(text), text)
		}
		return tupleHash(b.String()), true
	}
	return nil, false
}

// Set sets the value of a key. A new key is the last one.
func (d *Dict) Set(key string, value Value) { d.put(Text{S: key}, value) }

func (d *Dict) put(key, value Value) bool {
	h, ok := hashOf(key)
	if !ok {
		return false
	}
	if i, ok := d.index[h]; ok {
		d.items[i] = value
		return true
	}
	d.index[h] = len(d.keys)
	d.keys, d.items = append(d.keys, key), append(d.items, value)
	return true
}

// Get returns the value of a key.
func (d *Dict) Get(key string) (Value, bool) { return d.get(Text{S: key}) }

func (d *Dict) get(key Value) (Value, bool) {
	h, ok := hashOf(key)
	if !ok {
		return nil, false
	}
	i, ok := d.index[h]
	if !ok {
		return nil, false
	}
	return d.items[i], true
}

// Len returns the number of keys.
func (d *Dict) Len() int { return len(d.keys) }

// Each calls f for each key and value.
func (d *Dict) Each(f func(key string, value Value)) {
	for i, k := range d.keys {
		if t, ok := k.(Text); ok {
			f(t.S, d.items[i])
		}
	}
}

// strings returns the values of the keys that are strings.
func (d *Dict) strings() map[string]Value {
	m := make(map[string]Value, d.Len())
	d.Each(func(k string, v Value) { m[k] = v })
	return m
}

// undefined is the value of a name or key that does not exist.
type undefined struct{ what string }

// namespace has attributes that a template may set.
type namespace struct{ *Dict }

// function is a function, method or macro.
type function struct {
	name string
	call func(in *interp, line int, args []Value, named []namedValue) Value
}

type namedValue struct {
	name  string
	value Value
}

// truth returns Python's bool(v).
func truth(v Value) bool {
	switch v := v.(type) {
	case nil, undefined:
		return false
	case bool:
		return v
	case int64:
		return v != 0
	case float64:
		return v != 0
	case Text:
		return v.S != ""
	case *List:
		return v.unindexed == isIterator || len(v.Items) > 0
	case *Dict:
		return v.Len() > 0
	}
	return true
}

// textOf returns Python's str(v).
func textOf(v Value) Text {
	switch v := v.(type) {
	case Text:
		return v
	case undefined:
		return Text{}
	}
	return Text{S: Repr(v)}
}

// Repr returns Python's repr(v).
func Repr(v Value) string {
	var b strings.Builder
	writeRepr(&b, v, 0)
	return b.String()
}

// maxRepr limits the nesting of lists and objects that are shown; FromJSON has a lower limit.
const maxRepr = 1000

func writeRepr(b *strings.Builder, v Value, depth int) {
	if depth > maxRepr {
		b.WriteString("...")
		return
	}
	switch v := v.(type) {
	case nil:
		b.WriteString("None")
	case bool:
		b.WriteString(map[bool]string{true: "True", false: "False"}[v])
	case int64:
		b.WriteString(strconv.FormatInt(v, 10))
	case float64:
		b.WriteString(floatText(v))
	case Number:
		b.WriteString(string(v))
	case Text:
		writeQuoted(b, v.S)
	case undefined:
		b.WriteString("Undefined")
	case *List:
		open, end := "[", "]"
		switch {
		case v.span != nil:
			b.WriteString(fmt.Sprintf("range(%d, %d", v.span.start, v.span.stop))
			if v.span.step != 1 {
				b.WriteString(fmt.Sprintf(", %d", v.span.step))
			}
			b.WriteByte(')')
			return
		case v.unindexed > 0 && v.unindexed < isIterator:
			open, end = "dict_"+[]string{"keys", "values", "items"}[v.unindexed-isKeys]+"([", "])"
		case v.tuple:
			if open, end = "(", ")"; len(v.Items) == 1 {
				end = ",)"
			}
		}
		b.WriteString(open)
		for i, x := range v.Items {
			if i > 0 {
				b.WriteString(", ")
			}
			writeRepr(b, x, depth+1)
		}
		b.WriteString(end)
	case *Dict:
		b.WriteByte('{')
		for i, k := range v.keys {
			if i > 0 {
				b.WriteString(", ")
			}
			writeRepr(b, k, depth+1)
			b.WriteString(": ")
			writeRepr(b, v.items[i], depth+1)
		}
		b.WriteByte('}')
	case *namespace:
		b.WriteString("<Namespace ")
		writeRepr(b, v.Dict, depth+1)
		b.WriteByte('>')
	case *function:
		b.WriteString("<function " + v.name + ">")
	}
}

// floatText returns Python's repr of a float.
func floatText(x float64) string {
	switch {
	case math.IsNaN(x):
		return "nan"
	case math.IsInf(x, 1):
		return "inf"
	case math.IsInf(x, -1):
		return "-inf"
	}
	s := strconv.FormatFloat(x, 'e', -1, 64)
	mantissa, exponent, _ := strings.Cut(s, "e")
	if e, _ := strconv.Atoi(exponent); e < -4 || e >= 16 {
		return mantissa + "e" + exponent // Go and Python both write at least two digits
	}
	s = strconv.FormatFloat(x, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// writeQuoted writes Python's repr of a string.
func writeQuoted(b *strings.Builder, s string) {
	quote := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	b.WriteByte(quote)
	for _, r := range s {
		switch {
		case r == rune(quote) || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == ' ' || unicode.IsPrint(r):
			b.WriteRune(r)
		case r < 0x100:
			b.WriteString(`\x` + hex(r, 2))
		case r < 0x10000:
			b.WriteString(`\u` + hex(r, 4))
		default:
			b.WriteString(`\U` + hex(r, 8))
		}
	}
	b.WriteByte(quote)
}

func hex(r rune, digits int) string {
	s := strconv.FormatInt(int64(r), 16)
	return strings.Repeat("0", max(0, digits-len(s))) + s
}

// length returns Python's len(v); false if v has none.
func length(v Value) (int64, bool) {
	switch v := v.(type) {
	case Text:
		return int64(utf8.RuneCountInString(v.S)), true
	case *List:
		return int64(len(v.Items)), v.unindexed != isIterator
	case *Dict:
		return int64(v.Len()), true
	case undefined:
		return 0, true
	}
	return 0, false
}

// typeName returns the name of the value's type for messages.
func typeName(v Value) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return "a bool"
	case int64, Number:
		return "an int"
	case float64:
		return "a float"
	case Text:
		return "a string"
	case *List:
		switch {
		case v.tuple:
			return "a tuple"
		case v.unindexed == isIterator:
			return "an iterator"
		case v.unindexed != 0:
			return "a view of an object"
		case v.span != nil:
			return "a range"
		}
		return "a list"
	case *Dict:
		return "an object"
	case undefined:
		return v.what + ", which is undefined,"
	case *namespace:
		return "a namespace"
	}
	return "a function"
}

// number returns the value of a number as both types; whole = it is an int or a bool.
func number(v Value) (i int64, x float64, whole, ok bool) {
	switch v := v.(type) {
	case bool:
		if v {
			return 1, 1, true, true
		}
		return 0, 0, true, true
	case int64:
		return v, float64(v), true, true
	case float64:
		return 0, v, false, true
	}
	return 0, 0, false, false
}
