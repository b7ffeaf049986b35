package jinja

func (s *dataStmt) exec(in *interp, b *builder) flow {
	in.step(0)
	in.count(0, len(s.text.S))
	b.add(s.text)
	return flowNext
}

func (s *outStmt) exec(in *interp, b *builder) flow {
	b.add(in.made(s.line, in.textOf(s.line, s.of.eval(in))))
	return flowNext
}

func (s *ifStmt) exec(in *interp, b *builder) flow {
	in.step(0)
	if truth(s.test.eval(in)) {
		return in.run(s.yes, b)
	}
	return in.run(s.no, b)
}

// assign sets names in the current scope.
func (in *interp) assign(line int, names []string, unpack bool, v Value) {
	if !unpack {
		in.scope.names[names[0]] = v
		return
	}
	items := in.mustIterate(line, v)
	if len(items) != len(names) {
		fail(line, "%d values cannot be unpacked to %d names", len(items), len(names))
	}
	for i, n := range names {
		in.scope.names[n] = items[i]
	}
}

func (s *forStmt) exec(in *interp, b *builder) flow {
	return s.loop(in, b, s.over.eval(in), 0)
}

// loop runs the loop over a value. depth is that of a recursive loop. A break or continue in the
// part behind else is one of the loop around this one.
func (s *forStmt) loop(in *interp, b *builder, over Value, depth int64) (of flow) {
	in.step(s.line)
	items := in.mustIterate(s.line, over)
	if s.cond != nil {
		var kept []Value
		for _, x := range items {
			in.inScope(nil, func() {
				in.assign(s.line, s.targets, s.unpack, x)
				if truth(s.cond.eval(in)) {
					kept = append(kept, x)
				}
			})
		}
		items = kept
	}
	l := &loop{stmt: s, items: items, depth: depth}
	ended := false // the body, once at least: without break or continue, as in Jinja
	for l.at = range items {
		f := flowNext
		in.inScope(map[string]Value{"loop": l}, func() {
			in.assign(s.line, s.targets, s.unpack, items[l.at])
			f = in.run(s.body, b)
		})
		if f == flowBreak {
			break
		}
		ended = ended || f == flowNext
	}
	if !ended {
		in.inScope(nil, func() { of = in.run(s.no, b) })
	}
	return of
}

// loop is the variable loop of a for.
type loop struct {
	stmt  *forStmt
	items []Value
	at    int
	depth int64
	last  *List // arguments of the last call of changed
}

// attr returns an attribute; nil, false if there is none of this name.
func (l *loop) attr(name string) (Value, bool) {
	n, i := int64(len(l.items)), int64(l.at)
	switch name {
	case "index":
		return i + 1, true
	case "index0":
		return i, true
	case "revindex":
		return n - i, true
	case "revindex0":
		return n - i - 1, true
	case "first":
		return i == 0, true
	case "last":
		return i == n-1, true
	case "length":
		return n, true
	case "depth":
		return l.depth + 1, true
	case "depth0":
		return l.depth, true
	case "previtem":
		if i == 0 {
			return undefined{"there is no previous item"}, true
		}
		return l.items[i-1], true
	case "nextitem":
		if i == n-1 {
			return undefined{"there is no next item"}, true
		}
		return l.items[i+1], true
	case "cycle":
		return &function{"cycle", func(_ *interp, line int, args []Value, _ []namedValue) Value {
			if len(args) == 0 {
				fail(line, "loop.cycle needs arguments")
			}
			return args[l.at%len(args)]
		}}, true
	case "changed":
		return &function{"changed", func(in *interp, line int, args []Value, _ []namedValue) Value {
			now := &List{Items: args}
			changed := l.last == nil || !in.equal(line, l.last, now)
			l.last = now
			return changed
		}}, true
	}
	return nil, false
}

func (s *setStmt) exec(in *interp, _ *builder) flow {
	in.step(s.line)
	v := s.value.eval(in)
	if !s.unpack {
		in.store(s.line, s.targets[0], v)
		return flowNext
	}
	items := in.mustIterate(s.line, v)
	if len(items) != len(s.targets) {
		fail(s.line, "%d values cannot be unpacked to %d names", len(items), len(s.targets))
	}
	for i, to := range s.targets {
		in.store(s.line, to, items[i])
	}
	return flowNext
}

