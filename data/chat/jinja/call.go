package jinja

import (
	"slices"
	"strconv"
	"strings"
)

// call has the arguments of a function, method or filter.
type call struct {
	in    *interp
	line  int
	name  string
	args  []Value
	named []namedValue

	any   bool // any arguments are allowed
	read  int  // arguments without a name that were read, up to the last of them
	names int  // arguments with a name that were read
}

// run calls f. An argument that f does not read is an error: the result would be another one than
// in Python.
func (c *call) run(f func() Value) Value {
	v := f()
	switch {
	case c.any:
	case len(c.args) > c.read:
		fail(c.line, "%s: %d arguments are not supported, at most %d are", c.name, len(c.args), c.read)
	case len(c.named) > c.names:
		var names []string
		for _, n := range c.named {
			names = append(names, n.name)
		}
		fail(c.line, "%s: one of the arguments %s is not supported, or is given twice", c.name,
			strings.Join(names, ", "))
	}
	return v
}

// arg returns an argument by its position or name. Each argument is read once.
func (c *call) arg(i int, name string, otherwise Value) Value {
	c.read = max(c.read, i+1)
	if i < len(c.args) {
		return c.args[i]
	}
	for _, n := range c.named {
		if n.name == name {
			c.names++
			return n.value
		}
	}
	return otherwise
}

func (c *call) text(i int, name string) Text {
	v := c.arg(i, name, undefined{"the argument " + name})
	t, ok := v.(Text)
	if !ok {
		fail(c.line, "%s: %s is not a string", c.name, typeName(v))
	}
	return t
}

func (c *call) integer(i int, name string, otherwise int64) int64 {
	v := c.arg(i, name, otherwise)
	n, _, whole, ok := number(v)
	if !ok || !whole {
		fail(c.line, "%s: %s is not an integer", c.name, typeName(v))
	}
	return n
}

// dict returns the arguments of dict() and namespace().
func (c *call) dict() *Dict {
	c.any = true
	d := NewDict()
	if len(c.args) > 0 {
		from := dictOf(c.args[0])
		if from == nil {
			fail(c.line, "%s: an object is needed, not %s", c.name, typeName(c.args[0]))
		}
		c.in.spend(c.line, int64(from.Len()))
		for i, k := range from.keys {
			d.put(c.in.key(c.line, k), from.items[i])
		}
	}
	for _, n := range c.named {
		d.Set(n.name, n.value)
	}
	return d
}

func (c *call) textOf(v Value) Text { return c.in.textOf(c.line, v) }

func (c *call) made(t Text) Text { return c.in.made(c.line, t) }

func (c *call) items(v Value) []Value { return c.in.mustIterate(c.line, v) }

// replaced returns a text with replacements. It counts the bytes before it makes them.
func (c *call) replaced(t Text, old string, with Text, n int) Text {
	found := strings.Count(t.S, old)
	if n >= 0 {
		found = min(found, n)
	}
	c.in.count(c.line, len(t.S)+found*max(0, len(with.S)-len(old)))
	c.in.spend(c.line, int64(found))
	return t.replace(old, with, n)
}

// joined joins the elements of a value as strings.
func (c *call) joined(v Value, sep Text) Text {
	var b builder
	for i, x := range c.items(v) {
		if i > 0 {
			b.add(sep)
		}
		t := c.textOf(x)
		c.in.count(c.line, len(t.S)+len(sep.S))
		b.add(t)
	}
	return b.text()
}

// attribute returns x.a.b for "a.b"; numbers are indices.
func (c *call) attribute(x Value, path Value) Value {
	if i, ok := path.(int64); ok {
		return c.in.item(c.line, x, i)
	}
	for name := range strings.SplitSeq(c.textOf(path).S, ".") {
		if i, err := strconv.ParseInt(name, 10, 64); err == nil {
			x = c.in.item(c.line, x, i)
		} else {
			x = c.in.item(c.line, x, Text{S: name})
		}
	}
	return x
}

// selected returns the elements that pass a test, or those that do not. With attribute, the first
// argument names an attribute of the element to test.
func selected(keep, attribute bool) func(c *call, v Value) Value {
	return func(c *call, v Value) Value {
		args := c.args
		c.any = true
		var path Value
		if attribute {
			if len(args) == 0 {
				fail(c.line, "%s: the name of an attribute is needed", c.name)
			}
			path, args = args[0], args[1:]
		}
		out := &List{unindexed: isIterator}
		for _, x := range c.items(v) {
			tested := x
			if attribute {
				tested = c.attribute(x, path)
			}
			pass := truth(tested)
			if len(args) > 0 {
				pass = c.in.test(c.line, c.textOf(args[0]).S, tested, args[1:])
			}
			if pass == keep {
				out.Items = append(out.Items, x)
			}
		}
		return out
	}
}

// mapFilter applies a filter to each element, or without a filter takes an attribute of it.
func mapFilter(c *call, v Value) Value {
	out := &List{unindexed: isIterator}
	if len(c.args) == 0 { // otherwise attribute and default are arguments of the filter
		path, otherwise := c.arg(0, "attribute", nil), c.arg(0, "default", nil)
		if path == nil {
			fail(c.line, "map: the name of a filter, or attribute, is needed")
		}
		for _, x := range c.items(v) {
			y := c.attribute(x, path)
			if _, missing := y.(undefined); missing && otherwise != nil {
				y = otherwise
			}
			out.Items = append(out.Items, y)
		}
		return out
	}
	c.any = true
	name := c.textOf(c.args[0]).S
	f := filters[name]
	if f == nil {
		fail(c.line, "the filter %q is not supported", name)
	}
	for _, x := range c.items(v) {
		c.in.readText(c.line, x)
		inner := &call{in: c.in, line: c.line, name: name, args: c.args[1:], named: c.named}
		out.Items = append(out.Items, inner.run(func() Value { return f(inner, x) }))
	}
	return out
}

// sorted sorts values by Python's order. key returns what an element is compared by.
func (c *call) sorted(items []Value, key func(Value) Value, reverse bool) []Value {
	c.in.spend(c.line, int64(len(items))*20)
	items = slices.Clone(items)
	slices.SortStableFunc(items, func(a, b Value) int {
		x, y := key(a), key(b)
		if reverse {
			x, y = y, x
		}
		if before, ok := c.in.less(c.line, x, y); !ok {
			fail(c.line, "%s: %s and %s cannot be compared", c.name, typeName(x), typeName(y))
		} else if before {
			return -1
		}
		if before, _ := c.in.less(c.line, y, x); before {
			return 1
		}
		return 0
	})
	return items
}

// folded returns a string in lower case, for comparisons without case.
func folded(v Value) Value {
	if t, ok := v.(Text); ok {
		return Text{S: lowerOf(t.S)}
	}
	return v
}
