package tokenizer

import (
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Files that could make a text of unlimited size are refused, when they are opened or when the text
// is encoded, before the memory is allocated.
func TestBounds(t *testing.T) {
	replace := func(from, to string) object {
		return object{"type": "Replace", "pattern": object{"String": from}, "content": to}
	}
	sequence := func(n int, p object) object {
		return object{"type": "Sequence", "normalizers": slices.Repeat([]any{p}, n),
			"pretokenizers": slices.Repeat([]any{p}, n), "decoders": slices.Repeat([]any{p}, n)}
	}
	added := func(n int) (all []any) {
		for i := range n {
			all = append(all, object{"content": fmt.Sprintf("%01000d", i)})
		}
		return all
	}
	put := func(key string, x any) func(object) { return func(f object) { f[key] = x } }
	long := strings.Repeat("é", 1<<20)
	for name, x := range map[string]struct {
		change func(object)
		text   string // to encode, if the file is opened without an error
		want   string
	}{
		"40 Replaces": {put("normalizer", sequence(40, replace("e", "ee"))), "",
			"normalizer: 40 components, at most 32"},
		"30 Replaces": {put("normalizer", sequence(30, replace("e", "ee"))), "e", "make more than 4128 bytes"},
		"30 of a regex": {
			put("normalizer",
				sequence(30, object{"type": "Replace", "pattern": object{"Regex": "e"}, "content": "ee"})), "eee",
			"make more than 4192 bytes"},
		"a megabyte": {put("normalizer", replace("e", long)), "",
			`normalizer, component 0 (Replace): content is "éé`},
		"a kilobyte": {put("normalizer", replace("e", long[:1000])), strings.Repeat("e", 5000),
			"make more than 164096 bytes (165000) of a text of 5000"},
		"10,000 Prepends": {put("normalizer", sequence(10000, object{"type": "Prepend", "prepend": "a"})), "",
			"normalizer: 10000 components"},
		"a long Prepend": {put("normalizer", object{"type": "Prepend", "prepend": long}), "",
			"(2097152 bytes), at most 1024"},
		"30 ByteLevels": {
			put("pre_tokenizer",
				sequence(30, object{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false})), "é",
			"make more than 4160 bytes"},
		"40 ByteLevels": {put("pre_tokenizer", sequence(40, object{"type": "ByteLevel"})), "",
			"pre_tokenizer: 40 components"},
		"40 decoders": {put("decoder", sequence(40, replace("e", "ee"))), "", "decoder: 40 components"},
		"a long pattern": {put("pre_tokenizer", split(strings.Repeat("(", 1<<20))), "",
			"pre_tokenizer, component 0 (Split): the pattern is"},
		"a long prefix": {func(f object) { f["model"].(object)["continuing_subword_prefix"] = long }, "",
			"model.continuing_subword_prefix is"},
		"a long added token": {put("added_tokens", []any{object{"id": 4, "content": long}}), "",
			"(2097152 bytes), at most 1024 bytes"},
		"1100 added tokens": {put("added_tokens", added(1100)), "", "have more than 1048576 bytes"},
		"a long eos":        {func(f object) { f["model"].(object)["type"] = long }, "", "(2097152 bytes)"},
	} {
		f := small()
		x.change(f)
		path := write(t, t.TempDir(), "tokenizer.json", f)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		tok, err := Open(path)
		if err == nil && x.text != "" {
			if _, err = tok.Encode(nil, []byte("c")); err != nil {
				t.Errorf("%s: a text that grows within the limit: %v", name, err)
			}
			_, err = tok.Encode(nil, []byte(x.text))
		}
		runtime.ReadMemStats(&after)
		if status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), x.want) || len(err.Error()) > 700 {
			t.Errorf("%s: %v (%v), want %q", name, err, status.Of(err), x.want)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 100<<20 {
			t.Errorf("%s: %d bytes were allocated", name, n)
		}
	}
	// A text that grows within the limits is encoded.
	f := small()
	f["normalizer"] = sequence(3, replace("c", "ab"))
	tok := open(t, write(t, t.TempDir(), "tokenizer.json", f))
	if ids, err := tok.Encode(nil, []byte(strings.Repeat("c", 100000))); err != nil || len(ids) != 100000 {
		t.Errorf("%d ids, %v", len(ids), err)
	}
}

// Encode returns an error for a text on which a pattern takes exponential time, in a normalizer and
// in a pre-tokenizer. The next text is encoded.
func TestExponentialPatterns(t *testing.T) {
	for _, pattern := range []string{"(a+)+b", "(a|a)*b", "(?=(a+)+b)a", "(?>(a+)+b)|c"} {
		for key, p := range map[string]object{
			"pre_tokenizer": split(pattern),
			"normalizer":    {"type": "Replace", "pattern": object{"Regex": pattern}, "content": "c"},
		} {
			f := small()
			f[key] = p
			tok := open(t, write(t, t.TempDir(), "tokenizer.json", f))
			_, err := tok.Encode(nil, []byte(strings.Repeat("a", 200)))
			if status.Of(err) != status.Unsupported ||
				!strings.Contains(err.Error(), "take more than 1150976 steps on a text of 200 bytes") {
				t.Errorf("%s in a %s: %v", pattern, key, err)
			}
			if _, err := tok.Encode(nil, []byte("ab")); err != nil {
				t.Errorf("%s in a %s, the next text: %v", pattern, key, err)
			}
		}
	}
}

// A nested post-processor is decoded once, not once for each of the Sequences around it.
func TestNestedPostProcessors(t *testing.T) {
	f := small()
	f["post_processor"] = json.RawMessage(strings.Repeat(`{"type": "Sequence", "processors": [`, 4000) +
		strings.Repeat("]}", 4000))
	path := write(t, t.TempDir(), "tokenizer.json", f)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	open(t, path)
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 100<<20 {
		t.Errorf("%d bytes were allocated", n)
	}
}

// A lookbehind counts the characters that it steps back.
func TestLongLookbehind(t *testing.T) {
	f := small()
	f["pre_tokenizer"] = split("(?<=(?:a{1000}){8}).")
	tok := open(t, write(t, t.TempDir(), "tokenizer.json", f))
	for _, c := range []struct {
		text int
		code status.Code
	}{{1000, status.OK}, {8000, status.Unsupported}} {
		if _, err := tok.Encode(nil, []byte(strings.Repeat("b", c.text))); status.Of(err) != c.code {
			t.Errorf("%d bytes: %v, want the code %v", c.text, err, c.code)
		}
	}
}

// A repeated key is refused, in the file and in the vocabulary.
func TestRepeatedKeys(t *testing.T) {
	for _, text := range []string{
		`{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":1,"a":1},"merges":[]}}`,
		`{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]},"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}`,
	} {
		if _, err := Open(write(t, t.TempDir(), "tokenizer.json", text)); status.Of(err) != status.InvalidConfig ||
			!strings.Contains(err.Error(), "is there twice") {
			t.Error(err)
		}
	}
	dir := t.TempDir()
	write(t, dir, "tokenizer_config.json", `{"eos_token": "a", "eos_token": "b"}`)
	if _, err := Open(write(t, dir, "tokenizer.json", small())); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), `the key "eos_token" is there twice`) {
		t.Error(err)
	}
}
