package jinja

import (
	"math/big"
	"strconv"
	"strings"
)

// expression reads an expression, with a condition.
func (p *parser) expression() expr { return p.conditional(true) }

func (p *parser) conditional(withCondition bool) expr {
	defer p.enter()()
	e := p.or()
	for withCondition && p.acceptName("if") {
		c := &condExpr{test: p.or(), yes: e}
		if p.acceptName("else") {
			c.no = p.conditional(true)
		}
		e = c
	}
	return e
}

// tuple reads an expression, or several that are separated by commas. In the list of a for, "if"
// begins the condition of the loop.
func (p *parser) tuple(inFor bool) expr {
	first := p.conditional(!inFor)
	if !p.isOp(",") {
		return first
	}
	l := &listExpr{items: []expr{first}, tuple: true}
	for p.accept(",") {
		if t := p.peek(); t.kind == tokVarEnd || t.kind == tokBlockEnd || p.isOp(")") {
			break
		}
		l.items = append(l.items, p.conditional(!inFor))
	}
	return l
}

func (p *parser) or() expr {
	e := p.and()
	for p.acceptName("or") {
		e = &logicExpr{true, e, p.and()}
	}
	return e
}

func (p *parser) and() expr {
	e := p.not()
	for p.acceptName("and") {
		e = &logicExpr{false, e, p.not()}
	}
	return e
}

func (p *parser) not() expr {
	if p.acceptName("not") {
		defer p.enter()()
		return &notExpr{p.not()}
	}
	return p.compare()
}

func (p *parser) compare() expr {
	c := &compareExpr{line: p.peek().line}
	c.first = p.sum()
	for {
		op := ""
		switch t := p.peek(); {
		case t.kind == tokOp && (t.text == "==" || t.text == "!=" || t.text == "<" || t.text == ">" || t.text == "<=" ||
			t.text == ">="), p.isName("in"):
			op = t.text
			p.at++
		case p.isName("not") && p.tokens[p.at+1].kind == tokName && p.tokens[p.at+1].text == "in":
			op = "not in"
			p.at += 2
		}
		if op == "" {
			break
		}
		c.ops = append(c.ops, op)
		c.rest = append(c.rest, p.sum())
	}
	if len(c.ops) == 0 {
		return c.first
	}
	return c
}

func (p *parser) sum() expr {
	e := p.concat()
	for p.isOp("+") || p.isOp("-") {
		t := p.next()
		e = &binaryExpr{t.text, e, p.concat(), t.line}
	}
	return e
}

func (p *parser) concat() expr {
	line := p.peek().line
	all := []expr{p.product()}
	for p.accept("~") {
		all = append(all, p.product())
	}
	if len(all) == 1 {
		return all[0]
	}
	return &concatExpr{all, line}
}

func (p *parser) product() expr {
	e := p.power()
	for p.isOp("*") || p.isOp("/") || p.isOp("//") || p.isOp("%") {
		t := p.next()
		e = &binaryExpr{t.text, e, p.power(), t.line}
	}
	return e
}

func (p *parser) power() expr {
	e := p.unary(true)
	for p.isOp("**") {
		t := p.next()
		e = &binaryExpr{t.text, e, p.unary(true), t.line}
	}
	return e
}

func (p *parser) unary(filters bool) expr {
	defer p.enter()()
	var e expr
	if t := p.peek(); p.isOp("-") || p.isOp("+") {
		p.at++
		e = &negExpr{p.unary(false), t.text == "+", t.line}
	} else {
		e = p.primary()
	}
	e = p.postfix(e)
	for filters {
		switch t := p.peek(); {
		case p.accept("|"):
			e = p.filterName(e)
		case p.acceptName("is"):
			e = p.test(e)
		case p.isOp("("):
			e = p.call(e, t.line)
		default:
			return e
		}
	}
	return e
}

