package tokenizer

import (
	"slices"
	"strconv"
	"strings"
)

// escape reads an escape sequence outside brackets, after its backslash.
func (p *parser) escape() node {
	switch r := p.next(); r {
	case 'A', 'z', 'Z':
		return anchor(r)
	case 'b', 'B', 'G', 'K', 'R', 'X', 'g', 'k':
		p.refuse(`\` + string(r))
	default:
		s := &set{}
		if literal, ok := p.classEscape(s, r, "regex_word"); ok {
			return p.literal(literal)
		}
		p.refuseFolded(s)
		return s.sealed()
	}
	return cat{}
}

// classEscape adds a class such as \s or \p{L} to a set, or returns the character that an escape
// sequence stands for. word is the name of the table for \w.
func (p *parser) classEscape(s *set, r rune, word string) (literal rune, ok bool) {
	switch r {
	case 's':
		s.spans = append(s.spans, whitespace...)
	case 'S':
		s.spans = append(s.spans, complement(whitespace)...)
	case 'd':
		s.any |= classBits("Nd")
	case 'D':
		p.addComplement(s, classBits("Nd"))
	case 'w':
		s.any |= classBits(word)
	case 'W':
		p.addComplement(s, classBits(word))
	case 'h':
		s.spans = append(s.spans, '0', '9', 'A', 'F', 'a', 'f')
	case 'H':
		s.spans = append(s.spans, complement([]rune{'0', '9', 'A', 'F', 'a', 'f'})...)
	case 'p', 'P':
		p.property(s, r == 'P')
	case 'n':
		return '\n', true
	case 'r':
		return '\r', true
	case 't':
		return '\t', true
	case 'f':
		return '\f', true
	case 'v':
		return '\v', true
	case 'a':
		return 7, true
	case 'e':
		return 27, true
	case 'x':
		if p.accept("{") {
			end := slices.Index(p.src[p.at:], '}')
			return p.hex(end, 1), true
		}
		return p.hex(2, 0), true
	case 'u':
		return p.hex(4, 0), true
	default:
		if r >= 0x80 || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' {
			p.refuse(`\` + string(r))
		}
		return r, true
	}
	return 0, false
}

// refuseFolded refuses \p{..} and \w in (?i): Oniguruma adds the other case of every character in
// them, which may be no letter.
func (p *parser) refuseFolded(s *set) {
	if p.fold && (s.any|s.none)&^classBits("Nd") != 0 {
		p.refuse("a class of letters in (?i)")
	}
}

// addComplement adds the characters that have none of the bits. A set can have one such class.
func (p *parser) addComplement(s *set, b bits) {
	if s.none != 0 {
		p.refuse("two negated classes in one set")
	}
	s.none = b
}

// hex reads a number of the given digits and skips over more characters.
func (p *parser) hex(digits, over int) rune {
	if digits < 1 || p.at+digits > len(p.src) {
		p.refuse("an unfinished hexadecimal escape")
		return 0
	}
	text := string(p.src[p.at : p.at+digits])
	n, err := strconv.ParseUint(text, 16, 32)
	// two digits are a byte of UTF-8
	if err != nil || n > 0x10FFFF || digits == 2 && over == 0 && n >= 0x80 {
		p.refuse("the hexadecimal escape " + text)
		return 0
	}
	p.at += digits + over
	return rune(n)
}

// property reads {L}, {^L} or {Han} after \p or, with not, after \P. \P{^L} is \p{L}.
func (p *parser) property(s *set, not bool) {
	end := slices.Index(p.src[p.at:], '}')
	if end < 2 || !p.accept("{") {
		p.refuse(`\p without a name in braces`)
		return
	}
	name := string(p.src[p.at : p.at+end-1])
	p.at += end
	if inner, ok := strings.CutPrefix(name, "^"); ok {
		name, not = inner, !not
	}
	long := map[string]string{"Letter": "L", "Number": "N", "Mark": "M", "Punctuation": "P", "Symbol": "S",
		"Separator": "Z", "Digit": "Nd",
		"Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt", "Modifier_Letter": "Lm",
		"Other_Letter": "Lo"}
	if l, ok := long[name]; ok {
		name = l
	}
	b := classBits(name)
	if first := strings.ToUpper(name[:min(1, len(name))]); b == 0 || name == "C" || first != name[:1] {
		p.refuse(`\p{` + name + "}")
		return
	}
	if not {
		p.addComplement(s, b)
	} else {
		s.any |= b
	}
}

// brackets reads a class, after its [.
func (p *parser) brackets() node {
	s := &set{not: p.accept("^")}
	for first := true; p.err == nil; first = false {
		r := p.next()
		switch {
		case r == ']' && !first:
			return s.sealed()
		case r == ']':
			p.refuse("an empty []")
			continue
		case r == '[':
			p.refuse("a [ inside brackets: write \\[")
		case r == '&' && p.accept("&"):
			p.refuse("&& inside brackets")
		case r == '\\':
			literal, ok := p.classEscape(s, p.next(), "regex_set_word")
			if !ok {
				p.refuseFolded(s)
				continue
			}
			r = literal
		}
		last := r
		if p.more() && p.src[p.at] == '-' && p.at+1 < len(p.src) && p.src[p.at+1] != ']' {
			p.at++
			if last = p.next(); last == '\\' {
				var ok bool
				if last, ok = p.classEscape(s, p.next(), "regex_set_word"); !ok {
					p.refuse("a range up to a class")
				}
			} else if last == '[' {
				p.refuse("a [ inside brackets: write \\[")
			}
			if last < r {
				p.refuse("a range that goes backwards")
			}
		}
		s.spans = append(s.spans, r, last)
		if p.fold {
			p.foldInto(s, r, last)
		}
	}
	return cat{}
}

// complement returns the complement of sorted spans.
func complement(spans []rune) []rune {
	var out []rune
	next := rune(0)
	for i := 0; i < len(spans); i += 2 {
		if spans[i] > next {
			out = append(out, next, spans[i]-1)
		}
		next = spans[i+1] + 1
	}
	return append(out, next, 0x10FFFF)
}
