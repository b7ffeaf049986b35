package jinja

import (
	"math"
	"unicode/utf8"
)

func (e *literal) eval(*interp) Value { return e.value }

func (e *nameExpr) eval(in *interp) Value {
	in.step(e.line)
	return in.lookup(e.name)
}

func (e *listExpr) eval(in *interp) Value {
	l := &List{Items: make([]Value, len(e.items)), tuple: e.tuple}
	for i, x := range e.items {
		l.Items[i] = x.eval(in)
	}
	in.spend(0, int64(len(e.items)))
	return l
}

func (e *dictExpr) eval(in *interp) Value {
	d := NewDict()
	for i, k := range e.keys {
		key := k.eval(in)
		if !d.put(in.key(e.line, key), e.values[i].eval(in)) {
			fail(e.line, "%s cannot be the key of an object", typeName(key))
		}
	}
	in.spend(e.line, int64(len(e.keys)))
	return d
}

func (e *attrExpr) eval(in *interp) Value {
	in.step(e.line)
	of := e.of.eval(in)
	refuseUndefined(e.line, of)
	if l, ok := of.(*loop); ok {
		if v, ok := l.attr(e.name); ok {
			return v
		}
		return undefined{"loop." + e.name}
	}
	if m := method(of, e.name); m != nil {
		return m
	}
	if d := dictOf(of); d != nil {
		if v, ok := d.Get(e.name); ok {
			return v
		}
	}
	return undefined{"the attribute " + e.name + " of " + typeName(of)}
}

// dictOf returns the dict of an object or a namespace.
func dictOf(v Value) *Dict {
	switch v := v.(type) {
	case *Dict:
		return v
	case *namespace:
		return v.Dict
	}
	return nil
}

func (e *itemExpr) eval(in *interp) Value {
	in.step(e.line)
	of := e.of.eval(in)
	key := e.key.eval(in)
	refuseUndefined(e.line, of)
	return in.item(e.line, of, key)
}

// item returns of[key]; undefined if it does not exist.
func (in *interp) item(line int, of, key Value) Value {
	if d := dictOf(of); d != nil {
		if v, ok := d.get(in.key(line, key)); ok {
			return v
		}
	}
	in.readText(line, of)
	l, isList := of.(*List)
	if i, _, whole, ok := number(key); ok && whole && !(isList && l.unindexed != 0) {
		n, _ := length(of)
		if i < 0 {
			i += n
		}
		if i >= 0 && i < n {
			switch v := of.(type) {
			case *List:
				return v.Items[i]
			case Text:
				in.spend(line, i/8)
				at := 0
				for ; i > 0; i-- {
					_, size := utf8.DecodeRuneInString(v.S[at:])
					at += size
				}
				_, size := utf8.DecodeRuneInString(v.S[at:])
				return v.slice(at, at+size)
			}
		}
	}
	if name, ok := key.(Text); ok {
		if l, isLoop := of.(*loop); isLoop {
			if v, ok := l.attr(name.S); ok {
				return v
			}
		}
		if m := method(of, name.S); m != nil {
			return m
		}
	}
	in.visit(line, key)
	return undefined{"the element " + Repr(key) + " of " + typeName(of)}
}

func (e *sliceExpr) eval(in *interp) Value {
	in.step(e.line)
	of := e.of.eval(in)
	refuseUndefined(e.line, of)
	n, ok := length(of)
	_, isDict := of.(*Dict)
	if l, isList := of.(*List); !ok || isDict || isList && l.unindexed != 0 {
		fail(e.line, "%s cannot be sliced", typeName(of))
	}
	bound := func(x expr, otherwise int64) int64 {
		if x == nil {
			return otherwise
		}
		v := x.eval(in)
		i, _, whole, ok := number(v)
		if v == nil {
			return otherwise
		}
		if !ok || !whole {
			fail(e.line, "a slice needs integers, not %s", typeName(v))
		}
		return i
	}
	step := bound(e.step, 1)
	if step == 0 {
		fail(e.line, "the step of a slice is 0")
	}
	lo, hi := int64(0), n
	if step < 0 {
		lo, hi = n-1, -1
	}
	clamp := func(x expr, otherwise int64) int64 {
		i := bound(x, math.MaxInt64)
		if i == math.MaxInt64 && (x == nil || x.eval(in) == nil) {
			return otherwise
		}
		if i < 0 {
			i += n
		}
		if step < 0 {
			return max(-1, min(i, n-1))
		}
		return max(0, min(i, n))
	}
	lo, hi = clamp(e.lo, lo), clamp(e.hi, hi)
	in.spend(e.line, n/8)
	var indices []int64
	if step != 1 {
		for i := lo; step > 0 && i < hi || step < 0 && i > hi; i += step {
			indices = append(indices, i)
			if step > n || -step > n {
				break
			}
		}
	}
	switch v := of.(type) {
	case *List:
		out := &List{tuple: v.tuple}
		if s := v.span; s != nil {
			out.span = &span{s.start + lo*s.step, s.start + hi*s.step, s.step * step}
		}
		if step == 1 {
			out.Items = v.Items[lo:max(lo, hi):max(lo, hi)]
			return out
		}
		in.spend(e.line, int64(len(indices)))
		for _, i := range indices {
			out.Items = append(out.Items, v.Items[i])
		}
		return out
	case Text:
		starts := make([]int, 0, n+1)
		for i := range v.S {
			starts = append(starts, i)
		}
		starts = append(starts, len(v.S))
		if step == 1 {
			return in.made(e.line, v.slice(starts[lo], starts[max(lo, hi)]))
		}
		var b builder
		for _, i := range indices {
			b.addSlice(v, starts[i], starts[i+1])
		}
		return in.made(e.line, b.text())
	}
	return undefined{"the slice"}
}

