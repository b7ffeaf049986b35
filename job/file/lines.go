package file

import (
	"maps"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
)

// keyLines finds the line of each table and key of a TOML document, by the full dotted name in the
// spelling of toml.Key. The library does not return positions of valid keys. keyLines expects valid
// TOML; on other text it ends without an error and may return wrong lines. Of the elements of an
// array of tables, the first counts. keyLines also finds values that contradict a dotted key (a.b =
// 1, then a = 2), which the library accepts, and nesting for which the library needs quadratic
// time.
func keyLines(src string) *scanner {
	s := &scanner{src: src, line: 1, lines: map[string]int{}, defined: map[string]int{}}
	var table toml.Key
	for s.blank(); s.more(); s.blank() {
		line := s.line
		if s.peek() == '[' {
			before := s.i
			for s.more() && s.peek() == '[' {
				s.i++
			}
			elements := s.i - before
			table = s.key()
			if elements == 2 { // the next element may have the keys of the one before
				inside := table.String() + "."
				maps.DeleteFunc(s.defined, func(key string, _ int) bool { return strings.HasPrefix(key, inside) })
			}
			s.record(table, 0, line)
		} else if key := s.key(); s.accept('=') {
			key = append(table[:len(table):len(table)], key...)
			if first, ok := s.defined[key.String()]; ok {
				s.clashes = append(s.clashes, clash{key.String(), line, first})
			}
			s.record(key, len(table), line)
			s.value(key)
		}
		s.restOfLine()
	}
	return s
}

// scanner reads a TOML document from left to right.
type scanner struct {
	src   string
	i     int
	line  int
	depth int // of inline tables and arrays

	lines   map[string]int
	defined map[string]int // lines of the keys that may not come again
	clashes []clash
	deep    int // first line with too deep nesting; 0 = none
}

// clash is a key that is defined twice.
type clash struct {
	key         string
	line, first int
}

// maxNesting is the largest depth of dotted keys, arrays and inline tables. Job files need fewer.
const maxNesting = 50

func (s *scanner) more() bool { return s.i < len(s.src) }
func (s *scanner) peek() byte { return s.src[s.i] }

// record records the line of a key and of the tables that it implies, except the first known ones.
func (s *scanner) record(key toml.Key, known, line int) {
	if len(key) > maxNesting {
		s.tooDeep()
		return
	}
	for n := known + 1; n <= len(key); n++ {
		name := key[:n].String()
		if _, ok := s.lines[name]; !ok {
			s.lines[name] = line
		}
		if _, ok := s.defined[name]; !ok {
			s.defined[name] = line
		}
	}
}

func (s *scanner) tooDeep() {
	if s.deep == 0 {
		s.deep = s.line
	}
}

func (s *scanner) spaces() {
	for s.more() && (s.peek() == ' ' || s.peek() == '\t' || s.peek() == '\r') {
		s.i++
	}
}

// blank skips white space, newlines and comments.
func (s *scanner) blank() {
	for s.spaces(); s.more() && (s.peek() == '\n' || s.peek() == '#'); s.spaces() {
		s.restOfLine()
	}
}

// restOfLine moves behind the next newline.
func (s *scanner) restOfLine() {
	n := strings.IndexByte(s.src[s.i:], '\n')
	if n < 0 {
		s.i = len(s.src)
		return
	}
	s.i += n + 1
	s.line++
}

// accept skips spaces and then the character c, if it follows.
func (s *scanner) accept(c byte) bool {
	s.spaces()
	if s.more() && s.peek() == c {
		s.i++
		return true
	}
	return false
}

// key reads a dotted key of bare and quoted names.
func (s *scanner) key() toml.Key {
	var key toml.Key
	for {
		s.spaces()
		start := s.i
		if s.more() && (s.peek() == '"' || s.peek() == '\'') {
			s.str()
			name := s.src[start:s.i]
			if plain, err := strconv.Unquote(name); err == nil && name[0] == '"' {
				name = plain
			} else {
				name = strings.Trim(name, `"'`)
			}
			key = append(key, name)
		} else {
			for s.more() && !strings.ContainsRune(" \t\r\n.=[]{},#\"'", rune(s.peek())) {
				s.i++
			}
			if start == s.i {
				return key
			}
			key = append(key, s.src[start:s.i])
		}
		if !s.accept('.') {
			return key
		}
	}
}

// str skips a string of any of the four kinds.
func (s *scanner) str() {
	quote := s.src[s.i : s.i+1]
	if strings.HasPrefix(s.src[s.i:], strings.Repeat(quote, 3)) {
		quote = strings.Repeat(quote, 3)
	}
	for s.i += len(quote); s.more(); s.i++ {
		switch c := s.peek(); {
		case c == '\\' && quote[0] == '"' && s.i+1 < len(s.src):
			s.i++
			if s.peek() == '\n' {
				s.line++
			}
		case strings.HasPrefix(s.src[s.i:], quote):
			s.i += len(quote)
			// A multi-line string may end in up to two quotes that belong to it.
			for len(quote) == 3 && s.more() && s.peek() == quote[0] {
				s.i++
			}
			return
		case c == '\n':
			if len(quote) == 1 {
				return
			}
			s.line++
		}
	}
}

// value skips a value and records the keys of the inline tables in it.
func (s *scanner) value(prefix toml.Key) {
	s.blank()
	if s.depth++; s.depth > maxNesting {
		s.tooDeep()
	}
	defer func() { s.depth-- }()
	if !s.more() || s.deep > 0 {
		return
	}
	switch s.peek() {
	case '"', '\'':
		s.str()
	case '[':
		for s.i++; ; {
			s.blank()
			before := s.i
			if !s.more() || s.accept(']') {
				return
			}
			if s.value(prefix); !s.accept(',') && s.i == before {
				return
			}
		}
	case '{':
		for s.i++; ; {
			s.blank()
			before, line := s.i, s.line
			if !s.more() || s.accept('}') {
				return
			}
			key := append(prefix[:len(prefix):len(prefix)], s.key()...)
			if s.accept('=') {
				s.record(key, len(prefix), line)
				s.value(key)
			}
			for s.more() && !strings.ContainsRune(",}\n#", rune(s.peek())) {
				s.i++
			}
			if !s.accept(',') && s.i == before {
				return
			}
		}
	default:
		for s.more() && !strings.ContainsRune(",]}\n#", rune(s.peek())) {
			s.i++
		}
	}
}
