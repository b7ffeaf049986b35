//go:build !linux

package comm

import (
	"fmt"
	"io/fs"
)

// identity is equal for two ranks of a host that see the same file.
func identity(path string, info fs.FileInfo) string {
	return fmt.Sprint(hostName(), path, info.Size(), info.ModTime().UnixNano())
}
