package jinja

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// upperOf has the characters whose upper case has several characters, each followed by it
// (SpecialCasing.txt of Unicode, as in Python's str.upper).
var upperOf = func() map[rune]string {
	m := map[rune]string{}
	for _, x := range strings.Fields(
		"ßSS ŉʼN ǰJ\u030c ΐΙ\u0308\u0301 ΰΥ\u0308\u0301 ևԵՒ ẖH\u0331 ẗT\u0308 ẘW\u030a ẙY\u030a " +
			"ẚAʾ ὐΥ\u0313 ὒΥ\u0313\u0300 ὔΥ\u0313\u0301 ὖΥ\u0313\u0342 ᾀἈΙ ᾁἉΙ ᾂἊΙ ᾃἋΙ ᾄἌΙ ᾅἍΙ ᾆἎΙ ᾇἏΙ " +
			"ᾈἈΙ ᾉἉΙ ᾊἊΙ ᾋἋΙ ᾌἌΙ ᾍἍΙ ᾎἎΙ ᾏἏΙ ᾐἨΙ ᾑἩΙ ᾒἪΙ ᾓἫΙ ᾔἬΙ ᾕἭΙ ᾖἮΙ ᾗἯΙ ᾘἨΙ ᾙἩΙ ᾚἪΙ ᾛἫΙ ᾜἬΙ ᾝἭΙ " +
			"ᾞἮΙ ᾟἯΙ ᾠὨΙ ᾡὩΙ ᾢὪΙ ᾣὫΙ ᾤὬΙ ᾥὭΙ ᾦὮΙ ᾧὯΙ ᾨὨΙ ᾩὩΙ ᾪὪΙ ᾫὫΙ ᾬὬΙ ᾭὭΙ ᾮὮΙ ᾯὯΙ ᾲᾺΙ ᾳΑΙ ᾴΆΙ " +
			"ᾶΑ\u0342 ᾷΑ\u0342Ι ᾼΑΙ ῂῊΙ ῃΗΙ ῄΉΙ ῆΗ\u0342 ῇΗ\u0342Ι ῌΗΙ ῒΙ\u0308\u0300 ΐΙ\u0308\u0301 " +
			"ῖΙ\u0342 ῗΙ\u0308\u0342 ῢΥ\u0308\u0300 ΰΥ\u0308\u0301 ῤΡ\u0313 ῦΥ\u0342 ῧΥ\u0308\u0342 " +
			"ῲῺΙ ῳΩΙ ῴΏΙ ῶΩ\u0342 ῷΩ\u0342Ι ῼΩΙ ﬀFF ﬁFI ﬂFL ﬃFFI ﬄFFL ﬅST ﬆST ﬓՄՆ ﬔՄԵ ﬕՄԻ ﬖՎՆ ﬗՄԽ ") {
		r, n := utf8.DecodeRuneInString(x)
		m[r] = x[n:]
	}
	return m
}()

// upper returns the upper case of the character r, as an argument of eachRune.
func upper(_ string, _ int, r rune) string {
	if s, ok := upperOf[r]; ok {
		return s
	}
	return string(unicode.ToUpper(r))
}

// titleCase returns a character as the first one of a word.
func titleCase(r rune) string {
	t, s := unicode.ToTitle(r), upperOf[r]
	if s == "" || t != r || unicode.Is(unicode.Lt, r) {
		return string(t)
	}
	if r == 'ŉ' {
		return s
	}
	_, n := utf8.DecodeRuneInString(s)
	return s[:n] + strings.ReplaceAll(strings.ToLower(s[n:]), "ι", "\u0345")
}

// lower returns the lower case of the character r at a position of s. A Greek sigma at the end of a
// word has another one.
func lower(s string, at int, r rune) string {
	switch {
	case r == 'İ':
		return "i\u0307"
	case r == 'Σ' && isFinal(s, at):
		return "ς"
	}
	return string(unicode.ToLower(r))
}

// isFinal reports whether the sigma at a position of s ends a word (Final_Sigma of Unicode): the
// cased characters are before it, and not behind it. Marks and signs inside of words do not count.
func isFinal(s string, at int) bool {
	before := strings.TrimRightFunc(s[:at], caseIgnorable)
	behind := strings.TrimLeftFunc(s[at+len("Σ"):], caseIgnorable)
	last, _ := utf8.DecodeLastRuneInString(before)
	next, _ := utf8.DecodeRuneInString(behind)
	return before != "" && cased(last) && !(behind != "" && cased(next))
}

// cased and caseIgnorable are Cased and Case_Ignorable of Unicode.
func cased(r rune) bool {
	return unicode.In(r, unicode.Lu, unicode.Ll, unicode.Lt, unicode.Other_Lowercase, unicode.Other_Uppercase)
}

func caseIgnorable(r rune) bool {
	return unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) ||
		strings.ContainsRune("'.:·\u0387\u055f\u05f4‘’\u2024\u2027︓﹒﹕＇．：", r)
}

// hasCase returns Python's s.islower() or s.isupper(): whether s has characters with a case, and
// all of them have the given one.
func hasCase(s string, tables ...*unicode.RangeTable) (found bool) {
	for _, r := range s {
		is := unicode.In(r, tables...)
		if !is && cased(r) {
			return false
		}
		found = found || is
	}
	return found
}

// lowerOf returns a string in lower case.
func lowerOf(s string) string { return Text{S: s}.eachRune(lower).S }

// eachRune returns the text with each character replaced. f gets the text, the position of a
// character, and the character. The marks stay.
func (t Text) eachRune(f func(s string, at int, r rune) string) Text {
	var b builder
	t.Runs(func(lo, hi int, mark Mark) {
		for i, r := range t.S[lo:hi] {
			b.addString(f(t.S, lo+i, r), mark)
		}
	})
	out := b.text()
	out.safe = t.safe
	return out
}

// digits has the digits that are no decimal numbers (Numeric_Type=Digit of Unicode).
var digits = &unicode.RangeTable{
	R16: []unicode.Range16{{0xb2, 0xb3, 1}, {0xb9, 0xb9, 1}, {0x1369, 0x1371, 1}, {0x19da, 0x19da, 1},
		{0x2070, 0x2070, 1}, {0x2074, 0x2079, 1}, {0x2080, 0x2089, 1}, {0x2460, 0x2468, 1}, {0x2474, 0x247c, 1},
		{0x2488, 0x2490, 1}, {0x24ea, 0x24ea, 1}, {0x24f5, 0x24fd, 1}, {0x24ff, 0x24ff, 1}, {0x2776, 0x277e, 1},
		{0x2780, 0x2788, 1}, {0x278a, 0x2792, 1}},
	R32: []unicode.Range32{{0x10a40, 0x10a43, 1}, {0x10e60, 0x10e68, 1}, {0x11052, 0x1105a, 1},
		{0x1f100, 0x1f10a, 1}},
	LatinOffset: 2,
}
