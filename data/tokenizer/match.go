package tokenizer

import (
	mathbits "math/bits"
	"unicode/utf8"
)

// matcher has the stack and the limits for matching patterns. It is reused for the next text.
type matcher struct {
	stack []frame
	limit int   // largest size of a changed text in bytes; 0 = no limit
	steps int64 // of all patterns so far; their number must be proportional to the text's size
	stop  int64 // limit of steps; 0 = no limit
	text  int   // bytes of the current text
}

// begin sets the limits for a text of the given bytes.
func (m *matcher) begin(text int) {
	m.text, m.limit, m.stop = text, maxBytes(text), m.steps+maxSteps(text)
}

// exceeded reports whether the patterns took more steps than the text may take. After that, no
// pattern matches.
func (m *matcher) exceeded() bool { return m.stop > 0 && m.steps > m.stop }

// frame is a point to which a match can backtrack: code pc at pos. For a run of characters, pos may
// go back to low, one character at a time. For an alternative, mask has the branches that were not
// tried.
type frame struct {
	pc, pos, low int
	mask         uint64
}

// match runs the code from pc on at text[pos:]. It returns the end of the match, or -1.
func (p *program) match(m *matcher, text []byte, pc, pos int) int {
	base := len(m.stack)
	for {
		if m.steps++; m.exceeded() {
			m.stack = m.stack[:base]
			return -1
		}
		in := &p.code[pc]
		ok := true
		switch in.op {
		case opMatch:
			m.stack = m.stack[:base]
			return pos
		case opJump:
			pc = in.x
		case opSplit:
			m.stack = append(m.stack, frame{pc: in.y, pos: pos, low: pos})
			pc = in.x
		case opSet:
			if ok = pos < len(text); ok {
				var r rune
				var n int
				r, n = decodeRune(text, pos)
				if ok = in.set.has(r); ok {
					pos, pc = pos+n, pc+1
				}
			}
		case opRun:
			end, low, count := run(in, text, pos)
			m.steps += int64(count)
			if ok = count >= in.min; ok {
				if pc++; end > low && in.x == 0 {
					m.stack = append(m.stack, frame{pc: pc, pos: end, low: low})
				}
				pos = end
			}
		case opAlt:
			mask := in.masks[byteAt(text, pos)]
			if ok = mask != 0; ok {
				pc = p.branch(m, pc, pos, mask)
			}
		case opAtomic:
			end := p.match(m, text, in.x, pos)
			if ok = end >= 0; ok {
				pos, pc = end, in.y
			}
		case opLook:
			if ok = p.lookaround(m, text, in, pos) != in.not; ok {
				pc = in.y
			}
		case opAnchor:
			ok = in.anchor.at(text, pos)
			pc++
		}
		if ok {
			continue
		}
		if len(m.stack) == base {
			return -1
		}
		f := &m.stack[len(m.stack)-1]
		pc, pos = f.pc, f.pos
		switch {
		case f.mask != 0:
			mask := f.mask
			m.stack = m.stack[:len(m.stack)-1]
			pc = p.branch(m, pc, pos, mask)
		case f.pos > f.low:
			_, n := utf8.DecodeLastRune(text[:f.pos])
			pos -= n
			if f.pos = pos; pos <= f.low {
				m.stack = m.stack[:len(m.stack)-1]
			}
		default:
			m.stack = m.stack[:len(m.stack)-1]
		}
	}
}

// branch enters the first branch of a mask and pushes the others as a frame.
func (p *program) branch(m *matcher, pc, pos int, mask uint64) int {
	i := mathbits.TrailingZeros64(mask)
	if mask &= mask - 1; mask != 0 {
		m.stack = append(m.stack, frame{pc: pc, pos: pos, low: pos, mask: mask})
	}
	return p.code[pc].branches[i]
}

// run matches characters of a class. It returns the end of the run, the end of its first in.min
// characters, and the number of characters.
func run(in *inst, text []byte, pos int) (end, low, count int) {
	low = pos
	for pos < len(text) && (in.max < 0 || count < in.max) {
		r, n := decodeRune(text, pos)
		if !in.set.has(r) {
			break
		}
		pos += n
		if count++; count <= in.min {
			low = pos
		}
	}
	return pos, low, count
}

// lookaround reports whether the body of a lookahead or lookbehind matches at pos. It ignores
// in.not.
func (p *program) lookaround(m *matcher, text []byte, in *inst, pos int) bool {
	if in.behind == nil {
		return p.match(m, text, in.x, pos) >= 0
	}
	for _, chars := range in.behind {
		from := pos
		for ; chars > 0 && from > 0; chars-- {
			m.steps++
			_, n := utf8.DecodeLastRune(text[:from])
			from -= n
		}
		if chars == 0 && p.match(m, text, in.x, from) == pos {
			return true
		}
	}
	return false
}

// at reports whether the anchor matches at pos.
func (e anchor) at(text []byte, pos int) bool {
	switch e {
	case '^':
		return pos == 0 || text[pos-1] == '\n' && pos < len(text)
	case '$':
		return pos == len(text) || text[pos] == '\n'
	case 'A':
		return pos == 0
	case 'Z':
		return pos == len(text) || pos == len(text)-1 && text[pos] == '\n'
	}
	return pos == len(text)
}

// byteAt returns text[pos], or 256 at the end.
func byteAt(text []byte, pos int) int {
	if pos < len(text) {
		return int(text[pos])
	}
	return 256
}

// finder iterates over the matches in a text from left to right, like the iterator of Oniguruma.
// After an empty match it continues one character later. An empty match directly after the last
// match does not count.
type finder struct {
	p         *program
	m         *matcher
	text      []byte
	at, ended int
}

func (p *program) find(m *matcher, text []byte) finder { return finder{p, m, text, 0, -1} }

func (f *finder) next() (start, end int, ok bool) {
	for pos := f.at; pos <= len(f.text) && !f.m.exceeded(); {
		f.m.steps++
		if f.p.starts[byteAt(f.text, pos)] {
			if end := f.p.match(f.m, f.text, 0, pos); end >= 0 {
				if end > pos || f.ended != end {
					f.at, f.ended = end, end
					return pos, end, true
				}
			}
		}
		if pos == len(f.text) {
			break
		}
		_, n := decodeRune(f.text, pos)
		pos += n
	}
	f.at = len(f.text) + 1
	return 0, 0, false
}
