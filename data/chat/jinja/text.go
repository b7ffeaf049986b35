package jinja

import (
	"sort"
	"strings"
	"unicode/utf8"
)

// Text is a string whose bytes have marks. The zero value is the empty string.
type Text struct {
	S    string
	runs []run // in order, up to the end of S; nil = all marks are 0
	safe bool  // made by the filter safe: `+` escapes the other operand
}

// run is a range of bytes with one mark. It begins where the run before it ends.
type run struct {
	end  int
	mark Mark
}

// NewText returns a text with one mark.
func NewText(s string, mark Mark) Text {
	if mark == 0 || s == "" {
		return Text{S: s}
	}
	return Text{S: s, runs: []run{{len(s), mark}}}
}

// Runs calls f for each range of bytes [lo, hi) with the same mark, in order.
func (t Text) Runs(f func(lo, hi int, mark Mark)) {
	lo := 0
	for _, r := range t.runs {
		f(lo, r.end, r.mark)
		lo = r.end
	}
	if lo < len(t.S) {
		f(lo, len(t.S), 0)
	}
}

// slice returns bytes [lo, hi).
func (t Text) slice(lo, hi int) Text {
	out := Text{S: t.S[lo:hi], safe: t.safe}
	if t.runs == nil || lo == hi {
		return out
	}
	var b builder
	b.addSlice(t, lo, hi)
	out.runs = b.runs
	return out
}

// with returns the text with other bytes of the same number, such as its upper case. If the number
// differs, the result has no marks.
func (t Text) with(s string) Text {
	if len(s) != len(t.S) {
		return Text{S: s, safe: t.safe}
	}
	return Text{S: s, runs: t.runs, safe: t.safe}
}

// builder makes a text.
type builder struct {
	s    strings.Builder
	runs []run
	n    int
}

func (b *builder) add(t Text) { b.s.WriteString(t.S); b.addMarks(t, 0, len(t.S)) }

func (b *builder) addString(s string, mark Mark) {
	b.s.WriteString(s)
	b.mark(len(s), mark)
}

func (b *builder) addSlice(t Text, lo, hi int) { b.s.WriteString(t.S[lo:hi]); b.addMarks(t, lo, hi) }

// addMarks appends the marks of bytes [lo, hi) of a text.
func (b *builder) addMarks(t Text, lo, hi int) {
	i := sort.Search(len(t.runs), func(i int) bool { return t.runs[i].end > lo })
	for ; i < len(t.runs) && lo < hi; i++ {
		end := min(t.runs[i].end, hi)
		b.mark(end-lo, t.runs[i].mark)
		lo = end
	}
	b.mark(max(0, hi-lo), 0)
}

// mark appends n bytes with a mark to the runs.
func (b *builder) mark(n int, mark Mark) {
	if n == 0 {
		return
	}
	b.n += n
	if k := len(b.runs); k > 0 && b.runs[k-1].mark == mark {
		b.runs[k-1].end = b.n
		return
	}
	b.runs = append(b.runs, run{b.n, mark})
}

func (b *builder) text() Text {
	t := Text{S: b.s.String(), runs: b.runs}
	if len(t.runs) == 1 && t.runs[0].mark == 0 {
		t.runs = nil
	}
	return t
}

// generated returns the text with Generated set in all marks.
func (t Text) generated() Text {
	var b builder
	t.Runs(func(lo, hi int, mark Mark) { b.addString(t.S[lo:hi], mark|Generated) })
	return b.text()
}

// plus returns a + b. As in Python's Markup, a safe operand escapes an operand that is not.
func plus(a, b Text) Text {
	safe := a.safe || b.safe
	if safe && !a.safe {
		a = escapeHTML(a)
	}
	if safe && !b.safe {
		b = escapeHTML(b)
	}
	var out builder
	out.add(a)
	out.add(b)
	t := out.text()
	t.safe = safe
	return t
}

var htmlEscapes = map[byte]string{'&': "&amp;", '<': "&lt;", '>': "&gt;", '"': "&#34;", '\'': "&#39;"}

func escapeHTML(t Text) Text {
	if t.safe || !strings.ContainsAny(t.S, `&<>"'`) {
		t.safe = true
		return t
	}
	var b builder
	t.Runs(func(lo, hi int, mark Mark) {
		for i := lo; i < hi; i++ {
			if e, ok := htmlEscapes[t.S[i]]; ok {
				b.addString(e, mark)
			} else {
				b.addString(t.S[i:i+1], mark)
			}
		}
	})
	out := b.text()
	out.safe = true
	return out
}

// trim returns the text without characters at its ends that in reports true for.
func (t Text) trim(in func(rune) bool, left, right bool) Text {
	lo, hi := 0, len(t.S)
	if left {
		lo = hi - len(strings.TrimLeftFunc(t.S, in))
	}
	if right {
		hi = lo + len(strings.TrimRightFunc(t.S[lo:], in))
	}
	return t.slice(lo, hi)
}

// replace replaces the first n occurrences of old, all if n is negative.
func (t Text) replace(old string, with Text, n int) Text {
	var b builder
	at := 0
	for ; n != 0; n-- {
		var i int
		if old == "" { // between the characters, and at both ends
			if at > len(t.S) {
				break
			}
			_, size := utf8.DecodeRuneInString(t.S[at:])
			b.add(with)
			if size == 0 {
				at = len(t.S) + 1
				break
			}
			b.addSlice(t, at, at+size)
			at += size
			continue
		}
		if i = strings.Index(t.S[at:], old); i < 0 {
			break
		}
		b.addSlice(t, at, at+i)
		b.add(with)
		at += i + len(old)
	}
	if at < len(t.S) {
		b.addSlice(t, at, len(t.S))
	}
	return b.text()
}

// Append returns the text followed by another.
func (t Text) Append(more Text) Text {
	var b builder
	b.add(t)
	b.add(more)
	return b.text()
}
