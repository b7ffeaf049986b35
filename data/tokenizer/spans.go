package tokenizer

import (
	"bytes"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"ulysses/internal/status"
)

// surfaces has the bytes of each token of the model as they stand in an encoded text. ▁ stands for
// itself and for a space.
type surfaces map[int32]string

func (t *Tokenizer) surfacesOf() surfaces {
	s := make(surfaces, len(t.model.names))
	for id, name := range t.model.names {
		if t.model.raw {
			if b, ok := fromByteLevel(nil, name); ok {
				s[id] = string(b)
			}
			continue
		}
		s[id] = name
	}
	if t.model.byteFallback {
		for b, id := range t.model.bytes {
			if id >= 0 {
				s[id] = string([]byte{byte(b)})
			}
		}
	}
	if t.model.unk >= 0 {
		delete(s, t.model.unk)
	}
	return s
}

// Special returns the contents of the added tokens that are special, such as the ends of turns, in
// the order of their ids.
func (t *Tokenizer) Special() []string {
	var all []string
	for _, id := range slices.Sorted(maps.Keys(t.added.tokens)) {
		if a := t.added.tokens[id]; a.Special {
			all = append(all, a.Content)
		}
	}
	return all
}

// Lookup returns the id of a token.
func (t *Tokenizer) Lookup(token string) (id int32, ok bool) { return t.lookup(token) }

// Canonical returns a text in the normal forms of the tokenizer. It returns false if the tokenizer
// has normalizers that are not normal forms. The tokenizer gives the same ids for the result.
func (t *Tokenizer) Canonical(text []byte) ([]byte, bool) {
	if !t.canonical {
		return text, false
	}
	var m matcher
	m.begin(len(text))
	p := segment{text: text}
	for _, n := range t.normalizers {
		var err error
		if p, err = n(&m, p); err != nil {
			return text, false
		}
	}
	return p.text, true
}

// Spans appends, for each token of ids, the bytes [from, to) of the text that it spells. ids is the
// result of Encode for the text. White space that an added token takes along (lstrip, rstrip) is in
// no span. The error has the code Unsupported if the tokenizer has changed the text, so that the
// tokens do not spell it.
func (t *Tokenizer) Spans(dst [][2]int, text []byte, ids []int32) ([][2]int, error) {
	t.mu.Lock()
	if t.surfaces == nil {
		t.surfaces = t.surfacesOf()
	}
	t.mu.Unlock()
	at, word := 0, true // word: the tokenizer may have put a space before the text here
	for i, id := range ids {
		// A token may be both: Gemma 3 has its runs of ▁, which the model makes of spaces, as added
		// tokens as well.
		span, next, added := t.addedSpan(text, at, id)
		if !added {
			var ok bool
			if next, ok = t.wordEnd(text, at, id, word); !ok {
				return dst,
					status.Errorf(status.Unsupported,
						"tokenizer: token %d of a text, %d, does not spell the text at byte %d, because the tokenizer changes the text",
						i, id, at)
			}
			span = [2]int{at, next}
		}
		at, word = next, added
		dst = append(dst, span)
	}
	if at != len(text) {
		return dst, status.Errorf(status.Unsupported,
			"tokenizer: the tokens of a text spell %d of its %d bytes, because the tokenizer changes the text", at,
			len(text))
	}
	return dst, nil
}

// addedSpan returns the bytes that are the content of an added token that stands in the text at a
// position, and the position after the white space that the token takes along; false if none with
// this id stands there.
func (t *Tokenizer) addedSpan(text []byte, at int, id int32) (span [2]int, next int, ok bool) {
	a, ok := t.added.tokens[id]
	if !ok {
		return span, 0, false
	}
	for !bytes.HasPrefix(text[at:], []byte(a.Content)) {
		after := afterSpace(text, at)
		if !a.LStrip || after == at {
			return span, 0, false
		}
		at = after
	}
	span = [2]int{at, at + len(a.Content)}
	next = span[1]
	for after := afterSpace(text, next); a.RStrip && after > next; after = afterSpace(text, next) {
		next = after
	}
	return span, next, true
}

// afterSpace returns the position after a character of white space, or at if there is none.
func afterSpace(text []byte, at int) int {
	if _, n := utf8.DecodeRune(text[at:]); n > 0 && isClass(text[at:at+n], false, spaceBits) {
		return at + n
	}
	return at
}

// wordEnd returns the position where a token of the model that stands in the text at a position
// ends; false if it does not stand there. word: the token may begin with a space that the tokenizer
// has put before the text.
func (t *Tokenizer) wordEnd(text []byte, at int, id int32, word bool) (end int, ok bool) {
	s, ok := t.surfaces[id]
	if !ok {
		return 0, false
	}
	n, ok := spelled(text[at:], s, !t.model.raw)
	if word && (!ok || t.prepends) {
		s = strings.TrimPrefix(strings.TrimPrefix(s, "▁"), " ")
		n, ok = spelled(text[at:], s, !t.model.raw)
	}
	return at + n, ok
}

// spelled returns the number of bytes at the start of a text that are a token's; false if the token
// is not there. With spaces, ▁ in the token may be a space of the text.
func spelled(text []byte, token string, spaces bool) (n int, ok bool) {
	if len(text) >= len(token) && string(text[:len(token)]) == token {
		return len(token), true
	}
	if !spaces || !strings.Contains(token, "▁") {
		return 0, false
	}
	for token != "" {
		_, size := utf8.DecodeRuneInString(token)
		letter := token[:size]
		token = token[size:]
		switch {
		case n+size <= len(text) && string(text[n:n+size]) == letter:
			n += size
		case letter == "▁" && n < len(text) && text[n] == ' ':
			n++
		default:
			return 0, false
		}
	}
	return n, true
}
