package data

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/data/tokenizer"
	"ulysses/internal/input"
	"ulysses/internal/status"
)

// The tokens of a text equal the tokens of the whole document and the EOS id, for any size of the
// blocks. The tokenizers split text into words (qwen2, llama3), mark the beginning of a text, merge
// over newlines (gemma), or encode a text as one word (llama2).
func TestTokenizers(t *testing.T) {
	dir := t.TempDir()
	book, err := os.ReadFile("../examples/data/opticks.txt")
	if err != nil {
		t.Fatal(err)
	}
	texts := []string{string(book[3000:9000]), "", "One.\n\n\nTwo.\n", string(book[20000:20700])}
	var lines strings.Builder
	for _, s := range texts {
		line, _ := json.Marshal(map[string]string{"text": s})
		fmt.Fprintf(&lines, "%s\n", line)
	}
	paths := []string{file(t, dir, "a.txt", input.BOM+texts[0]), file(t, dir, "b.jsonl", input.BOM+lines.String()),
		file(t, dir, "c.txt", strings.Repeat("x", 999)), file(t, dir, "d.txt", input.BOM)}
	texts = append(append([]string{texts[0]}, texts...), strings.Repeat("x", 999))
	for _, name := range []string{"qwen2", "llama2", "gemma", "llama3"} {
		folder := filepath.Join(dir, name)
		b, err := os.ReadFile("../testdata/goldens/tokenizers/" + name + "/tokenizer.json")
		if err == nil {
			err = os.Mkdir(folder, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
		file(t, folder, "tokenizer.json", input.BOM+string(b))
		file(t, folder, "config.json", input.BOM+`{"eos_token_id": 7}`)
		tok, err := tokenizer.Open(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, eos := range []bool{true, false} {
			var docs [][]int32
			for _, s := range texts {
				ids, err := tok.Encode(nil, []byte(s))
				if err != nil {
					t.Fatal(err)
				}
				if len(ids) == 0 {
					continue
				}
				if eos {
					ids = append(ids, 7)
				}
				docs = append(docs, ids)
			}
			for _, pack := range []bool{true, false} {
				want := plainSequences(docs, 100, pack)
				for _, block := range []int64{100, 1000, 0} {
					for _, ranks := range []int{1, 3} {
						onRanks(t, ranks, func(c comm.Comm) {
							d := config(100, paths...)
							d.Pack, d.AddEOS, d.Tokenizer = pack, eos, folder
							data,
								err := Open(d, EvalConfig{},
								Options{Vocab: tok.Size(), Comm: c, Workers: 2, block: block, cache: 1000})
							if err != nil {
								t.Error(err)
								return
							}
							defer data.Close()
							if got := whole(t, data.Train()); !reflect.DeepEqual(got, want) {
								t.Errorf("%s, EOS %v, pack %v, blocks of %d: the sequences differ", name, eos,
									pack, block)
							}
							n := len(data.train.sources[0].(*documentRange).blocks)
							if divisible := name != "llama2"; block == 1000 && divisible != (n >= 6) {
								t.Errorf("%s: the files have %d blocks", name, n)
							}
							if s := data.Tokenizer(); !strings.Contains(s, tok.Digest()[:16]) ||
								strings.Contains(s, "end mark 7") != eos {
								t.Error(s)
							}
						})
					}
				}
			}
		}
		d := config(100, paths...)
		d.Tokenizer = folder
		if _, err := Open(d, EvalConfig{}, Options{Vocab: tok.Words() - 1}); status.Of(err) != status.InvalidConfig ||
			!strings.Contains(err.Error(), fmt.Sprintf("the tokenizer has %d ids", tok.Size())) {
			t.Error(err)
		}
	}
	d := config(100, paths...)
	d.Tokenizer = filepath.Join(dir, "nowhere")
	if _, err := Open(d, EvalConfig{}, Options{Vocab: 9}); status.Of(err) != status.IO ||
		!strings.Contains(err.Error(), "data.tokenizer: there is no "+d.Tokenizer) {
		t.Error(err)
	}
}

// A line that is longer than a block, anywhere in a .txt file, leaves the rest of the file in
// blocks.
func TestLongLineOfText(t *testing.T) {
	const folder = "../testdata/goldens/tokenizers/qwen2"
	tok, err := tokenizer.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Repeat("A line of the text of a book.\n", 300)
	for _, at := range []int{0, 3000, len(lines)} {
		text := lines[:at] + strings.Repeat("A long paragraph. ", 1000) + "\n" + lines[at:]
		ids, err := tok.Encode(nil, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		d := config(100, file(t, t.TempDir(), "a.txt", text))
		d.Tokenizer = folder
		data, err := Open(d, EvalConfig{}, Options{Vocab: tok.Size(), block: 1000})
		if err != nil {
			t.Fatal(err)
		}
		if got := whole(t, data.Train()); !reflect.DeepEqual(got, plainSequences([][]int32{ids}, 100, true)) {
			t.Errorf("long line at %d: the sequences differ", at)
		}
		if n := len(data.train.sources[0].(*documentRange).blocks); n < 7 {
			t.Errorf("long line at %d: the file has %d blocks", at, n)
		}
		data.Close()
	}
}

// Added tokens may be outside of the model's vocabulary, as the token of an image in Gemma 3's text
// models. A text that has one is refused, with its file and line.
func TestAddedTokensOutsideOfTheModel(t *testing.T) {
	dir := t.TempDir()
	file(t, dir, "tokenizer.json",
		`{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": [
		{"id": 2, "content": "<end>", "special": true}, {"id": 3, "content": "<image>", "special": true}]}`)
	for text, want := range map[string]string{
		`{"text": "abba<end>"}`:   "",
		`{"text": "abba<image>"}`: "a.jsonl:2 (document 1): data.tokenizer: the added token with the id 3 is outside the model's vocabulary of 3; remove it from the text",
	} {
		d := config(4, file(t, dir, "a.jsonl", `{"text": "aaaaa"}`+"\n"+text+"\n"))
		d.Tokenizer = dir
		data, err := Open(d, EvalConfig{}, Options{Vocab: 3})
		if want == "" && err != nil || want != "" &&
			(status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
		if err == nil {
			data.Close()
		}
	}
	d := config(4, file(t, dir, "a.txt", "aaaaa"))
	d.Tokenizer = dir
	if _, err := Open(d, EvalConfig{}, Options{Vocab: 1}); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), "the tokenizer has 4 ids, the model's vocab_size is 1") {
		t.Error(err)
	}
}

// Documents of text, and prompts that are strings, begin with the marks with which the tokenizer
// begins a text, unless they have them. They are no targets. Conversations have the marks of
// their template.
func TestBeginMarks(t *testing.T) {
	dir := t.TempDir()
	file(t, dir, "tokenizer.json",
		`{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": [{"id": 2, "content": "<s>", "special": true}, {"id": 3, "content": "</s>", "special": true},
		{"id": 4, "content": "\n"}, {"id": 5, "content": "<cut>"}],
		"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
		"special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}}]}}`)
	file(t, dir, "tokenizer_config.json",
		`{"eos_token": "</s>", "chat_template": "{% for m in messages %}<s>{{ m.content }}{% endfor %}"}`)
	long := strings.Repeat("ab<cut>ba\n", 300)
	ids := []int32{2}
	for range 300 {
		ids = append(ids, 0, 1, 5, 1, 0, 4)
	}
	for _, x := range []struct {
		name, text string
		begin      bool
		want       [][]int32 // ids of the documents
		targets    []int32   // of the first document; nil = its ids from the second on
	}{
		{"a.jsonl", `{"text": "ab"}` + "\n" + `{"text": "<s>ba"}` + "\n" + `{"text": ""}` + "\n" +
			`{"prompt": "a", "completion": "b"}`, true, [][]int32{{2, 0, 1, 3}, {2, 1, 0, 3}, {2, 0, 1, 3}}, nil},
		{"a.jsonl", `{"text": "ab"}` + "\n" + `{"prompt": "<s>a", "completion": "b"}`, false,
			[][]int32{{0, 1, 3}, {2, 0, 1, 3}}, nil},
		{"a.jsonl", `{"prompt": "aa", "completion": "b"}`, true, [][]int32{{2, 0, 0, 1, 3}},
			[]int32{Ignore, Ignore, 1, 3, Ignore}},
		// A completion that has the end mark does not get another.
		{"a.jsonl", `{"prompt": "aa", "completion": "b</s>"}`, true, [][]int32{{2, 0, 0, 1, 3}},
			[]int32{Ignore, Ignore, 1, 3, Ignore}},
		{"a.jsonl", `{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`, true,
			[][]int32{{2, 0, 2, 1}}, []int32{Ignore, Ignore, 1, Ignore}},
		{"a.jsonl", `{"input_ids": [0, 1]}`, true, [][]int32{{0, 1}}, nil},
		{"a.txt", "abba", true, [][]int32{{2, 0, 1, 1, 0, 3}}, nil},
		{"a.txt", long, true, [][]int32{append(ids, 3)}, nil},
	} {
		d := config(10000, file(t, dir, x.name, x.text))
		d.Tokenizer, d.Pack, d.AddBOS, d.AddEOS, d.TrainOn = dir, false, x.begin, true, "assistant"
		data, err := Open(d, EvalConfig{}, Options{Vocab: 6, block: 100})
		if err != nil {
			t.Errorf("%s: %v", x.text, err)
			continue
		}
		var got [][]int32
		all := whole(t, data.Train())
		for _, m := range all {
			got = append(got, m.IDs)
		}
		targets := x.targets
		if targets == nil {
			targets = append(slices.Clone(x.want[0][1:]), Ignore)
		}
		if !reflect.DeepEqual(got, x.want) || !slices.Equal(all[0].Targets, targets) {
			t.Errorf("%.100s: %.100v, targets %.100v, want %.100v", x.text, got, all[0].Targets, x.want)
		}
		if has := strings.Contains(data.Tokenizer(), "begin marks [2]"); has != x.begin {
			t.Errorf("%.100s: %s", x.text, data.Tokenizer())
		}
		if n := len(data.train.sources[0].(*documentRange).blocks); (n > 1) != (len(x.text) > 1000) {
			t.Errorf("%.100s: %d blocks", x.text, n)
		}
		data.Close()
	}
	d := config(8, file(t, dir, "a.txt", "ab"))
	d.Tokenizer, d.AddBOS = dir, true
	if _, err := Open(d, EvalConfig{}, Options{Vocab: 2}); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(),
			"the ids [2] that begin a document are outside the model's vocabulary of 2; set data.add_bos = false") {
		t.Error(err)
	}
}

// testTokenizer encodes each byte as a token, and each run of newlines as one token that depends on
// its length.
type testTokenizer struct {
	fail string // Encode returns an error for texts that contain fail; "" = never
	none bool   // Encode returns no tokens
}

func (f testTokenizer) Encode(dst []int32, text []byte) ([]int32, error) {
	if f.fail != "" && bytes.Contains(text, []byte(f.fail)) {
		return dst, status.Errorf(status.Unsupported, "no tokens for %q", f.fail)
	}
	for i := 0; i < len(text) && !f.none; {
		n := 1
		for text[i] == '\n' && i+n < len(text) && text[i+n] == '\n' {
			n++
		}
		dst, i = append(dst, int32(text[i])+int32(n)-1), i+n
	}
	return dst, nil
}
func (f testTokenizer) EOS() (int32, bool) { return 300, true }
func (f testTokenizer) Size() int64        { return 301 }
func (f testTokenizer) Words() int64       { return 301 }
func (f testTokenizer) Begin() []int32     { return nil }
func (f testTokenizer) Digest() string     { return "testTokenizer" }

func TestTokenizerFaults(t *testing.T) {
	dir := t.TempDir()
	txt, lines := file(t, dir, "a.txt", "good"),
		file(t, dir, "a.jsonl", "{\"text\":\"good\"}\n\n{\"text\":\"so bad\"}\n")
	latin := file(t, dir, "latin.txt", "caf\xe9 good")
	for _, c := range []struct {
		path  string
		tok   testTokenizer
		vocab int64
		want  string
	}{
		{lines, testTokenizer{fail: "bad"}, 301, lines + ":3 (document 1): data.tokenizer: no tokens for \"bad\""},
		{txt, testTokenizer{fail: "oo"}, 301, txt + " (document 0): data.tokenizer: no tokens for \"oo\""},
		{latin, testTokenizer{}, 301,
			latin + " (document 0), byte 3: the text is not UTF-8; convert the file to UTF-8"},
		{txt, testTokenizer{none: true}, 301, "no text and no tokens"},
		{txt, testTokenizer{}, 300, "the tokenizer has 301 ids"},
	} {
		d := config(9, c.path)
		d.AddEOS = true
		if _, err := Open(d, EvalConfig{}, Options{Vocab: c.vocab, Tokenizer: c.tok}); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

// endsInD is a tokenizer whose end mark is the token of the letter d.
type endsInD struct{ testTokenizer }

func (endsInD) EOS() (int32, bool) { return 'd', true }

// The end mark is added to documents that do not end with it.
func TestEndMark(t *testing.T) {
	dir := t.TempDir()
	d := config(9, file(t, dir, "a.txt", "cod"), file(t, dir, "b.txt", "code"),
		file(t, dir, "c.jsonl", "{\"text\":\"add\"}\n{\"text\":\"b\"}\n{\"text\":\"b\"}"))
	for _, c := range []struct {
		add  bool
		want string
	}{{true, "cod coded add bd bd"}, {false, "cod code add b b"}} {
		d.AddEOS, d.Pack = c.add, false
		data, err := Open(d, EvalConfig{}, Options{Vocab: 301, Tokenizer: endsInD{}})
		if err != nil {
			t.Fatal(err)
		}
		defer data.Close()
		var got []string
		for _, s := range whole(t, data.Train()) {
			var b []byte
			for _, id := range s.IDs {
				b = append(b, byte(id))
			}
			got = append(got, string(b))
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("add_eos %v: %s; want %s", c.add, s, c.want)
		}
	}
}
