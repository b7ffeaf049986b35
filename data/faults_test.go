package data

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/tensorfile"
)

func TestDataFaults(t *testing.T) {
	dir := t.TempDir()
	toks := func(name string, items map[string][]int64) string {
		return tensorfile.WriteTokens(t, filepath.Join(dir, name), 2, 3, items)
	}
	ids := []int64{1, 2, 3, 4, 5, 6}
	floats := filepath.Join(dir, "floats.safetensors")
	odd := filepath.Join(dir, "odd.safetensors")
	flat := filepath.Join(dir, "flat.safetensors")
	for path, items := range map[string][]tensor.Item{
		floats: {{Name: "input_ids", Tensor: tensor.OfFloat32(make([]float32, 6), 2, 3)}},
		odd: {{Name: "input_ids", Tensor: tensor.OfInt32(make([]int32, 6), 2, 3)},
			{Name: "labels", Tensor: tensor.OfInt32(make([]int32, 6), 3, 2)}},
		flat: {{Name: "input_ids", Tensor: tensor.OfInt32(make([]int32, 6), 6)}},
	} {
		if err := tensor.WriteSafetensors(path, nil, items); err != nil {
			t.Fatal(err)
		}
	}
	mask := filepath.Join(dir, "mask.safetensors")
	if err := tensor.WriteSafetensors(mask, nil,
		[]tensor.Item{{Name: "attention_mask", Tensor: tensor.OfInt32(make([]int32, 6), 2, 3)}}); err != nil {
		t.Fatal(err)
	}
	none := filepath.Join(dir, "none.safetensors")
	if err := tensor.WriteSafetensors(none, nil,
		[]tensor.Item{{Name: "input_ids", Tensor: tensor.OfInt32(nil, 0, 3)}}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path  string
		vocab int64
		code  status.Code
		want  []string
	}{
		{filepath.Join(dir, "no.txt"), 256, status.IO, []string{"data.path", "no.txt: no such file"}},
		{filepath.Join(dir, "*.nope"), 256, status.IO, []string{"data.path: no file matches", "*.nope"}},
		{filepath.Join(dir, `no\[1].txt`), 256, status.IO, []string{"data.path", "no[1].txt: no such file"}},
		{filepath.Join(dir, "[.txt"), 256, status.InvalidConfig, []string{"is not a valid pattern"}},
		{filepath.Join(dir, "**", "*.txt"), 256, status.InvalidConfig,
			[]string{`data.path: "`, "** is not supported; write a pattern for each depth, such as */*.txt"}},
		{dir, 256, status.IO, []string{"is a folder"}},
		{file(t, dir, "x.csv", "a"), 256, status.InvalidConfig, []string{"x.csv", `".csv"`, ".jsonl"}},
		{file(t, dir, "empty.txt", ""), 256, status.InvalidConfig, []string{"empty.txt", "have no text and no tokens"}},
		{file(t, dir, "empty.jsonl", "\n{\"text\":\"\"}\n"), 256, status.InvalidConfig,
			[]string{"empty.jsonl", "have no text and no tokens"}},
		{file(t, dir, "high.txt", "ab\x80"), 128, status.InvalidConfig,
			[]string{"high.txt (document 0), position 2: token id 128 is outside the model's vocabulary of 128"}},
		{file(t, dir, "high.jsonl", "{\"text\":\"ok\"}\n{\"text\":\"o\u00fc\"}\n"), 128, status.InvalidConfig,
			[]string{"high.jsonl:2 (document 1), position 1: token id 195"}},
		{file(t, dir, "bad.jsonl", "{\"text\":\"ok\"}\n{\"text\":\n"), 256, status.InvalidConfig,
			[]string{"bad.jsonl:2: the line is not JSON at byte",
				"; write each document as an object on a line of its own"}},
		{file(t, dir, "list.jsonl", "[1]\n"), 256, status.InvalidConfig,
			[]string{"list.jsonl:1: the line is not a JSON object"}},
		{file(t, dir, "field.jsonl", "{\"body\":\"x\",\"id\":3}\n"), 256, status.InvalidConfig,
			[]string{`field.jsonl:1: there is no field "text" among "body", "id"; set data.text_field`}},
		{dir + "/data\train.txt", 256, status.IO, []string{`data\train.txt": no such file; write / between folders`}},
		{dir + `/data\*.txt`, 256, status.IO, []string{`data*.txt: no such file; in the pattern `,
			`data\*.txt, a \ makes the next character a plain one`}},
		{file(t, dir, "alpaca.jsonl", "{\"instruction\":\"x\",\"output\":\"y\"}\n"), 256, status.InvalidConfig,
			[]string{
				`alpaca.jsonl:1: there is no field "text" among "instruction", "output"; set data.text_field, or write each line with prompt and completion, or with messages (docs/data.md)`}},
		{file(t, dir, "nothing.jsonl", "{\"text\":\"x\"}\n{}\n"), 256, status.InvalidConfig,
			[]string{`nothing.jsonl:2: the record is empty; write field "text", or remove the line`}},
		{file(t, dir, "type.jsonl", "{\"text\":3}\n"), 256, status.InvalidConfig,
			[]string{`type.jsonl:1: field "text" is not a string`}},
		{file(t, dir, "latin.jsonl", "{\"text\":\"ok\",\"author\":\"J\xf6rg\"}\n{\"text\":\"J\xf6rg\"}\n"), 256,
			status.InvalidConfig, []string{`latin.jsonl:2: field "text" is not UTF-8`}},
		{file(t, dir, "null.jsonl", "{\"text\":null}\n"), 256, status.InvalidConfig,
			[]string{`null.jsonl:1: field "text" is not a string`}},
		{floats, 256, status.InvalidConfig,
			[]string{"floats.safetensors: input_ids has the type F32; convert it to I32 or I64"}},
		{odd, 256, status.InvalidConfig, []string{"labels I32[3, 2] and input_ids I32[2, 3] have different shapes"}},
		{flat, 256, status.InvalidConfig, []string{"1 dimensions"}},
		{mask, 256, status.Unsupported, []string{`"attention_mask"`}},
		{none, 256, status.InvalidConfig, []string{"have no text and no tokens"}},
		{toks("labels.safetensors", map[string][]int64{"labels": ids}), 256, status.InvalidConfig,
			[]string{"labels.safetensors: there is no tensor input_ids"}},
		{toks("id.safetensors", map[string][]int64{"input_ids": ids}), 6, status.InvalidConfig,
			[]string{
				"id.safetensors: input_ids, sequence 1, position 2: token id 6 is outside the model's vocabulary of 6"}},
		{toks("neg.safetensors", map[string][]int64{"input_ids": {0, -1, 0, 0, 0, 0}}), 6, status.InvalidConfig,
			[]string{"sequence 0, position 1: token id -1"}},
		{toks("label.safetensors", map[string][]int64{"input_ids": ids, "labels": {0, 0, 0, -100, -99, 0}}), 9,
			status.InvalidConfig, []string{"labels (-100 = ignored), sequence 1, position 1: token id -99"}},
		{toks("pos.safetensors", map[string][]int64{"input_ids": ids, "position_ids": {0, 1, -2, 0, 1, 2}}), 9,
			status.InvalidConfig, []string{"position_ids, sequence 0, position 2: -2 is out of range"}},
		{file(t, dir, "cut.safetensors", "\xff\x00"), 9, status.InvalidConfig,
			[]string{"cut.safetensors: not a usable safetensors file"}},
	} {
		_, err := Open(config(3, c.path), EvalConfig{}, Options{Vocab: c.vocab, Seed: 1})
		if status.Of(err) != c.code || err == nil {
			t.Errorf("%s: code %v, want %v: %v", c.path, status.Of(err), c.code, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v\nwant %q", c.path, err, w)
			}
		}
	}
	wide := toks("wide.safetensors", map[string][]int64{"input_ids": ids})
	if _, err := Open(config(4, wide), EvalConfig{}, Options{Vocab: 9, Seed: 1}); err == nil ||
		!strings.Contains(err.Error(), "have 3 tokens, data.sequence is 4; set data.sequence = 3") {
		t.Error(err)
	}
	for _, single := range []string{tensorfile.WriteTokens(t, filepath.Join(dir, "single.safetensors"), 1, 3,
		map[string][]int64{"input_ids": {1, 2, 3}}), file(t, dir, "byte.txt", "x")} {
		if _, err := Open(config(3, single), EvalConfig{Split: 0.5}, Options{Vocab: 256, Seed: 1}); err == nil ||
			!strings.Contains(err.Error(), "eval.split") {
			t.Error(err)
		}
	}
	if _, err := Open(config(3, wide), EvalConfig{Path: []string{filepath.Join(dir, "gone.txt")}},
		Options{Vocab: 9, Seed: 1}); err == nil || !strings.Contains(err.Error(), "eval.path") {
		t.Error(err)
	}
}

