package tensor

import (
	"os"
	"sync"
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
