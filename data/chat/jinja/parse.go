package jinja

import (
	"slices"
	"strings"
)

// maxNesting limits the nesting of statements and of expressions in a template, and maxSource its
// bytes. Published templates have at most 30 KiB.
const (
	maxNesting = 200
	maxSource  = 1 << 20
)

// Parse reads a template. The error is an *Error with the line of the fault.
func Parse(src string) (t *Template, err error) {
	defer catch(&err)
	if len(src) > maxSource {
		fail(1, "the template has %d bytes, at most %d are supported", len(src), maxSource)
	}
	p := &parser{tokens: lex(src), template: &Template{names: map[string]bool{}}}
	p.template.body = p.statements()
	if p.peek().kind != tokEOF {
		fail(p.peek().line, "unexpected {%% %s %%}", p.tokens[p.at+1].text)
	}
	return p.template, nil
}

type parser struct {
	tokens   []token
	at       int
	template *Template
	depth    int
	loops    int      // for statements around the current token
	macros   []*macro // around the current token
}

func (p *parser) peek() token { return p.tokens[p.at] }

func (p *parser) next() token {
	t := p.tokens[p.at]
	if t.kind != tokEOF {
		p.at++
	}
	return t
}

// enter counts a level of nesting and returns the function that leaves it.
func (p *parser) enter() func() {
	if p.depth++; p.depth > maxNesting {
		fail(p.peek().line, "more than %d levels of nesting", maxNesting)
	}
	return func() { p.depth-- }
}

func (p *parser) isOp(op string) bool { t := p.peek(); return t.kind == tokOp && t.text == op }

func (p *parser) isName(names ...string) bool {
	t := p.peek()
	return t.kind == tokName && slices.Contains(names, t.text)
}

// accept reads an operator if it is the next token.
func (p *parser) accept(op string) bool {
	if p.isOp(op) {
		p.at++
		return true
	}
	return false
}

func (p *parser) acceptName(name string) bool {
	if p.isName(name) {
		p.at++
		return true
	}
	return false
}

func (p *parser) expect(op string) {
	if !p.accept(op) {
		fail(p.peek().line, "%q is needed instead of %s", op, p.peek())
	}
}

func (p *parser) expectKind(k kind, what string) token {
	t := p.next()
	if t.kind != k {
		fail(t.line, "%s is needed instead of %s", what, t)
	}
	return t
}

func (t token) String() string {
	switch t.kind {
	case tokEOF:
		return "the end of the template"
	case tokBlockEnd:
		return "%}"
	case tokVarEnd:
		return "}}"
	}
	return `"` + t.text + `"`
}

// statements reads statements up to a block whose name is in ends, and does not read that block's
// name. Without ends it reads up to the end of the template.
func (p *parser) statements(ends ...string) []stmt {
	defer p.enter()()
	var all []stmt
	for {
		switch t := p.peek(); t.kind {
		case tokData:
			p.at++
			all = append(all, &dataStmt{Text{S: t.text}})
		case tokVarBegin:
			p.at++
			all = append(all, &outStmt{p.tuple(false), t.line})
			p.expectKind(tokVarEnd, "}}")
		case tokBlockBegin:
			name := p.tokens[p.at+1]
			if name.kind == tokName && slices.Contains(ends, name.text) {
				p.at++
				return all
			}
			if strings.HasPrefix(name.text, "end") || name.text == "else" || name.text == "elif" {
				fail(name.line, "unexpected {%% %s %%}", name.text)
			}
			p.at++
			all = append(all, p.statement())
		default:
			if len(ends) > 0 {
				fail(t.line, "{%% %s %%} is missing", ends[len(ends)-1])
			}
			return all
		}
	}
}

// block reads the rest of a tag, statements, and the tag that ends them.
func (p *parser) block(end string) []stmt {
	p.expectKind(tokBlockEnd, "%}")
	body := p.statements(end)
	p.at++
	return body
}

// blockOutsideLoops reads a block in which break and continue have no loop.
func (p *parser) blockOutsideLoops(end string) []stmt {
	loops := p.loops
	p.loops = 0
	body := p.block(end)
	p.loops = loops
	return body
}

