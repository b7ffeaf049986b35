package tensor

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// A process that ends while it writes leaves the previous file unchanged and no temporary file.
func TestRemoveUnfinished(t *testing.T) {
	if dir := os.Getenv("ULYSSES_TEST_UNFINISHED"); dir != "" {
		WriteFile(filepath.Join(dir, "done"), func(w io.Writer) error { return nil })
		folder, err := Beside(filepath.Join(dir, "folder"), func(name string) error { return os.Mkdir(name, 0o777) })
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, "half"), nil, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		WriteFile(filepath.Join(dir, "file"), func(w io.Writer) error {
			fmt.Fprintln(w, "half")
			RemoveUnfinished()
			os.Exit(5)
			return nil
		})
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("as it was"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestRemoveUnfinished$")
	cmd.Env = append(os.Environ(), "ULYSSES_TEST_UNFINISHED="+dir)
	if out, _ := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != 5 {
		t.Fatalf("%v: %s", cmd.ProcessState, out)
	}
	entries, err := os.ReadDir(dir)
	if text, _ := os.ReadFile(filepath.Join(dir, "file")); err != nil || len(entries) != 2 ||
		string(text) != "as it was" {
		t.Errorf("%v, %v: %q", entries, err, text)
	}
}