func (e *callExpr) eval(in *interp) Value { return e.invoke(in) }

// invoke calls the function, with more named arguments.
func (e *callExpr) invoke(in *interp, more ...namedValue) Value {
	in.step(e.line)
	of := e.of.eval(in)
	args, named := e.args.eval(in)
	named = append(named, more...)
	switch f := of.(type) {
	case *function:
		return f.call(in, e.line, args, named)
	case *loop:
		if !f.stmt.recursive || len(args) != 1 {
			fail(e.line, "loop is called, but the loop is not recursive")
		}
		defer in.nest(e.line)()
		var b builder
		f.stmt.loop(in, &b, args[0], f.depth+1)
		return in.made(e.line, b.text())
	}
	refuseUndefined(e.line, of)
	fail(e.line, "%s cannot be called", typeName(of))
	return nil
}

func (a *arguments) eval(in *interp) (args []Value, named []namedValue) {
	for _, x := range a.positional {
		args = append(args, x.eval(in))
	}
	for i, x := range a.named {
		named = append(named, namedValue{a.names[i], x.eval(in)})
	}
	return args, named
}

func (e *notExpr) eval(in *interp) Value { return !truth(e.of.eval(in)) }

func (e *negExpr) eval(in *interp) Value {
	v := e.of.eval(in)
	i, x, whole, ok := number(v)
	if !ok {
		refuseUndefined(e.line, v)
		fail(e.line, "%s has no sign", typeName(v))
	}
	switch {
	case whole && e.plus:
		return i
	case whole:
		return (&binaryExpr{op: "-", line: e.line}).integers(0, i)
	case e.plus:
		return x
	}
	return -x
}

func (e *logicExpr) eval(in *interp) Value {
	in.step(0)
	if v := e.left.eval(in); truth(v) == e.or {
		return v
	}
	return e.right.eval(in)
}

func (e *condExpr) eval(in *interp) Value {
	in.step(0)
	if truth(e.test.eval(in)) {
		return e.yes.eval(in)
	}
	if e.no == nil {
		return undefined{"an expression with if and without else"}
	}
	return e.no.eval(in)
}

func (e *concatExpr) eval(in *interp) Value {
	var b builder
	for _, x := range e.of {
		b.add(in.made(e.line, in.textOf(e.line, x.eval(in))))
	}
	return b.text()
}

func (e *compareExpr) eval(in *interp) Value {
	in.step(e.line)
	a := e.first.eval(in)
	for i, op := range e.ops {
		b := e.rest[i].eval(in)
		if !in.compare(e.line, op, a, b) {
			return false
		}
		a = b
	}
	return true
}

func (in *interp) compare(line int, op string, a, b Value) bool {
	switch op {
	case "==":
		return in.equal(line, a, b)
	case "!=":
		return !in.equal(line, a, b)
	case "in":
		return in.contains(line, b, a)
	case "not in":
		return !in.contains(line, b, a)
	}
	x, y := a, b
	if op == ">" || op == "<=" {
		x, y = b, a
	}
	before, ok := in.less(line, x, y)
	if !ok {
		refuseUndefined(line, a)
		refuseUndefined(line, b)
		fail(line, "%s %s %s: the two cannot be compared", typeName(a), op, typeName(b))
	}
	if op == "<" || op == ">" {
		return before
	}
	return !before
}

func (e *filterExpr) eval(in *interp) Value { return e.apply(in, e.of.eval(in)) }

func (e *filterExpr) apply(in *interp, v Value) Value {
	in.step(e.line)
	in.readText(e.line, v)
	f := filters[e.name]
	if f == nil {
		fail(e.line, "the filter %q is not supported", e.name)
	}
	args, named := e.args.eval(in)
	c := &call{in: in, line: e.line, name: e.name, args: args, named: named}
	return c.run(func() Value { return f(c, v) })
}

func (e *testExpr) eval(in *interp) Value {
	in.step(e.line)
	v := e.of.eval(in)
	var args []Value
	for _, a := range e.args {
		args = append(args, a.eval(in))
	}
	return in.test(e.line, e.name, v, args) != e.not
}
