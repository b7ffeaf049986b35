package tokenizer

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"
)

func encode(t testing.TB, tok *Tokenizer, text []byte) []int32 {
	t.Helper()
	ids, err := tok.Encode(nil, text)
	if err != nil {
		t.Fatalf("%.100q: %v", text, err)
	}
	return ids
}

// With tokens of bytes, Decode returns the encoded text, after NFC if the tokenizer has this
// normalizer.
func TestDecodeReturnsTheText(t *testing.T) {
	for _, name := range []string{"gpt2", "llama3", "o200k", "cl100k", "deepseek", "qwen2", "qwen3_5"} {
		tok := open(t, filepath.Join(goldens(), name))
		for _, text := range texts(t) {
			want := validUTF8(text)
			if strings.HasPrefix(name, "qwen") {
				want = loadNormalTables().normalize(nfc, want)
			}
			if got := tok.Decode(encode(t, tok, text)); got != string(want) {
				t.Fatalf("%s: %.100q is decoded to %.100q", name, want, got)
			}
		}
	}
}

// A special token separates the texts around it: the ids of documents with the EOS token between
// them are the concatenated ids of the documents.
func TestSpecialTokensSeparate(t *testing.T) {
	all := texts(t)
	for name, mark := range map[string]string{"gpt2": "<|endoftext|>", "llama2": "</s>", "gemma": "<eos>",
		"deepseek": "<｜end▁of▁sentence｜>"} {
		tok := open(t, filepath.Join(goldens(), name))
		end := encode(t, tok, []byte(mark))
		if len(end) != 1 {
			t.Fatalf("%s: %s is %v", name, mark, end)
		}
		for i := 1; i < len(all); i++ {
			a, b := all[i-1], all[i]
			// A part of the EOS token or of a character at the boundary would be joined.
			if bytes.ContainsAny(a, "<") || bytes.ContainsAny(b, ">") || !utf8.Valid(a) {
				continue
			}
			want := slices.Concat(encode(t, tok, a), end, encode(t, tok, b))
			if got := encode(t, tok, slices.Concat(a, []byte(mark), b)); !slices.Equal(got, want) {
				t.Fatalf("%s: %.60q and %.60q: %v, not %v", name, a, b, got, want)
			}
		}
	}
}

// An added token of whitespace takes whitespace of its neighbours once. The ids are from the
// `tokenizers` package.
func TestAddedWhitespace(t *testing.T) {
	for _, c := range []struct {
		strips string
		want   [][]int32
	}{
		{`"lstrip": true, "rstrip": true`, [][]int32{{0, 2, 1}, {0, 2, 1}, {3, 1}, {2, 0, 2}}},
		{`"lstrip": true`, [][]int32{{0, 2, 2, 1}, {0, 2, 2, 2, 1}, {3, 1}, {2, 0, 2}}},
	} {
		path := filepath.Join(t.TempDir(), "tokenizer.json")
		text := `{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": [
			{"id": 2, "content": " ", ` + c.strips + `}, {"id": 3, "content": "x", "rstrip": true}]}`
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		tok := open(t, path)
		for i, s := range []string{"a  b", "a   b", "x b", " a "} {
			if got := encode(t, tok, []byte(s)); !slices.Equal(got, c.want[i]) {
				t.Errorf("%s, %q: %v, not %v", c.strips, s, got, c.want[i])
			}
		}
	}
}

// An added token of whitespace reads a long run of whitespace once, not once for each of its
// characters: that would take hours here.
func TestLongWhitespace(t *testing.T) {
	f := small()
	f["added_tokens"] = []any{object{"content": " ", "lstrip": true, "rstrip": true}}
	tok := open(t, write(t, t.TempDir(), "tokenizer.json", f))
	text := "a" + strings.Repeat(" ", 1<<20) + "b"
	if got := encode(t, tok, []byte(text)); !slices.Equal(got, []int32{0, 4, 1}) {
		t.Errorf("%d ids, want 3", len(got))
	}
}

