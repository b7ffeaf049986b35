package tokenizer

import (
	_ "embed"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// What the `tokenizers` package knows of each code point, asked of the package itself by
// testdata/goldens/unicode.py: its regex engine stands on Unicode 16, its normalizers on Unicode 9.
// Tables of Go's that are newer or older would split a word elsewhere.
//
//go:embed classes.txt
var classesText string

// bits of a code point: one for each general category, and the tests that are no union of these.
type bits uint64

// categories in the order of their bits; what has none of them is unassigned.
var categories = strings.Fields("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co")

// others are the rest of classes.txt: \w of the regex engine, alone and inside brackets, scripts,
// and the tests of characters that the package takes from elsewhere.
var others = strings.Fields("regex_word regex_set_word Han Hiragana Katakana Hangul Thai Latin Cyrillic Greek Arabic Hebrew Devanagari word space punctuation numeric")

// classTable is bits by code point, in blocks of 256 that are kept once.
type classTable struct {
	block [0x1100]uint16
	bits  [][256]bits
}

func (t *classTable) of(r rune) bits { return t.bits[t.block[uint32(r)>>8&0x1fff]][r&0xff] }

// classes is read at the first use, some milliseconds.
var classes = sync.OnceValue(func() *classTable {
	flat := make([]bits, 0x110000)
	for name, data := range tables(classesText) {
		bit := classBits(name)
		eachRange(data, func(first, last rune) {
			for r := first; r <= last; r++ {
				flat[r] |= bit
			}
		})
	}
	t, seen := &classTable{}, map[[256]bits]uint16{}
	for i := range t.block {
		b := [256]bits(flat[i<<8:])
		at, ok := seen[b]
		if !ok {
			at = uint16(len(t.bits))
			seen[b] = at
			t.bits = append(t.bits, b)
		}
		t.block[i] = at
	}
	return t
})

// classBits is the bits of a category ("Lu"), of a group of them ("L") or of another name of
// classes.txt; 0 for an unknown one.
func classBits(name string) bits {
	var all bits
	for i, c := range categories {
		if c == name || len(name) == 1 && c[:1] == name {
			all |= 1 << i
		}
	}
	for i, c := range others {
		if c == name {
			all |= 1 << (len(categories) + i)
		}
	}
	return all
}

var (
	wordBits    = classBits("word")
	spaceBits   = classBits("space")
	punctBits   = classBits("punctuation")
	numericBits = classBits("numeric")
)

// tables cuts a file of ours into its lines: name → data.
func tables(text string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		if name, data, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			out[name] = data
		}
	}
	return out
}

// eachRange calls f for "41-5a 61 …".
func eachRange(data string, f func(first, last rune)) {
	for s := range strings.FieldsSeq(data) {
		a, b, ok := strings.Cut(s, "-")
		if !ok {
			b = a
		}
		f(hexRune(a), hexRune(b))
	}
}

// hexRune reads a number of a file of ours.
func hexRune(s string) rune {
	n, _ := strconv.ParseUint(s, 16, 32)
	return rune(n)
}

// decodeRune is utf8.DecodeRune with the short way for ASCII; the text is valid.
func decodeRune(text []byte, at int) (rune, int) {
	if c := text[at]; c < utf8.RuneSelf {
		return rune(c), 1
	}
	return utf8.DecodeRune(text[at:])
}

// isClass tells whether the first (or, from the end, the last) character of the text is in the
// class.
func isClass(text []byte, last bool, b bits) bool {
	r, n := utf8.DecodeRune(text)
	if last {
		r, n = utf8.DecodeLastRune(text)
	}
	return n > 0 && classes().of(r)&b != 0
}
