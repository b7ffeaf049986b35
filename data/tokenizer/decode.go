package tokenizer

import (
	"strconv"
	"strings"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// decoder changes the texts of tokens into the text that they encode. m has the limits for all
// tokens together.
type decoder func(m *matcher, tokens []string) []string

func newDecoders(components []component) ([]decoder, error) {
	var all []decoder
	for _, p := range components {
		d, err := newDecoder(p)
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

func newDecoder(p component) (decoder, error) {
	switch p.Kind {
	case "ByteLevel":
		return func(_ *matcher, t []string) []string { return decodeByteLevel(t) }, nil
	case "ByteFallback":
		return func(_ *matcher, t []string) []string { return decodeBytes(t) }, nil
	case "Fuse":
		return func(_ *matcher, t []string) []string { return []string{strings.Join(t, "")} }, nil
	case "Metaspace":
		if p.Replacement == "" {
			return nil, emptyField(p.Kind, "replacement", "▁")
		}
		return func(_ *matcher, t []string) []string {
			return decodeMetaspace(t, p.Replacement, p.PrependScheme != "never")
		}, nil
	case "BPEDecoder":
		if p.Suffix == "" {
			return nil, emptyField(p.Kind, "suffix", "</w>")
		}
		return func(_ *matcher, t []string) []string { return decodeSuffix(t, p.Suffix) }, nil
	case "Strip":
		return func(_ *matcher, t []string) []string {
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
		return func(m *matcher, t []string) []string { return decodeReplace(m, t, n) }, nil
	}
	return nil, status.Errorf(status.Unsupported, "decoder: %s is not supported; %s", input.Quote(p.Kind),
		notbuilt.Decoders.Instead)
}

// emptyField returns the error for a text that would match between all characters.
func emptyField(kind, field, usual string) error {
	return status.Errorf(status.InvalidConfig, "decoder: %s: the %s is empty; set it to %q", kind, field, usual)
}

// decodeReplace applies a Replace to each token. It does not change a token if the pattern has an
// empty match or takes too many steps, or if all tokens together would become too long.
func decodeReplace(m *matcher, tokens []string, n normalizer) []string {
	limit, size := m.limit, bytesOf(tokens)
	defer func() { m.limit = limit }()
	for i, t := range tokens {
		m.limit = max(1, limit-(size-len(t))) // 0 would mean no limit
		if r, err := n(m, segment{text: []byte(t)}); err == nil && !m.exceeded() && len(r.text) <= m.limit {
			size += len(r.text) - len(t)
			tokens[i] = string(r.text)
		}
	}
	return tokens
}

func bytesOf(tokens []string) (n int) {
	for _, t := range tokens {
		n += len(t)
	}
	return n
}

// decodeByteLevel replaces letters by the bytes that they stand for, and joins the tokens.
func decodeByteLevel(tokens []string) []string {
	var all []byte
	for _, t := range tokens {
		if b, ok := fromByteLevel(nil, t); ok {
			all = append(all, b...)
		} else { // an added token is not written in letters
			all = append(all, t...)
		}
	}
	return []string{string(validUTF8(all))}
}

// decodeBytes joins adjacent tokens such as <0xE2> into text. If their bytes are not UTF-8, each
// becomes U+FFFD.
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

// decodeMetaspace replaces each letter (▁) by a space; the first token has none if the letter was
// prepended.
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

// decodeSuffix replaces the suffix of words by a space, except in the last token.
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

// stripped removes a letter up to start times from the start of s and up to end times from its end.
func stripped(s, letter string, start, end int) string {
	for ; start > 0 && letter != "" && strings.HasPrefix(s, letter); start-- {
		s = s[len(letter):]
	}
	for ; end > 0 && letter != "" && strings.HasSuffix(s, letter); end-- {
		s = s[:len(s)-len(letter)]
	}
	return s
}
