package report

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

// A report shows every variable that docs/job-file.md documents, and of this program's variables no
// other.
func TestDocumentedVariablesAreShown(t *testing.T) {
	b, err := os.ReadFile("../../docs/job-file.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\|").FindAllStringSubmatch(string(b), -1)
	for _, r := range rows {
		if !slices.Contains(shownVariables, r[1]) {
			t.Errorf("%s is not shown", r[1])
		}
	}
	for _, name := range OwnVariables() {
		if !slices.ContainsFunc(rows, func(r []string) bool { return r[1] == name }) {
			t.Errorf("docs/job-file.md has no row of %s", name)
		}
	}
}
