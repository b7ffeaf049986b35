package jinja

import (
	"math"
	"strings"
)

func (e *binaryExpr) eval(in *interp) Value {
	in.step(e.line)
	a, b := e.left.eval(in), e.right.eval(in)
	refuseUndefined(e.line, a)
	refuseUndefined(e.line, b)
	if v, ok := in.sequenceOp(e.line, e.op, a, b); ok {
		return v
	}
	i, x, whole, ok := number(a)
	j, y, whole2, ok2 := number(b)
	if !ok || !ok2 {
		fail(e.line, "%s %s %s is not possible", typeName(a), e.op, typeName(b))
	}
	if whole && whole2 {
		return e.integers(i, j)
	}
	return e.floats(x, y)
}

// sequenceOp returns the result of an operator on texts and lists.
func (in *interp) sequenceOp(line int, op string, a, b Value) (Value, bool) {
	if op == "*" {
		if _, isNumber := a.(int64); isNumber {
			a, b = b, a
		}
		n, whole, ok := int64(0), false, false
		if n, _, whole, ok = number(b); !ok || !whole {
			return nil, false
		}
		switch a := a.(type) {
		case Text:
			n = max(0, n)
			if n > 0 && int64(len(a.S)) > in.limits.Bytes/n {
				fail(line, "the template repeats a text %d times, which makes more than %d bytes", n, in.limits.Bytes)
			}
			in.count(line, len(a.S)*int(n))
			var b builder
			for range n {
				b.add(a)
			}
			in.spend(line, n)
			return b.text(), true
		case *List:
			if !a.isPlain() {
				return nil, false
			}
			if n > in.limits.Steps { // the product with the length may not be an int64
				fail(line, "the template repeats a list %d times, which takes more than %d steps", n, in.limits.Steps)
			}
			in.spend(line, max(0, n)*int64(len(a.Items)+1))
			out := &List{tuple: a.tuple}
			for range n {
				out.Items = append(out.Items, a.Items...)
			}
			return out, true
		}
		return nil, false
	}
	switch a := a.(type) {
	case Text:
		if t, ok := b.(Text); ok && op == "+" {
			return in.made(line, plus(a, t)), true
		}
		if op == "%" {
			return in.percent(line, a.S, b), true
		}
	case *List:
		if l, ok := b.(*List); ok && op == "+" && a.tuple == l.tuple && a.isPlain() && l.isPlain() {
			in.spend(line, int64(len(a.Items)+len(l.Items)))
			return &List{Items: append(append(make([]Value, 0, len(a.Items)+len(l.Items)), a.Items...), l.Items...),
				tuple: a.tuple}, true
		}
	}
	return nil, false
}

// percent returns format % args for the conversions s, d and %.
func (in *interp) percent(line int, format string, args Value) Text {
	list := []Value{args}
	if l, ok := args.(*List); ok && l.tuple {
		list = l.Items
	}
	var b builder
	for {
		i := strings.IndexByte(format, '%')
		if i < 0 || i+1 == len(format) {
			break
		}
		b.addString(format[:i], 0)
		verb := format[i+1]
		format = format[i+2:]
		if verb == '%' {
			b.addString("%", 0)
			continue
		}
		if verb != 's' && verb != 'd' || len(list) == 0 {
			fail(line, "the format %%%c is not supported, or has no argument", verb)
		}
		v := list[0]
		if verb == 'd' {
			i, x, whole, ok := number(v)
			if _, large := v.(Number); !ok && !large {
				fail(line, "the format %%d needs a number, not %s", typeName(v))
			} else if whole {
				v = i
			} else if ok {
				v = truncated(x)
			}
		}
		b.add(in.made(line, in.textOf(line, v)))
		list = list[1:]
	}
	if _, isDict := args.(*Dict); len(list) > 0 && !isDict {
		fail(line, "the format %s has fewer conversions than arguments", format)
	}
	b.addString(format, 0)
	return in.made(line, b.text())
}

func (e *binaryExpr) integers(i, j int64) Value {
	overflow := func(wrong bool) {
		if wrong {
			fail(e.line, "%d %s %d is not a 64-bit integer", i, e.op, j)
		}
	}
	if j == 0 && (e.op == "/" || e.op == "//" || e.op == "%") {
		fail(e.line, "division by zero")
	}
	switch e.op {
	case "+":
		overflow((i+j > i) != (j > 0) && j != 0)
		return i + j
	case "-":
		overflow((i-j < i) != (j > 0) && j != 0)
		return i - j
	case "*":
		overflow(i != 0 && (i*j/i != j || i == -1 && j == math.MinInt64))
		return i * j
	case "/":
		return float64(i) / float64(j)
	case "//":
		overflow(i == math.MinInt64 && j == -1)
		q := i / j
		if i%j != 0 && (i < 0) != (j < 0) {
			q--
		}
		return q
	case "%":
		if j == -1 {
			return int64(0)
		}
		r := i % j
		if r != 0 && (r < 0) != (j < 0) {
			r += j
		}
		return r
	}
	if j < 0 {
		return e.floats(float64(i), float64(j))
	}
	switch {
	case j == 0 || i == 1 || i == -1 && j%2 == 0:
		return int64(1)
	case i == 0 || i == -1:
		return i
	}
	out := int64(1)
	for ; j > 0; j-- { // 63 times at most
		overflow(out*i/out != i)
		out *= i
	}
	return out
}

func (e *binaryExpr) floats(x, y float64) Value {
	if y == 0 && (e.op == "/" || e.op == "//" || e.op == "%") {
		fail(e.line, "division by zero")
	}
	switch e.op {
	case "+":
		return x + y
	case "-":
		return x - y
	case "*":
		return x * y
	case "/":
		return x / y
	case "//":
		quotient, _ := divided(x, y)
		return quotient
	case "%":
		_, rest := divided(x, y)
		return rest
	}
	switch {
	case x == 0 && y < 0:
		fail(e.line, "division by zero")
	case x < 0 && y != math.Trunc(y):
		fail(e.line, "%v ** %v is not a real number", x, y)
	}
	return math.Pow(x, y)
}

// divided returns Python's x // y and x % y. The rest is exact, so 1.0 // 0.1 is 9 and not 10: the
// float 0.1 is a little more than a tenth.
func divided(x, y float64) (quotient, rest float64) {
	rest = math.Mod(x, y)
	quotient = math.Round((x - rest) / y)
	switch {
	case rest == 0:
		rest = math.Copysign(0, y)
	case (rest < 0) != (y < 0):
		quotient, rest = quotient-1, rest+y
	}
	if quotient == 0 {
		quotient = math.Copysign(0, x/y)
	}
	return quotient, rest
}
