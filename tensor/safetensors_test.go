package tensor

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"ulysses/internal/status"
)

func write(t testing.TB, header string, data int) string {
	t.Helper()
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	path := filepath.Join(t.TempDir(), "x.safetensors")
	if err := os.WriteFile(path, append(append(b, header...), make([]byte, data)...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSafetensorsRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.safetensors")
	x, n := []float32{1, -2.5, 3, 0, 7, 8}, []int32{-100, 5}
	err := WriteSafetensors(path, map[string]string{"format": "pt"}, []Item{
		{Name: "x", Tensor: OfFloat32(x, 2, 3)}, {Name: "n", Tensor: OfInt32(n, 2)},
		{Name: "none", Tensor: Of(nil, F32, 0, 4)}})
	if err != nil {
		t.Fatal(err)
	}
	s, err := OpenSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	e, ok := s.Entry("x")
	got := make([]float32, 2)
	if err := s.ReadFloat32(e, 1, got); !ok || err != nil || got[0] != -2.5 || got[1] != 3 {
		t.Fatal(got, ok, err)
	}
	e, _ = s.Entry("n")
	ints := make([]int64, 2)
	if err := s.ReadInt64(e, 0, ints); err != nil || ints[0] != -100 || ints[1] != 5 {
		t.Fatal(ints, err)
	}
	if err := s.ReadFloat32(e, 0, got); status.Of(err) != status.InvalidConfig {
		t.Fatal("integers read as floats:", err)
	}
	if len(s.Entries()) != 3 || s.Metadata["format"] != "pt" {
		t.Fatal(s.Entries(), s.Metadata)
	}
}

// If a writer writes too few bytes, no file remains.
func TestSafetensorsWriteIsWholeOrAbsent(t *testing.T) {
	dir := t.TempDir()
	err := WriteSafetensors(filepath.Join(dir, "a"), nil, []Item{{Name: "x", Tensor: Of(nil, F32, 4),
		Write: func(w io.Writer) error { _, err := w.Write(make([]byte, 12)); return err }}})
	left, _ := os.ReadDir(dir)
	if status.Of(err) != status.IO || len(left) != 0 {
		t.Fatal(err, left)
	}
	if err := WriteSafetensors(filepath.Join(dir, "no", "a"), nil, nil); status.Of(err) != status.IO {
		t.Fatal(err)
	}
}

// Writing through a symbolic link, or a link to a link, replaces the file to which it points, which
// need not exist.
func TestWriteFileThroughLink(t *testing.T) {
	for name, exists := range map[string]bool{"a file": true, "a file that does not exist": false} {
		dir := t.TempDir()
		file, other := filepath.Join(dir, "to", "file"), filepath.Join(dir, "other")
		err := errors.Join(os.Mkdir(filepath.Dir(file), 0o700), os.Symlink("to", filepath.Join(dir, "folder")),
			os.Symlink("../to/file", filepath.Join(dir, "to", "link")), os.Symlink("folder/link", other))
		if exists {
			err = errors.Join(err, os.WriteFile(file, nil, 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
		write := func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }
		if err := WriteFile(other, write); err != nil {
			t.Fatal(name, err)
		}
		to, err := os.Readlink(other)
		if text, _ := os.ReadFile(file); to != "folder/link" || string(text) != "new" {
			t.Errorf("%s: the link leads to %q, %v; in the file is %q", name, to, err, text)
		}
	}
}

// A file that WriteFile writes has the mode that the umask leaves.
func TestWriteFileHasTheUmasksMode(t *testing.T) {
	for umask, want := range map[int]os.FileMode{0o077: 0o600, 0o022: 0o644, 0o002: 0o664} {
		path := filepath.Join(t.TempDir(), "a")
		was := syscall.Umask(umask)
		err := WriteFile(path, func(io.Writer) error { return nil })
		syscall.Umask(was)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != want {
			t.Errorf("umask %03o: %v, %v; want %v", umask, info.Mode(), err, want)
		}
	}
}

func TestSafetensorsHostile(t *testing.T) {
	for _, c := range []struct {
		header string
		data   int
		want   string
	}{
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 7, "are outside the"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 9, "its tensors have 8"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}`,
			12, "overlap"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}`, 12, "unused bytes"},
		{`{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}`, 8, "needs 12"},
		{`{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}`, 8, "negative"},
		{`{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}`, 8, "overflows"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}`, 8, "outside"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}`, 8, "outside"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}}`, 8, "two numbers"},
		{`{"a":{"dtype":"Q4","shape":[2],"data_offsets":[0,8]}}`, 8, "unknown dtype"},
		{`{"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}}`, 8, "tensor \"a\""},
		{`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`,
			8, "twice"},
		{`{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}`, 4, "dimensions"},
		{`{"a":{"dtype":"F32","shape":[` + strings.Repeat("1,", 39) + `1],"data_offsets":[0,4]}}`, 4, "40 dimensions"},
		{`{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}`, 4, `the key "dtype" is there twice`},
		{`{"__metadata__":{"a":"b","a":"c"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, 4,
			`the key "a" is there twice`},
		{`{"` + strings.Repeat("n", 1<<20) + `":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, 8,
			"(1048576 bytes)"},
		{`{"a":{"dtype":"` + strings.Repeat("n", 1<<20) + `","shape":[1],"data_offsets":[0,4]}}`, 4, "(1048576 bytes)"},
		{`[]`, 0, "not a JSON object"}, {`{`, 0, "JSON"}, {``, 0, "JSON"}, {`{} {}`, 0, "text after"},
	} {
		path := write(t, c.header, c.data)
		s, err := OpenSafetensors(path)
		if err == nil {
			t.Errorf("%s: opened: %v", c.header, s.Entries())
		} else if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), path) || len(err.Error()) > 500 {
			t.Errorf("%.200s: %v, want %q", c.header, err, c.want)
		}
	}
	for name, b := range map[string][]byte{"empty": nil, "short": {1, 2},
		"long header": {255, 255, 255, 255, 255, 255, 255, 127, '{'}} {
		path := filepath.Join(t.TempDir(), "x")
		os.WriteFile(path, b, 0o600)
		if _, err := OpenSafetensors(path); status.Of(err) != status.InvalidConfig {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := OpenSafetensors(t.TempDir()); status.Of(err) != status.IO {
		t.Error("a folder:", err)
	}
}

// FuzzSafetensors checks that every byte of a file that opens can be read.
func FuzzSafetensors(f *testing.F) {
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`), 8)
	f.Add([]byte(`{"__metadata__":{"a":"b"},"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}`), 2)
	f.Add([]byte(`{"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}`), 0)
	f.Fuzz(func(t *testing.T, header []byte, data int) {
		s, err := OpenSafetensors(write(t, string(header), max(0, data%4096)))
		if err != nil {
			return
		}
		defer s.Close()
		for _, e := range s.Entries() {
			if err := s.ReadAt(e, 0, make([]byte, e.hi-e.lo)); err != nil {
				t.Fatal(err)
			}
			if e.DType == BF16 || e.DType == F32 {
				if err := s.ReadFloat32(e, 0, make([]float32, e.Numel())); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// A file that is written is flushed to disk each GiB.
func TestFlushing(t *testing.T) {
	d := &disk{}
	w, part := &flushing{f: d}, make([]byte, 1<<27)
	for i := range 20 {
		if n, err := w.Write(part); n != len(part) || err != nil {
			t.Fatal(n, err)
		}
		if want := (i + 1) / 8; d.flushes != want {
			t.Errorf("%d flushes after %d of 128 MiB, want %d", d.flushes, i+1, want)
		}
	}
}

type disk struct{ flushes int }

func (d *disk) Write(p []byte) (int, error) { return len(p), nil }
func (d *disk) Sync() error                 { d.flushes++; return nil }
