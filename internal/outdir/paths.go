// Package outdir guards the folder that a run writes, output.dir.
//
// Take makes this process its Owner, and refuses a folder that a living process owns. Found lists the results of other runs in it.
// Owner.Check comes before each result that is written: the folder must still be there and this process's, and no symbolic link in it
// may lead elsewhere. Inside keeps results out of folders that are only read, such as the folder of the base model.
package outdir

import (
	"os"
	"path/filepath"
)

// Inside reports whether path is dir or lies below it. Neither has to exist. Links are followed, and folders are compared by what they
// are (os.SameFile), so that two names of one folder count as one.
func Inside(path, dir string) bool {
	want, _ := os.Stat(dir)
	real, realDir := resolve(path), resolve(dir)
	for {
		if real == realDir {
			return true
		}
		if info, err := os.Stat(real); err == nil && want != nil && os.SameFile(info, want) {
			return true
		}
		parent := filepath.Dir(real)
		if parent == real {
			return false
		}
		real = parent
	}
}

// resolve returns the absolute path with the links of the part that exists followed.
func resolve(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		return path // the current folder is gone
	}
	rest := ""
	for at := abs; ; at = filepath.Dir(at) {
		if real, err := filepath.EvalSymlinks(at); err == nil {
			return filepath.Join(real, rest)
		}
		if filepath.Dir(at) == at {
			return abs
		}
		rest = filepath.Join(filepath.Base(at), rest)
	}
}