// store assigns a value to a name or an attribute.
func (in *interp) store(line int, to target, v Value) {
	if to.attr == "" {
		in.scope.names[to.name] = v
		return
	}
	ns, ok := in.lookup(to.name).(*namespace)
	if !ok {
		fail(line, "%s is not a namespace, so its attribute %s cannot be set", to.name, to.attr)
	}
	checkAttribute(line, to.attr)
	ns.Set(to.attr, v)
}

func checkAttribute(line int, name string) {
	if name != "" && name[0] == '_' {
		fail(line, "a namespace cannot have the attribute %q", name)
	}
}

func (s *setBlock) exec(in *interp, b *builder) flow {
	in.step(s.line)
	var v Value
	f := flowNext
	in.inScope(nil, func() { v, f = in.capture(s.line, s.body) })
	if f != flowNext {
		return f
	}
	for _, f := range s.filters {
		v = f.apply(in, v)
	}
	if s.to.name == "" {
		b.add(in.made(s.line, in.textOf(s.line, v)))
	} else {
		in.store(s.line, s.to, v)
	}
	return flowNext
}

func (s *macroStmt) exec(in *interp, _ *builder) flow {
	in.scope.names[s.macro.name] = s.macro.function(in)
	return flowNext
}

func (s *callBlock) exec(in *interp, b *builder) flow {
	in.step(s.line)
	caller := namedValue{"caller", s.macro.function(in)}
	b.add(in.made(s.line, in.textOf(s.line, s.call.invoke(in, caller))))
	return flowNext
}

func (s *withStmt) exec(in *interp, b *builder) (f flow) {
	names := map[string]Value{}
	for i, n := range s.names {
		names[n] = s.values[i].eval(in)
	}
	in.inScope(names, func() { f = in.run(s.body, b) })
	return f
}

// exec renders the body, like a call block, and marks its output.
func (s *generationStmt) exec(in *interp, b *builder) flow {
	in.step(s.line)
	in.inScope(nil, func() {
		out, _ := in.capture(s.line, s.body)
		b.add(out.generated())
	})
	return flowNext
}

func (s *loopControl) exec(*interp, *builder) flow { return s.flow }

// function returns the macro as a value. It sees the names around its definition.
func (m *macro) function(in *interp) *function {
	defined := in.scope
	return &function{m.name, func(in *interp, line int, args []Value, named []namedValue) Value {
		defer in.nest(line)()
		outer := in.scope
		in.scope = newScope(defined, nil)
		m.bind(in, line, args, named)
		out, _ := in.capture(m.line, m.body)
		in.scope = outer
		return out
	}}
}

// bind sets the parameters in the current scope.
func (m *macro) bind(in *interp, line int, args []Value, named []namedValue) {
	names := in.scope.names
	rest := &List{tuple: true}
	for i, a := range args {
		if i < len(m.params) {
			names[m.params[i]] = a
		} else {
			rest.Items = append(rest.Items, a)
		}
	}
	more := NewDict()
	hasCaller := false
	for _, n := range named {
		isParam := false
		for _, p := range m.params {
			isParam = isParam || p == n.name
		}
		switch {
		case n.name == "caller" && !isParam:
			names["caller"], hasCaller = n.value, true
		case isParam:
			if _, twice := names[n.name]; twice {
				fail(line, "macro %s gets the argument %s twice", m.name, n.name)
			}
			names[n.name] = n.value
		default:
			more.Set(n.name, n.value)
		}
	}
	if len(rest.Items) > 0 && !m.varargs {
		fail(line, "macro %s takes at most %d arguments", m.name, len(m.params))
	}
	if more.Len() > 0 && !m.kwargs {
		fail(line, "macro %s has no parameter %s", m.name, textOf(more.keys[0]).S)
	}
	if hasCaller && !m.caller {
		fail(line, "macro %s is used by call, and does not use caller", m.name)
	}
	if m.caller && !hasCaller {
		names["caller"] = undefined{"no caller defined"}
	}
	names["varargs"], names["kwargs"] = rest, more
	for i, p := range m.params {
		if _, ok := names[p]; ok {
			continue
		}
		if m.defaults[i] == nil {
			names[p] = undefined{"parameter " + p}
		} else {
			names[p] = m.defaults[i].eval(in)
		}
	}
}
