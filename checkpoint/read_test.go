package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// A checkpoint of more ranks than a process may open files is read.
func TestReadOfManyFiles(t *testing.T) {
	const ranks = 3 * maxOpen
	dir := Dir(t.TempDir())
	if err := dir.Begin(8); err != nil {
		t.Fatal(err)
	}
	first, err := dir.Write(8, 0, []Shard{{Name: "a", Numel: 1, Values: []float32{3}}})
	if err != nil {
		t.Fatal(err)
	}
	m := &Manifest{Step: 8, Updates: 8, Kinds: 1,
		Groups: []Group{{Name: "all", Tensors: []Tensor{{Name: "a", Shape: []int64{ranks}}}}}}
	for r := range ranks { // the files of all ranks are alike
		f := File{FileName(r), first.Bytes, first.CRC32C}
		if r > 0 {
			if err := os.Link(filepath.Join(dir.temp(8), first.Name), filepath.Join(dir.temp(8), f.Name)); err != nil {
				t.Fatal(err)
			}
		}
		m.Files = append(m.Files, f)
		m.Groups[0].Ranges = append(m.Groups[0].Ranges, []int64{int64(r), int64(r) + 1})
	}
	if left, err := dir.Finish(m, 1, nil); left != nil || err != nil {
		t.Fatal(left, err)
	}
	c, err := Open(dir.Path(8))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	values := make([]float32, ranks)
	if err := c.Read("a", 0, 0, values); err != nil || slices.Min(values) != 3 || slices.Max(values) != 3 {
		t.Errorf("%v, values from %g to %g, want 3", err, slices.Min(values), slices.Max(values))
	}
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	held := 0
	for _, f := range open {
		to, err := os.Readlink(fmt.Sprint("/proc/self/fd/", f.Name()))
		if err == nil && filepath.Dir(to) == string(dir.Path(8)) {
			held++
		}
	}
	if held < 1 || held > maxOpen {
		t.Errorf("%d of %d files are open, at most %d may be", held, ranks, maxOpen)
	}
}
