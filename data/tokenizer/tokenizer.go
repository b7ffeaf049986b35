// Package tokenizer reads the tokenizer.json of Hugging Face with byte pair encoding. It gives the
// same token ids as the Python package `tokenizers` (0.23.3).
//
// Open reads a file and returns a Tokenizer. Tokenizer.Encode processes a text in this order: it
// finds added tokens (added.go), normalizes the text between them (normalizer.go), splits it into
// words (pretokenizer.go), and merges the characters of each word into tokens (bpe.go, merge.go).
//
// Sources: the file format and behavior of huggingface/tokenizers; byte pair encoding, Sennrich et
// al. 2016, section 3.2.
//
// No Go library gives these ids. github.com/sugarme/tokenizer (v0.3.0) has neither byte_fallback
// nor ignore_merges nor patterns with lookahead, panics on the files of Llama 3 and Qwen, and
// differs on a fifth of the test texts for GPT-2 (benchmarks/results/tokenizer.md).
// github.com/gomlx/go-huggingface (v0.3.1) reads SentencePiece models only.
// github.com/daulet/tokenizers (v1.24.0) is the Rust library by cgo and needs an archive that is
// not in the module.
//
// The standard library and golang.org/x/text would split text differently: patterns are in the
// syntax of Oniguruma with Unicode 16, normal forms have Unicode 9, and Go 1.26 and x/text have
// Unicode 15. x/text also splits long runs of combining marks. github.com/dlclark/regexp2 (v2.12.0)
// has the pattern syntax of .NET, and alone takes the time that the whole tokenizer may take.
// Therefore this package has a parser and a matcher of patterns (pattern.go, program.go, match.go),
// and tables that were made with the Python package (classes.txt, normal.txt).
package tokenizer

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Tokenizer is an open tokenizer.json. Several goroutines may use it at the same time.
type Tokenizer struct {
	path          string
	files         []string
	digest        string
	size, words   int64   // see Size and Words
	begin         []int32 // see Begin
	normalizers   []normalizer
	preTokenizers []preTokenizer
	added         *added
	plain, norm   [256]bool // first bytes of the added tokens of the text, of the normalized text
	model         *model
	decoders      []decoder
	eos           int32 // -1 = none
	canonical     bool  // all normalizers are normal forms
	prepends      bool  // a normalizer writes text before each segment

	mu       sync.Mutex
	idle     []*scratch // those that no goroutine uses
	surfaces surfaces   // made by the first call of Spans
}

// scratch is the memory that a goroutine uses while it encodes.
type scratch struct {
	matcher   matcher
	merger    merger
	bufs      [][]byte              // for each pre-tokenizer, memory for changed text
	emits     []func(segment) error // for each pre-tokenizer, passes a segment to the next one
	out       []int32               // ids so far
	wordBytes int                   // bytes of the words of the text so far
}

// Path returns the file of a tokenizer: path, or tokenizer.json in the folder path.
func Path(path string) string {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return filepath.Join(path, "tokenizer.json")
	}
	return path
}

