package tokenizer

import (
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// Patterns of tokenizer.json mean what Oniguruma makes of them (Ruby's syntax), the engine of the
// `tokenizers` package. What follows reads the part of that syntax that pre-tokenizers are written
// in and refuses the rest by name.

// node is one of: *set, cat, alt, *repeat, *look, atomic, edge.
type node any

type (
	cat    []node
	alt    []node
	atomic struct{ body node }
	repeat struct {
		body     node
		min, max int // max -1: no end
		lazy     bool
	}
	look struct {
		body        node
		behind, not bool
	}
	// edge is a place between characters: ^ $ A (start of text) Z (end, or before a last line's
	// end) z (end).
	edge byte
	// set is one character of a class.
	set struct {
		ascii [2]uint64 // all tests on ASCII are made beforehand
		any   bits
		none  bits // in the set where none of these hold: \P{..} inside brackets
		spans []rune
		not   bool
	}
)

func (s *set) has(r rune) bool {
	if r < utf8.RuneSelf {
		return s.ascii[r>>6]>>(r&63)&1 != 0
	}
	return s.member(r) != s.not
}

func (s *set) member(r rune) bool {
	if s.any|s.none != 0 {
		if b := classes().of(r); b&s.any != 0 || s.none != 0 && b&s.none == 0 {
			return true
		}
	}
	for i := 0; i < len(s.spans); i += 2 {
		if r >= s.spans[i] && r <= s.spans[i+1] {
			return true
		}
	}
	return false
}

// sealed makes the tests of ASCII, once the set is complete.
func (s *set) sealed() *set {
	for r := rune(0); r < utf8.RuneSelf; r++ {
		if s.member(r) != s.not {
			s.ascii[r>>6] |= 1 << (r & 63)
		}
	}
	return s
}

// whitespace is \s; the same in the engine and in the language that the package is written in.
var whitespace = []rune{9, 13, ' ', ' ', 0x85, 0x85, 0xA0, 0xA0, 0x1680, 0x1680, 0x2000, 0x200A, 0x2028, 0x2029, 0x202F, 0x202F, 0x205F, 0x205F, 0x3000, 0x3000}

// parser reads one pattern. After a refusal it stands at the end, and what it returns counts for
// nothing.
type parser struct {
	src   []rune
	at    int
	err   error
	depth int
	fold  bool // (?i)
	dot   bool // (?m): the dot matches line ends
}

func parsePattern(src string) (node, error) {
	p := &parser{src: []rune(src)}
	n := p.alternatives()
	if p.more() {
		p.refuse("a ) without a (")
	}
	return n, p.err
}

// refuse ends the reading; the first refusal holds.
func (p *parser) refuse(what string) {
	if p.err == nil {
		p.err = status.Errorf(status.Unsupported, "the pattern %s uses %s (near character %d), which is not built: %s", input.Quote(string(p.src)), what, p.at, notbuilt.Patterns.Instead)
	}
	p.at = len(p.src)
}

func (p *parser) more() bool { return p.at < len(p.src) }

// next is the next character; 0 behind the end, which is a refusal.
func (p *parser) next() rune {
	if !p.more() {
		p.refuse("an end in the middle of an expression")
		return 0
	}
	p.at++
	return p.src[p.at-1]
}

func (p *parser) take(s string) bool {
	if strings.HasPrefix(string(p.src[p.at:min(p.at+len(s), len(p.src))]), s) {
		p.at += len(s)
		return true
	}
	return false
}

// alternatives reads up to a ) or the end. A (?i) holds up to there, over the bars behind it.
func (p *parser) alternatives() node {
	fold, dot := p.fold, p.dot
	if p.depth++; p.depth > 100 {
		p.refuse("groups more than 100 deep")
	}
	var all alt
	var c cat
	for p.more() && p.src[p.at] != ')' {
		if p.take("|") {
			all, c = append(all, c), nil
			continue
		}
		c = append(c, p.repeated(p.atom()))
	}
	p.fold, p.dot, p.depth = fold, dot, p.depth-1
	if all == nil {
		return c
	}
	return append(all, c)
}

func (p *parser) atom() node {
	switch r := p.next(); r {
	case '(':
		return p.group()
	case '[':
		return p.brackets()
	case '.':
		if p.dot {
			return (&set{not: true}).sealed()
		}
		return (&set{not: true, spans: []rune{'\n', '\n'}}).sealed()
	case '^', '$':
		return edge(r)
	case '\\':
		return p.escape()
	case '*', '+', '?':
		p.refuse("a quantifier with nothing before it")
	case '{':
		p.refuse("a bare {")
	default:
		return p.literal(r)
	}
	return cat{}
}

func (p *parser) literal(r rune) node {
	s := &set{spans: []rune{r, r}}
	if p.fold {
		p.foldInto(s, r, r)
		p.refuseLongFolds(r)
	}
	return s.sealed()
}

// foldInto adds what is the same letter in another case.
func (p *parser) foldInto(s *set, first, last rune) {
	if last-first > 0x3000 {
		p.refuse("a range as wide in (?i)")
		return
	}
	for r := first; r <= last; r++ {
		if r >= utf8.RuneSelf {
			p.refuse("a letter beyond ASCII in (?i)")
			return
		}
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			s.spans = append(s.spans, f, f)
		}
	}
}

