package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// NOTICE and the copy for the wheel are what make notice writes. The wheel has the same LICENSE.
func TestNoticeIsCurrent(t *testing.T) {
	root := filepath.Join("..", "..")
	want, err := notice(root)
	if err != nil {
		t.Fatal(err)
	}
	license, err := os.ReadFile(filepath.Join(root, "LICENSE"))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string][]byte{"NOTICE": want, "python/NOTICE": want, "python/LICENSE": license} {
		if got, err := os.ReadFile(filepath.Join(root, path)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not current (%v): run make notice", path, err)
		}
	}
	for _, name := range []string{"github.com/spf13/cobra", "uPlot", "The Go runtime", "cudnn-frontend"} {
		if !bytes.Contains(want, []byte(name)) {
			t.Errorf("no section for %s", name)
		}
	}
}
