package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every test in testkit/slow-tests.txt, which make unit skips, exists. The list changes with the
// name of a test.
func TestSlowTestsExist(t *testing.T) {
	list, err := os.ReadFile(filepath.Join(root, "testkit", "slow-tests.txt"))
	if err != nil {
		t.Fatal(err)
	}
	exists := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	walkFiles(t, []string{"_test.go"}, func(path string) {
		source, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range declared.FindAllStringSubmatch(string(source), -1) {
			exists[m[1]] = true
		}
	})
	for name := range strings.SplitSeq(strings.TrimSpace(string(list)), "\n") {
		if !strings.HasPrefix(name, "#") && !exists[name] {
			t.Errorf("testkit/slow-tests.txt: there is no test %s", name)
		}
	}
}
