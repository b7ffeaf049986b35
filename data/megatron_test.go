package data

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
)

const megatronGoldens = "../testdata/goldens/megatron"

// megatronDocuments returns the documents of the goldens by name of the dataset:
// [document][sequence] ids.
func megatronDocuments(t *testing.T) map[string][][][]int32 {
	t.Helper()
	var sets map[string][][][]int32
	b, err := os.ReadFile(filepath.Join(megatronGoldens, "documents.json"))
	if err == nil {
		err = json.Unmarshal(b, &sets)
	}
	if err != nil {
		t.Fatal(err)
	}
	return sets
}

// Datasets of each type of id, which Megatron-LM wrote, give the sequences of their documents for
// any blocks and ranks, also between text files.
func TestMegatron(t *testing.T) {
	dir := t.TempDir()
	text := file(t, dir, "a.txt", "abc")
	for name, sets := range megatronDocuments(t) {
		if name == "float32" || name == "none" {
			continue
		}
		var docs [][]int32
		for _, sequences := range sets {
			if doc := slices.Concat(sequences...); len(doc) > 0 {
				docs = append(docs, doc)
			}
		}
		for k, pack := range []bool{true, false} {
			for _, block := range []int64{64, 128, 0} {
				for _, ranks := range []int{1, 5} {
					onRanks(t, ranks, func(c comm.Comm) {
						path := filepath.Join(megatronGoldens, name+[]string{".bin", ".idx"}[k])
						d := config(16, text, path, text)
						d.Pack = pack
						data,
							err := Open(d, EvalConfig{},
							Options{Vocab: 60000, Comm: c, Workers: 2, block: block, cache: 999})
						if err != nil {
							t.Error(err)
							return
						}
						defer data.Close()
						abc := []int32{'a', 'b', 'c'}
						want := plainSequences(slices.Concat([][]int32{abc}, docs, [][]int32{abc}), 16, pack)
						if got := whole(t, data.Train()); !reflect.DeepEqual(got, want) {
							t.Errorf("%s, pack %v, blocks of %d, %d ranks:\ngot  %v\nwant %v", name, pack, block, ranks,
								got, want)
						}
					})
				}
			}
		}
	}
	both := open(t, config(4, filepath.Join(megatronGoldens, "one.*")), EvalConfig{Split: 0.4}, 12)
	if got, kept := whole(t, both.Train()), whole(t, both.Eval()); len(got) != 1 ||
		!slices.Equal(got[0].IDs, []int32{5, 6, 7, 8}) || !slices.Equal(kept[0].IDs, []int32{9, 10, 11}) {
		t.Error(got, kept)
	}
}

// A dataset whose two files a key names is read once, in any order of the names.
func TestBothFilesOfMegatron(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b"} {
		copyMegatron(t, dir, "one", name, func(idx, bin []byte) ([]byte, []byte) { return idx, bin })
	}
	for _, names := range [][]string{{"*"}, {"*.bin", "*.idx"}, {"*.idx", "*.bin"}, {"a.idx", "b.*", "a.bin"},
		{"*.idx"}} {
		var paths []string
		for _, name := range names {
			paths = append(paths, filepath.Join(dir, name))
		}
		if n := open(t, config(4, paths...), EvalConfig{}, 12).Train().Tokens(); n != 14 {
			t.Errorf("%v: %d tokens", names, n)
		}
	}
}

// The size of the blocks, and thereby of the index, follows from the .bin if a key names the .idx.
func TestBlocksOfMegatron(t *testing.T) {
	bin := copyMegatron(t, t.TempDir(), "one", "x", func(idx, bin []byte) ([]byte, []byte) { return idx, bin })
	if err := os.Truncate(bin, 1<<37); err != nil { // a sparse file
		t.Fatal(err)
	}
	for _, path := range []string{bin, bin[:len(bin)-4] + ".idx"} {
		list, err := listFiles(&opener{}, "data.path", []string{path}, "")
		if err != nil {
			t.Fatal(err)
		}
		if n := list[0].formats[1].unit(); n != unitBytes(1<<37) {
			t.Errorf("%s: blocks of %d bytes, want %d", path, n, unitBytes(1<<37))
		}
	}
}

