package tokenizer

import (
	"slices"
	"unicode/utf8"
)

// node is one of: *set, cat, alt, *repeat, *look, atomic, anchor. Patterns of tokenizer.json are in
// the syntax of Oniguruma (Ruby), the engine of the `tokenizers` package. The parser accepts the
// part of this syntax that pre-tokenizers use and refuses the rest by name.
type node any

type (
	cat    []node
	alt    []node
	atomic struct{ body node }
	repeat struct {
		body     node
		min, max int // max -1: no limit
		lazy     bool
	}
	look struct {
		body        node
		behind, not bool
	}
	// anchor is ^, $, A (start of the text), Z (end of the text, or before its last newline) or z
	// (end of the text).
	anchor byte
	// set is a class of characters.
	set struct {
		ascii [2]uint64 // members below 128, set by sealed
		any   bits      // has the characters with one of these bits
		// has the characters with none of these bits, unless 0: \P{..} inside brackets
		none  bits
		spans []rune // has the characters of the ranges [first, last]
		not   bool   // is the complement
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

// sealed computes ascii, after the set is complete.
func (s *set) sealed() *set {
	for r := rune(0); r < utf8.RuneSelf; r++ {
		if s.member(r) != s.not {
			s.ascii[r>>6] |= 1 << (r & 63)
		}
	}
	return s
}

// whitespace is \s, in Oniguruma and in Rust.
var whitespace = []rune{9, 13, ' ', ' ', 0x85, 0x85, 0xA0, 0xA0, 0x1680, 0x1680, 0x2000, 0x200A, 0x2028, 0x2029, 0x202F,
	0x202F, 0x205F, 0x205F, 0x3000, 0x3000}

// canBeEmpty reports whether a node may match without characters.
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
