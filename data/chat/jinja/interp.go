package jinja

import (
	"strings"
	"time"
	"unicode/utf8"
)

// interp is the state of a rendering.
type interp struct {
	scope  *scope
	limits Limits
	steps  int64
	bytes  int64
	depth  int
	now    func() time.Time
}

// scope has the names of a template, a macro or an iteration of a loop.
type scope struct {
	outer *scope
	names map[string]Value
}

func newScope(outer *scope, names map[string]Value) *scope {
	if names == nil {
		names = map[string]Value{}
	}
	return &scope{outer, names}
}

func (in *interp) lookup(name string) Value {
	for s := in.scope; s != nil; s = s.outer {
		if v, ok := s.names[name]; ok {
			return v
		}
	}
	return undefined{`"` + name + `"`}
}

// inScope runs f with a new scope inside of the current one.
func (in *interp) inScope(names map[string]Value, f func()) {
	outer := in.scope
	in.scope = newScope(outer, names)
	f()
	in.scope = outer
}

// step counts a step.
func (in *interp) step(line int) { in.spend(line, 1) }

func (in *interp) spend(line int, steps int64) {
	if in.steps += steps; in.steps > in.limits.Steps {
		fail(line, "the template takes more than %d steps; it may not end, or the conversation is too long for it",
			in.limits.Steps)
	}
}

// made counts the bytes of a text that the rendering has made, and returns the text.
func (in *interp) made(line int, t Text) Text {
	in.count(line, len(t.S))
	return t
}

func (in *interp) count(line, bytes int) {
	// A text of a few bytes needs memory as well.
	if in.bytes += int64(bytes) + 8; in.bytes > in.limits.Bytes {
		fail(line, "the template makes more than %d bytes of text", in.limits.Bytes)
	}
}

// nest counts a level of calls and returns the function that leaves it.
func (in *interp) nest(line int) func() {
	if in.depth++; in.depth > in.limits.Depth {
		fail(line, "more than %d nested calls", in.limits.Depth)
	}
	return func() { in.depth-- }
}

// run executes statements.
func (in *interp) run(body []stmt, b *builder) flow {
	for _, s := range body {
		if f := s.exec(in, b); f != flowNext {
			return f
		}
	}
	return flowNext
}

// capture returns the output of statements, and how the loop around them continues.
func (in *interp) capture(line int, body []stmt) (Text, flow) {
	var b builder
	f := in.run(body, &b)
	return in.made(line, b.text()), f
}

// items returns the elements that a for over v visits; false if v is not iterable.
func (in *interp) items(line int, v Value) ([]Value, bool) {
	switch v := v.(type) {
	case *List:
		in.spend(line, int64(len(v.Items)))
		items := v.Items
		if v.unindexed == isIterator {
			v.Items = nil
		}
		return items, true
	case *Dict:
		in.spend(line, int64(v.Len()))
		return v.keys, true
	case Text:
		in.spend(line, int64(len(v.S)))
		items := make([]Value, 0, len(v.S))
		for i := 0; i < len(v.S); {
			_, n := utf8.DecodeRuneInString(v.S[i:])
			items = append(items, v.slice(i, i+n))
			i += n
		}
		return items, true
	case undefined:
		return nil, true
	}
	return nil, false
}

func (in *interp) mustIterate(line int, v Value) []Value {
	items, ok := in.items(line, v)
	if !ok {
		fail(line, "%s is not iterable", typeName(v))
	}
	return items
}

// contains returns Python's x in v.
func (in *interp) contains(line int, v, x Value) bool {
	switch v := v.(type) {
	case Text:
		t, ok := x.(Text)
		if !ok {
			fail(line, "in: %s cannot be inside of a string", typeName(x))
		}
		in.spend(line, int64(len(v.S))/64)
		return strings.Contains(v.S, t.S)
	case *List:
		in.spend(line, int64(len(v.Items)))
		for _, item := range v.Items {
			if in.equal(line, item, x) {
				return true
			}
		}
		return false
	case *Dict:
		if _, ok := hashOf(in.key(line, x)); !ok {
			fail(line, "in: %s cannot be the key of an object", typeName(x))
		}
		_, ok := v.get(x)
		return ok
	case undefined:
		return false
	}
	fail(line, "in: %s contains nothing", typeName(v))
	return false
}

// refuseUndefined ends the rendering if a value is undefined.
func refuseUndefined(line int, v Value) {
	if u, ok := v.(undefined); ok {
		fail(line, "%s is undefined", u.what)
	}
}
