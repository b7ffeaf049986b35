package tokenizer

import (
	_ "embed"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// classesText has the classes of each code point in the `tokenizers` package.
// testdata/goldens/unicode.py computes them with this package. Its regex engine has Unicode 16, its
// normalizers Unicode 9; tables of another version, such as Go's, would split some words
// differently.
//
//go:embed classes.txt
var classesText string

// bits are the classes of a code point: one bit for each general category and for each class of
// otherClasses.
type bits uint64

// categories are the general categories in the order of their bits. A code point without a category
// is unassigned.
var categories = strings.Fields("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co")

// otherClasses are the other classes of classes.txt: \w of the regex engine outside and inside
// brackets, scripts, and the tests of characters that the package has from other sources.
var otherClasses = strings.Fields(
	"regex_word regex_set_word Han Hiragana Katakana Hangul Thai Latin Cyrillic Greek Arabic Hebrew Devanagari word space punctuation numeric")

// classTable maps code points to bits, by blocks of 256. Equal blocks are stored once.
type classTable struct {
	block [0x1100]uint16
	bits  [][256]bits
}

func (t *classTable) of(r rune) bits { return t.bits[t.block[uint32(r)>>8&0x1fff]][r&0xff] }

// classes returns the table. The first call computes it, which takes some milliseconds.
var classes = sync.OnceValue(func() *classTable {
	flat := make([]bits, 0x110000)
	for name, data := range parseTables(classesText) {
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

// classBits returns the bits of a category ("Lu"), of a group of categories ("L") or of another
// class; 0 for an unknown name.
func classBits(name string) bits {
	var all bits
	for i, c := range categories {
		if c == name || len(name) == 1 && c[:1] == name {
			all |= 1 << i
		}
	}
	for i, c := range otherClasses {
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

// parseTables splits classes.txt or normal.txt into its lines: name → data.
func parseTables(text string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		if name, data, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			out[name] = data
		}
	}
	return out
}

// eachRange calls f for each range of "41-5a 61 …".
func eachRange(data string, f func(first, last rune)) {
	for s := range strings.FieldsSeq(data) {
		a, b, ok := strings.Cut(s, "-")
		if !ok {
			b = a
		}
		f(hexRune(a), hexRune(b))
	}
}

// hexRune decodes a hexadecimal number.
func hexRune(s string) rune {
	n, _ := strconv.ParseUint(s, 16, 32)
	return rune(n)
}

// decodeRune is utf8.DecodeRune(text[at:]), faster for ASCII. The text must be valid UTF-8.
func decodeRune(text []byte, at int) (rune, int) {
	if c := text[at]; c < utf8.RuneSelf {
		return rune(c), 1
	}
	return utf8.DecodeRune(text[at:])
}

// isClass reports whether the first character of the text, or with last the last one, is in a
// class.
func isClass(text []byte, last bool, b bits) bool {
	r, n := utf8.DecodeRune(text)
	if last {
		r, n = utf8.DecodeLastRune(text)
	}
	return n > 0 && classes().of(r)&b != 0
}
