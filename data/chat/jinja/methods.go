package jinja

import (
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// maxRange is the longest range that Jinja's sandbox allows.
const maxRange = 100_000

// globals returns the functions that every template has.
func (in *interp) globals() map[string]Value {
	f := func(name string, body func(c *call) Value) Value {
		return &function{name, func(in *interp, line int, args []Value, named []namedValue) Value {
			c := &call{in: in, line: line, name: name, args: args, named: named}
			return c.run(func() Value { return body(c) })
		}}
	}
	return map[string]Value{
		"raise_exception": f("raise_exception", func(c *call) Value {
			panic(&Error{Line: c.line, Text: c.textOf(c.arg(0, "message", Text{})).S, Raised: true})
		}),
		"strftime_now": f("strftime_now", func(c *call) Value {
			if c.in.now == nil {
				fail(c.line, "strftime_now: the template shows the current date, which differs when the job is resumed")
			}
			return Text{S: strftime(c.line, c.in.now(), c.text(0, "format").S)}
		}),
		"range": f("range", rangeOf),
		"dict":  f("dict", func(c *call) Value { return c.dict() }),
		"namespace": f("namespace", func(c *call) Value {
			d := c.dict()
			d.Each(func(k string, _ Value) { checkAttribute(c.line, k) })
			return &namespace{d}
		}),
	}
}

func rangeOf(c *call) Value {
	lo, hi, step := int64(0), c.integer(0, "stop", 0), int64(1)
	if len(c.args) > 1 {
		lo, hi, step = hi, c.integer(1, "stop", 0), c.integer(2, "step", 1)
	}
	if step == 0 {
		fail(c.line, "range: the step is 0")
	}
	out := &List{span: &span{lo, hi, step}}
	for i := lo; step > 0 && i < hi || step < 0 && i > hi; i += step {
		if len(out.Items) >= maxRange {
			fail(c.line, "range: more than %d numbers", maxRange)
		}
		out.Items = append(out.Items, i)
	}
	c.in.spend(c.line, int64(len(out.Items)))
	return out
}

// mutating has the methods that Jinja's immutable sandbox refuses.
var mutating = map[string]bool{"append": true, "clear": true, "extend": true, "insert": true, "pop": true,
	"popitem": true, "remove": true, "reverse": true, "setdefault": true, "sort": true, "update": true}

// method returns a method of a value; nil if it has none of this name.
func method(of Value, name string) Value {
	bound := func(f func(c *call) Value) Value {
		return &function{name, func(in *interp, line int, args []Value, named []namedValue) Value {
			in.step(line)
			c := &call{in: in, line: line, name: name, args: args, named: named}
			return c.run(func() Value { return f(c) })
		}}
	}
	refused := func(c *call) Value {
		c.any = true
		fail(c.line, "%s: a template cannot change its values", name)
		return nil
	}
	switch v := of.(type) {
	case Text:
		if f := textMethods[name]; f != nil {
			return bound(func(c *call) Value {
				c.in.read(c.line, v)
				return f(c, v)
			})
		}
	case *Dict:
		switch name {
		case "get":
			return bound(func(c *call) Value {
				key, otherwise := c.arg(0, "key", nil), c.arg(1, "default", nil)
				if x, ok := v.get(c.in.key(c.line, key)); ok {
					return x
				}
				return otherwise
			})
		case "items":
			return bound(func(c *call) Value { l := c.in.pairs(c.line, v); l.unindexed = isItems; return l })
		case "keys":
			return bound(func(c *call) Value {
				c.in.spend(c.line, int64(v.Len()))
				return &List{Items: v.keys, unindexed: isKeys}
			})
		case "values":
			return bound(func(c *call) Value {
				c.in.spend(c.line, int64(v.Len()))
				return &List{Items: v.items, unindexed: isValues}
			})
		case "copy":
			return bound(func(c *call) Value { return v })
		}
		if mutating[name] {
			return bound(refused)
		}
	case *List:
		switch name {
		case "index", "count":
			return bound(func(c *call) Value {
				n, x := int64(0), c.arg(0, "value", nil)
				c.in.spend(c.line, int64(len(v.Items)))
				for i, item := range v.Items {
					if c.in.equal(c.line, item, x) {
						if name == "index" {
							return int64(i)
						}
						n++
					}
				}
				if name == "index" {
					c.in.visit(c.line, x)
					fail(c.line, "index: %s is not in the list", Repr(x))
				}
				return n
			})
		}
		if mutating[name] {
			return bound(refused)
		}
	}
	return nil
}

// pairs returns the items of a dict as tuples.
func (in *interp) pairs(line int, d *Dict) *List {
	in.spend(line, 2*int64(d.Len()))
	out := &List{Items: make([]Value, d.Len())}
	for i, k := range d.keys {
		out.Items[i] = &List{Items: []Value{k, d.items[i]}, tuple: true}
	}
	return out
}

func strip(left, right bool) func(c *call, t Text) Value {
	return func(c *call, t Text) Value {
		chars, ok := c.arg(0, "chars", nil).(Text)
		if !ok {
			return c.in.made(c.line, t.trim(isSpace, left, right))
		}
		return c.in.made(c.line, t.trim(func(r rune) bool { return strings.ContainsRune(chars.S, r) }, left, right))
	}
}

func affix(has func(s, affix string) bool) func(c *call, t Text) Value {
	return func(c *call, t Text) Value {
		of, _, inside := c.between(t.S)
		switch a := c.arg(0, "prefix", nil).(type) {
		case Text:
			return inside && has(of, a.S)
		case *List:
			for _, x := range a.Items {
				if s, ok := x.(Text); ok && inside && has(of, s.S) {
					return true
				}
			}
			return false
		default:
			fail(c.line, "%s: a string is needed, not %s", c.name, typeName(a))
			return nil
		}
	}
}

// between returns the part of a string from the argument start to the argument end, which follow
// the first argument, and the characters before it; false if start is behind end.
func (c *call) between(s string) (part string, before int64, inside bool) {
	start, end := c.arg(1, "", nil), c.arg(2, "", nil)
	if start == nil && end == nil {
		return s, 0, true
	}
	n := int64(utf8.RuneCountInString(s))
	bound := func(v Value, otherwise int64) int64 {
		i, _, whole, ok := number(v)
		switch {
		case v == nil:
			return otherwise
		case !ok || !whole:
			fail(c.line, "%s: %s is not an integer", c.name, typeName(v))
		case i < 0:
			i = max(0, i+n)
		}
		return i
	}
	lo, hi := bound(start, 0), min(bound(end, n), n)
	if lo > hi {
		return "", 0, false
	}
	c.in.spend(c.line, n/8)
	first, at := len(s), int64(0)
	for i := range s {
		if at == lo {
			first = min(first, i)
		}
		if at == hi {
			return s[first:i], lo, true
		}
		at++
	}
	return s[first:], lo, true
}

func mapped(f func(string) string) func(c *call, t Text) Value {
	return func(c *call, t Text) Value { return c.in.made(c.line, t.with(f(t.S))) }
}

func mappedRunes(f func(string, int, rune) string) func(c *call, t Text) Value {
	return func(c *call, t Text) Value { return c.in.made(c.line, t.eachRune(f)) }
}

func classOf(is func(rune) bool) func(c *call, t Text) Value {
	return func(c *call, t Text) Value {
		return t.S != "" && strings.IndexFunc(t.S, func(r rune) bool { return !is(r) }) < 0
	}
}

func capitalize(s string) string {
	return Text{S: s}.eachRune(func(s string, at int, r rune) string {
		if at == 0 {
			return titleCase(r)
		}
		return lower(s, at, r)
	}).S
}

// isDigit reports whether Python's str.isdigit does: digits of all scripts, also raised, lowered
// and circled ones.
func isDigit(r rune) bool { return unicode.IsDigit(r) || unicode.Is(digits, r) }

// isAlnum reports whether Python's str.isalnum does.
func isAlnum(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }

// titleWords is the filter title, whose words begin behind spaces, hyphens and opening brackets.
// The words of the method title begin behind every character without a case.
func titleWords(s string) string {
	var b strings.Builder
	for s != "" {
		first, n := utf8.DecodeRuneInString(s)
		b.WriteString(upper(s, 0, first))
		end := strings.IndexFunc(s, func(r rune) bool { return strings.ContainsRune("-({[<", r) || isSpace(r) })
		if end < 0 {
			end = len(s)
		}
		end = max(end, n)
		b.WriteString(lowerOf(s[n:end]))
		s = s[end:]
	}
	return b.String()
}

func title(s string) string {
	inWord := false
	return Text{S: s}.eachRune(func(s string, at int, r rune) string {
		first := !inWord
		if inWord = cased(r); first {
			return titleCase(r)
		}
		return lower(s, at, r)
	}).S
}

var textMethods map[string]func(c *call, t Text) Value

func init() {
	position := func(last bool) func(c *call, t Text) Value {
		return func(c *call, t Text) Value {
			of, before, inside := c.between(t.S)
			find := strings.Index
			if last {
				find = strings.LastIndex
			}
			i := find(of, c.text(0, "sub").S)
			if i < 0 || !inside {
				return int64(-1)
			}
			return before + int64(utf8.RuneCountInString(of[:i]))
		}
	}
	textMethods = map[string]func(c *call, t Text) Value{
		"strip": strip(true, true), "lstrip": strip(true, false), "rstrip": strip(false, true),
		"startswith": affix(strings.HasPrefix), "endswith": affix(strings.HasSuffix),
		"upper": mappedRunes(upper), "lower": mappedRunes(lower), "capitalize": mapped(capitalize),
		"title": mapped(title),
		"split": split(false), "rsplit": split(true), "splitlines": splitLines,
		"find": position(false), "rfind": position(true),
		"isdigit": classOf(isDigit), "isalpha": classOf(unicode.IsLetter), "isspace": classOf(isSpace),
		"isalnum": classOf(isAlnum),
		"replace": func(c *call, t Text) Value {
			return c.replaced(t, c.text(0, "old").S, c.text(1, "new"), int(c.integer(2, "count", -1)))
		},
		"join": func(c *call, t Text) Value { return c.joined(c.arg(0, "iterable", nil), t) },
		"count": func(c *call, t Text) Value {
			of, _, inside := c.between(t.S)
			n := int64(strings.Count(of, c.text(0, "sub").S))
			if !inside {
				return int64(0)
			}
			return n
		},
		"removeprefix": func(c *call, t Text) Value {
			if p := c.text(0, "prefix").S; strings.HasPrefix(t.S, p) {
				return t.slice(len(p), len(t.S))
			}
			return t
		},
		"removesuffix": func(c *call, t Text) Value {
			if p := c.text(0, "suffix").S; strings.HasSuffix(t.S, p) {
				return t.slice(0, len(t.S)-len(p))
			}
			return t
		},
	}
}

// split returns the method split or rsplit.
func split(fromRight bool) func(c *call, t Text) Value {
	return func(c *call, t Text) Value {
		n := c.integer(1, "maxsplit", -1)
		sep, ok := c.arg(0, "sep", nil).(Text)
		if ok && sep.S == "" {
			fail(c.line, "split: the separator is empty")
		}
		c.in.spend(c.line, int64(len(t.S))/8)
		var cuts [][2]int
		if ok {
			cuts = separators(t.S, sep.S, fromRight)
		} else {
			cuts = spaces(t.S)
		}
		first, last := 0, len(t.S)
		if !ok { // separators at the ends make no empty strings; what is not divided keeps its far end
			drop := func(left bool) {
				k := len(cuts)
				switch whole := n < 0 || int64(k) <= n || left != fromRight; {
				case k == 0 || !whole:
				case left && cuts[0][0] == first:
					first, cuts = cuts[0][1], cuts[1:]
				case !left && cuts[k-1][1] == last:
					last, cuts = cuts[k-1][0], cuts[:k-1]
				}
			}
			drop(!fromRight)
			drop(fromRight)
			if first >= last {
				return &List{}
			}
		}
		if n >= 0 && int64(len(cuts)) > n {
			if fromRight {
				cuts = cuts[int64(len(cuts))-n:]
			} else {
				cuts = cuts[:n]
			}
		}
		out, at := &List{}, first
		for _, x := range cuts {
			out.Items = append(out.Items, c.in.made(c.line, t.slice(at, x[0])))
			at = x[1]
		}
		out.Items = append(out.Items, c.in.made(c.line, t.slice(at, last)))
		return out
	}
}

// separators returns where a text has a separator. Those that overlap are counted from one end.
func separators(s, sep string, fromRight bool) (cuts [][2]int) {
	if fromRight {
		for at := strings.LastIndex(s, sep); at >= 0; at = strings.LastIndex(s[:at], sep) {
			cuts = append(cuts, [2]int{at, at + len(sep)})
		}
		slices.Reverse(cuts)
		return cuts
	}
	for at := 0; ; at = cuts[len(cuts)-1][1] {
		i := strings.Index(s[at:], sep)
		if i < 0 {
			return cuts
		}
		cuts = append(cuts, [2]int{at + i, at + i + len(sep)})
	}
}

// spaces returns where a text has white space.
func spaces(s string) (cuts [][2]int) {
	for at := 0; ; at = cuts[len(cuts)-1][1] {
		i := strings.IndexFunc(s[at:], isSpace)
		if i < 0 {
			return cuts
		}
		cuts = append(cuts, [2]int{at + i, len(s) - len(strings.TrimLeftFunc(s[at+i:], isSpace))})
	}
}

func splitLines(c *call, t Text) Value {
	out, keep := &List{}, truth(c.arg(0, "keepends", false))
	lines(t, func(at, end, next int) {
		if keep {
			end = next
		}
		out.Items = append(out.Items, c.in.made(c.line, t.slice(at, end)))
	})
	return out
}

// lines calls do for each line [at, end) of a text, as Python's str.splitlines divides it. The next
// line begins at next.
func lines(t Text, do func(at, end, next int)) {
	for at := 0; at < len(t.S); {
		end := strings.IndexAny(t.S[at:], "\n\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029")
		if end < 0 {
			do(at, len(t.S), len(t.S))
			return
		}
		end += at
		_, n := utf8.DecodeRuneInString(t.S[end:])
		if strings.HasPrefix(t.S[end:], "\r\n") {
			n = 2
		}
		do(at, end, end+n)
		at = end + n
	}
}

// strftime returns Python's t.strftime(format) in the C locale.
func strftime(line int, t time.Time, format string) string {
	layouts := map[byte]string{'d': "02", 'm': "01", 'Y': "2006", 'y': "06", 'b': "Jan", 'h': "Jan", 'B': "January",
		'a': "Mon", 'A': "Monday", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002", 'F': "2006-01-02",
		'T': "15:04:05", 'R': "15:04", 'D': "01/02/06", 'e': "_2",
		'Z': "", 'z': ""} // now() of Python has no time zone
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		plain := format[i] == '-' && i+1 < len(format) // without leading zeros
		if plain {
			i++
		}
		layout, ok := layouts[format[i]]
		switch {
		case format[i] == '%':
			b.WriteByte('%')
			continue
		case !ok:
			fail(line, "strftime_now: the format %%%c is not supported", format[i])
		}
		s := t.Format(layout)
		if plain {
			s = strings.TrimLeft(s, "0 ")
			if s == "" {
				s = "0"
			}
		}
		b.WriteString(s)
	}
	return b.String()
}
