package tensor

import (
	"os"
	"sync"
)

// unfinished are the temporary names in use: files and folders that are being written and have not got their own names yet.
var unfinished = struct {
	sync.Mutex
	names map[string]bool
}{names: map[string]bool{}}

// Finish runs rename, which gives what was written under a temporary name of Beside its own. The process does not end through RemoveUnfinished
// while rename runs.
func Finish(name string, rename func() error) error {
	unfinished.Lock()
	defer unfinished.Unlock()
	if err := rename(); err != nil {
		return err
	}
	delete(unfinished.names, name)
	return nil
}

// Discard removes what was written under a temporary name of Beside. After Finish there is nothing to remove.
func Discard(name string) {
	unfinished.Lock()
	defer unfinished.Unlock()
	if unfinished.names[name] {
		os.RemoveAll(name)
		delete(unfinished.names, name)
	}
}

// RemoveUnfinished removes everything that is written under a temporary name. It is for a process that ends at once, and nothing more gets
// its own name afterwards: Finish blocks for ever.
func RemoveUnfinished() {
	unfinished.Lock()
	for name := range unfinished.names {
		os.RemoveAll(name)
	}
}