func (p *parser) statement() stmt {
	t := p.expectKind(tokName, "the name of a statement")
	var s stmt
	switch t.text {
	case "if":
		s = p.ifStatement()
	case "for":
		s = p.forStatement(t.line)
	case "set":
		s = p.set(t.line)
	case "macro":
		name := p.expectKind(tokName, "the name of the macro").text
		m := &macro{name: name, line: t.line}
		p.signature(m)
		p.macroBody(m, "endmacro")
		s = &macroStmt{m}
	case "call":
		m := &macro{name: "caller", line: t.line}
		if p.isOp("(") {
			p.signature(m)
		}
		call, ok := p.expression().(*callExpr)
		if !ok {
			fail(t.line, "call needs a call of a macro")
		}
		p.macroBody(m, "endcall")
		s = &callBlock{m, call, t.line}
	case "filter":
		b := &setBlock{line: t.line}
		b.filters = append(b.filters, p.filterName(nil))
		for p.accept("|") {
			b.filters = append(b.filters, p.filterName(nil))
		}
		b.body = p.block("endfilter")
		s = b
	case "with":
		w := &withStmt{}
		for p.peek().kind == tokName {
			w.names = append(w.names, p.next().text)
			p.expect("=")
			w.values = append(w.values, p.expression())
			if !p.accept(",") {
				break
			}
		}
		w.body = p.block("endwith")
		s = w
	case "generation":
		p.template.Tagged = true
		s = &generationStmt{p.blockOutsideLoops("endgeneration"), t.line}
	case "break", "continue":
		if p.loops == 0 {
			fail(t.line, "%s outside of a loop", t.text)
		}
		s = &loopControl{map[string]flow{"break": flowBreak, "continue": flowContinue}[t.text]}
	default:
		fail(t.line, "the statement %q is not supported in chat templates", t.text)
	}
	p.expectKind(tokBlockEnd, "%}")
	return s
}

func (p *parser) ifStatement() stmt {
	s := &ifStmt{test: p.tuple(false)}
	p.expectKind(tokBlockEnd, "%}")
	s.yes = p.statements("elif", "else", "endif")
	switch p.next().text {
	case "elif":
		defer p.enter()()
		s.no = []stmt{p.ifStatement()}
	case "else":
		s.no = p.block("endif")
	}
	return s
}

func (p *parser) forStatement(line int) stmt {
	s := &forStmt{line: line}
	s.targets, s.unpack = p.names()
	if !p.acceptName("in") {
		fail(p.peek().line, "for needs \"in\" instead of %s", p.peek())
	}
	s.over = p.tuple(true)
	if p.acceptName("if") {
		s.cond = p.expression()
	}
	s.recursive = p.acceptName("recursive")
	p.expectKind(tokBlockEnd, "%}")
	p.loops++
	s.body = p.statements("else", "endfor")
	p.loops--
	if p.next().text == "else" {
		s.no = p.block("endfor")
	}
	return s
}

// names reads the targets of a for: a, or a, b, or (a, b).
func (p *parser) names() (names []string, unpack bool) {
	open := p.accept("(")
	for {
		names = append(names, p.expectKind(tokName, "a name").text)
		if !p.accept(",") {
			break
		}
		unpack = true
		if p.isName("in") || p.isOp(")") {
			break
		}
	}
	if open {
		p.expect(")")
	}
	return names, unpack
}

func (p *parser) set(line int) stmt {
	var targets []target
	unpack := false
	for {
		to := target{name: p.expectKind(tokName, "a name").text}
		if p.accept(".") {
			to.attr = p.expectKind(tokName, "the name of an attribute").text
		}
		targets = append(targets, to)
		if !p.accept(",") {
			break
		}
		if unpack = true; p.isOp("=") {
			break
		}
	}
	if p.accept("=") {
		return &setStmt{targets, unpack, p.tuple(false), line}
	}
	if unpack {
		fail(line, "set needs = behind several names")
	}
	b := &setBlock{to: targets[0], line: line}
	for p.accept("|") {
		b.filters = append(b.filters, p.filterName(nil))
	}
	b.body = p.block("endset")
	return b
}

// signature reads the parameters of a macro.
func (p *parser) signature(m *macro) {
	p.expect("(")
	for !p.accept(")") {
		if len(m.params) > 0 {
			p.expect(",")
			if p.accept(")") {
				return
			}
		}
		m.params = append(m.params, p.expectKind(tokName, "the name of a parameter").text)
		var value expr
		if p.accept("=") {
			value = p.expression()
		} else if k := len(m.defaults); k > 0 && m.defaults[k-1] != nil {
			fail(m.line, "a parameter without a default is behind one with a default")
		}
		m.defaults = append(m.defaults, value)
	}
}

func (p *parser) macroBody(m *macro, end string) {
	p.macros = append(p.macros, m)
	m.body = p.blockOutsideLoops(end)
	p.macros = p.macros[:len(p.macros)-1]
}
