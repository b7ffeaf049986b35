package input

import (
	"os"
	"path/filepath"
)

// Match returns the paths of the entries of a folder whose names match the pattern, in the order of
// their names. The folder's own name is never a pattern: filepath.Glob would read the folder run1
// instead of run[12]. A folder that cannot be read has no entries.
func Match(dir, pattern string) []string {
	entries, _ := os.ReadDir(dir)
	var paths []string
	for _, e := range entries {
		if ok, _ := filepath.Match(pattern, e.Name()); ok {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths
}
