package checkpoint

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/need"
)

// small writes a checkpoint of two parameters and returns its path.
func small(t *testing.T) (dir Dir, path string) {
	t.Helper()
	dir = Dir(t.TempDir())
	if err := dir.Begin(8); err != nil {
		t.Fatal(err)
	}
	f, err := dir.Write(8, 0,
		[]Shard{{Name: "a", Numel: 2, Values: []float32{1, 2}}, {Name: "b", Numel: 1, Values: []float32{3}}})
	if err != nil {
		t.Fatal(err)
	}
	m := &Manifest{Step: 8, Updates: 8, Run: map[string]string{"seed": "1"},
		Settings: map[string]string{"optimizer.lr": "0.001"}, Kinds: 1, Files: []File{f},
		Groups: []Group{{Name: "all", Tensors: []Tensor{{Name: "a", Shape: []int64{2}}, {Name: "b", Shape: []int64{1}}},
			Ranges: [][]int64{{0, 3}}}}}
	if left, err := dir.Finish(m, 2, nil); left != nil || err != nil {
		t.Fatal(left, err)
	}
	return dir, dir.Path(8)
}

// manifestOf returns the manifest of a checkpoint.
func manifestOf(t *testing.T, path string) Manifest {
	t.Helper()
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return c.Manifest
}

// writeAgain writes a checkpoint with a manifest of another one, and keeps no older ones.
func writeAgain(t *testing.T, dir Dir, m Manifest, step int64) (left, err error) {
	t.Helper()
	if err := dir.Begin(step); err != nil {
		t.Fatal(err)
	}
	if _, err := dir.Write(step, 0, nil); err != nil {
		t.Fatal(err)
	}
	m.Step = step
	return dir.Finish(&m, 1, nil)
}

