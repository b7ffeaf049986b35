package jinja

import "unicode"

// test returns whether a value passes a test (`x is name`).
func (in *interp) test(line int, name string, v Value, args []Value) bool {
	isNumber := func() bool { _, _, _, ok := number(v); _, large := v.(Number); return ok || large }
	integer := func() int64 {
		i, _, whole, ok := number(v)
		if !ok || !whole {
			fail(line, "is %s: %s is not an integer", name, typeName(v))
		}
		return i
	}
	arg := func() Value {
		if len(args) != 1 {
			fail(line, "is %s: one argument is needed", name)
		}
		return args[0]
	}
	text := func() string {
		in.readText(line, v)
		return in.textOf(line, v).S
	}
	switch name {
	case "defined":
		_, ok := v.(undefined)
		return !ok
	case "undefined":
		_, ok := v.(undefined)
		return ok
	case "none":
		return v == nil
	case "string":
		_, ok := v.(Text)
		return ok
	case "mapping":
		_, ok := v.(*Dict)
		return ok
	case "boolean":
		_, ok := v.(bool)
		return ok
	case "true":
		return v == true
	case "false":
		return v == false
	case "integer":
		_, ok := v.(int64)
		_, large := v.(Number)
		return ok || large
	case "float":
		_, ok := v.(float64)
		return ok
	case "number":
		return isNumber()
	case "iterable":
		switch v.(type) {
		case Text, *List, *Dict, undefined, *loop:
			return true
		}
		return false
	case "sequence":
		switch v := v.(type) {
		case Text, *Dict, undefined:
			return true
		case *List:
			return v.unindexed == 0
		}
		return false
	case "callable":
		switch v.(type) {
		case *function, undefined: // Jinja2's Undefined has a method __call__
			return true
		}
		return false
	case "odd":
		return integer()%2 != 0
	case "even":
		return integer()%2 == 0
	case "divisibleby":
		j, _, whole, ok := number(arg())
		if !ok || !whole || j == 0 {
			fail(line, "is divisibleby: an integer that is not 0 is needed")
		}
		return integer()%j == 0
	case "lower":
		return hasCase(text(), unicode.Ll, unicode.Other_Lowercase)
	case "upper":
		return hasCase(text(), unicode.Lu, unicode.Other_Uppercase)
	case "in":
		return in.contains(line, arg(), v)
	case "eq", "equalto", "==":
		return in.equal(line, v, arg())
	case "ne", "!=":
		return !in.equal(line, v, arg())
	case "sameas":
		a, b := v, arg()
		if _, ok := a.(Text); ok {
			return in.equal(line, a, b)
		}
		return typeName(a) == typeName(b) && in.equal(line, a, b)
	case "lt", "lessthan", "<":
		return in.compare(line, "<", v, arg())
	case "le", "<=":
		return in.compare(line, "<=", v, arg())
	case "gt", "greaterthan", ">":
		return in.compare(line, ">", v, arg())
	case "ge", ">=":
		return in.compare(line, ">=", v, arg())
	}
	fail(line, "the test %q is not supported", name)
	return false
}