func (p *parser) primary() expr {
	t := p.next()
	switch t.kind {
	case tokName:
		switch t.text {
		case "true", "True":
			return &literal{true}
		case "false", "False":
			return &literal{false}
		case "none", "None":
			return &literal{nil}
		}
		p.template.names[t.text] = true
		for _, m := range p.macros {
			m.caller = m.caller || t.text == "caller"
			m.varargs = m.varargs || t.text == "varargs"
			m.kwargs = m.kwargs || t.text == "kwargs"
		}
		return &nameExpr{t.text, t.line}
	case tokString:
		var s strings.Builder
		s.WriteString(t.text)
		for p.peek().kind == tokString {
			s.WriteString(p.next().text)
		}
		return &literal{Text{S: s.String()}}
	case tokInt:
		n, ok := new(big.Int).SetString(t.text, 0)
		if trimmed := t.text; !ok { // 007 is 7
			n, ok = new(big.Int).SetString(trimmed, 10)
		}
		if !ok || !n.IsInt64() {
			fail(t.line, "the number %s is not a 64-bit integer", t.text)
		}
		return &literal{n.Int64()}
	case tokFloat:
		x, err := strconv.ParseFloat(t.text, 64)
		if err != nil {
			fail(t.line, "the number %s is out of range", t.text)
		}
		return &literal{x}
	case tokOp:
		switch t.text {
		case "(":
			if p.accept(")") {
				return &listExpr{tuple: true}
			}
			e := p.tuple(false)
			p.expect(")")
			return e
		case "[":
			l := &listExpr{}
			for !p.accept("]") {
				if len(l.items) > 0 {
					p.expect(",")
					if p.accept("]") {
						break
					}
				}
				l.items = append(l.items, p.expression())
			}
			return l
		case "{":
			d := &dictExpr{line: t.line}
			for !p.accept("}") {
				if len(d.keys) > 0 {
					p.expect(",")
					if p.accept("}") {
						break
					}
				}
				d.keys = append(d.keys, p.expression())
				p.expect(":")
				d.values = append(d.values, p.expression())
			}
			return d
		}
	}
	fail(t.line, "an expression is needed instead of %s", t)
	return nil
}

func (p *parser) postfix(e expr) expr {
	for {
		switch t := p.peek(); {
		case p.accept("."):
			if n := p.peek(); n.kind == tokInt {
				p.at++
				i, _ := strconv.ParseInt(n.text, 10, 64)
				e = &itemExpr{e, &literal{i}, t.line}
				continue
			}
			e = &attrExpr{e, p.expectKind(tokName, "the name of an attribute").text, t.line}
		case p.accept("["):
			e = p.subscript(e, t.line)
		case p.isOp("("):
			e = p.call(e, t.line)
		default:
			return e
		}
	}
}

func (p *parser) subscript(of expr, line int) expr {
	var bounds [3]expr
	colons := 0
	for !p.accept("]") {
		if p.accept(":") {
			if colons++; colons > 2 {
				fail(line, "a slice has more than two colons")
			}
			continue
		}
		if bounds[colons] != nil {
			fail(line, "\"]\" is needed instead of %s", p.peek())
		}
		bounds[colons] = p.expression()
	}
	switch {
	case colons > 0:
		return &sliceExpr{of, bounds[0], bounds[1], bounds[2], line}
	case bounds[0] == nil:
		fail(line, "an index is needed between the brackets")
	}
	return &itemExpr{of, bounds[0], line}
}

func (p *parser) call(of expr, line int) expr { return &callExpr{of, p.arguments(), line} }

// arguments reads arguments in parentheses.
func (p *parser) arguments() (a arguments) {
	p.expect("(")
	for first := true; !p.accept(")"); first = false {
		if !first {
			p.expect(",")
			if p.accept(")") {
				break
			}
		}
		if p.isOp("*") || p.isOp("**") {
			fail(p.peek().line, "arguments with * are not supported")
		}
		if n := p.tokens[p.at+1]; p.peek().kind == tokName && n.kind == tokOp && n.text == "=" {
			a.names = append(a.names, p.next().text)
			p.at++
			a.named = append(a.named, p.expression())
			continue
		}
		if len(a.names) > 0 {
			fail(p.peek().line, "an argument without a name is behind one with a name")
		}
		a.positional = append(a.positional, p.expression())
	}
	return a
}

// filterName reads the name and the arguments of a filter.
func (p *parser) filterName(of expr) *filterExpr {
	t := p.expectKind(tokName, "the name of a filter")
	f := &filterExpr{of: of, name: t.text, line: t.line}
	for p.accept(".") {
		f.name += "." + p.expectKind(tokName, "the name of a filter").text
	}
	if p.isOp("(") {
		f.args = p.arguments()
	}
	return f
}

// test reads the name and the argument of a test behind "is".
func (p *parser) test(of expr) expr {
	not := p.acceptName("not")
	t := p.expectKind(tokName, "the name of a test")
	x := &testExpr{of: of, name: t.text, not: not, line: t.line}
	next := p.peek()
	switch {
	case p.isOp("("):
		x.args = p.arguments().positional
	case next.kind == tokString || next.kind == tokInt || next.kind == tokFloat || p.isOp("[") || p.isOp("{"),
		next.kind == tokName && !p.isName("else", "or", "and", "is", "if", "not", "in", "recursive"):
		x.args = []expr{p.postfix(p.primary())}
	}
	return x
}
