package tokenizer

import (
	"bytes"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// normalizer changes a text before it is split. It returns the same text if there is nothing to
// change.
type normalizer func(m *matcher, p segment) (segment, error)

func newNormalizers(components []component) ([]normalizer, error) {
	var all []normalizer
	for _, p := range components {
		n, err := newNormalizer(p)
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	return all, nil
}

func newNormalizer(p component) (normalizer, error) {
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
		return func(_ *matcher, x segment) (segment, error) {
			if len(x.text) == 0 {
				return x, nil
			}
			return x.prepended(nil, p.Prepend), nil
		}, nil
	case "Replace":
		return replace(p)
	case "ByteLevel":
		return func(_ *matcher, x segment) (segment, error) {
			out := toByteLevel(nil, x.text)
			return segment{out, len(toByteLevel(nil, x.text[:x.first]))}, nil
		}, nil
	}
	return nil, status.Errorf(status.Unsupported, "normalizer: %s is not supported; %s", input.Quote(p.Kind),
		notbuilt.Normalizers.Instead)
}

// inForm returns the normalizer of a normal form.
func inForm(f form) normalizer {
	return func(_ *matcher, p segment) (segment, error) {
		out := loadNormalTables().normalize(f, p.text)
		if p.first > 0 && !bytes.Equal(out[:min(p.first, len(out))], p.text[:p.first]) {
			_, n := utf8.DecodeRune(out)
			if p.first = n; !f.composes() {
				r, _ := utf8.DecodeRune(p.text)
				p.first = min(len(out), len(string(loadNormalTables().decompose(f, nil, r))))
			}
		}
		return segment{out, p.first}, nil
	}
}

// eachRune calls f for each character of a segment; f appends the new characters.
func eachRune(p segment, f func(dst []byte, r rune) []byte) segment {
	out, first := make([]byte, 0, len(p.text)), 0
	for at := 0; at < len(p.text); {
		r, n := decodeRune(p.text, at)
		out = f(out, r)
		if at += n; at <= p.first {
			first = len(out)
		}
	}
	return segment{out, first}
}

func lowercase(_ *matcher, p segment) (segment, error) {
	lower := loadNormalTables().lower
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

func stripAccents(_ *matcher, p segment) (segment, error) {
	accent := loadNormalTables().accent
	return eachRune(p, func(dst []byte, r rune) []byte {
		if r >= utf8.RuneSelf && accent[r] {
			return dst
		}
		return utf8.AppendRune(dst, r)
	}), nil
}

func strip(left, right bool) normalizer {
	return func(_ *matcher, p segment) (segment, error) {
		start, end := 0, len(p.text)
		for left && isClass(p.text[start:], false, spaceBits) {
			_, n := utf8.DecodeRune(p.text[start:])
			start += n
		}
		for right && isClass(p.text[start:end], true, spaceBits) {
			_, n := utf8.DecodeLastRune(p.text[start:end])
			end -= n
		}
		return p.sub(start, end), nil
	}
}

// replace returns the normalizer that replaces each match of a pattern by Content.
func replace(p component) (normalizer, error) {
	prog, err := p.Pattern.program()
	if err != nil {
		return nil, err
	}
	if s := p.Pattern.String; s != nil && *s != "" {
		plain := []byte(*s)
		return func(m *matcher, x segment) (segment, error) {
			if !bytes.Contains(x.text, plain) {
				return x, nil
			}
			return replaced(x, p.Content, m.limit, func(at int) (int, int, bool) {
				i := bytes.Index(x.text[at:], plain)
				return at + i, at + i + len(plain), i >= 0
			})
		}, nil
	}
	return func(m *matcher, x segment) (segment, error) {
		f := prog.find(m, x.text)
		return replaced(x, p.Content, m.limit, func(int) (int, int, bool) { return f.next() })
	}, nil
}

// replaced replaces the ranges that next returns by content. The new text counts as bytes of the
// last character that it replaces.
func replaced(x segment, content string, limit int, next func(at int) (start, end int, ok bool)) (segment, error) {
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
			return x, status.Errorf(status.Unsupported,
				"tokenizer: the pattern of a Replace normalizer with the content %s has an empty match, which is not supported; %s",
				input.Quote(content), notbuilt.EmptyReplacements.Instead)
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
	return segment{out, first}, nil
}
