package tokenizer

import (
	"path/filepath"
	"slices"
	"testing"
)

// The spans of tokens ascend and have all bytes of the text.
func TestSpans(t *testing.T) {
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
			spans, err := tok.Spans(nil, text, ids)
			if canonical, ok := tok.Canonical(text); err != nil && ok {
				text = canonical
				again, _ := tok.Encode(nil, text)
				if spans, err = tok.Spans(nil, text, again); err != nil {
					t.Errorf("%s: %q: %v", name, s, err)
				}
			}
			if err != nil {
				continue
			}
			spelled++
			at := 0
			for _, x := range spans {
				if x[0] != at || x[1] < at || x[1] > len(text) || len(spans) != len(ids) {
					t.Fatalf("%s: %q: spans %v of %d bytes", name, s, spans, len(text))
				}
				at = x[1]
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
func TestSpansOfAddedWords(t *testing.T) {
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
		"a  b":          {0, 1, 3, 4},
		"a▁▁b":          {0, 1, 7, 8},
		"  ▁▁<end>   c": {0, 2, 8, 13, 15, 16, 17},
	} {
		ids := encode(t, tok, []byte(text))
		got, err := tok.Spans(nil, []byte(text), ids)
		ends := []int{0}
		for _, x := range got {
			if x[0] != ends[len(ends)-1] {
				t.Errorf("%q: a token begins at %d after %d", text, x[0], ends)
			}
			ends = append(ends, x[1])
		}
		if err != nil || !slices.Equal(ends, want) {
			t.Errorf("%q: tokens %d between %d, want %d (%v)", text, ids, ends, want, err)
		}
	}
}

// White space that an added token takes along is in no span.
func TestSpansOfStrippingTokens(t *testing.T) {
	f := small()
	f["added_tokens"] = []any{object{"id": 6, "content": "<l>", "lstrip": true},
		object{"id": 7, "content": "<r>", "rstrip": true},
		object{"id": 8, "content": "<b>", "lstrip": true, "rstrip": true}}
	tok, err := Open(write(t, t.TempDir(), "tokenizer.json", f))
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string][][2]int{
		"a \n<l>b":        {{0, 1}, {3, 6}, {6, 7}},
		"a<r>\n b":        {{0, 1}, {1, 4}, {6, 7}},
		"a <b>\u3000<r> ": {{0, 1}, {2, 5}, {8, 11}},
	} {
		ids := encode(t, tok, []byte(text))
		if got, err := tok.Spans(nil, []byte(text), ids); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: tokens %d have spans %d, want %d (%v)", text, ids, got, want, err)
		}
	}
}
