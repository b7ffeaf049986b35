package tokenizer

import (
	"strings"
	"testing"
	"time"

	"ulysses/internal/status"
)

// The limits on patterns and growth hold for decoders. A Replace that exceeds them does not change
// the text.
func TestDecoderBounds(t *testing.T) {
	aaa := strings.Repeat("a", 60)
	replace := func(pattern object, to string) object {
		return object{"type": "Replace", "pattern": pattern, "content": to}
	}
	for name, x := range map[string]struct {
		decoders []any
		want     string // of Decode
	}{
		"backtracking": {[]any{replace(object{"Regex": "(a+)+b"}, "c")}, aaa},
		"within":       {[]any{replace(object{"String": "aa"}, "b"), replace(object{"Regex": "b+"}, "c")}, "c"},
		"growth": {[]any{replace(object{"String": "a"}, strings.Repeat("b", 100)),
			replace(object{"String": "b"}, strings.Repeat("c", 1024)),
			replace(object{"String": "c"}, strings.Repeat("d", 1024))}, strings.Repeat("b", 6000)},
	} {
		f := small()
		f["added_tokens"] = []any{object{"id": 4, "content": aaa, "special": true}}
		f["decoder"] = object{"type": "Sequence", "decoders": x.decoders}
		tok := open(t, write(t, t.TempDir(), "tokenizer.json", f))
		got := make(chan string, 1)
		go func() { got <- tok.Decode([]int32{4}) }()
		select {
		case s := <-got:
			if s != x.want {
				t.Errorf("%s: %d bytes, want %d", name, len(s), len(x.want))
			}
		case <-time.After(20 * time.Second):
			t.Errorf("%s: Decode does not end", name)
		}
	}
}

// A decoder that would insert a space between all characters is refused.
func TestEmptyDecoders(t *testing.T) {
	for _, d := range []object{
		{"type": "BPEDecoder", "suffix": ""},
		{"type": "Metaspace", "replacement": "", "prepend_scheme": "always"},
	} {
		f := small()
		f["decoder"] = d
		_, err := Open(write(t, t.TempDir(), "tokenizer.json", f))
		if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), "is empty; set it to") {
			t.Errorf("%v: %v", d, err)
		}
	}
}
