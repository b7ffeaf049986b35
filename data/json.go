package data

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

// quickField is the text of a JSON object, appended to dst, for lines of the usual kind: it reads
// once what encoding/json reads four times. Whatever is out of the ordinary, right or wrong, is not
// ok, and is textField's to read or to refuse: a test holds the two to the same answers.
func quickField(dst, doc []byte, field string) (text []byte, ok bool) {
	q := quick{in: doc}
	found := false
	at := len(dst)
	if !q.eat('{') || q.eat('}') {
		return dst, false
	}
	for {
		if !q.key(0) || !q.eat(':') {
			return dst, false
		}
		if string(q.keys[q.known-1]) == field {
			if dst, ok = q.text(dst[:at]); !ok {
				return dst, false
			}
			found = true
		} else if !q.skip(0) {
			return dst, false
		}
		if q.eat(',') {
			continue
		}
		return dst, q.eat('}') && q.at == len(q.in) && found
	}
}

// quick reads JSON from a place on.
type quick struct {
	in []byte
	at int

	keys  [32][]byte // of the objects that have begun, the outermost first
	known int
}

// key reads a key without escapes. It fails if the object, whose keys start at first, already has
// the key.
func (q *quick) key(first int) bool {
	key, plain := q.str()
	if !plain || q.known == len(q.keys) {
		return false
	}
	for _, k := range q.keys[first:q.known] {
		if bytes.Equal(k, key) {
			return false
		}
	}
	q.keys[q.known] = key
	q.known++
	return true
}

// next is the next byte that is no space, or 0.
func (q *quick) next() byte {
	for q.at < len(q.in) {
		switch c := q.in[q.at]; c {
		case ' ', '\t', '\r', '\n':
			q.at++
		default:
			return c
		}
	}
	return 0
}

// eat takes a byte if it is the next, and the spaces around it.
func (q *quick) eat(c byte) bool {
	if q.next() != c || c == 0 {
		return false
	}
	q.at++
	q.next()
	return true
}

// special are the bytes at which a string's plain run ends.
var special = func() (t [256]bool) {
	for c := range 32 {
		t[c] = true
	}
	t['"'], t['\\'] = true, true
	return t
}()

// run is the bytes up to the next special one.
func (q *quick) run() []byte {
	from := q.at
	for q.at < len(q.in) && !special[q.in[q.at]] {
		q.at++
	}
	return q.in[from:q.at]
}

// str takes a string without escapes.
func (q *quick) str() (s []byte, ok bool) {
	if q.next() != '"' {
		return nil, false
	}
	q.at++
	s = q.run()
	if q.at == len(q.in) || q.in[q.at] != '"' {
		return nil, false
	}
	q.at++
	return s, utf8.Valid(s)
}

// text takes a string with its escapes undone.
func (q *quick) text(dst []byte) ([]byte, bool) {
	if q.next() != '"' {
		return dst, false
	}
	from := len(dst)
	for q.at++; ; {
		dst = append(dst, q.run()...)
		if q.at == len(q.in) {
			return dst, false
		}
		switch q.in[q.at] {
		case '"':
			q.at++
			return dst, utf8.Valid(dst[from:])
		case '\\':
			var ok bool
			if dst, ok = q.escape(dst); !ok {
				return dst, false
			}
		default:
			return dst, false
		}
	}
}

// escapes are what stands behind a backslash, but for u.
var escapes = map[byte]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

func (q *quick) escape(dst []byte) ([]byte, bool) {
	if q.at+1 >= len(q.in) {
		return dst, false
	}
	c := q.in[q.at+1]
	if c != 'u' {
		v, ok := escapes[c]
		q.at += 2
		return append(dst, v), ok
	}
	r, ok := q.unit()
	if ok && utf16.IsSurrogate(r) {
		var low rune
		if low, ok = q.unit(); ok {
			r = utf16.DecodeRune(r, low)
			ok = r != utf8.RuneError
		}
	}
	return utf8.AppendRune(dst, r), ok
}

// unit takes \uXXXX.
func (q *quick) unit() (r rune, ok bool) {
	if q.at+6 > len(q.in) || q.in[q.at] != '\\' || q.in[q.at+1] != 'u' {
		return 0, false
	}
	for _, c := range q.in[q.at+2 : q.at+6] {
		v := bytes.IndexByte([]byte("0123456789abcdef"), c|0x20)
		if v < 0 || c < '0' {
			return 0, false
		}
		r = r<<4 | rune(v)
	}
	q.at += 6
	return r, true
}

// skip takes a value of any kind.
func (q *quick) skip(depth int) bool {
	switch c := q.next(); c {
	case '"':
		for q.at++; ; {
			q.run()
			if q.at == len(q.in) || q.in[q.at] < 32 {
				return false
			}
			if q.in[q.at] == '"' {
				q.at++
				return true
			}
			var none [4]byte
			if _, ok := q.escape(none[:0]); !ok {
				return false
			}
		}
	case '{', '[':
		if depth > 50 {
			return false
		}
		end := c + 2
		q.at++
		if q.eat(end) {
			return true
		}
		first := q.known
		for {
			if c == '{' && (!q.key(first) || !q.eat(':')) {
				return false
			}
			if !q.skip(depth + 1) {
				return false
			}
			if !q.eat(',') {
				q.known = first
				return q.eat(end)
			}
		}
	case 't':
		return q.word("true")
	case 'f':
		return q.word("false")
	case 'n':
		return q.word("null")
	}
	return q.number()
}

func (q *quick) word(w string) bool {
	ok := bytes.HasPrefix(q.in[q.at:], []byte(w))
	q.at += len(w)
	return ok
}

// number takes -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?
func (q *quick) number() bool {
	peek := func() byte {
		if q.at < len(q.in) {
			return q.in[q.at]
		}
		return 0
	}
	digits := func() bool {
		from := q.at
		for c := peek(); '0' <= c && c <= '9'; c = peek() {
			q.at++
		}
		return q.at > from
	}
	if peek() == '-' {
		q.at++
	}
	if peek() == '0' {
		q.at++
	} else if !digits() {
		return false
	}
	if peek() == '.' {
		if q.at++; !digits() {
			return false
		}
	}
	if c := peek(); c == 'e' || c == 'E' {
		q.at++
		if c := peek(); c == '+' || c == '-' {
			q.at++
		}
		return digits()
	}
	return true
}
