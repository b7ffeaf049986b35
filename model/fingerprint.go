package model

import (
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"io"
	"path/filepath"

	"ulysses/internal/status"
)

// Fingerprint returns a digest of the weights of a folder: names and sizes of the files, and blocks
// at regular distances in each. It tells a folder from one with other weights without reading all
// of them. A copy of the folder has the same digest. The files are the opened ones.
func (f *Folder) Fingerprint() (string, error) {
	const blocks, size = 256, 4096
	h := fnv.New128a()
	buffer := make([]byte, size)
	for _, s := range f.files {
		err := func() error {
			file, err := s.Content()
			if err != nil {
				return err
			}
			n := file.Size()
			fmt.Fprintf(h, "%s %d ", filepath.Base(s.Path), n)
			step := max(size, n/blocks)
			for at := int64(0); at < n; at += step {
				m, err := file.ReadAt(buffer, at)
				if err != nil && err != io.EOF {
					return err
				}
				h.Write(buffer[:m])
			}
			return nil
		}()
		if err != nil {
			return "", status.Errorf(status.IO, "%s: %w", f.Dir, err)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8]), nil
}
