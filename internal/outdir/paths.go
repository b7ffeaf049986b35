// Package outdir guards the folder that a run writes, output.dir.
//
// Take makes this process the folder's Owner and refuses a folder that a live process owns. Found
// lists the results of other runs in it. Owner.Check is called before each result is written: this
// process must still own the folder, and no symbolic link in it may lead elsewhere. Inside keeps
// results out of read-only folders, such as the folder of the base model.
package outdir

import (
	"os"
	"path/filepath"
)

// Inside reports whether path is dir or lies below it. Neither needs to exist. Links are followed,
// and folders are compared by identity (os.SameFile), so two names of one folder are equal.
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

// resolve returns the absolute path, with links resolved in its existing part.
func resolve(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		return path // the working directory was removed
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
