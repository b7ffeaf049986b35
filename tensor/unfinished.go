package tensor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// unfinished is the set of temporary names in use: files and folders that are being written.
var unfinished = struct {
	sync.Mutex
	names map[string]bool
}{names: map[string]bool{}}

// Finish calls rename, which moves a temporary name of Beside to its final name. While rename runs,
// RemoveUnfinished waits.
func Finish(name string, rename func() error) error {
	unfinished.Lock()
	defer unfinished.Unlock()
	if err := rename(); err != nil {
		return err
	}
	delete(unfinished.names, name)
	return nil
}

// Discard removes the file or folder at a temporary name of Beside. After Finish it does nothing.
func Discard(name string) {
	unfinished.Lock()
	defer unfinished.Unlock()
	if unfinished.names[name] {
		os.RemoveAll(name)
		delete(unfinished.names, name)
	}
}

// RemoveUnfinished removes all unfinished files and folders. It is for a process that is about to
// exit: afterwards Finish blocks forever, so no file gets its final name.
func RemoveUnfinished() {
	unfinished.Lock()
	for name := range unfinished.names {
		os.RemoveAll(name)
	}
}

// RemoveLeft removes the files and folders that killed processes have left under temporary names of
// Beside for path. No other process may be writing path. Replaced folders (".old") stay, because
// they may hold files of the user.
func RemoveLeft(path string) error {
	entries, err := os.ReadDir(filepath.Dir(path))
	if os.IsNotExist(err) || errors.Is(err, syscall.ENOTDIR) {
		return nil
	} else if err != nil {
		return err
	}
	unfinished.Lock()
	defer unfinished.Unlock()
	for _, e := range entries {
		name := filepath.Join(filepath.Dir(path), e.Name())
		if isTemporary(e.Name(), filepath.Base(path)) && !unfinished.names[name] {
			if err := os.RemoveAll(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// isTemporary reports whether Beside gives such a name for a file or folder.
func isTemporary(name, base string) bool {
	digits, ok := strings.CutPrefix(name, "."+base+".")
	return ok && len(digits) == 8 && strings.Trim(digits, "0123456789abcdef") == ""
}