// Open refuses a manifest in which any byte was changed, removed or added.
func TestEveryByteOfAManifest(t *testing.T) {
	_, path := small(t)
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	file := filepath.Join(path, ManifestFile)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	try := func(what string, at int, changed []byte) {
		t.Helper()
		n++
		if err := os.WriteFile(file, changed, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := Open(path); err == nil {
			c.Close()
			t.Errorf("byte %d of %q, %s: accepted", at, text, what)
		}
	}
	for at := range text {
		for bit := range 8 {
			changed := bytes.Clone(text)
			changed[at] ^= 1 << bit
			try(fmt.Sprintf("bit %d", bit), at, changed)
		}
		try("removed", at, slices.Delete(bytes.Clone(text), at, at+1))
		try("a space before it", at, slices.Insert(bytes.Clone(text), at, ' '))
		try("truncated", at, text[:at])
	}
	try("one byte appended", len(text), append(bytes.Clone(text), '\n'))
	if n < 3000 {
		t.Errorf("only %d manifests were tested", n)
	}
}

// A manifest with a correct checksum and inconsistent values is refused by name, without a panic.
func TestImpossibleManifests(t *testing.T) {
	_, path := small(t)
	file := filepath.Join(path, ManifestFile)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	body := text[:len(text)-len(fmt.Sprintf(sealed, [32]byte{}))]
	long := strings.Repeat("n", 1<<20)
	for _, x := range []struct{ old, new, want string }{
		{`"shape":[2]`, `"shape":[` + strings.Repeat("1,", 39) + `2]`,
			`tensor "a" has no possible shape: 40 dimensions`},
		{`"shape":[2]`, `"shape":[4611686018427387904,4]`, `tensor "a" has no possible shape`},
		{`"shape":[2]`, `"shape":[-2]`, `tensor "a" has no possible shape`},
		{`"name":"b"`, `"name":"a"`, `tensor "a" is there twice`},
		{`"name":"a","shape":[2]`, `"name":"` + long + `","shape":[3]`, `has 3 elements of 4`},
		{`"name":"a","shape":[2]`, `"name":"` + long + `","shape":[-3]`, "(1048576 bytes)"},
		{`"step":8`, `"step":8,"step":9`, `the key "step" is there twice`},
		{`"step":8`, `"step":1e99`, "manifest.json is damaged"},
		{`"step":8,"updates":8`, `"step":9,"updates":8`, "its name says step 8, its manifest.json step 9"},
		{`"cut":[[0,3]]`, `"cut":[[0,2]]`, `group "all" has 2 elements of 3`},
		{`"name":"rank-00000.safetensors"`, `"name":"../x"`, `file 0 is "../x", it must be rank-00000.safetensors`},
		{`{"format":2`, `{"format":2,"model":[{"name":"../x","bytes":1,"crc32c":1}]`,
			`"../x" is not a path of a file in model`},
	} {
		changed := bytes.Replace(body, []byte(x.old), []byte(x.new), 1)
		if bytes.Equal(changed, body) {
			t.Fatalf("%s is not in %s", x.old, body)
		}
		if err := os.WriteFile(file, seal(append(changed, '}')), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(path)
		if status.Of(err) != status.InvalidConfig || !strings.Contains(fmt.Sprint(err), x.want) ||
			len(err.Error()) > 700 {
			t.Errorf("%.60s: %v, want %q", x.new, err, x.want)
		}
	}
}

// A manifest that is too large to be read is not written.
func TestManifestsThatCannotBeRead(t *testing.T) {
	dir, path := small(t)
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	info, err := os.Stat(c.ManifestPath())
	if err != nil {
		t.Fatal(err)
	}
	defer func(n int64) { maxManifest = n }(maxManifest)
	for more, want := range []error{nil, fs.ErrNotExist} { // the first one has exactly the largest size
		maxManifest = info.Size()
		m := c.Manifest
		m.Step, m.Mesh = 9, strings.Repeat("n", more)
		if err := dir.Begin(m.Step); err != nil {
			t.Fatal(err)
		}
		_, err := dir.Finish(&m, 2, nil)
		if _, there := os.Stat(dir.Path(m.Step)); !errors.Is(there, want) || (err == nil) != (want == nil) {
			t.Errorf("a manifest of %d bytes, of which %d are read: %v, its folder: %v", info.Size()+int64(more),
				maxManifest, err, there)
		}
		if want == nil {
			if err := os.RemoveAll(dir.Path(m.Step)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if steps, err := dir.Steps(); err != nil || !slices.Equal(steps, []int64{8}) {
		t.Errorf("%v %v", steps, err)
	}
}

// Only folders with the exact name of a checkpoint count, and a damaged checkpoint does not replace
// an undamaged one.
func TestStepsAndPrune(t *testing.T) {
	dir, _ := small(t)
	for _, name := range []string{"step-9", "step-00000009.old", "step-+0000009", "step-", "step-00000010",
		"step-00000004", "step-00000005"} {
		if err := os.Mkdir(filepath.Join(string(dir), name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	steps, err := dir.Steps()
	if err != nil || !slices.Equal(steps, []int64{4, 5, 8, 10}) {
		t.Errorf("%v %v", steps, err)
	}
	if left, err := dir.prune(8, 2, 0, []int64{5}); left != nil || err != nil {
		t.Fatal(left, err)
	}
	if steps, err = dir.Steps(); err != nil || !slices.Equal(steps, []int64{4, 8}) {
		t.Errorf("%v %v", steps, err)
	}
	// the checkpoint of the best evaluation is kept besides the newest
	for _, name := range []string{"step-00000009", "step-00000012", "step-00000015"} {
		if err := os.Mkdir(filepath.Join(string(dir), name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := dir.prune(12, 1, 8, nil); left != nil || err != nil {
		t.Fatal(left, err)
	}
	if steps, err = dir.Steps(); err != nil || !slices.Equal(steps, []int64{8, 12}) {
		t.Errorf("%v %v", steps, err)
	}
	if _, err := os.Stat(filepath.Join(string(dir), "step-9")); errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// A checkpoint is written although an old one cannot be removed, as on NFS while a process reads
// it. The old one is no checkpoint any more, and is removed when it can be.
func TestOldCheckpointInUse(t *testing.T) {
	dir, path := small(t)
	m := manifestOf(t, path)
	removeAll = func(path string) error {
		if strings.HasSuffix(path, ".old") {
			return &os.PathError{Op: "unlinkat", Path: path, Err: syscall.ENOTEMPTY}
		}
		return os.RemoveAll(path)
	}
	defer func() { removeAll = os.RemoveAll }()
	again := func(step int64) {
		t.Helper()
		left, err := writeAgain(t, dir, m, step)
		if err != nil || !errors.Is(left, syscall.ENOTEMPTY) {
			t.Errorf("step %d: %v, %v", step, left, err)
		}
		if steps, err := dir.Steps(); err != nil || !slices.Equal(steps, []int64{step}) {
			t.Errorf("step %d: %v %v", step, steps, err)
		}
	}
	again(9)
	again(9) // replaces one of the same step
	again(9)
	again(10)
	if err := dir.Ready(10); err != nil {
		t.Error(err)
	}
	removeAll = os.RemoveAll
	if err := dir.Begin(11); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(string(dir))
	if err != nil || len(entries) != 2 { // steps 10 and 11
		t.Errorf("%v %v", entries, err)
	}
}

// A checkpoint that replaces one of the same step has its name before the old one is removed.
func TestReplacedCheckpointGoesLast(t *testing.T) {
	dir, path := small(t)
	m := manifestOf(t, path)
	removed := 0
	removeAll = func(old string) error {
		removed++
		if _, err := os.Stat(filepath.Join(path, ManifestFile)); err != nil {
			t.Error(err)
		}
		return os.RemoveAll(old)
	}
	defer func() { removeAll = os.RemoveAll }()
	if left, err := writeAgain(t, dir, m, m.Step); left != nil || err != nil || removed != 1 {
		t.Errorf("%v %v, %d folders removed", left, err, removed)
	}
}

// A file or a link with the name of a checkpoint that the run may write is refused before the first
// step. Names of steps that are done may be links, for example to an archive.
func TestReadyRefusesFilesNamedAsCheckpoints(t *testing.T) {
	for _, place := range []func(path string) error{
		func(path string) error { return os.WriteFile(path, nil, 0o600) },
		func(path string) error { return os.Symlink(t.TempDir(), path) },
	} {
		d := Dir(t.TempDir())
		if err := place(d.Path(12)); err != nil {
			t.Fatal(err)
		}
		if err := d.Ready(8); err == nil ||
			!strings.Contains(err.Error(),
				d.Path(12)+" is a file or a link, and the run writes a folder of this name; remove it") {
			t.Error(err)
		}
		if err := d.Ready(12); err != nil {
			t.Error(err)
		}
	}
}

// A message shows the elements of a description that differ, and all of it if one description has
// all elements of the other.
func TestDiffering(t *testing.T) {
	for _, x := range [][4]string{
		{"3 documents, 9 rows of up to 4, checksum 1", "3 documents, 5 rows of up to 8, checksum 1",
			"9 sequences of up to 4", "5 sequences of up to 8"},
		{`rank 2, targets ["q", "k"]`, `rank 2, targets ["q", "v"]`, `targets ["q", "k"]`, `targets ["q", "v"]`},
		{"a, b", "a", "a, b", "a"},
		{"5 rows of up to 8, best", "5 rows of up to 8", "5 sequences of up to 8, best", "5 sequences of up to 8"},
		{"6", "5", "6", "5"},
	} {
		if now, was := differing(x[0], x[1]); now != x[2] || was != x[3] {
			t.Errorf("%q and %q: %q, %q", x[0], x[1], now, was)
		}
	}
}

// Folders of some file systems, such as /proc, cannot be flushed to disk.
func TestFoldersWithoutSync(t *testing.T) {
	folder, err := os.Open(need.File(t, "/proc", "mount it"))
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	if err := folder.Sync(); !errors.Is(err, syscall.EINVAL) {
		t.Fatalf("the kernel flushes /proc: %v", err)
	}
	if err := syncDir("/proc"); err != nil {
		t.Error(err)
	}
	if err := syncDir("/proc/no-such-folder"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// export and eval name the folder that they cannot read, not a key of a job.
func TestFindNamesTheFolder(t *testing.T) {
	loop := filepath.Join(t.TempDir(), "loop")
	if err := os.Symlink(loop, loop); err != nil {
		t.Fatal(err)
	}
	_, err := Find(loop)
	if status.Of(err) != status.IO || !strings.Contains(err.Error(), "checkpoint "+loop+": ") ||
		strings.Contains(err.Error(), "output.dir") {
		t.Error(err)
	}
}