// Encode does not change the ids in dst.
func TestEncodeAppends(t *testing.T) {
	tok := open(t, filepath.Join(goldens(), "llama3"))
	got, err := tok.Encode([]int32{7, 8}, []byte("Hello"))
	if want := append([]int32{7, 8}, encode(t, tok, []byte("Hello"))...); err != nil || !slices.Equal(got, want) {
		t.Fatal(got, want, err)
	}
}

// Several goroutines that share a tokenizer get the same ids as one alone.
func TestGoroutines(t *testing.T) {
	all := texts(t)
	for _, name := range []string{"qwen2", "mistral", "odd"} {
		tok := open(t, filepath.Join(goldens(), name))
		want := make([][]int32, len(all))
		for i, text := range all {
			want[i] = encode(t, tok, text)
		}
		var wg sync.WaitGroup
		for g := range uint64(4) {
			wg.Go(func() {
				for _, i := range rand.New(rand.NewPCG(g, 1)).Perm(len(all)) {
					if got, err := tok.Encode(nil, all[i]); err != nil || !slices.Equal(got, want[i]) {
						t.Errorf("%s, goroutine %d, text %d: the ids differ, %v", name, g, i, err)
						return
					}
				}
			})
		}
		wg.Wait()
		if len(tok.idle) > 5 {
			t.Errorf("%s: %d scratches for 5 goroutines", name, len(tok.idle))
		}
	}
}

// A text that is eight times as long takes at most twelve times the steps of patterns and merging,
// also if it has few words. With n·log n the factor is ten, with n² sixty-four.
func TestStepsGrowWithTheText(t *testing.T) {
	units := []string{"a", "A", " ", "\n", " \n", "1", "!", "é", "e\u0301", "天", "👍", "<", "<|", "▁", "'s", "ab", "aB",
		" a", "\t ", "\r"}
	files, _ := filepath.Glob(filepath.Join(goldens(), "*", "tokenizer.json"))
	steps := func(tok *Tokenizer, text string) int64 {
		tok.idle = nil // an empty cache
		encode(t, tok, []byte(text))
		s := tok.idle[0]
		return s.matcher.steps + s.merger.steps
	}
	total := int64(0)
	for _, file := range files {
		tok := open(t, file)
		for _, u := range units {
			short, long := steps(tok, strings.Repeat(u, 3000/len(u))), steps(tok, strings.Repeat(u, 24000/len(u)))
			total += long
			if long > 12*short+1000 {
				t.Errorf("%s: %q: %d steps for 3 KB, %d for 24 KB", filepath.Base(filepath.Dir(file)), u, short, long)
			}
		}
	}
	if total < 1e6 {
		t.Errorf("%d steps in total: not all were counted", total)
	}
}

// mergeShort and mergeLong give the same ids.
func TestMergeShortAndLong(t *testing.T) {
	tok := open(t, filepath.Join(goldens(), "llama2"))
	rng := rand.New(rand.NewPCG(1, 2))
	book, err := os.ReadFile("../../examples/data/opticks.txt")
	if err != nil {
		t.Fatal(err)
	}
	for range 3000 {
		at := rng.IntN(len(book) - 100)
		symbols, err := tok.model.symbols(nil,
			bytes.ReplaceAll(validUTF8(book[at:at+2+rng.IntN(60)]), []byte(" "), []byte("▁")))
		if err != nil {
			t.Fatal(err)
		}
		var a, b merger
		short, long := tok.model.mergeShort(&a, slices.Clone(symbols)), tok.model.mergeLong(&b, slices.Clone(symbols))
		if !slices.Equal(short, long) {
			t.Fatalf("%v: %v and %v", symbols, short, long)
		}
	}
}

