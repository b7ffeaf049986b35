package data

import (
	"bytes"
	"compress/gzip"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"

	"ulysses/data/tokenizer"
	"ulysses/internal/status"
)

// The same records in .jsonl, .gz, .zst and .parquet files, which pyarrow and zstandard wrote, give
// the same sequences.
func TestExpandedFiles(t *testing.T) {
	tok, err := tokenizer.Open(chatGoldens + "qwen2.json")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	text, err := os.ReadFile(chatGoldens + "rows.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	upper := file(t, dir, "ROWS.JSONL.GZ", string(text))
	var first []MicroBatch
	parquet, err := os.ReadFile(chatGoldens + "rows.parquet")
	if err != nil {
		t.Fatal(err)
	}
	named := file(t, dir, "rows.gz.parquet", string(parquet)) // the rows of a Parquet file are not compressed
	for _, path := range []string{chatGoldens + "rows.jsonl", chatGoldens + "rows.jsonl.gz",
		chatGoldens + "rows.jsonl.zst", chatGoldens + "rows.parquet", upper, named} {
		c := config(64, path)
		c.ChatTemplate = filepath.Join(chatGoldens, "templates", "qwen3.jinja")
		data, err := Open(c, EvalConfig{}, Options{Vocab: tok.Size(), Tokenizer: tok, block: 1000, Workers: 2})
		if err != nil {
			t.Fatal(err)
		}
		got := whole(t, data.Train())
		if err := data.Close(); err != nil {
			t.Error(err)
		}
		if first == nil {
			first = got
		} else if !reflect.DeepEqual(got, first) {
			t.Errorf("%s gives other sequences than rows.jsonl", path)
		}
	}
	if len(first) < 20 {
		t.Errorf("%d sequences", len(first))
	}
}

// Text files may be compressed. Damaged files, and files that nothing can be read from, are refused
// by name; a wrong row of a Parquet file has its number as the line.
func TestExpandedFaults(t *testing.T) {
	dir := t.TempDir()
	read := func(name string) string {
		text, err := os.ReadFile(chatGoldens + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	gz, zst, parquet := read("rows.jsonl.gz"), read("rows.jsonl.zst"), read("rows.parquet")
	broken := []byte(parquet)
	for i := 100; i < len(broken)-2000; i += 7 {
		broken[i] ^= 0x55
	}
	var long bytes.Buffer // as of zstd --long=29
	w, err := zstd.NewWriter(&long, zstd.WithWindowSize(1<<29), zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write([]byte(`{"text": "x"}`))
	if err = errors.Join(err, w.Flush(), w.Close()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		code status.Code
		want string
	}{
		{file(t, dir, "long.jsonl.zst", long.String()), status.Unsupported,
			"long.jsonl.zst: zstd: the window has more than 256 MiB; compress the file again with --long=28 or less"},
		{file(t, dir, "cut.jsonl.gz", gz[:len(gz)/2]), status.IO, "cut.jsonl.gz: the file cannot be expanded"},
		{file(t, dir, "cut.jsonl.zst", zst[:len(zst)-9]), status.IO, "cut.jsonl.zst: the file cannot be expanded"},
		{file(t, dir, "more.jsonl.gz", gz+"\x00\x00more"), status.IO,
			"more.jsonl.gz: the file cannot be expanded: gzip"},
		{file(t, dir, "text.jsonl.gz", `{"text": "x"}`), status.IO, "text.jsonl.gz: the file cannot be expanded: gzip"},
		{file(t, dir, "text.parquet", `{"text": "x"}`), status.IO, "text.parquet: the file cannot be expanded"},
		{file(t, dir, "broken.parquet", string(broken)), status.IO, "broken.parquet: the file cannot be expanded"},
		{file(t, dir, "x.bin.gz", gz), status.InvalidConfig,
			`a compressed file of the extension ".bin" is not supported`},
		{file(t, dir, "rows.parquet", parquet), status.InvalidConfig, "rows.parquet:1: there is no chat template"},
	} {
		data, err := Open(config(64, c.path), EvalConfig{}, Options{Vocab: 1000})
		if err == nil {
			data.Close()
			t.Errorf("%s: no error; want %s", c.path, c.want)
		} else if status.Of(err) != c.code || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v (%v); want %s", c.path, err, status.Of(err), c.want)
		}
	}
	d := config(64, file(t, dir, "columns.parquet", parquet))
	d.TextField, d.Format = "body", "text"
	if _, err := Open(d, EvalConfig{}, Options{Vocab: 1000}); err == nil ||
		!strings.Contains(err.Error(), `columns.parquet:1: there is no field "body"`) {
		t.Error(err)
	}
}

// data.text_field may be a field of another kind of record, which a Parquet file is searched for as
// well.
func TestTextFieldOfAnotherKind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.parquet")
	if err := parquet.WriteFile(path, []struct {
		Prompt string `parquet:"prompt"`
	}{{"abc"}, {"de"}}); err != nil {
		t.Fatal(err)
	}
	c := config(64, path)
	c.TextField, c.Format = "prompt", "text"
	if got := whole(t, open(t, c, EvalConfig{}, 256).Train()); len(got) != 1 ||
		!slices.Equal(got[0].IDs, []int32{'a', 'b', 'c', 'd', 'e'}) {
		t.Errorf("%v", got)
	}
}

// A compressed .txt file is one document, as an expanded one is, also if it has several members and
// zeros after them.
func TestCompressedText(t *testing.T) {
	dir := t.TempDir()
	text := strings.Repeat("A line of text.\n", 500)
	var b bytes.Buffer
	for _, part := range []string{text[:1000], text[1000:]} {
		w := gzip.NewWriter(&b)
		if _, err := w.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		b.Write(make([]byte, 700))
	}
	plain := open(t, config(300, file(t, dir, "a.txt", text)), EvalConfig{}, 256).Train()
	packed := open(t, config(300, file(t, dir, "a.txt.gz", b.String())), EvalConfig{}, 256).Train()
	if !reflect.DeepEqual(whole(t, packed), whole(t, plain)) || packed.Documents() != 1 {
		t.Error("other sequences")
	}
}
