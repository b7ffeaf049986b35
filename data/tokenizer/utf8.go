package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// validUTF8 returns the text with U+FFFD instead of bytes that are not UTF-8: one for each longest
// prefix of a character, as Python's decode(errors="replace") and browsers do (The Unicode
// Standard, 3.9).
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

// badLength returns the number of bytes of the incomplete character at the start of b, at least
// one.
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
