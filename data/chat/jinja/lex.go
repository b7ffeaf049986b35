package jinja

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// kind is the kind of a token.
type kind int

const (
	tokEOF kind = iota
	tokData
	tokBlockBegin
	tokBlockEnd
	tokVarBegin
	tokVarEnd
	tokName
	tokString
	tokInt
	tokFloat
	tokOp
)

type token struct {
	kind kind
	text string // name, operator, digits, or the value of a string
	line int
}

// lexer divides a template into tokens. It follows lexer.py of Jinja2, with trim_blocks and
// lstrip_blocks.
type lexer struct {
	src  string
	at   int
	line int
	// the last token ended with a newline, or there was none
	lineStart bool
	tokens    []token
}

// lex returns the tokens of a template.
func lex(src string) []token {
	src = strings.ReplaceAll(strings.ReplaceAll(src, "\r\n", "\n"), "\r", "\n")
	l := &lexer{src: strings.TrimSuffix(src, "\n"), line: 1, lineStart: true}
	for l.at < len(l.src) {
		l.root()
	}
	l.emit(tokEOF, "")
	return l.tokens
}

func (l *lexer) emit(k kind, text string) { l.tokens = append(l.tokens, token{k, text, l.line}) }

// advance moves to a position of the source and counts its lines.
func (l *lexer) advance(to int) {
	if to > l.at {
		l.line += strings.Count(l.src[l.at:to], "\n")
		l.lineStart = l.src[to-1] == '\n'
		l.at = to
	}
}

// root reads the text up to the next tag, and the tag.
func (l *lexer) root() {
	begin := -1
	for i := l.at; i+1 < len(l.src); i++ {
		if l.src[i] == '{' && (l.src[i+1] == '{' || l.src[i+1] == '%' || l.src[i+1] == '#') {
			begin = i
			break
		}
	}
	if begin < 0 {
		l.emit(tokData, l.src[l.at:])
		l.advance(len(l.src))
		return
	}
	text, variable := l.src[l.at:begin], l.src[begin+1] == '{'
	sign := byte(0)
	if begin+2 < len(l.src) && (l.src[begin+2] == '-' || l.src[begin+2] == '+') {
		sign = l.src[begin+2]
	}
	switch {
	case sign == '-':
		text = strings.TrimRightFunc(text, isSpace)
	case sign != '+' && !variable:
		start := strings.LastIndexByte(text, '\n') + 1
		if (start > 0 || l.lineStart) && strings.TrimFunc(text[start:], isSpace) == "" {
			text = text[:start]
		}
	}
	if text != "" {
		l.emit(tokData, text)
	}
	after := begin + 2
	if sign != 0 {
		after++
	}
	l.advance(after)
	switch l.src[begin+1] {
	case '#':
		end := strings.Index(l.src[l.at:], "#}")
		if end < 0 {
			fail(l.line, "a comment has no end; write #} behind it")
		}
		l.closeTag(l.at+end, true)
	case '%':
		if l.raw() {
			return
		}
		l.emit(tokBlockBegin, "")
		l.tag("%}", tokBlockEnd)
	default:
		l.emit(tokVarBegin, "")
		l.tag("}}", tokVarEnd)
	}
}

// closeTag moves behind the end of a tag, whose two characters are at the given position, and
// behind the whitespace that the end removes.
func (l *lexer) closeTag(end int, trimNewline bool) {
	sign := byte(0)
	if end > l.at {
		sign = l.src[end-1]
	}
	to := end + 2
	switch {
	case sign == '-':
		to = len(l.src) - len(strings.TrimLeftFunc(l.src[to:], isSpace))
	case trimNewline && sign != '+' && to < len(l.src) && l.src[to] == '\n':
		to++
	}
	l.advance(to)
}

// raw reads {% raw %} … {% endraw %}, if the tag is raw.
func (l *lexer) raw() bool {
	rest := strings.TrimLeftFunc(l.src[l.at:], isSpace)
	body, ok := strings.CutPrefix(rest, "raw")
	if !ok {
		return false
	}
	tail := strings.TrimLeftFunc(body, isSpace)
	tail = strings.TrimPrefix(tail, "-")
	if !strings.HasPrefix(tail, "%}") {
		return false
	}
	l.closeTag(len(l.src)-len(tail), false)
	for i := l.at; ; i++ {
		n := strings.Index(l.src[i:], "{%")
		if n < 0 {
			fail(l.line, "raw has no end; write {%% endraw %%} behind it")
		}
		i += n
		inner := strings.TrimLeft(l.src[i+2:], "-+")
		sign := l.src[i+2 : len(l.src)-len(inner)]
		inner, ok := strings.CutPrefix(strings.TrimLeftFunc(inner, isSpace), "endraw")
		if !ok {
			continue
		}
		inner = strings.TrimLeft(strings.TrimLeftFunc(inner, isSpace), "-+")
		if !strings.HasPrefix(inner, "%}") {
			continue
		}
		text := l.src[l.at:i]
		start := strings.LastIndexByte(text, '\n') + 1
		switch {
		case sign == "-":
			text = strings.TrimRightFunc(text, isSpace)
		case sign == "" && start > 0 && strings.TrimFunc(text[start:], isSpace) == "":
			text = text[:start] // the tag is alone on its line, which does not hold for the line of raw
		}
		l.emit(tokData, text)
		l.advance(i + 2)
		l.closeTag(len(l.src)-len(inner), true)
		return true
	}
}

