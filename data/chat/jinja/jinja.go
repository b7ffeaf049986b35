// Package jinja renders chat templates: Jinja templates in the dialect of the Python package
// transformers (5.23, apply_chat_template), with Jinja2's trim_blocks and lstrip_blocks, the loop
// controls, and the tag generation.
//
// Parse reads a template. Template.Render renders it and returns a Text: the output, and for each
// byte of it the Mark of the input text that it was copied from. Marks survive slices, methods,
// filters and macros. A caller that marks the text of each message sees in one rendering which
// bytes of the output are whose. FromJSON makes values, with the keys of objects in their order.
//
// Templates come from strangers. They reach nothing outside of their values, and Limits bounds
// their steps, memory and depth.
//
// The Go packages for Jinja templates that render chat templates do not tell where a text comes
// from, and their tag generation has no effect. github.com/ardanlabs/jinja (v1.12.0) renders most
// templates equally, but needs Go 1.27. github.com/nikolalohinski/gonja (v2.9.1) does not parse
// the templates of gpt-oss and Gemma 3, and sorts the keys of objects.
//
// Source: Jinja2 3.1.6, lexer.py, parser.py, filters.py and sandbox.py; transformers,
// utils/chat_template_utils.py.
package jinja

import (
	"fmt"
	"time"
)

// Mark says where a byte of a text comes from; 0 = from the template. The bit Generated is set by
// the tag generation. The other bits have the meaning that the caller gives them.
type Mark uint32

// Generated is set in the marks of the output of {% generation %} … {% endgeneration %}.
const Generated Mark = 1 << 31

// Limits bounds the work of a rendering.
type Limits struct {
	Steps int64 // expressions, statements, and elements of lists that filters visit
	Bytes int64 // of all texts that the rendering makes, its output included
	Depth int   // nested calls of macros, and nested lists and objects
}

// DefaultLimits returns limits for input values of the given bytes. Published templates take fewer
// than ten steps for each byte of a conversation, and visit each message at most twice for each
// other message.
func DefaultLimits(input int) Limits {
	return Limits{Steps: 2_000_000 + 64*int64(input), Bytes: 16<<20 + 64*int64(input), Depth: 100}
}

// Template is a parsed template. Several goroutines may render it at the same time.
type Template struct {
	body []stmt
	// Tagged reports whether the template has the tag generation.
	Tagged bool
	names  map[string]bool // that it reads
}

// Reads reports whether the template has an expression with a name: a variable or a function.
func (t *Template) Reads(name string) bool { return t.names[name] }

// Error is a fault of a template, or of what it does with its values.
type Error struct {
	Line   int // of the template, from 1
	Text   string
	Raised bool // the template called raise_exception with this text
}

func (e *Error) Error() string {
	if e.Raised {
		return fmt.Sprintf("the template raises %q (line %d of the template)", e.Text, e.Line)
	}
	return fmt.Sprintf("%s (line %d of the template)", e.Text, e.Line)
}

// Render renders the template with the given variables. now is the time that strftime_now shows;
// nil = a call of strftime_now fails. The error is an *Error.
func (t *Template) Render(variables *Dict, now func() time.Time, limits Limits) (out Text, err error) {
	in := &interp{limits: limits, now: now}
	defer catch(&err)
	in.scope = newScope(newScope(nil, in.globals()), variables.strings())
	var b builder
	in.run(t.body, &b)
	return b.text(), nil
}

// catch turns the panic of fail into an error.
func catch(err *error) {
	switch r := recover().(type) {
	case nil:
	case *Error:
		*err = r
	default:
		panic(r)
	}
}

// fail ends the parsing or rendering with an *Error.
func fail(line int, format string, args ...any) {
	panic(&Error{Line: line, Text: fmt.Sprintf(format, args...)})
}
