package notbuilt

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/not-built.md")

const root = "../.."

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// docs/not-built.md equals Page, and README.md links to it instead of naming features.
func TestPage(t *testing.T) {
	const path = "docs/not-built.md"
	if *update {
		if err := os.WriteFile(filepath.Join(root, path), []byte(Page()), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if read(t, path) != Page() {
		t.Errorf("%s is not current; run go test ./internal/notbuilt -update", path)
	}
	readme := read(t, "README.md")
	if !strings.Contains(readme, "("+path+")") {
		t.Errorf("README.md has no link to %s", path)
	}
	for _, a := range Areas {
		for _, f := range a.Features {
			if strings.Contains(readme, f.Name) {
				t.Errorf("README.md lists %s itself", f.Name)
			}
		}
	}
}

// The header's list of features that are not built has each such feature that the header declares,
// and no other.
func TestHeader(t *testing.T) {
	_, text, ok := strings.Cut(read(t, "capi/ulysses.h"), "return ULYSSES_UNSUPPORTED: ")
	text, _, end := strings.Cut(text, ".")
	if !ok || !end {
		t.Fatal("capi/ulysses.h does not say what is not built")
	}
	var said []string
	for _, name := range strings.Split(text, ",") {
		name = strings.TrimSpace(strings.TrimSuffix(strings.TrimLeft(name, " *\n"), " > 1"))
		said = append(said, strings.ToLower(name))
	}
	for _, name := range Names() {
		if !contains(said, name) {
			t.Errorf("capi/ulysses.h does not name %s", name)
		}
	}
	for _, name := range said {
		if !contains(Names(), name) {
			t.Errorf("capi/ulysses.h names %s, which is not on the list", name)
		}
	}
}

func contains(all []string, name string) bool {
	for _, x := range all {
		if x == name {
			return true
		}
	}
	return false
}

// Every feature of the list is refused somewhere, and every text that says "is not built" comes
// from the list.
func TestRefusalsUseTheList(t *testing.T) {
	listed := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\t(\w+)\s+= &Feature\{`).FindAllStringSubmatch(
		read(t, "internal/notbuilt/features.go"), -1) {
		listed[m[1]] = false
	}
	count := 0
	for _, a := range Areas {
		count += len(a.Features)
	}
	if len(listed) != count || count < 30 {
		t.Errorf("%d features are declared, %d are in an area", len(listed), count)
	}
	use := regexp.MustCompile(`\bnotbuilt\.(\w+)\.(?:Instead|Text|Refused)\b|\bnotbuilt\.(\w+)\b`)
	says := regexp.MustCompile("[\"`].*\\bnot built\\b")
	// Lines with these words that refuse no feature: the table of exit codes, and a sentence whose
	// words come from a function.
	other := regexp.MustCompile(`needs something that is not built|layerKinds\(\)`)
	goesOn := regexp.MustCompile(`[,(+=]$|&&$|\|\|$`) // in the next line
	for _, dir := range []string{
		"backends", "capi", "comm", "data", "data/tokenizer", "gdn", "internal/status", "job", "job/*",
		"model", "sp", "tile", "train",
	} {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatal(dir, err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			name, _ := filepath.Rel(root, file)
			statement := ""
			for n, line := range strings.Split(read(t, name), "\n") {
				code, _, _ := strings.Cut(line, "// ")
				statement += strings.TrimSpace(code)
				if goesOn.MatchString(statement) {
					continue
				}
				line, statement = statement, ""
				uses := use.FindAllStringSubmatch(line, -1)
				for _, m := range uses {
					listed[m[1]+m[2]] = true
				}
				if says.MatchString(line) && len(uses) == 0 && !other.MatchString(line) {
					t.Errorf("%s:%d says that something is not built without using the list: %s", name, n+1,
						line)
				}
			}
		}
	}
	for name, used := range listed {
		if !used {
			t.Errorf("nothing refuses notbuilt.%s", name)
		}
	}
}
