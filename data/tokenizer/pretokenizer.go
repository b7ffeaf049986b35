package tokenizer

import (
	"strings"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// step is one pre-tokenizer: it cuts a piece into smaller ones, and may write it anew. It hands
// each on before it finds the next, so that a document is never held as a list of its words.
type step interface {
	cut(s *state, buf *[]byte, p piece, emit func(piece) error) error
}

// gpt2 is the pattern that ByteLevel splits by.
const gpt2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// newSteps returns the steps, and whether words arrive at the model as plain bytes: a ByteLevel at
// the end need not write its letters, if the model lets it.
func newSteps(parts []part, plain bool) (steps []step, raw bool, err error) {
	for i, p := range parts {
		st, err := newStep(p)
		if err != nil {
			return nil, false, err
		}
		if b, ok := st.(*byteLevel); ok && plain && i == len(parts)-1 {
			b.plain, raw = true, true
		}
		steps = append(steps, st)
	}
	return steps, raw, nil
}

// checkFirst refuses the one case in which it matters which parts of a decomposed character the
// `tokenizers` package counts to the beginning of a text: where Metaspace prepends to the first
// word alone, and something has cut before it.
func checkFirst(normalizers, steps []part) error {
	for i, p := range steps {
		if p.Kind != "Metaspace" || p.PrependScheme != "first" || i == 0 {
			continue
		}
		for _, n := range normalizers {
			if strings.HasPrefix(n.Kind, "NF") {
				return status.Errorf(status.Unsupported, "Metaspace with the prepend_scheme \"first\" behind %s, over text in the form %s, is not built: %s", steps[i-1].Kind, n.Kind, notbuilt.LateMetaspace.Instead)
			}
		}
	}
	return nil
}

func newStep(p part) (step, error) {
	switch p.Kind {
	case "ByteLevel":
		b := &byteLevel{space: p.AddPrefixSpace == nil || *p.AddPrefixSpace}
		if p.UseRegex == nil || *p.UseRegex {
			prog, err := compile(gpt2)
			if err != nil {
				return nil, err
			}
			b.split = &splitter{prog: prog}
		}
		return b, nil
	case "Metaspace":
		return newMetaspace(p)
	case "Split":
		prog, err := p.Pattern.program()
		if err != nil {
			return nil, err
		}
		how, err := behaviorOf(p.Behavior)
		return &splitter{prog: prog, how: how, invert: p.Invert}, err
	case "Digits":
		return classSplitter(numericBits, map[bool]behavior{true: isolated, false: contiguous}[p.Individual])
	case "Punctuation":
		if p.Behavior == "" {
			p.Behavior = "Isolated"
		}
		how, err := behaviorOf(p.Behavior)
		if err != nil {
			return nil, err
		}
		return classSplitter(punctBits, how)
	case "WhitespaceSplit":
		return classSplitter(spaceBits, removed)
	case "Whitespace": // \w+|[^\w\s]+ of the package's second engine
		prog, err := compileNode(alt{
			&repeat{body: (&set{any: wordBits}).sealed(), min: 1, max: -1},
			&repeat{body: (&set{none: wordBits | spaceBits}).sealed(), min: 1, max: -1},
		})
		return &splitter{prog: prog, how: removed, invert: true}, err
	}
	return nil, status.Errorf(status.Unsupported, "pre_tokenizer %s is not built: %s", input.Quote(p.Kind), notbuilt.PreTokenizers.Instead)
}

func classSplitter(b bits, how behavior) (step, error) {
	prog, err := compileNode((&set{any: b}).sealed())
	return &splitter{prog: prog, how: how}, err
}

// behavior is what becomes of a match.
type behavior int

const (
	isolated behavior = iota
	removed
	mergedWithPrevious
	mergedWithNext
	contiguous
)

func behaviorOf(name string) (behavior, error) {
	for i, n := range []string{"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"} {
		if n == name {
			return behavior(i), nil
		}
	}
	return 0, status.Errorf(status.Unsupported, "the behavior %s of a split is not built: %s", input.Quote(name), notbuilt.SplitBehaviors.Instead)
}

// splitter cuts at the matches of a pattern, or, inverted, keeps these.
type splitter struct {
	prog   *program
	how    behavior
	invert bool
}

func (sp *splitter) cut(s *state, _ *[]byte, p piece, emit func(piece) error) error {
	j := joiner{p: p, how: sp.how, emit: emit}
	f := sp.prog.find(&s.matcher, p.text)
	at := 0
	for {
		start, end, ok := f.next()
		if !ok {
			break
		}
		if at != start {
			if err := j.add(at, start, sp.invert); err != nil {
				return err
			}
		}
		if err := j.add(start, end, !sp.invert); err != nil {
			return err
		}
		at = end
	}
	if at != len(p.text) {
		if err := j.add(at, len(p.text), sp.invert); err != nil {
			return err
		}
	}
	return j.flush()
}

// joiner puts the stretches of a split together as its behavior has it, holding back the last one.
type joiner struct {
	p          piece
	how        behavior
	emit       func(piece) error
	start, end int
	held       bool
	matched    bool // the stretch before was a match
}

func (j *joiner) add(start, end int, match bool) error {
	join := false
	switch j.how {
	case isolated:
	case removed:
		if match {
			return nil
		}
	case contiguous:
		join = match == j.matched
	case mergedWithPrevious:
		join = match && !j.matched
	case mergedWithNext:
		join = !match && j.matched
	}
	j.matched = match
	if join && j.held {
		j.end = end
		if j.how == mergedWithNext { // what is behind this is no match, or a match of its own
			return j.flush()
		}
		return nil
	}
	if err := j.flush(); err != nil {
		return err
	}
	j.start, j.end, j.held = start, end, true
	return nil
}

func (j *joiner) flush() error {
	if !j.held || j.start == j.end {
		j.held = false
		return nil
	}
	j.held = false
	return j.emit(j.p.cut(j.start, j.end))
}

// byteLevel may put a space before the text, may split as GPT-2 does, and writes each byte as a
// letter.
type byteLevel struct {
	space bool
	split *splitter
	plain bool // leave the bytes: the model knows them as they are
}

func (b *byteLevel) cut(s *state, buf *[]byte, p piece, emit func(piece) error) error {
	if b.space && (len(p.text) == 0 || p.text[0] != ' ') {
		p = p.prepended((*buf)[:0], " ")
		*buf = p.text
	}
	if !b.plain {
		inner := emit
		emit = func(p piece) error {
			return inner(piece{toByteLevel(nil, p.text), len(toByteLevel(nil, p.text[:p.first]))})
		}
	}
	if b.split == nil {
		return emit(p)
	}
	return b.split.cut(s, nil, p, emit)
}

// metaspace writes spaces as another character, ▁, puts one before the text, and cuts before each.
type metaspace struct {
	letter        string
	always, first bool
	split         *splitter
}

func newMetaspace(p part) (step, error) {
	m := &metaspace{letter: p.Replacement}
	r, n := utf8.DecodeRuneInString(m.letter)
	if n == 0 || n != len(m.letter) {
		return nil, status.Errorf(status.InvalidConfig, "Metaspace: the replacement %s is not one character", input.Quote(p.Replacement))
	}
	switch p.PrependScheme {
	case "always", "":
		m.always = true
	case "first":
		m.first = true
	case "never":
	default:
		return nil, status.Errorf(status.Unsupported, "Metaspace: the prepend_scheme %s is not built: %s", input.Quote(p.PrependScheme), notbuilt.PrependSchemes.Instead)
	}
	if p.AddPrefixSpace != nil && !*p.AddPrefixSpace {
		if p.PrependScheme != "never" {
			return nil, status.Errorf(status.InvalidConfig, "Metaspace: add_prefix_space = false and prepend_scheme = %s disagree", input.Quote(p.PrependScheme))
		}
	}
	if p.SplitWords == nil || *p.SplitWords {
		prog, err := compileNode((&set{spans: []rune{r, r}}).sealed())
		if err != nil {
			return nil, err
		}
		m.split = &splitter{prog: prog, how: mergedWithNext}
	}
	return m, nil
}

func (m *metaspace) cut(s *state, buf *[]byte, p piece, emit func(piece) error) error {
	out, first := (*buf)[:0], 0
	begins := len(p.text) > 0 && (p.text[0] == ' ' || len(p.text) >= len(m.letter) && string(p.text[:len(m.letter)]) == m.letter)
	if len(p.text) > 0 && !begins && (m.always || m.first && p.first > 0) {
		out = append(out, m.letter...)
	}
	for i, b := range p.text {
		if b == ' ' {
			out = append(out, m.letter...)
		} else {
			out = append(out, b)
		}
		if i < p.first {
			first = len(out)
		}
	}
	*buf = out
	if m.split == nil {
		return emit(piece{out, first})
	}
	return m.split.cut(s, nil, piece{out, first}, emit)
}
