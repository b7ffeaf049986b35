package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// header has the declarations of ulysses.h in their order.
type header struct {
	version  int // ULYSSES_VERSION
	decls    []decl
	opaque   []string // structs whose pointers are handles
	structs  map[string]bool
	callback map[string]bool // typedefs of function pointers
}

// decl is one declaration. Exactly one field is set.
type decl struct {
	enum      []constant
	structure *structure
	callback  *function // typedef of a pointer to a function
	function  *function
}

type constant struct{ name, value string }

type structure struct {
	name   string
	fields []field
}

// field is a member of a struct or a parameter of a function, whose name may be "".
type field struct {
	name string
	ctype
}

// ctype is a base type with pointers, an array extent, or a pointer to a function.
type ctype struct {
	base     string
	constant bool   // const before the base
	stars    []bool // a pointer each, from the base outwards; true = the pointer is const
	array    int    // extent; 0 = no array
	function *function
}

type function struct {
	name   string
	result ctype
	params []field
}

// plain maps the types that the header may use, except structs, to their size in bytes.
var plain = map[string]int{
	"int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8, "uint8_t": 1, "uint16_t": 2, "float": 4, "double": 8,
	"char": 1, "void": 0, "ulysses_status": 4,
}

// parse reads a header in a subset of C: enumerations with values, structs of plain members, opaque
// structs, function pointers and prototypes. Any other construct is an error that names the line.
func parse(text string) (h *header, err error) {
	p := parser{h: &header{structs: map[string]bool{}, callback: map[string]bool{}}}
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(fault)
			if !ok {
				panic(r)
			}
			err = fault
		}
	}()
	p.scan(text)
	for p.at < len(p.tokens) {
		p.declaration()
	}
	if p.h.version == 0 {
		return nil, fault{0, "no #define ULYSSES_VERSION"}
	}
	return p.h, nil
}

// fault is a construct that parse does not understand.
type fault struct {
	line int
	text string
}

func (f fault) Error() string { return fmt.Sprintf("%d: %s", f.line, f.text) }

type token struct {
	text string
	line int
}

type parser struct {
	h      *header
	tokens []token
	at     int
}

var (
	comments   = regexp.MustCompile(`(?s)/\*.*?\*/`)
	words      = regexp.MustCompile(`^([A-Za-z_]\w*|0x[0-9a-fA-F]+|\d+|[{}()\[\]*,;=])`)
	versions   = regexp.MustCompile(`^#define ULYSSES_VERSION (\d+)u$`)
	directives = regexp.MustCompile(
		`^#(ifndef ULYSSES_H|define ULYSSES_H|include <\w+\.h>|endif|define ULYSSES_INIT\(p\) .*)$`)
)

// scan divides the header into tokens. It skips comments, lines for C++ only, and the text of
// function bodies that is not made of tokens.
func (p *parser) scan(text string) {
	text = comments.ReplaceAllStringFunc(text, func(c string) string {
		return " " + strings.Repeat("\n", strings.Count(c, "\n"))
	})
	// joins continued directives, so later line numbers are too small
	text = strings.ReplaceAll(text, "\\\n", " ")
	cplusplus := false
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "#") {
			if m := versions.FindStringSubmatch(line); m != nil {
				p.h.version, _ = strconv.Atoi(m[1])
			} else if line == "#ifdef __cplusplus" {
				cplusplus = true
			} else if line == "#endif" && cplusplus {
				cplusplus = false
			} else if !directives.MatchString(line) {
				panic(fault{i + 1, "unknown directive " + line})
			}
			continue
		}
		for line = strings.TrimSpace(line); line != "" && !cplusplus; line = strings.TrimSpace(line) {
			w := words.FindString(line)
			if w == "" {
				if len(p.tokens) == 0 || !p.inline() {
					panic(fault{i + 1, "unknown text " + line})
				}
				w = line[:1] // of a function body, which is skipped
			}
			p.tokens = append(p.tokens, token{w, i + 1})
			line = line[len(w):]
		}
	}
}

// inline reports whether the last token is inside the body of an inline function.
func (p *parser) inline() bool {
	depth := 0
	for i := len(p.tokens) - 1; i >= 0; i-- {
		switch p.tokens[i].text {
		case "}":
			depth++
		case "{":
			depth--
		case "inline":
			return depth < 0
		}
	}
	return false
}

// fail ends the parsing with an error at the next token.
func (p *parser) fail(want string) {
	t := token{text: "the end of the file"}
	if p.at < len(p.tokens) {
		t = p.tokens[p.at]
	}
	panic(fault{t.line, fmt.Sprintf("found %q, want %s", t.text, want)})
}

// peek returns the next token, or "" at the end.
func (p *parser) peek() string {
	if p.at < len(p.tokens) {
		return p.tokens[p.at].text
	}
	return ""
}

// accept skips the next token if it is text, and reports whether it was.
func (p *parser) accept(text string) bool {
	if p.peek() == text {
		p.at++
		return true
	}
	return false
}

// expect skips the next token, which must be text.
func (p *parser) expect(text string) {
	if !p.accept(text) {
		p.fail(strconv.Quote(text))
	}
}

var identifier = regexp.MustCompile(`^[A-Za-z_]\w*$`)