// copyMegatron copies a golden, changed, and returns the path of its .bin.
func copyMegatron(t testing.TB, dir, from, to string, change func(idx, bin []byte) ([]byte, []byte)) string {
	t.Helper()
	idx, err := os.ReadFile(filepath.Join(megatronGoldens, from+".idx"))
	if err != nil {
		t.Fatal(err)
	}
	bin, err := os.ReadFile(filepath.Join(megatronGoldens, from+".bin"))
	if err != nil {
		t.Fatal(err)
	}
	idx, bin = change(idx, bin)
	file(t, dir, to+".idx", string(idx))
	return file(t, dir, to+".bin", string(bin))
}

func TestMegatronFaults(t *testing.T) {
	dir := t.TempDir()
	n, m := int64(0), int64(0) // of int32: sequences and entries of documents
	copyMegatron(t, dir, "int32", "plain", func(idx, bin []byte) ([]byte, []byte) {
		n, m = int64(binary.LittleEndian.Uint64(idx[18:])), int64(binary.LittleEndian.Uint64(idx[26:]))
		return idx, bin
	})
	lengths, begins, docs := idxHeader, idxHeader+4*n, idxHeader+12*n
	put := func(at int64, v uint64, width int64) func(idx, bin []byte) ([]byte, []byte) {
		return func(idx, bin []byte) ([]byte, []byte) {
			var b [8]byte
			binary.LittleEndian.PutUint64(b[:], v)
			copy(idx[at:at+width], b[:])
			return idx, bin
		}
	}
	for i, c := range []struct {
		change func(idx, bin []byte) ([]byte, []byte)
		code   status.Code
		want   string
	}{
		{put(0, 'X', 1), status.InvalidConfig, "is not the index of a Megatron dataset"},
		{func(idx, bin []byte) ([]byte, []byte) { return idx[:33], bin }, status.InvalidConfig,
			"is not the index of a Megatron dataset"},
		{func(idx, bin []byte) ([]byte, []byte) { return nil, bin }, status.InvalidConfig,
			"is not the index of a Megatron dataset"},
		{put(9, 2, 8), status.InvalidConfig, "version 2 of the index format"},
		{put(17, 9, 1), status.InvalidConfig, "the type code 9"},
		{put(17, 6, 1), status.InvalidConfig, "the ids are float64; write them as integers"},
		{put(18, 1<<63, 8), status.InvalidConfig, "9223372036854775808 sequences and"},
		{put(18, uint64(n+1), 8), status.InvalidConfig, "it is truncated or damaged"},
		{put(26, 1<<40, 8), status.InvalidConfig, "1099511627776 documents"},
		{func(idx, bin []byte) ([]byte, []byte) { return idx[:len(idx)-8], bin }, status.InvalidConfig,
			"it is truncated or damaged"},
		{func(idx, bin []byte) ([]byte, []byte) { return idx, bin[:len(bin)-3] }, status.InvalidConfig,
			"is not a multiple of the size of int32"},
		{func(idx, bin []byte) ([]byte, []byte) { return idx, bin[:len(bin)-4] }, status.InvalidConfig,
			"is not in x.bin"},
		{func(idx, bin []byte) ([]byte, []byte) { return idx, append(bin, 0, 0, 0, 0) }, status.InvalidConfig,
			"has data after the last sequence"},
		{func(idx, bin []byte) ([]byte, []byte) { return idx, nil }, status.InvalidConfig, "is not in x.bin"},
		{put(lengths+8, 1<<32-1, 4), status.InvalidConfig, "sequence 2 has -1 tokens"},
		{put(lengths+8, 1, 4), status.InvalidConfig, "only adjacent sequences are supported"},
		{put(begins, 4, 8), status.InvalidConfig, "sequence 0 begins at byte 4"},
		{put(begins+8*(n-1), 1<<62, 8), status.InvalidConfig, "only adjacent sequences are supported"},
		{put(docs, 1, 8), status.InvalidConfig, "the first document begins with sequence 1"},
		{put(docs+8*(m-1), uint64(n-1), 8), status.InvalidConfig, "and ends before sequence"},
		{func(idx, bin []byte) ([]byte, []byte) {
			copy(idx[docs+8*(m-2):], idx[docs+8*(m-3):docs+8*(m-2)])
			return put(docs+8*(m-1), binary.LittleEndian.Uint64(idx[docs+8*(m-2):]), 8)(idx, bin)
		},
			status.InvalidConfig, "the list of documents ends with sequence"},
		{func(idx, bin []byte) ([]byte, []byte) {
			modes := make([]byte, n)
			modes[n-1] = 1
			return append(idx, modes...), bin
		},
			status.InvalidConfig, "has the mode 1, and only text (mode 0) is supported"},
		{put(docs+8*5, 1<<63, 8), status.InvalidConfig, "the file is damaged"},
		{put(docs+8*5, uint64(n), 8), status.InvalidConfig, "document 5 begins with sequence"},
		{func(idx, bin []byte) ([]byte, []byte) {
			binary.LittleEndian.PutUint32(bin[len(bin)-4:], 70000)
			return idx, bin
		},
			status.InvalidConfig, "token id 70000 is outside the model's vocabulary of 60000"},
		{func(idx, bin []byte) ([]byte, []byte) { binary.LittleEndian.PutUint32(bin, 1<<31); return idx, bin },
			status.InvalidConfig, "(document 0), position 0: token id -2147483648"},
	} {
		path := copyMegatron(t, dir, "int32", "x", c.change)
		for _, block := range []int64{64, 0} {
			for _, ranks := range []int{1, 4} {
				onRanks(t, ranks, func(com comm.Comm) {
					_, err := Open(config(16, path), EvalConfig{}, Options{Vocab: 60000, Comm: com, block: block})
					if status.Of(err) != c.code || !strings.Contains(err.Error(), c.want) ||
						!strings.Contains(err.Error(), filepath.Join(dir, "x.")) {
						t.Errorf("case %d, blocks of %d, %d ranks: %v, want %q", i, block, ranks, err, c.want)
					}
				})
			}
		}
	}
	for path, want := range map[string]string{
		filepath.Join(megatronGoldens, "float32.bin"): "the ids are float32; write them as integers",
		filepath.Join(megatronGoldens, "none.bin"):    "have no text and no tokens",
		file(t, dir, "alone.bin", "ab"):               "a Megatron dataset needs both files, alone.bin and alone.idx",
	} {
		if _, err := Open(config(16, path), EvalConfig{}, Options{Vocab: 60000}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	// The error has the position of an id in its document, for any blocks.
	path := copyMegatron(t, dir, "one", "long", func(idx, bin []byte) ([]byte, []byte) { return idx, bin })
	for _, block := range []int64{64, 0} {
		if _, err := Open(config(16, path), EvalConfig{}, Options{Vocab: 10, block: block}); err == nil ||
			!strings.HasPrefix(err.Error(), path+" (document 0), position 5: token id 10") {
			t.Error(err)
		}
	}
}

// FuzzMegatron opens any bytes as a dataset. It is refused, or all of its sequences can be read.
func FuzzMegatron(f *testing.F) {
	for _, name := range []string{"one", "none"} {
		idx, err := os.ReadFile(filepath.Join(megatronGoldens, name+".idx"))
		if err != nil {
			f.Fatal(err)
		}
		bin, err := os.ReadFile(filepath.Join(megatronGoldens, name+".bin"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(idx, bin, true)
		f.Add(idx, bin, false)
	}
	// Two documents of two sequences each, one of them empty.
	idx := []byte(idxMagic)
	idx = append(binary.LittleEndian.AppendUint64(idx, 1), 1)
	for _, v := range []uint64{4, 3} {
		idx = binary.LittleEndian.AppendUint64(idx, v)
	}
	for _, v := range []uint32{90, 0, 5, 6} {
		idx = binary.LittleEndian.AppendUint32(idx, v)
	}
	for _, v := range []uint64{0, 90, 90, 95, 0, 2, 4} {
		idx = binary.LittleEndian.AppendUint64(idx, v)
	}
	f.Add(idx, []byte(strings.Repeat("a", 101)), true)
	f.Fuzz(func(t *testing.T, idx, bin []byte, pack bool) {
		dir := t.TempDir()
		file(t, dir, "x.idx", string(idx))
		d := config(7, file(t, dir, "x.bin", string(bin)))
		d.Pack = pack
		data, err := Open(d, EvalConfig{}, Options{Vocab: 1 << 40, block: 64, cache: 64})
		if err != nil {
			if status.Of(err) != status.InvalidConfig || !strings.HasPrefix(err.Error(), filepath.Join(dir, "x.")) &&
				!strings.Contains(err.Error(), "have no text and no tokens") {
				t.Fatal(err)
			}
			return
		}
		defer data.Close()
		n := int64(0)
		for r := range data.Train().Sequences() {
			m, err := data.Train().Range(r, r+1, nil)
			if err != nil || len(m.IDs) == 0 || m.Valid != int64(len(m.IDs)-len(m.CuSeqlens)+1) {
				t.Fatal(m, err)
			}
			n += int64(len(m.IDs))
		}
		if n != data.Train().Tokens() {
			t.Fatal(n, data.Train())
		}
	})
}
