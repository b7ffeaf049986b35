package unpack

import (
	"os"
	"strings"
	"syscall"
	"testing"
)

// The error for a temporary file that cannot be made names the fix: room, or more open files.
func TestNoTemporary(t *testing.T) {
	for err, want := range map[error]string{
		&os.PathError{Op: "open", Path: "/tmp/x", Err: syscall.EMFILE}: "raise the limit (ulimit -n), or join files",
		&os.PathError{Op: "open", Path: "/tmp/x", Err: syscall.ENOENT}: "set TMPDIR to a folder with room",
	} {
		if got := noTemporary(err).Error(); !strings.Contains(got, want) {
			t.Errorf("%s; want %s", got, want)
		}
	}
}
