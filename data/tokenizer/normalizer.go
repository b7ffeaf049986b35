package tokenizer

import (
	"bytes"
	"strings"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// piece is a stretch of text on its way through the pipeline. first is how many of its bytes come
// from the first character of the document; where that is none, the piece does not begin there.
// Metaspace asks, in the scheme "first".
type piece struct {
	text  []byte
	first int
}

// cut is the bytes from start to end as a piece of its own.
func (p piece) cut(start, end int) piece {
	return piece{p.text[start:end], max(0, min(p.first, end)-start)}
}

// prepended is the piece behind a prefix, which belongs to the character that it was put before.
func (p piece) prepended(dst []byte, prefix string) piece {
	text := append(append(dst, prefix...), p.text...)
	if p.first > 0 {
		p.first += len(prefix)
	}
	return piece{text, p.first}
}

// normalizer changes a text before anything is cut. It returns the text itself where nothing
// changes.
type normalizer func(m *matcher, p piece) (piece, error)

func newNormalizers(parts []part) ([]normalizer, error) {
	var all []normalizer
	for _, p := range parts {
		n, err := newNormalizer(p)
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	return all, nil
}

func newNormalizer(p part) (normalizer, error) {
	switch p.Kind {
	case "NFC":
		return inForm(nfc), nil
	case "NFD":
		return inForm(nfd), nil
	case "NFKC":
		return inForm(nfkc), nil
	case "NFKD":
		return inForm(nfkd), nil
	case "Lowercase":
		return lowercase, nil
	case "StripAccents":
		return stripAccents, nil
	case "Strip":
		return strip(p.StripLeft, p.StripRight), nil
	case "Prepend":
		return func(_ *matcher, x piece) (piece, error) {
			if len(x.text) == 0 {
				return x, nil
			}
			return x.prepended(nil, p.Prepend), nil
		}, nil
	case "Replace":
		return replace(p)
	case "ByteLevel":
		return func(_ *matcher, x piece) (piece, error) {
			out := toByteLevel(nil, x.text)
			return piece{out, len(toByteLevel(nil, x.text[:x.first]))}, nil
		}, nil
	}
	return nil, status.Errorf(status.Unsupported, "normalizer %s is not built: %s", input.Quote(p.Kind), notbuilt.Normalizers.Instead)
}

func inForm(f form) normalizer {
	return func(_ *matcher, p piece) (piece, error) {
		out := normals().normalize(f, p.text)
		if p.first > 0 && !bytes.Equal(out[:min(p.first, len(out))], p.text[:p.first]) {
			_, n := utf8.DecodeRune(out)
			if p.first = n; !f.composes() {
				r, _ := utf8.DecodeRune(p.text)
				p.first = min(len(out), len(string(normals().decompose(f, nil, r))))
			}
		}
		return piece{out, p.first}, nil
	}
}

// eachRune writes what f appends for each character of a piece.
func eachRune(p piece, f func(dst []byte, r rune) []byte) piece {
	out, first := make([]byte, 0, len(p.text)), 0
	for at := 0; at < len(p.text); {
		r, n := decodeRune(p.text, at)
		out = f(out, r)
		if at += n; at <= p.first {
			first = len(out)
		}
	}
	return piece{out, first}
}

func lowercase(_ *matcher, p piece) (piece, error) {
	lower := normals().lower
	return eachRune(p, func(dst []byte, r rune) []byte {
		if r < utf8.RuneSelf {
			if r >= 'A' && r <= 'Z' {
				r += 'a' - 'A'
			}
			return append(dst, byte(r))
		}
		to, ok := lower[r]
		if !ok {
			return utf8.AppendRune(dst, r)
		}
		for _, x := range to {
			dst = utf8.AppendRune(dst, x)
		}
		return dst
	}), nil
}

func stripAccents(_ *matcher, p piece) (piece, error) {
	accent := normals().accent
	return eachRune(p, func(dst []byte, r rune) []byte {
		if r >= utf8.RuneSelf && accent[r] {
			return dst
		}
		return utf8.AppendRune(dst, r)
	}), nil
}

func strip(left, right bool) normalizer {
	return func(_ *matcher, p piece) (piece, error) {
		start, end := 0, len(p.text)
		for left && isClass(p.text[start:], false, spaceBits) {
			_, n := utf8.DecodeRune(p.text[start:])
			start += n
		}
		for right && isClass(p.text[start:end], true, spaceBits) {
			_, n := utf8.DecodeLastRune(p.text[start:end])
			end -= n
		}
		return p.cut(start, end), nil
	}
}

// replace puts Content where the pattern is. New text belongs to the last character that it
// replaces.
func replace(p part) (normalizer, error) {
	prog, err := p.Pattern.program()
	if err != nil {
		return nil, err
	}
	if s := p.Pattern.String; s != nil && *s != "" {
		plain := []byte(*s)
		return func(m *matcher, x piece) (piece, error) {
			if !bytes.Contains(x.text, plain) {
				return x, nil
			}
			return replaced(x, p.Content, m.limit, func(at int) (int, int, bool) {
				i := bytes.Index(x.text[at:], plain)
				return at + i, at + i + len(plain), i >= 0
			})
		}, nil
	}
	return func(m *matcher, x piece) (piece, error) {
		f := prog.find(m, x.text)
		return replaced(x, p.Content, m.limit, func(int) (int, int, bool) { return f.next() })
	}, nil
}

func replaced(x piece, content string, limit int, next func(at int) (start, end int, ok bool)) (piece, error) {
	out, first, at := make([]byte, 0, len(x.text)+len(x.text)/4), 0, 0
	keep := func(to int) {
		out = append(out, x.text[at:to]...)
		if at < x.first {
			first = len(out) - max(0, to-x.first)
		}
	}
	for {
		start, end, ok := next(at)
		if !ok {
			break
		}
		if start == end {
			return x, status.Errorf(status.Unsupported, "tokenizer: a Replace normalizer found an empty match, where %s would be put between characters: this is not built: %s", input.Quote(content), notbuilt.EmptyReplacements.Instead)
		}
		keep(start)
		if out = append(out, content...); limit > 0 && len(out) > limit {
			return x, tooLong(len(out), limit)
		}
		if end-1 < x.first {
			first = len(out)
		}
		at = end
	}
	keep(len(x.text))
	return piece{out, first}, nil
}

// validUTF8 is the text with U+FFFD for what is no UTF-8, one for each longest beginning of a
// character, as Python's decode(errors="replace") and browsers have it (The Unicode Standard, 3.9).
func validUTF8(text []byte) []byte {
	if utf8.Valid(text) {
		return text
	}
	var out strings.Builder
	for at := 0; at < len(text); {
		r, n := utf8.DecodeRune(text[at:])
		if r != utf8.RuneError || n > 1 {
			out.Write(text[at : at+n])
			at += n
			continue
		}
		out.WriteRune(utf8.RuneError)
		at += badLength(text[at:])
	}
	return []byte(out.String())
}

// badLength is how many bytes are the beginning of a character that does not go on; at least one.
func badLength(b []byte) int {
	low, high, need := byte(0x80), byte(0xBF), 0
	switch c := b[0]; {
	case c >= 0xC2 && c <= 0xDF:
		need = 1
	case c >= 0xE0 && c <= 0xEF:
		if need = 2; c == 0xE0 {
			low = 0xA0
		} else if c == 0xED {
			high = 0x9F
		}
	case c >= 0xF0 && c <= 0xF4:
		if need = 3; c == 0xF0 {
			low = 0x90
		} else if c == 0xF4 {
			high = 0x8F
		}
	}
	n := 1
	for ; n <= need && n < len(b) && b[n] >= low && b[n] <= high; n++ {
		low, high = 0x80, 0xBF
	}
	return n
}