// An id outside the vocabulary is refused also if the file changed after it was opened.
func TestTokenFileChanged(t *testing.T) {
	path := tensorfile.WriteTokens(t, filepath.Join(t.TempDir(), "t.safetensors"), 1, 2,
		map[string][]int64{"input_ids": {1, 2}})
	s := open(t, config(2, path), EvalConfig{}, 3).Train()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, _ := f.Stat()
	if _, err := f.WriteAt(binary.LittleEndian.AppendUint32(nil, 77), info.Size()-4); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Range(0, 1, nil); err == nil || !strings.Contains(err.Error(), "position 1: token id 77") {
		t.Error(err)
	}
}

func TestLongLine(t *testing.T) {
	line := `{"text":"` + strings.Repeat("x", 1000) + `"}` + "\n"
	path := file(t, t.TempDir(), "a.jsonl", line+line)
	for _, unit := range []int64{7, 1000, 1010, 1 << 16} {
		for limit, want := range map[int64]string{int64(len(line)): "",
			int64(len(line)) - 1: "a.jsonl:1: the line is longer than"} {
			o := opener{Options: Options{Vocab: 256}, config: config(3)}
			found, _, err := o.scan([]format{
				&jsonl{path, int64(2 * len(line)), unit, "auto", "data.format", "text", limit}})
			if want != "" && (err == nil || !strings.Contains(err.Error(), want)) || want == "" && err != nil {
				t.Fatal(unit, limit, err)
			}
			if n := newIndex(nil, found, nil, 3, nil).docs; want == "" && n != 2 {
				t.Fatal(unit, n)
			}
		}
	}
}

