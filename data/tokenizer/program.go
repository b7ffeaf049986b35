package tokenizer

import (
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// program is a compiled pattern. The matcher has a stack of its own for backtracking, so the Go
// stack does not grow with the text. A run of one class, such as \p{L}+, is one instruction and one
// frame.
type program struct {
	code []inst
	// starts[c]: a match may begin with byte c. starts[256]: a match may be empty at the end.
	starts [257]bool
}

type opcode uint8

const (
	opMatch  opcode = iota
	opSet           // one character of set
	opRun           // min to max characters of set, as many as possible; x = 1: no backtracking
	opSplit         // continue at x, and if that fails at y
	opJump          // continue at x
	opAlt           // the first of branches that matches; masks select by the next byte
	opAtomic        // match the code at x, then continue at y; no backtracking into x
	opLook          // like opAtomic, but the position stays
	opAnchor
)

type inst struct {
	op       opcode
	anchor   anchor
	behind   []int // opLook: numbers of characters to step back; nil = lookahead
	not      bool
	set      *set
	x, y     int
	min, max int
	branches []int
	masks    *[257]uint64
}

const longestProgram = 20000

// compile parses and compiles a pattern.
func compile(src string) (*program, error) {
	n, err := parsePattern(src)
	if err != nil {
		return nil, err
	}
	p, err := compileNode(n)
	if err != nil {
		return nil, status.Errorf(status.Unsupported, "the pattern %s: %w", input.Quote(src), err)
	}
	return p, nil
}

func compileNode(n node) (*program, error) {
	p := &program{}
	p.starts = firstBytes(n)
	if err := p.emit(n); err != nil {
		return nil, err
	}
	p.add(inst{op: opMatch})
	return p, nil
}

// add appends an instruction and returns its index.
func (p *program) add(i inst) int {
	p.code = append(p.code, i)
	return len(p.code) - 1
}

// emit appends the code of a node.
func (p *program) emit(n node) error {
	if len(p.code) > longestProgram {
		return status.Errorf(status.Unsupported,
			"more than %d steps, which is not supported; split by a shorter pattern", longestProgram)
	}
	switch n := n.(type) {
	case *set:
		p.add(inst{op: opSet, set: n})
	case cat:
		for _, x := range n {
			if err := p.emit(x); err != nil {
				return err
			}
		}
	case alt:
		return p.emitAlt(n)
	case anchor:
		p.add(inst{op: opAnchor, anchor: n})
	case atomic:
		if r, ok := n.body.(*repeat); ok && !r.lazy {
			if s, ok := r.body.(*set); ok {
				p.add(inst{op: opRun, set: s, min: r.min, max: r.max, x: 1})
				return nil
			}
		}
		return p.emitInner(inst{op: opAtomic}, n.body)
	case *look:
		in := inst{op: opLook, not: n.not}
		if n.behind {
			if in.behind = lengths(n.body); in.behind == nil {
				return status.Errorf(status.Unsupported,
					"a lookbehind whose length is not fixed is not supported; use one of fixed length")
			}
		}
		return p.emitInner(in, n.body)
	case *repeat:
		return p.emitRepeat(n)
	}
	return nil
}

func (p *program) emitInner(in inst, body node) error {
	at := p.add(in)
	p.code[at].x = at + 1
	err := p.emit(body)
	p.add(inst{op: opMatch})
	p.code[at].y = len(p.code)
	return err
}

func (p *program) emitAlt(n alt) error {
	if len(n) > 64 {
		return status.Errorf(status.Unsupported,
			"more than 64 alternatives in one group are not supported; divide the group")
	}
	in := inst{op: opAlt, masks: new([257]uint64)}
	for i, x := range n {
		for c, ok := range firstBytes(x) {
			if ok {
				in.masks[c] |= 1 << i
			}
		}
	}
	at := p.add(in)
	var ends []int
	for _, x := range n {
		p.code[at].branches = append(p.code[at].branches, len(p.code))
		if err := p.emit(x); err != nil {
			return err
		}
		ends = append(ends, p.add(inst{op: opJump}))
	}
	for _, e := range ends {
		p.code[e].x = len(p.code)
	}
	return nil
}

func (p *program) emitRepeat(n *repeat) error {
	if s, ok := n.body.(*set); ok && !n.lazy {
		p.add(inst{op: opRun, set: s, min: n.min, max: n.max})
		return nil
	}
	for range n.min {
		if err := p.emit(n.body); err != nil {
			return err
		}
	}
	fork := func(at, in, out int) {
		if p.code[at].x, p.code[at].y = in, out; n.lazy {
			p.code[at].x, p.code[at].y = out, in
		}
	}
	if n.max < 0 {
		at := p.add(inst{op: opSplit})
		if err := p.emit(n.body); err != nil {
			return err
		}
		p.add(inst{op: opJump, x: at})
		fork(at, at+1, len(p.code))
		return nil
	}
	var forks []int
	for range n.max - n.min {
		forks = append(forks, p.add(inst{op: opSplit}))
		if err := p.emit(n.body); err != nil {
			return err
		}
	}
	for _, at := range forks {
		fork(at, at+1, len(p.code))
	}
	return nil
}

// firstBytes returns the bytes with which a match of the node may begin, or a superset.
func firstBytes(n node) (b [257]bool) {
	switch n := n.(type) {
	case *set:
		for c := range 256 {
			b[c] = c >= utf8.RuneSelf || n.has(rune(c))
		}
		return b
	case cat:
		for _, x := range n {
			switch x.(type) {
			case *look, anchor:
				continue
			}
			for c, ok := range firstBytes(x) {
				b[c] = b[c] || ok && c < 256
			}
			if !canBeEmpty(x) {
				return b
			}
		}
	case alt:
		for _, x := range n {
			for c, ok := range firstBytes(x) {
				b[c] = b[c] || ok
			}
		}
		return b
	case atomic:
		return firstBytes(n.body)
	case *repeat:
		if n.min > 0 && !canBeEmpty(n.body) {
			return firstBytes(n.body)
		}
	}
	for c := range b { // the match may be empty, so any byte may follow
		b[c] = true
	}
	return b
}

// lengths returns the number of characters of a match: one number, or one for each alternative; nil
// if it is not fixed.
func lengths(n node) []int {
	switch n := n.(type) {
	case *set:
		return []int{1}
	case alt:
		var all []int
		for _, x := range n {
			l := lengths(x)
			if l == nil {
				return nil
			}
			all = append(all, l...)
		}
		return all
	case cat:
		sum := 0
		for _, x := range n {
			l := lengths(x)
			if len(l) != 1 {
				return nil
			}
			sum += l[0]
		}
		return []int{sum}
	case atomic:
		return lengths(n.body)
	case *repeat:
		if l := lengths(n.body); len(l) == 1 && n.min == n.max {
			return []int{l[0] * n.min}
		}
		return nil
	}
	return []int{0} // anchors and lookarounds
}