// operators, the longest first.
var operators = []string{"**", "//", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
	">", "<", "=", ".", ":", "|", ",", ";"}

// tag reads the tokens of a tag up to its end.
func (l *lexer) tag(end string, endKind kind) {
	var open []byte
	for {
		rest := l.src[l.at:]
		trimmed := strings.TrimLeftFunc(rest, isSpace)
		l.advance(len(l.src) - len(trimmed))
		if trimmed == "" {
			fail(l.line, "a tag has no end; write %s behind it", end)
		}
		if len(open) == 0 {
			for _, sign := range []string{"", "-", "+"} {
				if strings.HasPrefix(trimmed, sign+end) && (sign != "+" || end == "%}") {
					l.emit(endKind, "")
					l.closeTag(l.at+len(sign), end == "%}")
					return
				}
			}
		}
		switch c := trimmed[0]; {
		case c == '"' || c == '\'':
			l.stringToken(trimmed, c)
		case c >= '0' && c <= '9':
			l.number(trimmed)
		default:
			if n := nameLength(trimmed); n > 0 {
				l.emit(tokName, trimmed[:n])
				l.advance(l.at + n)
				continue
			}
			op := ""
			for _, o := range operators {
				if strings.HasPrefix(trimmed, o) {
					op = o
					break
				}
			}
			switch op {
			case "":
				r, _ := utf8.DecodeRuneInString(trimmed)
				fail(l.line, "unexpected character %q", r)
			case "(", "[", "{":
				open = append(open, op[0])
			case ")", "]", "}":
				if len(open) == 0 || matching[open[len(open)-1]] != op[0] {
					fail(l.line, "unexpected %q", op)
				}
				open = open[:len(open)-1]
			}
			l.emit(tokOp, op)
			l.advance(l.at + len(op))
		}
	}
}

var matching = map[byte]byte{'(': ')', '[': ']', '{': '}'}

func nameLength(s string) int {
	for i, r := range s {
		if !(r == '_' || unicode.IsLetter(r) || i > 0 && unicode.IsDigit(r)) {
			return i
		}
	}
	return len(s)
}

func (l *lexer) stringToken(s string, quote byte) {
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case quote:
			l.emit(tokString, l.unescape(s[1:i]))
			l.advance(l.at + i + 1)
			return
		}
	}
	fail(l.line, "a string has no end; write %c behind it", quote)
}

// digitsOf has the digits of a \x, \u or \U escape.
var digitsOf = map[byte]int{'x': 2, 'u': 4, 'U': 8}

var simpleEscapes = map[byte]string{'n': "\n", 't': "\t", 'r': "\r", '\\': `\`, '\'': "'", '"': `"`, 'a': "\a",
	'b': "\b", 'f': "\f", 'v': "\v", '\n': ""}

// unescape decodes a string literal as Python's unicode-escape does. An unknown escape stays.
func (l *lexer) unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		i++
		c := s[i]
		if e, ok := simpleEscapes[c]; ok {
			b.WriteString(e)
		} else if n := digitsOf[c]; n > 0 {
			if i+n >= len(s) {
				fail(l.line, "the escape \\%c needs %d digits", c, n)
			}
			x, err := strconv.ParseUint(s[i+1:i+1+n], 16, 32)
			if err != nil || x > unicode.MaxRune {
				fail(l.line, "the escape \\%s is not a character", s[i:i+1+n])
			}
			b.WriteRune(rune(x))
			i += n
		} else if c >= '0' && c <= '7' {
			n := 1
			for n < 3 && i+n < len(s) && s[i+n] >= '0' && s[i+n] <= '7' {
				n++
			}
			x, _ := strconv.ParseUint(s[i:i+n], 8, 32)
			b.WriteRune(rune(x))
			i += n - 1
		} else {
			b.WriteByte('\\')
			b.WriteByte(c)
		}
	}
	return b.String()
}

func (l *lexer) number(s string) {
	digits := func(i int) int {
		for i < len(s) &&
			(s[i] >= '0' && s[i] <= '9' || s[i] == '_' && i+1 < len(s) && s[i+1] >= '0' && s[i+1] <= '9') {
			i++
		}
		return i
	}
	i, k := digits(0), tokInt
	if i == 1 && s[0] == '0' && len(s) > 2 && strings.IndexByte("xXoObB", s[1]) >= 0 {
		for i = 2; i < len(s) && (s[i] == '_' || strings.IndexByte("0123456789abcdefABCDEF", s[i]) >= 0); {
			i++
		}
	} else {
		if i+1 < len(s) && s[i] == '.' && digits(i+1) > i+1 {
			i, k = digits(i+1), tokFloat
		}
		if i < len(s) && (s[i] == 'e' || s[i] == 'E') {
			j := i + 1
			if j < len(s) && (s[j] == '+' || s[j] == '-') {
				j++
			}
			if n := digits(j); n > j {
				i, k = n, tokFloat
			}
		}
	}
	l.emit(k, strings.ReplaceAll(s[:i], "_", ""))
	l.advance(l.at + i)
}

// isSpace reports whether Python's str.isspace does.
func isSpace(r rune) bool {
	return r >= 0x1c && r <= 0x1f || unicode.IsSpace(r)
}
