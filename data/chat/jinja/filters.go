package jinja

import (
	"errors"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

var filters map[string]func(c *call, v Value) Value

func init() {
	onText := func(f func(string) string) func(c *call, v Value) Value {
		return func(c *call, v Value) Value { t := c.textOf(v); return c.made(t.with(f(t.S))) }
	}
	onRunes := func(f func(string, int, rune) string) func(c *call, v Value) Value {
		return func(c *call, v Value) Value { return c.made(c.textOf(v).eachRune(f)) }
	}
	size := func(c *call, v Value) Value {
		n, ok := length(v)
		if !ok {
			fail(c.line, "%s has no length", typeName(v))
		}
		if t, ok := v.(Text); ok {
			c.in.spend(c.line, int64(len(t.S))/64)
		}
		return n
	}
	otherwise := func(c *call, v Value) Value {
		value, all := c.arg(0, "default_value", Text{}), truth(c.arg(1, "boolean", false))
		if _, missing := v.(undefined); missing || all && !truth(v) {
			return value
		}
		return v
	}
	escape := func(c *call, v Value) Value { return c.made(escapeHTML(c.textOf(v))) }
	filters = map[string]func(c *call, v Value) Value{
		"trim":    func(c *call, v Value) Value { return strip(true, true)(c, c.textOf(v)) },
		"length":  size,
		"count":   size,
		"default": otherwise,
		"d":       otherwise,
		"tojson":  toJSON,
		"string":  func(c *call, v Value) Value { return c.made(c.textOf(v)) },
		"upper":   onRunes(upper), "lower": onRunes(lower), "capitalize": onText(capitalize),
		"title": onText(titleWords),
		"safe":  func(c *call, v Value) Value { t := c.textOf(v); t.safe = true; return t },
		"e":     escape, "escape": escape,
		"dictsort": dictSort,
		"items": func(c *call, v Value) Value {
			switch v := v.(type) {
			case *Dict:
				l := c.in.pairs(c.line, v)
				l.unindexed = isIterator
				return l
			case undefined:
				return &List{unindexed: isIterator}
			}
			fail(c.line, "items: an object is needed, not %s", typeName(v))
			return nil
		},
		"list": func(c *call, v Value) Value { return &List{Items: slices.Clone(c.items(v))} },
		"join": func(c *call, v Value) Value {
			if path := c.arg(1, "attribute", nil); path != nil {
				l := &List{}
				for _, x := range c.items(v) {
					l.Items = append(l.Items, c.attribute(x, path))
				}
				v = l
			}
			return c.joined(v, c.textOf(c.arg(0, "d", Text{})))
		},
		"replace": func(c *call, v Value) Value {
			n := int64(-1)
			if x := c.arg(2, "count", nil); x != nil {
				n = c.integer(2, "count", -1)
			}
			return c.replaced(c.textOf(v), c.text(0, "old").S, c.text(1, "new"), int(n))
		},
		"map": mapFilter, "select": selected(true, false), "reject": selected(false, false),
		"selectattr": selected(true, true), "rejectattr": selected(false, true),
		"first": end(true), "last": end(false), "min": extreme(false), "max": extreme(true),
		"int": toInt, "float": toFloat, "round": round, "indent": indent,
		"abs": func(c *call, v Value) Value {
			i, x, whole, ok := number(v)
			if !ok {
				fail(c.line, "abs: %s is not a number", typeName(v))
			}
			if whole && i < 0 {
				return (&binaryExpr{op: "-", line: c.line}).integers(0, i)
			} else if whole {
				return i
			}
			return math.Abs(x)
		},
		"sum": func(c *call, v Value) Value {
			path, total := c.arg(0, "attribute", nil), c.arg(1, "start", int64(0))
			for _, x := range c.items(v) {
				if path != nil {
					x = c.attribute(x, path)
				}
				total = (&binaryExpr{"+", &literal{total}, &literal{x}, c.line}).eval(c.in)
			}
			return total
		},
		"sort": func(c *call, v Value) Value {
			key := c.key(1, 2)
			return &List{Items: c.sorted(c.items(v), key, truth(c.arg(0, "reverse", false)))}
		},
		"reverse": func(c *call, v Value) Value {
			items := slices.Clone(c.items(v))
			slices.Reverse(items)
			if _, ok := v.(Text); ok {
				return c.joined(&List{Items: items}, Text{})
			}
			return &List{Items: items, unindexed: isIterator}
		},
		"unique": func(c *call, v Value) Value {
			out, key := NewDict(), c.key(0, 1)
			for _, x := range c.items(v) {
				if _, seen := out.get(c.in.key(c.line, key(x))); !seen && !out.put(key(x), x) {
					fail(c.line, "unique: %s cannot be compared", typeName(key(x)))
				}
			}
			return &List{Items: out.items, unindexed: isIterator}
		},
		"wordcount": func(c *call, v Value) Value {
			return int64(len(strings.FieldsFunc(c.textOf(v).S, func(r rune) bool { return !isAlnum(r) && r != '_' })))
		},
		"center": func(c *call, v Value) Value {
			t, n := c.textOf(v), c.integer(0, "width", 80)
			room := n - int64(utf8.RuneCountInString(t.S))
			if room <= 0 || n > 1<<16 {
				return t
			}
			left := room/2 + room&n&1
			var b builder
			b.addString(strings.Repeat(" ", int(left)), 0)
			b.add(t)
			b.addString(strings.Repeat(" ", int(room-left)), 0)
			return c.made(b.text())
		},
	}
}

func dictSort(c *call, v Value) Value {
	d, ok := v.(*Dict)
	if !ok {
		fail(c.line, "dictsort: an object is needed, not %s", typeName(v))
	}
	by := int64(0)
	switch c.textOf(c.arg(1, "by", Text{S: "key"})).S {
	case "value":
		by = 1
	case "key":
	default:
		fail(c.line, `dictsort: by is neither "key" nor "value"`)
	}
	exact := truth(c.arg(0, "case_sensitive", false))
	key := func(v Value) Value {
		k := v.(*List).Items[by]
		if !exact {
			c.in.readText(c.line, k)
			k = folded(k)
		}
		return k
	}
	return &List{Items: c.sorted(c.in.pairs(c.line, d).Items, key, truth(c.arg(2, "reverse", false)))}
}

// indent indents the lines of a text behind the first.
func indent(c *call, v Value) Value {
	width := c.arg(0, "width", int64(4))
	prefix, ok := width.(Text)
	if !ok {
		n, _, whole, ok := number(width)
		if !ok || !whole || n < 0 || n > 1<<10 {
			fail(c.line, "indent: the width is not a whole number from 0 to 1024")
		}
		prefix = Text{S: strings.Repeat(" ", int(n))}
	}
	first, blank := truth(c.arg(1, "first", false)), truth(c.arg(2, "blank", false))
	t, ok := v.(Text)
	if !ok { // Python adds a newline to the value
		fail(c.line, "indent: %s is not a string", typeName(v))
	}
	t = t.Append(Text{S: "\n"})
	var b builder
	lines(t, func(at, end, _ int) {
		if at > 0 {
			b.addString("\n", 0)
		}
		if at > 0 && (end > at || blank) || at == 0 && first {
			c.in.count(c.line, len(prefix.S))
			b.add(prefix)
		}
		b.addSlice(t, at, end)
	})
	return c.made(b.text())
}

func toInt(c *call, v Value) Value {
	otherwise := c.arg(0, "default", int64(0))
	switch v := v.(type) {
	case Text:
		digits := strings.TrimSpace(v.S)
		if len(digits) > maxDigits {
			return otherwise
		}
		if n, ok := new(big.Int).SetString(digits, 10); ok && n.IsInt64() {
			return n.Int64()
		} else if ok {
			return Number(n.String())
		}
		if x, ok := floatOf(digits); ok && !math.IsInf(x, 0) && !math.IsNaN(x) {
			return truncated(x)
		}
	case Number:
		return v
	default:
		refuseUndefined(c.line, v)
		if i, x, whole, ok := number(v); ok && whole {
			return i
		} else if ok && !math.IsInf(x, 0) && !math.IsNaN(x) {
			return truncated(x)
		}
	}
	return otherwise
}

// truncated returns Python's int(x).
func truncated(x float64) Value {
	if math.Abs(x) < 1<<62 {
		return int64(x)
	}
	return Number(strconv.FormatFloat(x, 'f', 0, 64))
}

func toFloat(c *call, v Value) Value {
	otherwise := c.arg(0, "default", 0.0)
	if t, ok := v.(Text); ok {
		if x, ok := floatOf(strings.TrimSpace(t.S)); ok {
			return x
		}
	} else if n, ok := v.(Number); ok {
		if x, err := strconv.ParseFloat(string(n), 64); err == nil {
			return x
		}
	} else if _, x, _, ok := number(v); ok {
		return x
	}
	refuseUndefined(c.line, v)
	return otherwise
}

// floatOf returns Python's float(s), which is infinite if s is out of range, and knows no
// hexadecimal numbers.
func floatOf(s string) (float64, bool) {
	x, err := strconv.ParseFloat(s, 64)
	return x, (err == nil || errors.Is(err, strconv.ErrRange)) && !strings.ContainsAny(s, "xX")
}

func round(c *call, v Value) Value {
	i, x, whole, ok := number(v)
	if !ok {
		fail(c.line, "round: %s is not a number", typeName(v))
	}
	digits := c.integer(0, "precision", 0)
	scale := math.Pow(10, float64(digits))
	switch c.textOf(c.arg(1, "method", Text{S: "common"})).S {
	case "ceil":
		return math.Ceil(x*scale) / scale
	case "floor":
		return math.Floor(x*scale) / scale
	case "common":
	default:
		fail(c.line, `round: the method is not "common", "ceil" or "floor"`)
	}
	switch {
	case whole && digits >= 0:
		return i
	case digits < 0:
		fail(c.line, "round: a precision below 0 is not supported")
	}
	y, _ := strconv.ParseFloat(strconv.FormatFloat(x, 'f', int(min(digits, 300)), 64), 64)
	return y
}

// end returns the first or the last element.
func end(first bool) func(c *call, v Value) Value {
	return func(c *call, v Value) Value {
		if l, ok := v.(*List); ok && l.unindexed == isIterator {
			if !first {
				fail(c.line, "last: an iterator has no last element; add the filter list before it")
			}
			if rest := l.Items; len(rest) > 1 { // c.items takes all, and first takes one
				defer func() { l.Items = rest[1:] }()
			}
		}
		items := c.items(v)
		switch {
		case len(items) == 0:
			return undefined{"the " + c.name + " element of an empty list"}
		case first:
			return items[0]
		}
		return items[len(items)-1]
	}
}

// extreme returns the smallest or the largest element.
func extreme(largest bool) func(c *call, v Value) Value {
	return func(c *call, v Value) Value {
		items := c.sorted(c.items(v), c.key(0, 1), largest)
		if len(items) == 0 {
			return undefined{"the " + c.name + " of an empty list"}
		}
		return items[0]
	}
}

// key returns what elements are compared by, by the arguments case_sensitive and attribute at the
// given positions.
func (c *call) key(exact, attribute int) func(Value) Value {
	sensitive, path := truth(c.arg(exact, "case_sensitive", false)), c.arg(attribute, "attribute", nil)
	return func(x Value) Value {
		if path != nil {
			x = c.attribute(x, path)
		}
		if !sensitive {
			c.in.readText(c.line, x)
			x = folded(x)
		}
		return x
	}
}
