package arch

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// words are expressions that comments, messages and pages do not use, each with the term that
// docs/glossary.md has, or with what to write.
var words = []struct{ not, but string }{
	{`to the (last )?bit`, "bitwise equal, bitwise reproducible"},
	{`rehears(e|ed|es|al|als)`, "dry run"},
	{`late devices?`, "test device"},
	{`fake devices?`, "test device"},
	{`carriers?`, "transport"},
	{`carvers?`, "allocator"},
	{`micro[ -]?steps?`, "micro-batch"},
	{`micros`, "micro-batches"},
	{`stretch(es)?`, "layer group; range; part of a document"},
	{`fates?`, "policy"},
	{`foresees?`, "predict"},
	{`(given|gives|gave|giving|give) up`, "abandon"},
	{`remed(y|ies)`, "fix"},
	{`numbers? that (is|are) none`, "NaN or Inf"},
	{`(what sends|sends|send) less`, "fewer bytes"},
	{`pointer's clothes`, "opaque handle"},
	{`without a word`, "silently"},
	{`nobody('s)?`, "the rank, caller or process that is meant"},
	{`by themselves`, "a sentence that says what acts"},
	{`as far as`, "the limit that is meant"},
	{`what it takes`, "what is needed"},
	{`those of`, "the noun that is repeated"},
	{`and so (is|are|does|do|has|have)`, "a sentence of its own"},
	{`vouch(es)?`, "guarantee"},
	{`knows? nothing`, "does not depend on"},
	{`is asked to`, "what asks, and for what"},
	{`for want of`, "because there is no"},
	{`need not be (here|there)`, "may be described instead"},
	{`manners`, "behavior"},
	{`pieces?`, "chunk, block, segment: the thing itself"},
	{`lends?|lent`, "Gather; give"},
	{`befriends?`, "enable peer access"},
}

// Comments, messages and pages have lines of at most 100 columns and use the project's words.
func TestProse(t *testing.T) {
	var not []string
	for _, w := range words {
		not = append(not, w.not)
	}
	all := regexp.MustCompile(`(?i)\b(` + strings.Join(not, "|") + `)\b`)
	walkFiles(t, []string{""}, func(path string) {
		if strings.HasPrefix(path, "testdata/") || strings.HasPrefix(path, "benchmarks/results/") ||
			strings.Contains(path, "/uplot/") || path == "internal/arch/prose_test.go" {
			return // made by programs, or of other projects, or this list
		}
		source, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range proseOf(path, source) {
			if l.over > 0 {
				t.Errorf("%s:%d: the line is %d columns too long", l.path, l.number, l.over)
			}
			for _, found := range all.FindAllString(l.text, -1) {
				for _, w := range words {
					if regexp.MustCompile(`(?i)^` + w.not + `$`).MatchString(found) {
						t.Errorf("%s:%d: %q: write %s", l.path, l.number, found, w.but)
					}
				}
			}
		}
	})
}

// The rule applies to comments, messages and pages, not to code, tables and addresses.
func TestProseOf(t *testing.T) {
	long := strings.Repeat("word ", 20)
	for _, x := range []struct{ path, source, want string }{
		{"a.go", "package a\n\nvar x = 1 // one\n// two " + long + "\nvar y = `three\nfour`\n",
			`3 "// one" 0, 4 "// two ` + long + `" 7, 5 "` + "`three" + `" 0, 6 "four` + "`" + `" 0`},
		{"a.c", "int x; /* one\n two */ char *s = \"a // b\"; char c = '\"'; // three\n",
			`1 "/* one" 0, 2 " two */" 0, 2 "\"a // b\"" 0, 2 "// three" 0`},
		{"a.py", "x = 'a # b'  # one\n\"\"\"two\nthree\"\"\"\n",
			`1 "'a # b'" 0, 1 "# one" 0, 2 "\"\"\"two" 0, 3 "three\"\"\"" 0`},
		{"a.sh", "#!/bin/sh\n# one\necho \"two # three\" # four\nx=$#\n",
			`2 "# one" 0, 3 " # four" 0, 3 "\"two # three\"" 0`},
		{"a.md", "one `code` two\n\n    code\n```\ncode\n```\n| " + long + "|\nhttps://" + long + "\n- a\n  " + long + "\n",
			`1 "one ` + "``" + ` two" 0, 7 "| ` + long + `|" 0, 9 "- a" 0, 10 "  ` + long + `" 2`},
		{"a.bin", "one", ""},
	} {
		var got []string
		for _, l := range proseOf(x.path, []byte(x.source)) {
			if strings.TrimSpace(l.text) != "" && !strings.HasPrefix(l.text, "http") &&
				!strings.HasPrefix(l.text, "#!") {
				got = append(got, fmt.Sprintf("%d %q %d", l.number, l.text, l.over))
			}
		}
		if got := strings.Join(got, ", "); got != x.want {
			t.Errorf("%s:\n%s\nwant\n%s", x.path, got, x.want)
		}
	}
}
