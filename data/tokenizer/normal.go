package tokenizer

import (
	_ "embed"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// normalText has the tables of the normal forms of the `tokenizers` package. They have the
// characters of Unicode 9; later characters do not change. There is no limit on the marks after a
// letter (golang.org/x/text inserts a joiner after thirty).
//
//go:embed normal.txt
var normalText string

// normalTables has the decompositions and compositions of characters. Syllables of Hangul are
// computed (The Unicode Standard, 3.12).
type normalTables struct {
	ccc        map[rune]uint8
	canonical  map[rune][]rune
	compatible map[rune][]rune
	compose    map[[2]rune]rune
	lower      map[rune][]rune
	accent     map[rune]bool
	// plain[f][b]: form f does not change the 256 code points of block b, in any context
	plain [4][0x1100]bool
}

type form int

const (
	nfc form = iota
	nfd
	nfkc
	nfkd
)

func (f form) composes() bool   { return f == nfc || f == nfkc }
func (f form) compatible() bool { return f == nfkc || f == nfkd }

var loadNormalTables = sync.OnceValue(func() *normalTables {
	d := &normalTables{ccc: map[rune]uint8{}, accent: map[rune]bool{}, compose: map[[2]rune]rune{}}
	t := parseTables(normalText)
	for name, data := range t {
		if class, ok := strings.CutPrefix(name, "ccc"); ok {
			n, _ := strconv.ParseUint(class, 10, 8)
			eachRange(data, func(first, last rune) {
				for r := first; r <= last; r++ {
					d.ccc[r] = uint8(n)
				}
			})
		}
	}
	eachRange(t["accent"], func(first, last rune) {
		for r := first; r <= last; r++ {
			d.accent[r] = true
		}
	})
	d.canonical, d.compatible, d.lower = eachMap(t["canonical"]), eachMap(t["compatible"]), eachMap(t["lower"])
	for c, pair := range eachMap(t["compose"]) {
		d.compose[[2]rune(pair)] = c
	}
	d.findPlain()
	return d
})

// eachMap decodes "c0:41+300 …".
func eachMap(data string) map[rune][]rune {
	out := map[rune][]rune{}
	for s := range strings.FieldsSeq(data) {
		from, to, _ := strings.Cut(s, ":")
		var runes []rune
		for x := range strings.SplitSeq(to, "+") {
			runes = append(runes, hexRune(x))
		}
		out[hexRune(from)] = runes
	}
	return out
}

// findPlain sets plain.
func (d *normalTables) findPlain() {
	for f := range d.plain {
		plain := &d.plain[f]
		for i := range plain {
			plain[i] = true
		}
		affect := func(r rune) { plain[r>>8] = false }
		for r := range d.ccc {
			affect(r)
		}
		for r := range d.canonical {
			affect(r)
		}
		for r := rune(hangulFirst); r <= hangulLast; r += 256 {
			affect(r)
		}
		affect(hangulLast)
		affect(0x1100) // the letters of this block compose
		if form(f).compatible() {
			for r := range d.compatible {
				affect(r)
			}
		}
		// A pair composes when its second letter follows the first, so second letters are affected.
		for pair := range d.compose {
			affect(pair[1])
		}
	}
}

const (
	hangulFirst, hangulLast      = 0xAC00, 0xD7A3
	hangulL, hangulV, hangulT    = 0x1100, 0x1161, 0x11A7
	hangulLs, hangulVs, hangulTs = 19, 21, 28
	hangulOfOneL                 = hangulVs * hangulTs
)

// normalize returns the text in form f. It returns the same slice if nothing changes.
func (d *normalTables) normalize(f form, text []byte) []byte {
	var out []byte
	var buf []rune
	for done := 0; ; {
		// Plain characters stay, except the last one before an affected character, because the two
		// may compose.
		from, at := d.nextAffected(f, text, done)
		if at == len(text) {
			if out == nil {
				return text
			}
			return append(out, text[done:]...)
		}
		if out == nil {
			out = make([]byte, 0, len(text)+len(text)/8)
		}
		out = append(out, text[done:from]...)
		buf = buf[:0]
		for at = from; at < len(text); {
			r, n := decodeRune(text, at)
			if at > from && d.isPlain(f, r) {
				break
			}
			buf = d.decompose(f, buf, r)
			at += n
		}
		d.reorder(buf)
		if f.composes() {
			buf = d.composeAll(buf)
		}
		for _, r := range buf {
			out = utf8.AppendRune(out, r)
		}
		done = at
	}
}

// isPlain reports whether form f does not change a character and does not compose it with the
// character before it.
func (d *normalTables) isPlain(f form, r rune) bool { return r < utf8.RuneSelf || d.plain[f][r>>8] }

// nextAffected returns the position of the first character in text[at:] that is not plain, or the
// end, and the position of the character before it.
func (d *normalTables) nextAffected(f form, text []byte, at int) (before, touched int) {
	before = at
	for at < len(text) {
		if text[at] < utf8.RuneSelf {
			before = at
			at++
			continue
		}
		r, n := utf8.DecodeRune(text[at:])
		if !d.plain[f][r>>8] {
			break
		}
		before = at
		at += n
	}
	return before, at
}

// decompose appends the decomposition of a character in form f.
func (d *normalTables) decompose(f form, dst []rune, r rune) []rune {
	if r >= hangulFirst && r <= hangulLast {
		s := r - hangulFirst
		dst = append(dst, hangulL+s/hangulOfOneL, hangulV+s%hangulOfOneL/hangulTs)
		if t := s % hangulTs; t != 0 {
			dst = append(dst, hangulT+t)
		}
		return dst
	}
	if f.compatible() {
		if x, ok := d.compatible[r]; ok {
			return append(dst, x...)
		}
	}
	if x, ok := d.canonical[r]; ok {
		return append(dst, x...)
	}
	return append(dst, r)
}

// reorder sorts adjacent marks by their combining class. The sort is stable.
func (d *normalTables) reorder(s []rune) {
	for i := 0; i < len(s); i++ {
		if d.ccc[s[i]] == 0 {
			continue
		}
		start := i
		for i < len(s) && d.ccc[s[i]] != 0 {
			i++
		}
		if run := s[start:i]; len(run) > 1 {
			slices.SortStableFunc(run, func(a, b rune) int { return int(d.ccc[a]) - int(d.ccc[b]) })
		}
	}
}

// composeAll composes in place: each starter with the following characters that are not blocked
// (The Unicode Standard, 3.11, D117).
func (d *normalTables) composeAll(s []rune) []rune {
	// last: class of the last mark after the starter, -1 = none
	out, starter, last := s[:0], -1, -1
	for _, r := range s {
		class := int(d.ccc[r])
		if starter >= 0 && last < class {
			if c, ok := d.composePair(out[starter], r); ok {
				out[starter] = c
				continue
			}
		}
		if class == 0 {
			starter, last = len(out), -1
		} else {
			last = class
		}
		out = append(out, r)
	}
	return out
}

// composePair returns the composition of two characters; false if there is none.
func (d *normalTables) composePair(a, b rune) (rune, bool) {
	if l := a - hangulL; l >= 0 && l < hangulLs && b >= hangulV && b < hangulV+hangulVs {
		return hangulFirst + l*hangulOfOneL + (b-hangulV)*hangulTs, true
	}
	if s := a - hangulFirst; s >= 0 && a <= hangulLast && s%hangulTs == 0 && b > hangulT && b < hangulT+hangulTs {
		return a + b - hangulT, true
	}
	c, ok := d.compose[[2]rune{a, b}]
	return c, ok
}
