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

// parser reads one pattern. After a refusal it is at the end of the pattern, and its results are
// not used.
type parser struct {
	src   []rune
	at    int
	err   error
	depth int
	fold  bool // (?i)
	dot   bool // (?m): the dot matches newlines
}

// refuse records an error, unless there is one, and moves to the end of the pattern.
func (p *parser) refuse(what string) {
	if p.err == nil {
		p.err = status.Errorf(status.Unsupported,
			"the pattern %s uses %s (near character %d), which is not supported; %s", input.Quote(string(p.src)), what,
			p.at, notbuilt.Patterns.Instead)
	}
	p.at = len(p.src)
}

func (p *parser) more() bool { return p.at < len(p.src) }

// next returns the next character. At the end of the pattern it refuses and returns 0.
func (p *parser) next() rune {
	if !p.more() {
		p.refuse("an incomplete expression")
		return 0
	}
	p.at++
	return p.src[p.at-1]
}

// accept skips s if it is next.
func (p *parser) accept(s string) bool {
	if strings.HasPrefix(string(p.src[p.at:min(p.at+len(s), len(p.src))]), s) {
		p.at += len(s)
		return true
	}
	return false
}

// literal returns the node of one character.
func (p *parser) literal(r rune) node {
	s := &set{spans: []rune{r, r}}
	if p.fold {
		p.foldInto(s, r, r)
		p.refuseLongFolds(r)
	}
	return s.sealed()
}

// foldInto adds the other cases of the letters [first, last] to a set.
func (p *parser) foldInto(s *set, first, last rune) {
	if last-first > 0x3000 {
		p.refuse("a range of more than 12288 characters in (?i)")
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

// refuseLongFolds refuses two letters that fold to one: Oniguruma finds ß for ss, and ligatures for
// ff, fi, fl and st.
func (p *parser) refuseLongFolds(r rune) {
	if p.more() {
		pair := strings.ToLower(string([]rune{r, p.src[p.at]}))
		if slices.Contains([]string{"ss", "ff", "fi", "fl", "st"}, pair) {
			p.refuse(strconv.Quote(pair) + " in (?i), which folds to one letter")
		}
	}
}
