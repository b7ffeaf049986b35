package tokenizer

import (
	"path/filepath"
	"testing"
)

// The ends of tokens ascend to the end of the text, and each token alone, where its text is not
// empty, spells its part of the text.
func TestEnds(t *testing.T) {
	for _, name := range []string{"gpt2", "llama3", "qwen2", "qwen3_5", "o200k", "deepseek", "gemma", "llama2", "mistral"} {
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
