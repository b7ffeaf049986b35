package tokenizer

import (
	"strings"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// preTokenizer splits a segment into smaller ones, and may change their text. It calls emit with
// each before it finds the next, so a document is never in memory as a list of its words. buf is
// memory that it may use for changed text.
type preTokenizer interface {
	split(m *matcher, buf *[]byte, p segment, emit func(segment) error) error
}

// gpt2Pattern is the pattern by which ByteLevel splits.
const gpt2Pattern = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// newPreTokenizers returns the pre-tokenizers of a file. raw reports that words reach the model as
// plain bytes: if plain is set, a ByteLevel at the end does not write bytes as letters.
func newPreTokenizers(components []component, plain bool) (all []preTokenizer, raw bool, err error) {
	for i, c := range components {
		p, err := newPreTokenizer(c)
		if err != nil {
			return nil, false, err
		}
		if b, ok := p.(*byteLevel); ok && plain && i == len(components)-1 {
			b.plain, raw = true, true
		}
		all = append(all, p)
	}
	return all, raw, nil
}

// checkMetaspace refuses a case in which the result depends on which characters of a decomposed
// character the `tokenizers` package counts as the beginning of a text: Metaspace prepends only to
// the first word, and another pre-tokenizer comes before it.
func checkMetaspace(normalizers, preTokenizers []component) error {
	for i, p := range preTokenizers {
		if p.Kind != "Metaspace" || p.PrependScheme != "first" || i == 0 {
			continue
		}
		for _, n := range normalizers {
			if strings.HasPrefix(n.Kind, "NF") {
				return status.Errorf(status.Unsupported,
					"pre_tokenizer: Metaspace with the prepend_scheme \"first\" after %s and the normalizer %s is not supported; %s",
					preTokenizers[i-1].Kind, n.Kind, notbuilt.LateMetaspace.Instead)
			}
		}
	}
	return nil
}

func newPreTokenizer(p component) (preTokenizer, error) {
	switch p.Kind {
	case "ByteLevel":
		b := &byteLevel{space: p.AddPrefixSpace == nil || *p.AddPrefixSpace}
		if p.UseRegex == nil || *p.UseRegex {
			prog, err := compile(gpt2Pattern)
			if err != nil {
				return nil, err
			}
			b.words = &splitter{prog: prog}
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
	case "Whitespace": // \w+|[^\w\s]+ of the package's second regex engine
		prog, err := compileNode(alt{
			&repeat{body: (&set{any: wordBits}).sealed(), min: 1, max: -1},
			&repeat{body: (&set{none: wordBits | spaceBits}).sealed(), min: 1, max: -1},
		})
		return &splitter{prog: prog, how: removed, invert: true}, err
	}
	return nil, status.Errorf(status.Unsupported, "pre_tokenizer: %s is not supported; %s", input.Quote(p.Kind),
		notbuilt.PreTokenizers.Instead)
}

func classSplitter(b bits, how behavior) (preTokenizer, error) {
	prog, err := compileNode((&set{any: b}).sealed())
	return &splitter{prog: prog, how: how}, err
}

// behavior is how a splitter treats matches. The file format has these names.
type behavior int

const (
	isolated           behavior = iota // a match is a segment of its own
	removed                            // a match is left out
	mergedWithPrevious                 // a match ends the segment before it
	mergedWithNext                     // a match begins the segment after it
	contiguous                         // adjacent matches are one segment
)

func behaviorOf(name string) (behavior, error) {
	for i, n := range []string{"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"} {
		if n == name {
			return behavior(i), nil
		}
	}
	return 0, status.Errorf(status.Unsupported, "pre_tokenizer: the behavior %s is not supported; %s",
		input.Quote(name), notbuilt.SplitBehaviors.Instead)
}

// splitter splits at the matches of a pattern; with invert, at the text between the matches.
type splitter struct {
	prog   *program
	how    behavior
	invert bool
}

func (x *splitter) split(m *matcher, _ *[]byte, p segment, emit func(segment) error) error {
	j := joiner{p: p, how: x.how, emit: emit}
	f := x.prog.find(m, p.text)
	at := 0
	for {
		start, end, ok := f.next()
		if !ok {
			break
		}
		if at != start {
			if err := j.add(at, start, x.invert); err != nil {
				return err
			}
		}
		if err := j.add(start, end, !x.invert); err != nil {
			return err
		}
		at = end
	}
	if at != len(p.text) {
		if err := j.add(at, len(p.text), x.invert); err != nil {
			return err
		}
	}
	return j.flush()
}

// joiner emits the ranges between the boundaries that a splitter finds, and joins adjacent ranges
// as the behavior requires. The last range is pending until it is known whether the next one joins
// it.
type joiner struct {
	p          segment
	how        behavior
	emit       func(segment) error
	start, end int // the pending range
	pending    bool
	matched    bool // the last range added was a match
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
	if join && j.pending {
		j.end = end
		if j.how == mergedWithNext { // the range after this one does not join it
			return j.flush()
		}
		return nil
	}
	if err := j.flush(); err != nil {
		return err
	}
	j.start, j.end, j.pending = start, end, true
	return nil
}

// flush emits the pending range.
func (j *joiner) flush() error {
	if !j.pending || j.start == j.end {
		j.pending = false
		return nil
	}
	j.pending = false
	return j.emit(j.p.sub(j.start, j.end))
}

// byteLevel may prepend a space to the text, may split by gpt2Pattern, and writes each byte as a
// letter (byteLetters).
type byteLevel struct {
	space bool
	words *splitter // nil = the text is not split
	plain bool      // the model reads bytes, so they are not written as letters
}

func (x *byteLevel) split(m *matcher, buf *[]byte, p segment, emit func(segment) error) error {
	if x.space && (len(p.text) == 0 || p.text[0] != ' ') {
		p = p.prepended((*buf)[:0], " ")
		*buf = p.text
	}
	if !x.plain {
		inner := emit
		emit = func(p segment) error {
			return inner(segment{toByteLevel(nil, p.text), len(toByteLevel(nil, p.text[:p.first]))})
		}
	}
	if x.words == nil {
		return emit(p)
	}
	return x.words.split(m, nil, p, emit)
}

// metaspace replaces each space by a letter (▁), may prepend the letter to the text, and may split
// before each letter.
type metaspace struct {
	letter        string
	always, first bool      // prepend the letter: to each segment, to the beginning of the document
	words         *splitter // nil = the text is not split
}

func newMetaspace(p component) (preTokenizer, error) {
	x := &metaspace{letter: p.Replacement}
	r, n := utf8.DecodeRuneInString(x.letter)
	if n == 0 || n != len(x.letter) {
		return nil, status.Errorf(status.InvalidConfig,
			"pre_tokenizer: Metaspace: the replacement %s is not one character; set it to \"▁\"",
			input.Quote(p.Replacement))
	}
	switch p.PrependScheme {
	case "always", "":
		x.always = true
	case "first":
		x.first = true
	case "never":
	default:
		return nil, status.Errorf(status.Unsupported,
			"pre_tokenizer: Metaspace: the prepend_scheme %s is not supported; %s", input.Quote(p.PrependScheme),
			notbuilt.PrependSchemes.Instead)
	}
	if p.AddPrefixSpace != nil && !*p.AddPrefixSpace {
		if p.PrependScheme != "never" {
			return nil, status.Errorf(status.InvalidConfig,
				"pre_tokenizer: Metaspace: add_prefix_space = false contradicts prepend_scheme = %s; remove add_prefix_space",
				input.Quote(p.PrependScheme))
		}
	}
	if p.SplitWords == nil || *p.SplitWords {
		prog, err := compileNode((&set{spans: []rune{r, r}}).sealed())
		if err != nil {
			return nil, err
		}
		x.words = &splitter{prog: prog, how: mergedWithNext}
	}
	return x, nil
}

func (x *metaspace) split(m *matcher, buf *[]byte, p segment, emit func(segment) error) error {
	out, first := (*buf)[:0], 0
	begins := len(p.text) > 0 &&
		(p.text[0] == ' ' || len(p.text) >= len(x.letter) && string(p.text[:len(x.letter)]) == x.letter)
	if len(p.text) > 0 && !begins && (x.always || x.first && p.first > 0) {
		out = append(out, x.letter...)
	}
	for i, b := range p.text {
		if b == ' ' {
			out = append(out, x.letter...)
		} else {
			out = append(out, b)
		}
		if i < p.first {
			first = len(out)
		}
	}
	*buf = out
	if x.words == nil {
		return emit(segment{out, first})
	}
	return x.words.split(m, nil, segment{out, first}, emit)
}
