package input

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// Git LFS leaves a pointer in place of a file whose content was not fetched: a text of less than
// 1024 bytes that begins with its version (git-lfs, docs/spec.md).
const (
	pointerStart = "version https://git-lfs.github.com/spec/"
	maxPointer   = 1024
)

// PointerError is the error of a Git LFS pointer in place of a file.
type PointerError struct{ Path string }

func (e *PointerError) Error() string {
	return fmt.Sprintf("%s is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder", Short(e.Path))
}

// OpenContent is Open. It returns a *PointerError for a Git LFS pointer.
func OpenContent(path string) (*os.File, int64, error) {
	f, size, err := Open(path)
	if err != nil || size >= maxPointer {
		return f, size, err
	}
	start := make([]byte, len(pointerStart))
	if n, err := f.ReadAt(start, 0); err != nil && err != io.EOF {
		f.Close()
		return nil, 0, err
	} else if bytes.Equal(start[:n], []byte(pointerStart)) {
		f.Close()
		return nil, 0, &PointerError{path}
	}
	return f, size, nil
}

// StatContent is Stat. It returns a *PointerError for a Git LFS pointer.
func StatContent(path string) (fs.FileInfo, error) {
	info, err := Stat(path)
	if err != nil || info.Size() >= maxPointer {
		return info, err
	}
	f, _, err := OpenContent(path)
	if err != nil {
		return nil, err
	}
	return info, f.Close()
}
