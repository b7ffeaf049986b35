// Package tokenizer reads Hugging Face's tokenizer.json with a model of byte pair encoding and cuts
// text into the same tokens as the Python package `tokenizers` (0.23.3), id for id.
//
// Why it is our own. No library for Go gives these ids: github.com/sugarme/tokenizer (v0.3.0) has
// neither byte_fallback nor ignore_merges nor patterns that look ahead, panics on the files of
// Llama 3 and Qwen and differs on a fifth of our texts for GPT-2 (benchmarks/results/tokenizer.md);
// github.com/gomlx/go-huggingface (v0.3.1) reads SentencePiece models alone;
// github.com/daulet/tokenizers (v1.24.0) is the Rust library by cgo, with an archive that is no
// part of the module. Nor do the usual parts give the same cuts: patterns are those of Oniguruma on
// Unicode 16 and normal forms those of Unicode 9, while Go 1.26 and golang.org/x/text know Unicode
// 15, x/text breaks up long runs of marks, and github.com/dlclark/regexp2 (v2.12.0) reads patterns
// in .NET's sense, at the speed that a whole tokenizer should have. So there is a small reader of
// patterns (pattern.go, program.go, match.go), tables asked of the package itself (classes.txt,
// normal.txt), and the merging (bpe.go, merge.go).
//
// The way of a text: added tokens are found (added.go), the rest is normalized (normalizer.go), cut
// into words (pretokenizer.go), and each word is merged. Sources: the file format and behavior of
// huggingface/tokenizers; byte pair encoding, Sennrich et al. 2016, section 3.2.
package tokenizer

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Tokenizer is an open tokenizer.json. It may be used by several goroutines at once.
type Tokenizer struct {
	path        string
	files       []string
	digest      string
	size        int64
	normalizers []normalizer
	steps       []step
	added       *added
	plain, norm [256]bool // bytes that added tokens begin with
	model       *model
	decoders    []decoder
	eos         int32 // -1 for none

	mu   sync.Mutex
	idle []*state
}

// state is what one goroutine needs while it encodes.
type state struct {
	matcher matcher
	words   words
	bufs    [][]byte
	emits   []func(piece) error
	out     []int32
	made    int // bytes of the words of the text so far
}

// Open reads a tokenizer.json, or that of a folder. What cannot be done exactly is refused by name,
// with status.Unsupported; what cannot be right with InvalidConfig; a file that cannot be read with
// IO.
func Open(path string) (*Tokenizer, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, "tokenizer.json")
	}
	text, err := input.Read(path, input.MaxTokenizer)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, status.Errorf(status.IO, "tokenizer: there is no %s: name a tokenizer.json, or a folder that holds one (a fast tokenizer's save_pretrained writes it): %w", path, err)
	} else if err != nil {
		return nil, status.Errorf(status.IO, "tokenizer: %w", err)
	}
	t := &Tokenizer{path: path, files: []string{path}}
	sum := sha256.Sum256(text)
	t.digest = hex.EncodeToString(sum[:])
	if err := t.read(text); err != nil {
		return nil, status.Errorf(status.Of(err), "tokenizer: %s: %w", path, err)
	}
	return t, nil
}

func (t *Tokenizer) read(text []byte) error {
	var f file
	if err := input.JSON(input.TrimBOM(text), &f); err != nil {
		return status.Errorf(status.InvalidConfig, "not a tokenizer.json: %w", err)
	}
	if f.Version != "" && f.Version != "1.0" {
		return status.Errorf(status.Unsupported, "version %s of the format is not known, only 1.0", input.Quote(f.Version))
	}
	parts := map[string]*part{}
	for what, raw := range map[string]json.RawMessage{"normalizer": f.Normalizer, "pre_tokenizer": f.PreTokenizer, "decoder": f.Decoder} {
		p, err := readPart(raw, what)
		if err != nil {
			return err
		}
		parts[what] = p
	}
	before := flat(parts["normalizer"], func(p *part) []part { return p.Normalizers })
	cuts := flat(parts["pre_tokenizer"], func(p *part) []part { return p.PreTokenizers })
	after := flat(parts["decoder"], func(p *part) []part { return p.Decoders })
	err := checkParts("normalizer", before)
	if err == nil {
		err = checkParts("pre_tokenizer", cuts)
	}
	if err == nil {
		err = checkParts("decoder", after)
	}
	if err == nil {
		err = checkFirst(before, cuts)
	}
	if err != nil {
		return err
	}
	if t.normalizers, err = newNormalizers(before); err != nil {
		return err
	}
	affixes := f.Model.Prefix != "" || f.Model.Suffix != ""
	steps, raw, err := newSteps(cuts, !affixes)
	if err != nil {
		return err
	}
	t.steps = steps
	if t.model, err = newModel(&f.Model, raw); err != nil {
		return err
	}
	if t.decoders, err = newDecoders(after); err != nil {
		return err
	}
	s := &state{}
	if t.added, err = newAdded(f.AddedTokens, f.Model.Vocab, func(text string) (string, error) {
		s.matcher.begin(len(text))
		p, err := t.normalize(s, piece{text: []byte(text)})
		return string(p.text), err
	}); err != nil {
		return err
	}
	t.plain, t.norm = t.added.plain.starts(), t.added.normalized.starts()
	for id := range t.model.names {
		t.size = max(t.size, int64(id)+1)
	}
	for id := range t.added.tokens {
		t.size = max(t.size, int64(id)+1)
	}
	t.eos, err = t.findEOS(filepath.Dir(t.path))
	return err
}

