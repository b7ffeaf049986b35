package comm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// TestSameFiles checks that copies which differ in any byte are found, with the file, the part and
// a rank of either copy. One copy, and equal copies, are accepted. Ranks that see one copy share
// the reading.
func TestSameFiles(t *testing.T) {
	const size = 1 << 10
	for _, x := range []struct {
		name  string
		spoil func(dir string) error // changes the copy that the last two ranks see
		want  string                 // "" if nothing differs
	}{
		{"alike", func(string) error { return nil }, ""},
		{"first byte", func(dir string) error { return flip(filepath.Join(dir, "a"), 0) },
			"model.path: a differs between rank 0 on HOST and rank 2 on HOST: header; copy it to every node"},
		{"in a part", func(dir string) error { return flip(filepath.Join(dir, "a"), 100) },
			"model.path: a differs between rank 0 on HOST and rank 2 on HOST: weights; copy"},
		{"behind the parts", func(dir string) error { return flip(filepath.Join(dir, "a"), size-1) },
			"a differs between rank 0 on HOST and rank 2 on HOST: bytes 600 to 1024; copy"},
		{"without parts", func(dir string) error { return flip(filepath.Join(dir, "b"), 5) },
			"b differs between rank 0 on HOST and rank 2 on HOST: bytes 0 to 1024; copy"},
		{"shorter", func(dir string) error { return os.Truncate(filepath.Join(dir, "b"), 7) },
			"b differs between rank 0 on HOST and rank 2 on HOST: it has 1024 bytes on the first and 7 on the second; copy"},
	} {
		dirs := []string{t.TempDir(), t.TempDir()}
		for _, dir := range dirs {
			for _, name := range []string{"a", "b"} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.Repeat(name, size)),
					0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := x.spoil(dirs[1]); err != nil {
			t.Fatal(err)
		}
		err := RunLocal(4, func(c Comm) error {
			dir := dirs[c.Rank()/2]
			index, n, err := Copies(c, filepath.Join(dir, "a"), filepath.Join(dir, "b"))
			if err != nil || index != c.Rank()%2 || n != 2 {
				return fmt.Errorf("rank %d is %d of %d: %v", c.Rank(), index, n, err)
			}
			err = SameFiles(c, "model.path",
				[]File{{"a", filepath.Join(dir, "a"), []Part{{"header", 10}, {"weights", 590}}},
					{Name: "b", Path: filepath.Join(dir, "b")}})
			if want := strings.ReplaceAll(x.want, "HOST", hostName()); (err == nil) != (want == "") || err != nil &&
				(!strings.Contains(err.Error(), want) || status.Of(err) != status.InvalidConfig) {
				return fmt.Errorf("rank %d: %v (%v), want %q", c.Rank(), err, status.Of(err), want)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", x.name, err)
		}
	}
	// A copy that all ranks see is not read: an unreadable range of it would be an error.
	path := filepath.Join(t.TempDir(), "c")
	if err := os.WriteFile(path, []byte("c"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := RunLocal(3, func(c Comm) error {
		if err := SameFiles(c, "model.path", []File{{Name: "c", Path: path}}); err != nil {
			return err
		}
		gone := path
		if c.Rank() == 1 {
			gone += ".gone"
		}
		if err := SameFiles(c, "model.path", []File{{Name: "c", Path: gone}}); status.Of(err) != status.IO ||
			!strings.Contains(err.Error(), "rank 1: model.path: ") {
			return fmt.Errorf("%v", err)
		}
		name := fmt.Sprintf("shard-%d", c.Rank()/2)
		err := SameFiles(c, "data.path", []File{{Name: name, Path: path}})
		if err == nil ||
			!strings.Contains(err.Error(), "data.path: the files differ between rank 0 on "+hostName()+
				" and rank 2 on "+hostName()+": file 1 is shard-0 on the first and shard-1 on the second") {
			return fmt.Errorf("%v", err)
		}
		var found []File // by rank 2 alone
		if c.Rank() == 2 {
			found = []File{{Name: "c", Path: path}}
		}
		if err := SameFiles(c, "data.path", found); status.Of(err) != status.InvalidConfig ||
			!strings.Contains(err.Error(), ": file 1 is absent on the first and c on the second") {
			return fmt.Errorf("%v", err)
		}
		return SameFiles(c, "data.path", nil)
	})
	if err != nil {
		t.Error(err)
	}
}

func flip(path string, at int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err = f.ReadAt(b, at); err == nil {
		b[0] ^= 1
		_, err = f.WriteAt(b, at)
	}
	return err
}
