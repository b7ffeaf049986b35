package input

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// The name of the folder is no pattern, names of entries are.
func TestMatch(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"run[12]/b.x", "run[12]/a.x", "run[12]/c.y", "run1/d.x", "x[/e.x"} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	for dir, want := range map[string][]string{"run[12]": {"a.x", "b.x"}, "x[": {"e.x"}, "run*": nil, "none": nil} {
		dir = filepath.Join(root, dir)
		for i := range want {
			want[i] = filepath.Join(dir, want[i])
		}
		if got := Match(dir, "*.x"); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", dir, got, want)
		}
	}
}
