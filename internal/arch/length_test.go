package arch

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
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
		if !sources.MatchString(path) || tests.MatchString(path) || path == "capi/ulysses.h" || strings.Contains(path, "/uplot/") {
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
