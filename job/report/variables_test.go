package report

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

// A report shows every variable that docs/job-file.md documents.
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
	if len(rows) < 7 {
		t.Errorf("%d variables in docs/job-file.md", len(rows))
	}
}
