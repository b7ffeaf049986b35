package data

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"

	"ulysses/data/chat"
)

// fastTextField appends the value of a field of a JSON object to dst, for usual lines. It reads the
// line once, where chat.Reader.Read reads it four times. If the line is unusual or wrong, or if it
// has a field of another kind of record and mayHaveOthers is false, it returns false, and the
// caller calls Read. A test checks that both return the same text.
func fastTextField(dst, doc []byte, field string, mayHaveOthers bool) (text []byte, ok bool) {
	r := jsonReader{in: doc}
	found := false
	at := len(dst)
	if !r.accept('{') || r.accept('}') {
		return dst, false
	}
	for {
		if !r.key(0) || !r.accept(':') {
			return dst, false
		}
		key := string(r.keys[r.known-1])
		switch key {
		case chat.Messages, chat.Conversations, "completion", "input_ids":
			if !mayHaveOthers {
				return dst, false
			}
		}
		if key == field {
			if dst, ok = r.escapedString(dst[:at]); !ok {
				return dst, false
			}
			found = true
		} else if !r.skipValue(0) {
			return dst, false
		}
		if r.accept(',') {
			continue
		}
		return dst, r.accept('}') && r.at == len(r.in) && found
	}
}

// jsonReader reads JSON. Its methods read one element, from in[at] on. They return false if the
// element is wrong or unusual.
type jsonReader struct {
	in []byte
	at int

	keys  [32][]byte // keys of the objects that contain in[at], the outermost object first
	known int        // number of keys
}

// key reads a key without escapes. It returns false if the object, whose keys start at keys[first],
// has the key already.
func (r *jsonReader) key(first int) bool {
	key, plain := r.plainString()
	if !plain || r.known == len(r.keys) {
		return false
	}
	for _, k := range r.keys[first:r.known] {
		if bytes.Equal(k, key) {
			return false
		}
	}
	r.keys[r.known] = key
	r.known++
	return true
}

// peek skips whitespace and returns the next byte without reading it; 0 at the end.
func (r *jsonReader) peek() byte {
	for r.at < len(r.in) {
		switch c := r.in[r.at]; c {
		case ' ', '\t', '\r', '\n':
			r.at++
		default:
			return c
		}
	}
	return 0
}

// accept reads c and the whitespace around it, if c is the next byte.
func (r *jsonReader) accept(c byte) bool {
	if r.peek() != c || c == 0 {
		return false
	}
	r.at++
	r.peek()
	return true
}

// special has the bytes that end a run of plain bytes of a string.
var special = func() (t [256]bool) {
	for c := range 32 {
		t[c] = true
	}
	t['"'], t['\\'] = true, true
	return t
}()

// plainBytes reads up to the next special byte.
func (r *jsonReader) plainBytes() []byte {
	from := r.at
	for r.at < len(r.in) && !special[r.in[r.at]] {
		r.at++
	}
	return r.in[from:r.at]
}

// plainString reads a string without escapes.
func (r *jsonReader) plainString() (s []byte, ok bool) {
	if r.peek() != '"' {
		return nil, false
	}
	r.at++
	s = r.plainBytes()
	if r.at == len(r.in) || r.in[r.at] != '"' {
		return nil, false
	}
	r.at++
	return s, utf8.Valid(s)
}

// escapedString reads a string and appends its decoded value to dst.
func (r *jsonReader) escapedString(dst []byte) ([]byte, bool) {
	if r.peek() != '"' {
		return dst, false
	}
	from := len(dst)
	for r.at++; ; {
		dst = append(dst, r.plainBytes()...)
		if r.at == len(r.in) {
			return dst, false
		}
		switch r.in[r.at] {
		case '"':
			r.at++
			return dst, utf8.Valid(dst[from:])
		case '\\':
			var ok bool
			if dst, ok = r.escape(dst); !ok {
				return dst, false
			}
		default:
			return dst, false
		}
	}
}

// escapes maps the byte after a backslash to the byte that it stands for, except for \u.
var escapes = map[byte]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// escape reads an escape sequence and appends the character to dst.
func (r *jsonReader) escape(dst []byte) ([]byte, bool) {
	if r.at+1 >= len(r.in) {
		return dst, false
	}
	c := r.in[r.at+1]
	if c != 'u' {
		v, ok := escapes[c]
		r.at += 2
		return append(dst, v), ok
	}
	x, ok := r.unicodeEscape()
	if ok && utf16.IsSurrogate(x) {
		var low rune
		if low, ok = r.unicodeEscape(); ok {
			x = utf16.DecodeRune(x, low)
			ok = x != utf8.RuneError
		}
	}
	return utf8.AppendRune(dst, x), ok
}

// unicodeEscape reads \uXXXX.
func (r *jsonReader) unicodeEscape() (x rune, ok bool) {
	if r.at+6 > len(r.in) || r.in[r.at] != '\\' || r.in[r.at+1] != 'u' {
		return 0, false
	}
	for _, c := range r.in[r.at+2 : r.at+6] {
		v := bytes.IndexByte([]byte("0123456789abcdef"), c|0x20)
		if v < 0 || c < '0' {
			return 0, false
		}
		x = x<<4 | rune(v)
	}
	r.at += 6
	return x, true
}

// skipValue reads a value of any type.
func (r *jsonReader) skipValue(depth int) bool {
	switch c := r.peek(); c {
	case '"':
		for r.at++; ; {
			r.plainBytes()
			if r.at == len(r.in) || r.in[r.at] < 32 {
				return false
			}
			if r.in[r.at] == '"' {
				r.at++
				return true
			}
			var unused [4]byte
			if _, ok := r.escape(unused[:0]); !ok {
				return false
			}
		}
	case '{', '[':
		if depth > 50 {
			return false
		}
		end := c + 2
		r.at++
		if r.accept(end) {
			return true
		}
		first := r.known
		for {
			if c == '{' && (!r.key(first) || !r.accept(':')) {
				return false
			}
			if !r.skipValue(depth + 1) {
				return false
			}
			if !r.accept(',') {
				r.known = first
				return r.accept(end)
			}
		}
	case 't':
		return r.literal("true")
	case 'f':
		return r.literal("false")
	case 'n':
		return r.literal("null")
	}
	return r.number()
}

// literal reads the given bytes.
func (r *jsonReader) literal(w string) bool {
	ok := bytes.HasPrefix(r.in[r.at:], []byte(w))
	r.at += len(w)
	return ok
}

// number reads -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?
func (r *jsonReader) number() bool {
	peek := func() byte {
		if r.at < len(r.in) {
			return r.in[r.at]
		}
		return 0
	}
	digits := func() bool {
		from := r.at
		for c := peek(); '0' <= c && c <= '9'; c = peek() {
			r.at++
		}
		return r.at > from
	}
	if peek() == '-' {
		r.at++
	}
	if peek() == '0' {
		r.at++
	} else if !digits() {
		return false
	}
	if peek() == '.' {
		if r.at++; !digits() {
			return false
		}
	}
	if c := peek(); c == 'e' || c == 'E' {
		r.at++
		if c := peek(); c == '+' || c == '-' {
			r.at++
		}
		return digits()
	}
	return true
}