// The cache of words does not exceed its limits, and words that were evicted get the same ids.
func TestWordCache(t *testing.T) {
	tok := open(t, filepath.Join(goldens(), "gpt2"))
	rng := rand.New(rand.NewPCG(3, 4))
	first := encode(t, tok, []byte(" wonderful"))
	var text []byte
	for i := range cacheWords + 1000 {
		text = append(text, ' ')
		for range 6 {
			text = append(text, 'a'+byte(rng.IntN(26)))
		}
		if i%1000 == 0 {
			encode(t, tok, text)
			text = text[:0]
		}
	}
	w := &tok.idle[0].merger
	if len(w.cache) > cacheWords || len(w.ids) > cacheIDs || len(w.cache) > 10000 {
		t.Errorf("%d words and %d ids in the cache: it was never emptied", len(w.cache), len(w.ids))
	}
	if again := encode(t, tok, []byte(" wonderful")); !slices.Equal(first, again) {
		t.Errorf("%v, then %v", first, again)
	}
}

// Invalid UTF-8 is replaced as by Python.
func TestInvalidUTF8(t *testing.T) {
	for in, want := range map[string]string{
		"a\xffb": "a\ufffdb", "\xe2\x82": "\ufffd", "\xf0\x9f\x98\xff": "\ufffd\ufffd",
		"\xed\xa0\x80": "\ufffd\ufffd\ufffd", "\xc0\x80": "\ufffd\ufffd",
		"\xf4\x90\x80\x80": "\ufffd\ufffd\ufffd\ufffd", "ok": "ok", "\ufffd": "\ufffd",
		"\xe4\xbd\xe4\xbd\xa0": "\ufffd你",
	} {
		if got := string(validUTF8([]byte(in))); got != want {
			t.Errorf("%q: %q, not %q", in, got, want)
		}
	}
}

// Each byte token that is not UTF-8 is decoded to U+FFFD. Other tokens do not change.
func TestInvalidByteTokens(t *testing.T) {
	for in, want := range map[string]string{"a <0xE2> <0x82> b": "a\ufffd\ufffdb", "<0xE2> <0x82> <0xAC>": "€",
		"<0x41> <0xFF>": "\ufffd\ufffd", "<0xZZ> <0x4>": "<0xZZ><0x4>"} {
		if got := strings.Join(decodeBytes(strings.Fields(in)), ""); got != want {
			t.Errorf("%s: %q, not %q", in, got, want)
		}
	}
}

// documents divides a text into documents of whole lines and at least 4096 bytes.
func documents(text []byte) (all [][]byte) {
	start, at := 0, 0
	for line := range bytes.Lines(text) {
		if at += len(line); at-start >= 4096 {
			all = append(all, text[start:at])
			start = at
		}
	}
	return append(all, text[start:])
}

// BenchmarkEncode encodes documents of about 4 KB, from opticks.txt or from text.txt in
// ULYSSES_TOKENIZER_GOLDENS. benchmarks/peers/tokenizer.py runs it and the `tokenizers` package,
// and compares the ids.
func BenchmarkEncode(b *testing.B) {
	text, err := os.ReadFile(filepath.Join(goldens(), "text.txt"))
	if err != nil {
		if text, err = os.ReadFile("../../examples/data/opticks.txt"); err != nil {
			b.Fatal(err)
		}
	}
	files, _ := filepath.Glob(filepath.Join(goldens(), "*", "tokenizer.json"))
	for _, file := range files {
		b.Run(filepath.Base(filepath.Dir(file)), func(b *testing.B) {
			tok, sum, tokens := open(b, file), sha256.New(), 0
			b.SetBytes(int64(len(text)))
			var ids []int32
			for n := 0; b.Loop(); n++ {
				for _, d := range documents(text) {
					if ids, err = tok.Encode(ids[:0], d); err != nil {
						b.Fatal(err)
					}
					if n == 0 {
						b.StopTimer()
						tokens += len(ids)
						buf, _ := binary.Append(nil, binary.LittleEndian, ids)
						sum.Write(buf)
						b.StartTimer()
					}
				}
			}
			b.ReportMetric(float64(tokens), "tokens")
			b.ReportMetric(float64(binary.BigEndian.Uint32(sum.Sum(nil))), "hash32")
		})
	}
}