// The error for a line that is longer than the limit names the file and the line. Only a small part
// of the line is read into memory.
func TestLineWithoutEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	if err := os.WriteFile(path, []byte("{\"text\":\"a\"}\n{\"text\":\""), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 4<<30); err != nil { // a sparse file
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := Open(config(8, path), EvalConfig{}, Options{Vocab: 256, Seed: 7})
	runtime.ReadMemStats(&after)
	if status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), path+":2: the line is longer than 33554432 bytes") ||
		!strings.Contains(err.Error(), ".txt file of its own") {
		t.Error(err)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 400<<20 {
		t.Errorf("%d MiB were allocated", n>>20)
	}
}

// FuzzJSONL opens any bytes as a .jsonl file, with blocks of any size. The file is refused, or all
// of it can be read.
func FuzzJSONL(f *testing.F) {
	for _, s := range []string{"", "{}", "{\"text\":\"a\"}\n{\"text\":\"\\ud800\"}", "[", "{\"text\":\"a\"} x", "\x00",
		"{\"text\":{\"text\":\"\"}}", "{\"text\":\"" + strings.Repeat("é", 50) + "\"}\n\n"} {
		f.Add(s, int64(3), uint8(9), true)
	}
	f.Fuzz(func(t *testing.T, s string, sequence int64, block uint8, pack bool) {
		path := file(t, t.TempDir(), "a.jsonl", s)
		d := config(1+(sequence&0xff+0x100)&0xff, path)
		d.Pack = pack
		data, err := Open(d, EvalConfig{}, Options{Vocab: 256, Seed: 7, block: int64(block) + 1, cache: 64})
		whole, e := Open(d, EvalConfig{}, Options{Vocab: 256, Seed: 7})
		if fmt.Sprint(err) != fmt.Sprint(e) {
			t.Fatalf("in blocks of %d: %v, in one: %v", block+1, err, e)
		}
		if err != nil {
			if status.Of(err) != status.InvalidConfig || !strings.HasPrefix(err.Error(), path+":") &&
				!strings.Contains(err.Error(), "have no text and no tokens") {
				t.Fatal(err)
			}
			return
		}
		defer data.Close()
		defer whole.Close()
		set, n := data.Train(), int64(0)
		for r := range set.Sequences() {
			m, err := set.Range(r, r+1, nil)
			if err != nil || int64(len(m.IDs)) > d.Sequence || len(m.IDs) == 0 ||
				m.Valid != int64(len(m.IDs)-len(m.CuSeqlens)+1) {
				t.Fatal(m, err)
			}
			if want, err := whole.Train().Range(r, r+1, nil); err != nil || !reflect.DeepEqual(m, want) {
				t.Fatalf("in blocks of %d: %v, in one: %v, %v", block+1, m, want, err)
			}
			n += int64(len(m.IDs))
		}
		if n != set.Tokens() {
			t.Fatal(n, set.Tokens())
		}
	})
}