// refuseLongFolds stops at letters that fold together with the next one: the engine finds ß for ss,
// and ligatures for ff, fi, fl and st.
func (p *parser) refuseLongFolds(r rune) {
	if p.more() {
		pair := strings.ToLower(string([]rune{r, p.src[p.at]}))
		if slices.Contains([]string{"ss", "ff", "fi", "fl", "st"}, pair) {
			p.refuse(strconv.Quote(pair) + " in (?i), which folds to one letter")
		}
	}
}

func (p *parser) group() node {
	var n node
	switch {
	case p.take("?:"):
		n = p.alternatives()
	case p.take("?="):
		n = &look{body: p.alternatives()}
	case p.take("?!"):
		n = &look{body: p.alternatives(), not: true}
	case p.take("?<="):
		n = &look{body: p.alternatives(), behind: true}
	case p.take("?<!"):
		n = &look{body: p.alternatives(), behind: true, not: true}
	case p.take("?>"):
		n = atomic{p.alternatives()}
	case p.take("?<"), p.take("?'"):
		p.refuse("a named group")
	case p.take("?"):
		return p.options()
	default:
		n = p.alternatives() // which part a group matched is never asked
	}
	if !p.take(")") {
		p.refuse("a ( without a )")
	}
	return n
}

// options reads (?i), (?m-i) and (?i:…), behind the question mark.
func (p *parser) options() node {
	fold, dot, on := p.fold, p.dot, true
	for p.err == nil {
		switch r := p.next(); r {
		case '-':
			on = false
		case 'i':
			fold = on
		case 'm':
			dot = on
		case ')': // up to the end of the group around this one
			p.fold, p.dot = fold, dot
			// in Ruby's syntax bars behind it belong to it: a(?i)b|c is a(?i:b|c)
			return p.alternatives()
		case ':':
			oldFold, oldDot := p.fold, p.dot
			p.fold, p.dot = fold, dot
			n := p.alternatives()
			p.fold, p.dot = oldFold, oldDot
			if !p.take(")") {
				p.refuse("a ( without a )")
			}
			return n
		default:
			p.refuse("(?" + string(r))
		}
	}
	return cat{}
}

// repeated reads the quantifiers behind an atom: *, +, ?, {n,m}, each lazy with ?, and *+, ++, ?+
// without a way back. Behind braces a + is a quantifier of its own, as in Ruby.
func (p *parser) repeated(n node) node {
	for p.more() {
		r := &repeat{body: n, max: -1}
		braces := false
		switch {
		case p.take("*"):
		case p.take("+"):
			r.min = 1
		case p.take("?"):
			r.max = 1
		case p.src[p.at] == '{':
			r.min, r.max = p.braces()
			braces = true
		default:
			return n
		}
		switch n.(type) {
		case edge, *look:
			p.refuse("a quantifier behind a place")
		}
		if canBeEmpty(n) {
			p.refuse("a quantifier of what may be empty")
		}
		n = r
		switch {
		case p.take("?"):
			if braces && r.min == r.max {
				p.refuse("{n}?")
			}
			r.lazy = true
		case !braces && p.take("+"):
			n = atomic{r}
		}
	}
	return n
}

func (p *parser) braces() (least, most int) {
	end := slices.Index(p.src[p.at:], '}')
	if end < 0 {
		p.refuse("a bare {")
		return 0, 0
	}
	text := string(p.src[p.at+1 : p.at+end])
	p.at += end + 1
	a, b, comma := strings.Cut(text, ",")
	least, most = p.count(a, 0), -1
	if !comma {
		most = p.count(a, -1)
	} else if b != "" {
		most = p.count(b, -1)
	}
	if a == "" && b == "" || most >= 0 && most < least || most == 0 {
		p.refuse("{" + text + "}")
	}
	return least, most
}

func (p *parser) count(s string, empty int) int {
	if s == "" {
		return empty
	}
	n, err := strconv.ParseUint(s, 10, 10)
	if err != nil {
		p.refuse("the count " + s)
		return 0
	}
	return int(n)
}

// canBeEmpty tells whether a node may match without taking a character.
func canBeEmpty(n node) bool {
	switch n := n.(type) {
	case *set:
		return false
	case cat:
		return !slices.ContainsFunc(n, func(x node) bool { return !canBeEmpty(x) })
	case alt:
		return slices.ContainsFunc(n, canBeEmpty)
	case atomic:
		return canBeEmpty(n.body)
	case *repeat:
		return n.min == 0 || canBeEmpty(n.body)
	}
	return true
}