// Size is one more than the largest id: a model's vocabulary must have at least as many rows.
func (t *Tokenizer) Size() int64 { return t.size }

// Files returns the paths of the files that were read: the tokenizer.json, then the files beside
// it.
func (t *Tokenizer) Files() []string { return t.files }

// Digest is the SHA-256 of the tokenizer.json, in hexadecimal.
func (t *Tokenizer) Digest() string { return t.digest }

// EOS is the id of the token that ends a document, and whether there is one: eos_token of
// tokenizer_config.json or special_tokens_map.json, else eos_token_id of generation_config.json or
// config.json beside the file; of a list the first.
func (t *Tokenizer) EOS() (id int32, ok bool) { return t.eos, t.eos >= 0 }

// Encode appends the ids of a text to dst, without tokens that mark its beginning or end; added
// tokens that stand in the text are their ids. Text that is no UTF-8 has U+FFFD in the places that
// Python's decode(errors="replace") would have it.
func (t *Tokenizer) Encode(dst []int32, text []byte) ([]int32, error) {
	s := t.take()
	s.out = dst
	p := piece{text: validUTF8(text)}
	s.matcher.begin(len(text))
	s.made = 0
	if len(p.text) > 0 {
		_, p.first = decodeRune(p.text, 0)
	}
	token := func(id int32) { s.out = append(s.out, id) }
	err := t.added.split(&t.added.plain, &t.plain, p, func(p piece) error {
		p, err := t.normalize(s, p)
		if err != nil {
			return err
		}
		return t.added.split(&t.added.normalized, &t.norm, p, func(p piece) error { return t.cut(s, 0, p) }, token)
	}, token)
	if err == nil && s.matcher.spent() {
		err = tooSlow(s.matcher.text)
	}
	out := s.out
	t.give(s)
	return out, err
}

func (t *Tokenizer) normalize(s *state, p piece) (piece, error) {
	var err error
	for _, n := range t.normalizers {
		if p, err = n(&s.matcher, p); err == nil && len(p.text) > s.matcher.limit {
			err = tooLong(len(p.text), s.matcher.limit)
		}
		if err == nil && s.matcher.spent() {
			err = tooSlow(s.matcher.text)
		}
		if err != nil {
			break
		}
	}
	return p, err
}

// cut sends a piece through the pre-tokenizers from the i-th on, and its words to the model.
func (t *Tokenizer) cut(s *state, i int, p piece) (err error) {
	if len(p.text) == 0 {
		return nil
	}
	if i == len(t.steps) {
		s.made += len(p.text)
	}
	// bytes of all words so far, or of this part of the text
	if n := max(s.made, len(p.text)); n > s.matcher.limit {
		return tooLong(n, s.matcher.limit)
	}
	if i == len(t.steps) {
		s.out, err = t.model.encode(&s.words, s.out, p.text)
		return err
	}
	return t.steps[i].cut(s, &s.bufs[i], p, s.emits[i])
}

// take lends a state that no other goroutine uses. States are kept, with the words they have seen:
// there are as many as goroutines ever encoded at once.
func (t *Tokenizer) take() *state {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.idle); n > 0 {
		s := t.idle[n-1]
		t.idle = t.idle[:n-1]
		return s
	}
	s := &state{bufs: make([][]byte, len(t.steps))}
	for i := range t.steps {
		s.emits = append(s.emits, func(p piece) error { return t.cut(s, i+1, p) })
	}
	return s
}

func (t *Tokenizer) give(s *state) {
	s.out = nil
	s.matcher.stack = s.matcher.stack[:0]
	t.mu.Lock()
	t.idle = append(t.idle, s)
	t.mu.Unlock()
}