// Open reads a tokenizer.json; path is its path or its folder. The error code is Unsupported for a
// file that this package cannot process exactly as the `tokenizers` package does, InvalidConfig for
// an invalid file, and IO for a file that cannot be read.
func Open(path string) (*Tokenizer, error) {
	path = Path(path)
	text, err := input.Read(path, input.MaxTokenizer)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, status.Errorf(status.IO,
			"tokenizer: there is no %s (%w); name a tokenizer.json or its folder, which save_pretrained of a fast tokenizer writes",
			path, err)
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

// read decodes the file and makes the components of the tokenizer.
func (t *Tokenizer) read(text []byte) error {
	var f file
	if err := input.JSON(input.TrimBOM(text), &f); err != nil {
		return status.Errorf(status.InvalidConfig, "the file is not a tokenizer.json: %w", err)
	}
	if f.Version != "" && f.Version != "1.0" {
		return status.Errorf(status.Unsupported,
			"version %s of the format is not supported; write the file in version 1.0", input.Quote(f.Version))
	}
	p, err := f.pipeline()
	if err != nil {
		return err
	}
	if t.normalizers, err = newNormalizers(p.normalizers); err != nil {
		return err
	}
	t.canonical = true
	for _, n := range p.normalizers {
		t.canonical = t.canonical && strings.HasPrefix(n.Kind, "NF")
		t.prepends = t.prepends || n.Kind == "Prepend"
	}
	affixes := f.Model.Prefix != "" || f.Model.Suffix != ""
	all, raw, err := newPreTokenizers(p.preTokenizers, !affixes)
	if err != nil {
		return err
	}
	t.preTokenizers = all
	if t.model, err = newModel(&f.Model, raw); err != nil {
		return err
	}
	if t.decoders, err = newDecoders(p.decoders); err != nil {
		return err
	}
	s := &scratch{}
	if t.added, err = newAdded(f.AddedTokens, f.Model.Vocab, func(text string) (string, error) {
		s.matcher.begin(len(text))
		p, err := t.normalize(s, segment{text: []byte(text)})
		return string(p.text), err
	}); err != nil {
		return err
	}
	t.plain, t.norm = t.added.plain.starts(), t.added.normalized.starts()
	for id := range t.model.names {
		t.words = max(t.words, int64(id)+1)
	}
	t.size = t.words
	for id := range t.added.tokens {
		t.size = max(t.size, int64(id)+1)
	}
	if t.begin, err = readBegin(f.Post, t.size); err != nil {
		return err
	}
	if err := checkConfig(filepath.Dir(t.path), func(token string) bool {
		_, added := t.added.ids[token]
		_, word := f.Model.Vocab[token]
		return added || word
	}); err != nil {
		return err
	}
	eos, files, err := findEOS(filepath.Dir(t.path), t.lookup, t.size)
	t.eos, t.files = eos, append(t.files, files...)
	return err
}

// pipeline is the components of a file, in the order in which they process a text.
type pipeline struct{ normalizers, preTokenizers, decoders []component }

// pipeline returns the components of a file. It refuses the ones whose time and memory would have
// no limit.
func (f *file) pipeline() (p pipeline, err error) {
	for _, x := range []struct {
		what    string
		raw     json.RawMessage
		members func(*component) []component
		to      *[]component
	}{
		{"normalizer", f.Normalizer, func(c *component) []component { return c.Normalizers }, &p.normalizers},
		{"pre_tokenizer", f.PreTokenizer, func(c *component) []component { return c.PreTokenizers }, &p.preTokenizers},
		{"decoder", f.Decoder, func(c *component) []component { return c.Decoders }, &p.decoders},
	} {
		c, err := readComponent(x.raw, x.what)
		if err != nil {
			return p, err
		}
		*x.to = flat(c, x.members)
		if err := checkComponents(x.what, *x.to); err != nil {
			return p, err
		}
	}
	return p, checkMetaspace(p.normalizers, p.preTokenizers)
}

// lookup returns the id of an added token or of a token of the model.
func (t *Tokenizer) lookup(token string) (id int32, ok bool) {
	if id, ok = t.added.ids[token]; ok {
		return id, true
	}
	id, ok = t.model.ids[token]
	return id, ok
}

// Size returns one more than the largest id.
func (t *Tokenizer) Size() int64 { return t.size }

// Words returns one more than the largest id of the vocabulary, without added tokens. The
// vocabulary of a model has at least this size. Added tokens may be outside of it: Gemma 3's text
// models have no row for the token of an image.
func (t *Tokenizer) Words() int64 { return t.words }

// Files returns the paths of the files that were read, tokenizer.json first.
func (t *Tokenizer) Files() []string { return t.files }

// Digest returns the SHA-256 of the tokenizer.json in hexadecimal.
func (t *Tokenizer) Digest() string { return t.digest }

// EOS returns the id of the token that ends a document; false if there is none. It is eos_token of
// tokenizer_config.json or special_tokens_map.json, or else eos_token_id of generation_config.json
// or config.json, in the folder of tokenizer.json. Of a list of ids it is the first.
func (t *Tokenizer) EOS() (id int32, ok bool) { return t.eos, t.eos >= 0 }

// Begin returns the ids that the file's post_processor puts before a text, such as the begin mark
// of Llama 3 and Gemma; nil = none. As in transformers 5, add_bos_token of tokenizer_config.json
// has no effect.
func (t *Tokenizer) Begin() []int32 { return t.begin }

// Encode appends the ids of a text to dst. It adds no tokens at the beginning and the end. Added
// tokens in the text become their ids. Bytes that are not UTF-8 are replaced by U+FFFD, as by
// Python's decode(errors="replace").
func (t *Tokenizer) Encode(dst []int32, text []byte) ([]int32, error) {
	s := t.acquire()
	s.out = dst
	p := segment{text: validUTF8(text)}
	s.matcher.begin(len(text))
	s.wordBytes = 0
	if len(p.text) > 0 {
		_, p.first = decodeRune(p.text, 0)
	}
	token := func(id int32) { s.out = append(s.out, id) }
	err := t.added.split(&t.added.plain, &t.plain, p, func(p segment) error {
		p, err := t.normalize(s, p)
		if err != nil {
			return err
		}
		return t.added.split(&t.added.normalized, &t.norm, p, func(p segment) error { return t.preTokenize(s, 0, p) },
			token)
	}, token)
	if err == nil && s.matcher.exceeded() {
		err = tooSlow(s.matcher.text)
	}
	out := s.out
	t.release(s)
	return out, err
}

// Decode returns the text of ids, including special tokens. Unknown ids are left out. If the file
// has no decoder, tokens are separated by spaces, as in the `tokenizers` package.
func (t *Tokenizer) Decode(ids []int32) string {
	tokens := make([]string, 0, len(ids))
	for _, id := range ids {
		if s, ok := t.added.decoded[id]; ok {
			tokens = append(tokens, s)
		} else if a, ok := t.added.tokens[id]; ok {
			tokens = append(tokens, a.Content)
		} else if s, ok := t.model.names[id]; ok {
			tokens = append(tokens, s)
		}
	}
	if len(t.decoders) == 0 {
		return strings.Join(tokens, " ")
	}
	var m matcher
	m.begin(bytesOf(tokens))
	for _, d := range t.decoders {
		tokens = d(&m, tokens)
	}
	return strings.Join(tokens, "")
}

func (t *Tokenizer) normalize(s *scratch, p segment) (segment, error) {
	var err error
	for _, n := range t.normalizers {
		if p, err = n(&s.matcher, p); err == nil && len(p.text) > s.matcher.limit {
			err = tooLong(len(p.text), s.matcher.limit)
		}
		if err == nil && s.matcher.exceeded() {
			err = tooSlow(s.matcher.text)
		}
		if err != nil {
			break
		}
	}
	return p, err
}

// preTokenize passes a segment through the pre-tokenizers from the i-th on, and encodes its words.
func (t *Tokenizer) preTokenize(s *scratch, i int, p segment) (err error) {
	if len(p.text) == 0 {
		return nil
	}
	if i == len(t.preTokenizers) {
		s.wordBytes += len(p.text)
	}
	if n := max(s.wordBytes, len(p.text)); n > s.matcher.limit {
		return tooLong(n, s.matcher.limit)
	}
	if i == len(t.preTokenizers) {
		s.out, err = t.model.encode(&s.merger, s.out, p.text)
		return err
	}
	return t.preTokenizers[i].split(&s.matcher, &s.bufs[i], p, s.emits[i])
}

// acquire returns a scratch that no other goroutine uses. A scratch is reused, with the words in
// its cache. There are as many as goroutines have encoded at the same time.
func (t *Tokenizer) acquire() *scratch {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.idle); n > 0 {
		s := t.idle[n-1]
		t.idle = t.idle[:n-1]
		return s
	}
	s := &scratch{bufs: make([][]byte, len(t.preTokenizers))}
	for i := range t.preTokenizers {
		s.emits = append(s.emits, func(p segment) error { return t.preTokenize(s, i+1, p) })
	}
	return s
}

func (t *Tokenizer) release(s *scratch) {
	s.out = nil
	s.matcher.stack = s.matcher.stack[:0]
	t.mu.Lock()
	t.idle = append(t.idle, s)
	t.mu.Unlock()
}
