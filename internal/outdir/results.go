package outdir

import (
	"os"
	"path/filepath"
	"strings"

	"ulysses/internal/status"
)

// Found returns the names that are results in a folder: files that are not empty, and folders that
// are not empty.
func Found(dir string, names ...string) (found []string, err error) {
	for _, name := range names {
		path := filepath.Join(dir, name)
		info, err := os.Lstat(path)
		if os.IsNotExist(err) {
			continue
		} else if err != nil {
			return nil, status.Errorf(status.IO, "output.dir: %w; choose another output.dir", err)
		}
		if !info.IsDir() {
			if info.Size() > 0 {
				found = append(found, name)
			}
			continue
		}
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, status.Errorf(status.IO, "output.dir: %w; choose another output.dir", err)
		}
		if len(entries) > 0 {
			found = append(found, name+"/")
		}
	}
	return found, nil
}

// Check returns an error if this process no longer owns the folder, or if one of the names in it, a
// path below the folder, is a symbolic link or goes through one: results are never written through
// a link. The folder may itself be a link.
func (o *Owner) Check(names ...string) error {
	if err := o.Held(); err != nil {
		return err
	}
	for _, name := range names {
		at := o.dir
		for _, part := range strings.Split(filepath.ToSlash(filepath.Clean(name)), "/") {
			at = filepath.Join(at, part)
			info, err := os.Lstat(at)
			if os.IsNotExist(err) {
				break
			} else if err != nil {
				return status.Errorf(status.IO, "output.dir: %w; choose another output.dir", err)
			}
			if info.Mode()&os.ModeSymlink != 0 {
				to, _ := os.Readlink(at) // "" if the link was removed meanwhile
				return status.Errorf(status.IO,
					"output.dir: %s is a symbolic link to %s, and no result is written through a link in output.dir; remove the link, or choose another output.dir",
					at, to)
			}
		}
	}
	return nil
}
