package arch

import (
	"go/scanner"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
	"unicode/utf8"
)

// A line of prose may be 100 columns wide, with tabs of four columns. A line of code with a comment
// behind it may be 120, as for clang-format.
const (
	columns     = 100
	codeColumns = 120
)

// line is one line of prose of a file.
type line struct {
	path   string
	number int // from 1
	text   string
	// over is by how many columns the line is too long. Messages, tables, code blocks and lines
	// with a link may be long.
	over int
}

// proseOf returns the prose of a source file or page: comments and string literals of sources,
// and everything outside of code in pages. It returns nothing for a type of file that it does not
// know.
func proseOf(path string, source []byte) []line {
	x := extract{path: path, lines: strings.Split(string(source), "\n")}
	switch name := filepath.Base(path); {
	case strings.HasSuffix(name, ".go"):
		x.golang(source)
	case has(name, ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".inc"):
		x.c(string(source))
	case has(name, ".py"):
		x.python(string(source))
	case has(name, ".sh", ".toml", ".mk", ".sbatch", ".yml", ".yaml", ".cff", ".def") ||
		has(name, "Makefile", "Dockerfile") || has(path, ".ci/run"):
		x.hash()
	case has(name, ".md"):
		x.markdown()
	}
	return x.found
}

func has(name string, ends ...string) bool {
	for _, end := range ends {
		if strings.HasSuffix(name, end) {
			return true
		}
	}
	return false
}

type extract struct {
	path  string
	lines []string
	found []line
}

// add takes the lines of a text that starts on a line. Only comments have a limit of columns.
func (x *extract) add(number int, text string, comment bool) {
	for i, t := range strings.Split(text, "\n") {
		over := 0
		if whole := x.lines[number+i-1]; comment && !exempt.MatchString(whole) {
			limit := columns
			start := t
			if indented := strings.TrimLeft(t, " "); len(t)-len(indented) < 4 { // in a list; more spaces begin code
				start = indented
			}
			if i == 0 && !strings.HasPrefix(strings.TrimSpace(whole), start[:min(2, len(start))]) {
				limit = codeColumns
			}
			over = utf8.RuneCountInString(strings.ReplaceAll(strings.TrimRight(whole, "\r"), "\t", "    ")) - limit
		}
		x.found = append(x.found, line{x.path, number + i, t, max(over, 0)})
	}
}

// exempt are lines with an address, and directives of compilers and linters.
var exempt = regexp.MustCompile(`https?://|^\s*//(go:|export |nolint|#)|shellcheck |^#!|type: ignore|noqa`)

func (x *extract) golang(source []byte) {
	files := token.NewFileSet()
	file := files.AddFile(x.path, -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, scanner.ScanComments)
	for {
		at, kind, text := s.Scan()
		switch kind {
		case token.EOF:
			return
		case token.COMMENT:
			x.add(file.Line(at), text, true)
		case token.STRING:
			x.add(file.Line(at), text, false)
		}
	}
}

// c reads comments and string literals of C, C++ and CUDA.
func (x *extract) c(s string) {
	number := 1
	for i := 0; i < len(s); i++ {
		end := i
		switch {
		case strings.HasPrefix(s[i:], "//"):
			end = i + until(s[i:], "\n", 0)
			x.add(number, s[i:end], true)
		case strings.HasPrefix(s[i:], "/*"):
			end = i + until(s[i:], "*/", 2)
			x.add(number, s[i:end], true)
		case s[i] == '"':
			end = i + quoted(s[i:])
			x.add(number, s[i:end], false)
		case s[i] == '\'' && i+2 < len(s) && (s[i+1] == '\\' || s[i+2] == '\''):
			end = i + quoted(s[i:])
		default:
			if s[i] == '\n' {
				number++
			}
			continue
		}
		number += strings.Count(s[i:end], "\n")
		i = end - 1
	}
}

// until returns the length of s through the first end after from, or all of s. A line's end is not
// part of it.
func until(s, end string, from int) int {
	i := strings.Index(s[from:], end)
	if i < 0 {
		return len(s)
	}
	if end == "\n" {
		return from + i
	}
	return from + i + len(end)
}

// quoted returns the length of the literal that s starts with, on one line.
func quoted(s string) int {
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '\n':
			return i
		case s[0]:
			return i + 1
		}
	}
	return len(s)
}

// python reads comments and strings. Strings of several lines are mostly documentation, so they
// have a width.
func (x *extract) python(s string) {
	number := 1
	for i := 0; i < len(s); i++ {
		end := i
		switch {
		case s[i] == '#':
			end = i + until(s[i:], "\n", 0)
			x.add(number, s[i:end], true)
		case strings.HasPrefix(s[i:], `"""`) || strings.HasPrefix(s[i:], `'''`):
			end = i + until(s[i:], s[i:i+3], 3)
			x.add(number, s[i:end], true)
		case s[i] == '"' || s[i] == '\'':
			end = i + quoted(s[i:])
			x.add(number, s[i:end], false)
		default:
			if s[i] == '\n' {
				number++
			}
			continue
		}
		number += strings.Count(s[i:end], "\n")
		i = end - 1
	}
}

var hashComment = regexp.MustCompile(`(?:^|\s)#(?: |$)`)

// hash reads comments of shell scripts, Makefiles and TOML, and what scripts print.
func (x *extract) hash() {
	for i, l := range x.lines {
		for _, at := range hashComment.FindAllStringIndex(l, -1) {
			if strings.Count(l[:at[0]], `"`)%2 == 0 && strings.Count(l[:at[0]], `'`)%2 == 0 {
				x.add(i+1, l[at[0]:], true)
				l = l[:at[0]]
				break
			}
		}
		if strings.Contains(l, `"`) {
			x.add(i+1, l[strings.Index(l, `"`):], false)
		}
	}
}

var code = regexp.MustCompile("`[^`]*`")

// markdown reads a page without its code.
func (x *extract) markdown() {
	block := false
	for i, l := range x.lines {
		if strings.HasPrefix(strings.TrimSpace(l), "```") {
			block = !block
			continue
		}
		if block || strings.HasPrefix(l, "    ") && i > 0 && strings.TrimSpace(x.lines[i-1]) == "" {
			continue
		}
		long := strings.HasPrefix(strings.TrimSpace(l), "|") || strings.Contains(l, "](")
		x.add(i+1, code.ReplaceAllString(l, "``"), !long)
	}
}
