package tokenizer

import (
	"strconv"
	"strings"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// decoder turns the names of tokens back into text.
type decoder func(tokens []string) []string

func newDecoders(parts []part) ([]decoder, error) {
	var all []decoder
	for _, p := range parts {
		d, err := newDecoder(p)
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

func newDecoder(p part) (decoder, error) {
	switch p.Kind {
	case "ByteLevel":
		return decodeByteLevel, nil
	case "ByteFallback":
		return decodeBytes, nil
	case "Fuse":
		return func(t []string) []string { return []string{strings.Join(t, "")} }, nil
	case "Metaspace":
		return func(t []string) []string { return decodeMetaspace(t, p.Replacement, p.PrependScheme != "never") }, nil
	case "BPEDecoder":
		return func(t []string) []string { return decodeSuffix(t, p.Suffix) }, nil
	case "Strip":
		return func(t []string) []string {
			for i := range t {
				t[i] = stripped(t[i], p.Content, p.Start, p.Stop)
			}
			return t
		}, nil
	case "Replace":
		n, err := replace(p)
		if err != nil {
			return nil, err
		}
		return func(t []string) []string {
			for i := range t {
				if r, err := n(&matcher{}, piece{text: []byte(t[i])}); err == nil {
					t[i] = string(r.text)
				}
			}
			return t
		}, nil
	}
	return nil, status.Errorf(status.Unsupported, "decoder %s is not built: %s", input.Quote(p.Kind), notbuilt.Decoders.Instead)
}

// Decode is the text of ids, special tokens and all; ids that are none are left out. Where the file
// has no decoder, tokens stand with spaces between them, as in the `tokenizers` package.
func (t *Tokenizer) Decode(ids []int32) string {
	tokens := make([]string, 0, len(ids))
	for _, id := range ids {
		if s, ok := t.added.shown[id]; ok {
			tokens = append(tokens, s)
		} else if a, ok := t.added.tokens[id]; ok {
			tokens = append(tokens, a.Content)
		} else if s, ok := t.model.names[id]; ok {
			tokens = append(tokens, s)
		}
	}
	if len(t.decoders) == 0 {
		return strings.Join(tokens, " ")
	}
	for _, d := range t.decoders {
		tokens = d(tokens)
	}
	return strings.Join(tokens, "")
}

func decodeByteLevel(tokens []string) []string {
	var all []byte
	for _, t := range tokens {
		if b, ok := fromByteLevel(nil, t); ok {
			all = append(all, b...)
		} else { // an added token that was never written in letters
			all = append(all, t...)
		}
	}
	return []string{string(validUTF8(all))}
}

// decodeBytes joins runs of <0xE2> to text; in a run that is no UTF-8 each is U+FFFD.
func decodeBytes(tokens []string) []string {
	var out []string
	var run []byte
	end := func() {
		if utf8.Valid(run) && len(run) > 0 {
			out = append(out, string(run))
		} else {
			for range run {
				out = append(out, "\uFFFD")
			}
		}
		run = run[:0]
	}
	for _, t := range tokens {
		if len(t) == 6 && strings.HasPrefix(t, "<0x") && t[5] == '>' {
			if b, err := strconv.ParseUint(t[3:5], 16, 8); err == nil {
				run = append(run, byte(b))
				continue
			}
		}
		end()
		out = append(out, t)
	}
	end()
	return out
}

func decodeMetaspace(tokens []string, letter string, prepended bool) []string {
	for i, t := range tokens {
		with := " "
		if i == 0 && prepended {
			with = ""
		}
		tokens[i] = strings.ReplaceAll(t, letter, with)
	}
	return tokens
}

func decodeSuffix(tokens []string, suffix string) []string {
	for i, t := range tokens {
		with := " "
		if i == len(tokens)-1 {
			with = ""
		}
		tokens[i] = strings.ReplaceAll(t, suffix, with)
	}
	return tokens
}

// stripped takes a letter away, at most so many times from the start and from the end.
func stripped(s, letter string, start, end int) string {
	for ; start > 0 && letter != "" && strings.HasPrefix(s, letter); start-- {
		s = s[len(letter):]
	}
	for ; end > 0 && letter != "" && strings.HasSuffix(s, letter); end-- {
		s = s[:len(s)-len(letter)]
	}
	return s
}
