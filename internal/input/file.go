// Package input reads what users give: files that must be regular ones, JSON that must say a thing once, and names that are quoted in messages.
//
// Open and Read never block and never read without a bound: a named pipe would make a rank wait for ever, and a device has no end. JSON decodes
// what encoding/json decodes, and refuses a key that an object has twice. Quote and Short keep a name from a file to the length of a line.
package input

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// Limits on files that are read whole, in bytes. The largest that are published have about a tenth of it.
const (
	MaxConfig    = 64 << 20  // config.json, an index, a manifest and the like
	MaxTokenizer = 512 << 20 // tokenizer.json
)

// KindError says that a path is no regular file.
type KindError struct {
	Path string
	Mode fs.FileMode
}

func (e *KindError) Error() string {
	return fmt.Sprintf("%s is %s, a regular file is needed", Short(e.Path), kindOf(e.Mode))
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
	return "no file"
}

// Stat describes the regular file that a path leads to, without opening it. It fails with a *KindError where the path leads to something else.
func Stat(path string) (fs.FileInfo, error) {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		return nil, &KindError{path, info.Mode()}
	}
	return info, err
}

// Open opens a regular file for reading and returns its length. It fails with a *KindError on anything else, which it does not open: opening a
// pipe waits for a writer, and opening a device may do something.
func Open(path string) (*os.File, int64, error) {
	if _, err := Stat(path); err != nil {
		return nil, 0, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // not to wait for a pipe that has just taken the file's name
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

// Read returns the bytes of a regular file of at most limit bytes; a longer one is refused.
func Read(path string, limit int64) ([]byte, error) {
	f, size, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	long := func(what string) error {
		return fmt.Errorf("%s has %s bytes, at most %d are read: it is another kind of file", Short(path), what, limit)
	}
	if size > limit {
		return nil, long(fmt.Sprint(size))
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1)) // it may grow meanwhile, and files of /proc have no size
	if err == nil && int64(len(text)) > limit {
		err = long(fmt.Sprintf("more than %d", limit))
	}
	if err != nil {
		return nil, err
	}
	return text, nil
}
