package tokenizer

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// small returns the content of a valid tokenizer.json, which tests change.
func small() map[string]any {
	return map[string]any{
		"version": "1.0", "added_tokens": []any{map[string]any{"id": 4, "content": "<end>", "special": true}},
		"normalizer": nil, "pre_tokenizer": nil, "decoder": nil,
		"model": map[string]any{"type": "BPE", "unk_token": nil, "dropout": nil,
			"vocab": map[string]any{"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": []any{[]any{"a", "b"}}},
	}
}

func write(t *testing.T, dir, name string, x any) string {
	t.Helper()
	text, ok := x.(string)
	if !ok {
		b, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		text = string(b)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

type object = map[string]any

func split(regex string) object {
	return object{"type": "Split", "pattern": object{"Regex": regex}, "behavior": "Isolated", "invert": false}
}

// A file that cannot be processed as by the `tokenizers` package is refused when it is opened. The
// error names the component.
func TestRefusals(t *testing.T) {
	model := func(change func(object)) func(object) {
		return func(f object) { change(f["model"].(object)) }
	}
	put := func(key string, x any) func(object) { return func(f object) { f[key] = x } }
	cases := map[string]struct {
		change func(object)
		code   status.Code
		want   string
	}{
		"whole":     {func(object) {}, status.OK, ""},
		"WordPiece": {model(func(m object) { m["type"] = "WordPiece" }), status.Unsupported, `"WordPiece"`},
		"Unigram": {model(func(m object) { m["type"], m["vocab"] = "Unigram", []any{[]any{"a", -1.5}} }),
			status.Unsupported, `"Unigram"`},
		"dropout":   {model(func(m object) { m["dropout"] = 0.1 }), status.Unsupported, "model.dropout = 0.1"},
		"dropout 0": {model(func(m object) { m["dropout"] = 0 }), status.OK, ""},
		"merge unknown": {model(func(m object) { m["merges"] = []any{[]any{"a", "z"}} }), status.InvalidConfig,
			`merge 1 joins "a" and "z"`},
		"merge to none":  {model(func(m object) { m["merges"] = []any{"a c"} }), status.InvalidConfig, `makes "ac"`},
		"merge of three": {model(func(m object) { m["merges"] = []any{"a b c"} }), status.InvalidConfig, `"a b c"`},
		"negative id": {model(func(m object) { m["vocab"] = object{"a": -1, "b": 1, "ab": 2} }),
			status.InvalidConfig, `"a" has the id -1`},
		"version": {put("version", "2.0"), status.Unsupported, `version "2.0"`},
		"no JSON": {nil, status.InvalidConfig, "is not a tokenizer.json"},
		"Precompiled": {put("normalizer", object{"type": "Precompiled"}), status.Unsupported,
			`normalizer: "Precompiled"`},
		"Nmt inside": {
			put("normalizer",
				object{"type": "Sequence", "normalizers": []any{object{"type": "NFC"}, object{"type": "Nmt"}}}),
			status.Unsupported, `"Nmt"`},
		"Bert": {put("pre_tokenizer", object{"type": "BertPreTokenizer"}), status.Unsupported,
			`"BertPreTokenizer"`},
		"scheme": {
			put("pre_tokenizer", object{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "last"}),
			status.Unsupported, `"last"`},
		"scheme 2": {
			put("pre_tokenizer",
				object{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "add_prefix_space": false}),
			status.InvalidConfig, "contradicts"},
		"first, late": {func(f object) {
			f["normalizer"] = object{"type": "NFD"}
			f["pre_tokenizer"] = object{"type": "Sequence",
				"pretokenizers": []any{object{"type": "WhitespaceSplit"},
					object{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}}}
		}, status.Unsupported, "after WhitespaceSplit"},
		"behavior": {put("pre_tokenizer", object{"type": "Punctuation", "behavior": "Doubled"}), status.Unsupported,
			`"Doubled"`},
		"no pattern": {put("pre_tokenizer", object{"type": "Split", "behavior": "Isolated"}), status.InvalidConfig,
			"a pattern is neither"},
		"decoder": {put("decoder", object{"type": "WordPiece"}), status.Unsupported, `decoder: "WordPiece"`},
		"empty token": {func(f object) {
			f["normalizer"] = object{"type": "Strip", "strip_left": true}
			f["added_tokens"] = []any{object{"content": " ", "normalized": true}}
		}, status.Unsupported, `" "`},
		"same tokens": {func(f object) {
			f["normalizer"] = object{"type": "Lowercase"}
			f["added_tokens"] = []any{object{"content": "X", "normalized": true},
				object{"content": "x", "normalized": true}}
		}, status.InvalidConfig, `both "x"`},
	}
	for name, pattern := range map[string]string{
		`\b`: `a\b`, `back`: `(a)\1`, "named": "(?<n>a)", "&&": "[a&&b]", "nested": "[a[b]]", "posix": "[[:alpha:]]",
		"property": `\p{Nope}`, "folded": `(?i)\p{L}`,
		"ß": "(?i)ss", "behind": "(?<=a+)b", "x": "(?x) a", "empty loop": "(a*)*", "unfinished": "[a", "paren": "(a",
		"paren 2": "a)", "star": "*a", "braces": "a{3,2}", "range": "[b-a]",
	} {
		cases["pattern "+name] = struct {
			change func(object)
			code   status.Code
			want   string
		}{put("pre_tokenizer", split(pattern)), status.Unsupported, "the pattern "}
	}
	for name, c := range cases {
		var x any = "{"
		if c.change != nil {
			f := small()
			c.change(f)
			x = f
		}
		_, err := Open(write(t, t.TempDir(), "tokenizer.json", x))
		if status.Of(err) != c.code || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v (%v), wanted %v with %s", name, err, status.Of(err), c.code, c.want)
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); status.Of(err) != status.IO {
		t.Errorf("missing file: %v", err)
	}
}

// Encode returns an error for a text for which the file has no ids.
func TestEncodeErrors(t *testing.T) {
	f := small()
	f["model"].(object)["unk_token"] = "<unk>"
	tok := open(t, write(t, t.TempDir(), "tokenizer.json", f))
	if ids, err := tok.Encode(nil, []byte("abc")); err != nil || len(ids) != 2 {
		t.Error(ids, err)
	}
	if _, err := tok.Encode(nil, []byte("abz")); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), `"<unk>"`) {
		t.Error(err)
	}
	f = small()
	f["normalizer"] = object{"type": "Replace", "pattern": object{"Regex": "^"}, "content": "a"}
	tok = open(t, write(t, t.TempDir(), "tokenizer.json", f))
	if _, err := tok.Encode(nil, []byte("b")); status.Of(err) != status.Unsupported ||
		!strings.Contains(err.Error(), "empty match") {
		t.Error(err)
	}
}

// Tokens that transformers would add from tokenizer_config.json are refused if tokenizer.json does
// not have them.
func TestTokensOfConfig(t *testing.T) {
	for token, want := range map[string]string{"<end>": "", "ab": "",
		"<mine>": "added_tokens_decoder has \"<mine>\", and tokenizer.json does not; write both with AutoTokenizer"} {
		dir := t.TempDir()
		write(t, dir, "tokenizer_config.json",
			object{"added_tokens_decoder": object{"4": object{"content": "<end>"}, "7": object{"content": token}}})
		_, err := Open(write(t, dir, "tokenizer.json", small()))
		if want == "" && err != nil || want != "" &&
			(status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", token, err)
		}
	}
}

// The EOS token is the first that a file names, in the order of findEOS. A token that the tokenizer
// does not have is an error.
func TestEOS(t *testing.T) {
	type files = map[string]any
	for name, c := range map[string]struct {
		files files
		id    int32 // -1: none; -2: an error
	}{
		"nothing": {nil, -1},
		"token":   {files{"tokenizer_config.json": object{"eos_token": "<end>"}}, 4},
		"object": {
			files{"tokenizer_config.json": object{"eos_token": object{"content": "<end>", "lstrip": false}}}, 4},
		"of the model": {files{"tokenizer_config.json": object{"eos_token": "ab"}}, 2},
		"null, then map": {files{"tokenizer_config.json": object{"eos_token": nil},
			"special_tokens_map.json": object{"eos_token": "c"}}, 3},
		"id":   {files{"config.json": object{"eos_token_id": 3}}, 3},
		"list": {files{"config.json": object{"eos_token_id": []any{1, 4}}}, 1},
		"generation first": {files{"config.json": object{"eos_token_id": 3},
			"generation_config.json": object{"eos_token_id": []any{1}}}, 1},
		"token first": {files{"config.json": object{"eos_token_id": 3},
			"tokenizer_config.json": object{"eos_token": "<end>"}}, 4},
		"inside text":                  {files{"config.json": object{"text_config": object{"eos_token_id": 2}}}, 2},
		"empty list":                   {files{"config.json": object{"eos_token_id": []any{}}}, -1},
		"empty list, with white space": {files{"config.json": "{\"eos_token_id\": [\n  ]}"}, -1},
		"unknown token":                {files{"tokenizer_config.json": object{"eos_token": "<stop>"}}, -2},
		"id too large":                 {files{"config.json": object{"eos_token_id": 5}}, -2},
		"no number":                    {files{"config.json": object{"eos_token_id": "x"}}, -2},
		"broken file":                  {files{"config.json": "{"}, -2},
	} {
		dir := t.TempDir()
		write(t, dir, "tokenizer.json", small())
		for f, x := range c.files {
			write(t, dir, f, x)
		}
		tok, err := Open(dir)
		if c.id == -2 {
			if status.Of(err) != status.InvalidConfig {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if id, ok := tok.EOS(); ok != (c.id >= 0) || ok && id != c.id {
			t.Errorf("%s: %d, %v, not %d", name, id, ok, c.id)
		}
	}
}

// Size counts added tokens, Words does not, and the digest is that of the file.
func TestSizeAndDigest(t *testing.T) {
	a := open(t, write(t, t.TempDir(), "tokenizer.json", small()))
	if a.Size() != 5 || a.Words() != 4 || len(a.Digest()) != 64 {
		t.Error(a.Size(), a.Words(), a.Digest())
	}
	f := small()
	f["added_tokens"] = nil
	b := open(t, write(t, t.TempDir(), "tokenizer.json", f))
	if b.Size() != 4 || b.Digest() == a.Digest() {
		t.Error(b.Size(), b.Digest())
	}
}
