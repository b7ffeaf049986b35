package tokenizer

import (
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"ulysses/internal/status"
)

// surfaces has the text of each token as it stands in an encoded text. In a token of the model, ▁
// stands for itself and for a space.
type surfaces map[int32]string

// surfacesOf returns the texts of all tokens: the content of added tokens, and the bytes of tokens
// of the model.
func (t *Tokenizer) surfacesOf() surfaces {
	s := make(surfaces, len(t.model.names)+len(t.added.tokens))
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
	for id, a := range t.added.tokens {
		s[id] = a.Content
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

// Ends appends, for each token of ids, the position in the text where the token ends. ids is the
// result of Encode for the text. The error has the code Unsupported if the tokenizer has changed
// the text, so that the tokens do not spell it.
func (t *Tokenizer) Ends(dst []int, text []byte, ids []int32) ([]int, error) {
	t.mu.Lock()
	if t.surfaces == nil {
		t.surfaces = t.surfacesOf()
	}
	all := t.surfaces
	t.mu.Unlock()
	space := func(at int) int {
		if _, n := utf8.DecodeRune(text[at:]); n > 0 && isClass(text[at:at+n], false, spaceBits) {
			return at + n
		}
		return at
	}
	at, word := 0, true // word: the tokenizer may have put a space before the text here
	for i, id := range ids {
		s, ok := all[id]
		a, added := t.added.tokens[id]
		n, matches := spelled(text[at:], s, !added && !t.model.raw)
		matches = matches && !(t.prepends && word && !added)
		for added && a.LStrip && ok && !matches && space(at) > at {
			at = space(at)
			n, matches = spelled(text[at:], s, false)
		}
		if ok && word && !matches && !added {
			s = strings.TrimPrefix(strings.TrimPrefix(s, "▁"), " ")
			n, matches = spelled(text[at:], s, !t.model.raw)
		}
		if !ok || !matches {
			return dst, status.Errorf(status.Unsupported, "tokenizer: token %d of a text, %d, does not spell the text at byte %d, because the tokenizer changes the text", i, id, at)
		}
		at += n
		for added && a.RStrip && space(at) > at {
			at = space(at)
		}
		word = added
		dst = append(dst, at)
	}
	if at != len(text) {
		return dst, status.Errorf(status.Unsupported, "tokenizer: the tokens of a text spell %d of its %d bytes, because the tokenizer changes the text", at, len(text))
	}
	return dst, nil
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
