package tokenizer

import (
	"slices"
	"strconv"
	"strings"
)

// parsePattern parses a pattern.
func parsePattern(src string) (node, error) {
	p := &parser{src: []rune(src)}
	n := p.alternatives()
	if p.more() {
		p.refuse("a ) without a (")
	}
	return n, p.err
}

// alternatives reads up to a ) or the end of the pattern. Options such as (?i) hold until there,
// also in later alternatives.
func (p *parser) alternatives() node {
	fold, dot := p.fold, p.dot
	if p.depth++; p.depth > 100 {
		p.refuse("groups more than 100 deep")
	}
	var all alt
	var c cat
	for p.more() && p.src[p.at] != ')' {
		if p.accept("|") {
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
		return anchor(r)
	case '\\':
		return p.escape()
	case '*', '+', '?':
		p.refuse("a quantifier with nothing before it")
	case '{':
		p.refuse("a { that is no quantifier")
	default:
		return p.literal(r)
	}
	return cat{}
}

// group reads a group, after its (.
func (p *parser) group() node {
	var n node
	switch {
	case p.accept("?:"):
		n = p.alternatives()
	case p.accept("?="):
		n = &look{body: p.alternatives()}
	case p.accept("?!"):
		n = &look{body: p.alternatives(), not: true}
	case p.accept("?<="):
		n = &look{body: p.alternatives(), behind: true}
	case p.accept("?<!"):
		n = &look{body: p.alternatives(), behind: true, not: true}
	case p.accept("?>"):
		n = atomic{p.alternatives()}
	case p.accept("?<"), p.accept("?'"):
		p.refuse("a named group")
	case p.accept("?"):
		return p.options()
	default:
		n = p.alternatives() // captures are not used
	}
	if !p.accept(")") {
		p.refuse("a ( without a )")
	}
	return n
}

// options reads (?i), (?m-i) and (?i:…), after the question mark.
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
		case ')': // the options hold until the end of the enclosing group
			p.fold, p.dot = fold, dot
			// in Ruby's syntax alternatives after it belong to it: a(?i)b|c is a(?i:b|c)
			return p.alternatives()
		case ':':
			oldFold, oldDot := p.fold, p.dot
			p.fold, p.dot = fold, dot
			n := p.alternatives()
			p.fold, p.dot = oldFold, oldDot
			if !p.accept(")") {
				p.refuse("a ( without a )")
			}
			return n
		default:
			p.refuse("(?" + string(r))
		}
	}
	return cat{}
}

// repeated reads the quantifiers after an atom: *, +, ?, {n,m}, each lazy with ?, and *+, ++, ?+
// without backtracking. After braces a + is another quantifier, as in Ruby.
func (p *parser) repeated(n node) node {
	for p.more() {
		r := &repeat{body: n, max: -1}
		braces := false
		switch {
		case p.accept("*"):
		case p.accept("+"):
			r.min = 1
		case p.accept("?"):
			r.max = 1
		case p.src[p.at] == '{':
			r.min, r.max = p.braces()
			braces = true
		default:
			return n
		}
		switch n.(type) {
		case anchor, *look:
			p.refuse("a quantifier after an anchor or a lookaround")
		}
		if canBeEmpty(n) {
			p.refuse("a quantifier after an expression that can be empty")
		}
		n = r
		switch {
		case p.accept("?"):
			if braces && r.min == r.max {
				p.refuse("{n}?")
			}
			r.lazy = true
		case !braces && p.accept("+"):
			n = atomic{r}
		}
	}
	return n
}

// braces reads {n}, {n,}, {,m} or {n,m}; most -1 = no limit.
func (p *parser) braces() (least, most int) {
	end := slices.Index(p.src[p.at:], '}')
	if end < 0 {
		p.refuse("a { that is no quantifier")
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

// count returns the number s, or empty if s is "".
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
