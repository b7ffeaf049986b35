package arch

import (
	"bytes"
	"fmt"
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// longest is the number of lines of a source file; a longer one has parts that can be read alone.
const longest = 500

var (
	sources   = regexp.MustCompile(`\.(go|py|c|h|cpp|cu|inc|sh|mk)$`)
	tests     = regexp.MustCompile(`(_test\.(go|cpp)$)|(^|/)(testdata|tests)/`)
	generated = regexp.MustCompile(`(?m)^(// |# )?(Code g|G)enerated (by|from)`)
)

// Sources have at most 500 lines, except tests, generated files and the public header.
func TestLength(t *testing.T) {
	walkFiles(t, []string{""}, func(path string) {
		if !sources.MatchString(path) || tests.MatchString(path) || path == "capi/ulysses.h" ||
			strings.Contains(path, "/uplot/") {
			return
		}
		source, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(source, []byte("\n")); n > longest && !generated.Match(source[:min(len(source), 1000)]) {
			t.Errorf("%s has %d lines, more than %d", path, n, longest)
		}
	})
}

const (
	widest   = 120 // columns of a line of Go; a tab has 4
	longText = 40  // columns of a text that may make a line longer: messages stay whole, for grep
)

var alignment = regexp.MustCompile(` +`) // gofmt's, which does not count

// Lines of Go have at most 120 columns, except in generated files and where a text is longer.
func TestWidth(t *testing.T) {
	walkFiles(t, []string{""}, func(path string) {
		if !strings.HasSuffix(path, ".go") {
			return
		}
		source, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		if generated.Match(source[:min(len(source), 1000)]) {
			return
		}
		for _, line := range wideLines(source) {
			t.Errorf("%s:%d has more than %d columns", path, line, widest)
		}
	})
}

// wideLines are the numbers of the lines of a Go file that are too wide and have no long text.
func wideLines(source []byte) (wide []int) {
	lines := bytes.Split(source, []byte("\n"))
	texts := textLines(source)
	for i, line := range lines {
		line = alignment.ReplaceAll(line, []byte(" "))
		columns := utf8.RuneCount(line) + 3*bytes.Count(line, []byte("\t"))
		if columns > widest && !texts[i+1] {
			wide = append(wide, i+1)
		}
	}
	return wide
}

// textLines are the lines of a Go file with a long text, or a part of a text of several lines.
func textLines(source []byte) map[int]bool {
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, 0)
	texts := map[int]bool{}
	for {
		pos, kind, text := s.Scan()
		if kind == token.EOF {
			return texts
		}
		if kind != token.STRING {
			continue
		}
		if lines := strings.Count(text, "\n"); lines > 0 || utf8.RuneCountInString(text) >= longText {
			first := file.Line(pos)
			for i := first; i <= first+lines; i++ {
				texts[i] = true
			}
		}
	}
}

func TestWideLines(t *testing.T) {
	long := strings.Repeat("x", 120)
	source := "package a\n\nvar " + long + " = 1\nvar y = \"" + long + "\"\nvar z = `\n" + long + long + "`\n\n\t// " +
		long + "\n" + long[1:] + "\n" + long + "\n"
	if got, want := fmt.Sprint(wideLines([]byte(source))), "[3 8]"; got != want {
		t.Errorf("lines %s are too wide, want %s", got, want)
	}
}