// name returns the next token, which must be an identifier.
func (p *parser) name(want string) string {
	t := p.peek()
	if !identifier.MatchString(t) {
		p.fail(want)
	}
	p.at++
	return t
}

// number returns the next token, which must be a number.
func (p *parser) number() string {
	t := p.peek()
	if t == "" || t[0] < '0' || t[0] > '9' {
		p.fail("a number")
	}
	p.at++
	return t
}

func (p *parser) declaration() {
	switch {
	case p.accept("enum"):
		p.enum()
	case p.accept("static"):
		p.expect("inline")
		p.skipBody()
	case p.accept("typedef"):
		p.typedef()
	default:
		result := p.base()
		p.pointers(&result)
		f := &function{name: p.name("the name of a function"), result: result}
		f.params = p.params()
		p.expect(";")
		p.h.decls = append(p.h.decls, decl{function: f})
	}
}

func (p *parser) enum() {
	var all []constant
	p.expect("{")
	for !p.accept("}") {
		c := constant{name: p.name("a constant")}
		if !strings.HasPrefix(c.name, "ULYSSES_") {
			p.at--
			p.fail("a constant ULYSSES_...")
		}
		p.expect("=")
		c.value = p.number()
		all = append(all, c)
		if !p.accept(",") && p.peek() != "}" {
			p.fail(`"," or "}"`)
		}
	}
	p.expect(";")
	p.h.decls = append(p.h.decls, decl{enum: all})
}

func (p *parser) skipBody() {
	for p.peek() != "{" && p.peek() != "" {
		p.at++
	}
	for depth := 0; ; {
		switch p.peek() {
		case "{":
			depth++
		case "}":
			depth--
		case "":
			p.fail("the end of a function")
		}
		p.at++
		if depth == 0 {
			return
		}
	}
}

func (p *parser) typedef() {
	switch {
	case p.accept("struct"):
		if !p.accept("{") { // typedef struct x x;
			name := p.name("the name of a struct")
			p.expect(name)
			p.expect(";")
			p.h.opaque = append(p.h.opaque, name)
			return
		}
		s := &structure{}
		for !p.accept("}") {
			s.fields = append(s.fields, p.members()...)
		}
		s.name = p.name("the name of a struct")
		p.expect(";")
		p.h.structs[s.name] = true
		p.h.decls = append(p.h.decls, decl{structure: s})
	default:
		t := p.base()
		p.pointers(&t)
		if p.accept("(") {
			p.expect("*")
			f := &function{name: p.name("the name of a function pointer"), result: t}
			p.expect(")")
			f.params = p.params()
			p.expect(";")
			p.h.callback[f.name] = true
			p.h.decls = append(p.h.decls, decl{callback: f})
			return
		}
		name := p.name("the name of a type")
		if name != "ulysses_status" || t.base != "int32_t" || len(t.stars) > 0 {
			p.at--
			p.fail("typedef int32_t ulysses_status")
		}
		p.expect(";")
	}
}

// base reads a type up to its pointers.
func (p *parser) base() (t ctype) {
	t.constant = p.accept("const")
	t.base = p.name("a type")
	_, known := plain[t.base]
	if !known && !p.h.structs[t.base] && !p.h.callback[t.base] && !slices.Contains(p.h.opaque, t.base) {
		p.at--
		p.fail("a type that the header has declared, or one of the plain types")
	}
	return t
}

// pointers reads the stars of a type.
func (p *parser) pointers(t *ctype) {
	t.stars = nil
	for p.accept("*") {
		t.stars = append(t.stars, p.accept("const"))
	}
}

// members reads one declaration of members of a struct, such as int32_t a, *b, c[2];
func (p *parser) members() (all []field) {
	first := p.base()
	for {
		f := field{ctype: first}
		p.pointers(&f.ctype)
		if p.accept("(") { // a pointer to a function
			p.expect("*")
			f.name = p.name("a member")
			p.expect(")")
			f.function = &function{name: f.name, result: f.ctype, params: p.params()}
		} else {
			f.name = p.name("a member")
			if p.accept("[") {
				f.array, _ = strconv.Atoi(p.number())
				p.expect("]")
			}
		}
		if f.base == "void" && len(f.stars) == 0 && f.function == nil || slices.Contains(p.h.opaque, f.base) {
			p.at--
			p.fail("a member of another type")
		}
		all = append(all, f)
		if p.accept(";") {
			return all
		}
		p.expect(",")
	}
}

// params reads the parameters of a function, with their parentheses.
func (p *parser) params() (all []field) {
	p.expect("(")
	if p.accept("void") {
		if p.accept(")") {
			return nil
		}
		p.at--
	}
	for {
		f := field{ctype: p.base()}
		p.pointers(&f.ctype)
		if p.peek() != "," && p.peek() != ")" {
			f.name = p.name("a parameter")
		}
		all = append(all, f)
		if p.accept(")") {
			return all
		}
		p.expect(",")
	}
}

// camel converts a C name to a name for Go and Python: ulysses_gdn_args becomes GDNArgs.
func camel(name string) (s string) {
	for _, word := range strings.Split(strings.TrimPrefix(name, "ulysses_"), "_") {
		if word == "gdn" {
			s += "GDN"
		} else {
			s += strings.ToUpper(word[:1]) + word[1:]
		}
	}
	return s
}
