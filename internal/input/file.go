// Package input reads files that users give: regular files alone, JSON objects without repeated
// keys, and names that are quoted in messages.
//
// Open and Read never block, and Read has a limit: a named pipe would make a rank wait forever, and
// a device has no end. OpenContent, StatContent and Read refuse Git LFS pointers. JSON decodes as
// encoding/json does, and refuses an object that has a key twice. Quote and Short shorten a long
// name from a file, so a message stays on one line.
package input

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// Limits on files that are read whole, in bytes. The largest published files have about a tenth of
// these sizes.
const (
	MaxConfig    = 64 << 20  // config.json, an index, a manifest and the like
	MaxTokenizer = 512 << 20 // tokenizer.json
)

// KindError is the error of a path that is not a regular file.
type KindError struct {
	Path string
	Mode fs.FileMode
}

func (e *KindError) Error() string {
	return fmt.Sprintf("%s is %s; a regular file is needed", Short(e.Path), kindOf(e.Mode))
}

func kindOf(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a folder"
	case m&fs.ModeNamedPipe != 0:
		return "a named pipe"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "a special file"
}

// Stat describes the regular file at a path without opening it. It returns a *KindError if the path
// leads to anything else.
func Stat(path string) (fs.FileInfo, error) {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		return nil, &KindError{path, info.Mode()}
	}
	return info, err
}

// Open opens a regular file for reading and returns its length. It returns a *KindError for
// anything else, without opening it: opening a pipe waits for a writer, and opening a device may
// have side effects.
func Open(path string) (*os.File, int64, error) {
	if _, err := Stat(path); err != nil {
		return nil, 0, err
	}
	// does not wait if a pipe has just replaced the file
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &KindError{path, info.Mode()}
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

// Read returns the bytes of a regular file of at most limit bytes; a longer one is refused, and so
// is a Git LFS pointer.
func Read(path string, limit int64) ([]byte, error) {
	f, size, err := OpenContent(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	long := func(what string) error {
		return fmt.Errorf("%s has %s bytes, and at most %d are read; give a file of the right kind", Short(path),
			what, limit)
	}
	if size > limit {
		return nil, long(fmt.Sprint(size))
	}
	// the file may grow meanwhile, and files of /proc have no size
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = long(fmt.Sprintf("more than %d", limit))
	}
	if err != nil {
		return nil, err
	}
	return text, nil
}
