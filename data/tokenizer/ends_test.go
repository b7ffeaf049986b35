package tokenizer

import (
	"path/filepath"
	"slices"
	"testing"
)

// The ends of tokens ascend to the end of the text, and each token alone, where its text is not
// empty, spells its part of the text.
func TestEnds(t *testing.T) {
	for _, name := range []string{"gpt2", "llama3", "qwen2", "qwen3_5", "o200k", "deepseek", "gemma", "llama2",
		"mistral"} {
		tok := open(t, filepath.Join(goldens(), name))
		texts := texts(t)
		spelled := 0
		for _, s := range texts {
			text := validUTF8(s)
			ids, err := tok.Encode(nil, text)
			if err != nil {
				t.Fatal(err)
			}
			ends, err := tok.Ends(nil, text, ids)
			if canonical, ok := tok.Canonical(text); err != nil && ok {
				text = canonical
				again, _ := tok.Encode(nil, text)
				if ends, err = tok.Ends(nil, text, again); err != nil {
					t.Errorf("%s: %q: %v", name, s, err)
				}
			}
			if err != nil {
				continue
			}
			spelled++
			for i, e := range ends {
				if i > 0 && e < ends[i-1] || e > len(text) || len(ends) != len(ids) {
					t.Fatalf("%s: %q: ends %v of %d bytes", name, s, ends, len(text))
				}
			}
		}
		if spelled < len(texts) {
			t.Errorf("%s: %d of %d texts are spelled by their tokens", name, spelled, len(texts))
		}
		t.Logf("%s: %d of %d texts", name, spelled, len(texts))
	}
}

// A token that the model makes of spaces may be an added token as well, as the runs of spaces of
// Gemma 3 are. It stands for spaces in one text and for its own letters in another.
func TestEndsOfAddedWords(t *testing.T) {
	f := small()
	f["normalizer"] = object{"type": "Replace", "pattern": object{"String": " "}, "content": "▁"}
	f["added_tokens"] = []any{object{"id": 6, "content": "<end>", "special": true},
		object{"id": 5, "content": "▁▁", "special": false}}
	m := f["model"].(object)
	m["vocab"] = object{"a": 0, "b": 1, "ab": 2, "c": 3, "▁": 4, "▁▁": 5}
	m["merges"] = []any{[]any{"a", "b"}, []any{"▁", "▁"}}
	tok, err := Open(write(t, t.TempDir(), "tokenizer.json", f))
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string][]int{
		"a  b":          {1, 3, 4},
		"a▁▁b":          {1, 7, 8},
		"  ▁▁<end>   c": {2, 8, 13, 15, 16, 17},
	} {
		ids := encode(t, tok, []byte(text))
		if got, err := tok.Ends(nil, []byte(text), ids); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: tokens %d end at %d, want %d (%v)", text, ids, got, want, err)
		}
	}
}
