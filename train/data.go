package train

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"ulysses/internal/status"
)

// Ignore is the target that counts in no loss, as in PyTorch.
const Ignore = -100

// Data is what a job trains on and evaluates on. Every rank opens all of it; which rows a rank works on is arithmetic.
type Data struct {
	train, eval *Set
	files       []*tokens
}

// Train is the training set, nil without data.path.
func (d *Data) Train() *Set { return d.train }

// Eval is the evaluation set, nil when there is none.
func (d *Data) Eval() *Set { return d.eval }

// Close closes the files.
func (d *Data) Close() error {
	var first error
	for _, f := range d.files {
		if err := f.file.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// source is a part of a set: text documents cut into rows, or the rows of one file of tokens.
type source interface {
	units() int64 // documents, as eval.split counts them; of a tokens file, its rows
	rows() int64
	tokens() int64
	longest() int64                                          // tokens of the longest row
	appendRow(m *Micro, row int64) error                     // adds a row to a micro batch
	split(unit int64) (before, after source)                 // cuts between documents
	cut(at func(n int64) int64) (head, tail source, _ error) // cuts the only document in two
}

// OpenData opens and checks everything [data] and [eval] name: every token id against the vocabulary of vocab entries, labels, positions.
// An error names the file and the document, line or row in it. Empty documents are left out. The seed decides the order of the rows
// where data.shuffle asks for one.
func OpenData(d DataConfig, e EvalConfig, vocab int64, seed uint64) (*Data, error) {
	data := &Data{}
	err := data.open(d, e, vocab, seed)
	if err != nil {
		data.Close()
		return nil, err
	}
	return data, nil
}

func (data *Data) open(d DataConfig, e EvalConfig, vocab int64, seed uint64) error {
	if d.Sequence < 1 || d.Sequence > math.MaxInt32 || vocab < 1 {
		return status.Errorf(status.InvalidArgument, "train.OpenData: data.sequence %d, vocabulary %d: both must be positive, the first below 2^31", d.Sequence, vocab)
	}
	if d.Tokenizer != "bytes" {
		return status.Errorf(status.Unsupported, "data.tokenizer = %q: tokenizer files are not built yet: set data.tokenizer = \"bytes\", or give ready tokens as a .safetensors file", d.Tokenizer)
	}
	r := reader{data: data, config: d, vocab: vocab}
	var train, eval []source
	var err error
	if len(d.Path) > 0 {
		if train, err = r.read("data.path", d.Path); err != nil {
			return err
		}
	}
	switch {
	case len(e.Path) > 0:
		if eval, err = r.read("eval.path", e.Path); err != nil {
			return err
		}
	case e.Split > 0 && len(train) > 0:
		if train, eval, err = keep(train, e.Split); err != nil {
			return err
		}
	}
	if len(train) > 0 {
		data.train = newSet(train, d.Shuffle, seed)
	}
	if len(eval) > 0 {
		data.eval = newSet(eval, false, seed)
	}
	return nil
}

// reader turns files into sources.
type reader struct {
	data   *Data
	config DataConfig
	vocab  int64
}

// read opens the files of a key in order. Neighbouring text files make one source, so that packing goes on over the files' ends.
func (r *reader) read(key string, patterns []string) ([]source, error) {
	paths, err := glob(key, patterns)
	if err != nil {
		return nil, err
	}
	var sources []source
	var open *text
	for _, path := range paths {
		switch ext := strings.ToLower(filepath.Ext(path)); ext {
		case ".txt", ".jsonl":
			if open == nil {
				open = &text{sequence: r.config.Sequence, pack: r.config.Pack}
				sources = append(sources, open)
			}
			if ext == ".txt" {
				err = open.readTxt(path, r.vocab)
			} else {
				err = open.readJSONL(path, r.config.TextField, r.vocab)
			}
		case ".safetensors":
			var t *tokens
			if t, err = openTokens(path, r.config.Sequence, r.vocab); err == nil {
				open = nil
				sources = append(sources, t)
				r.data.files = append(r.data.files, t)
			}
		default:
			err = status.Errorf(status.InvalidConfig, "%s: %s: unknown kind of data file %q: use .txt, .jsonl or .safetensors", key, path, ext)
		}
		if err != nil {
			return nil, err
		}
	}
	full := sources[:0]
	for _, s := range sources {
		if s.rows() > 0 {
			full = append(full, s)
		}
	}
	if len(full) == 0 {
		return nil, status.Errorf(status.InvalidConfig, "%s: %s: no text and no tokens in it: give files that are not empty", key, strings.Join(paths, ", "))
	}
	return full, nil
}

// glob expands patterns, the files of each in order. A name that exists is taken literally.
func glob(key string, patterns []string) ([]string, error) {
	var paths []string
	for _, p := range patterns {
		info, err := os.Stat(p)
		found := []string{p}
		switch {
		case err == nil && info.IsDir():
			return nil, status.Errorf(status.IO, "%s: %s is a folder: name its files, such as %s", key, p, filepath.Join(p, "*.txt"))
		case err != nil && strings.ContainsAny(p, `*?[`):
			if found, err = filepath.Glob(p); err != nil {
				return nil, status.Errorf(status.InvalidConfig, "%s: %q is not a pattern: %w", key, p, err)
			}
			if len(found) == 0 {
				return nil, status.Errorf(status.IO, "%s: no file matches %q", key, p)
			}
			sort.Strings(found)
		case os.IsNotExist(err):
			return nil, status.Errorf(status.IO, "%s: %s: no such file", key, p)
		case err != nil:
			return nil, status.Errorf(status.IO, "%s: %s: cannot be read: %w", key, p, err)
		}
		paths = append(paths, found...)
	}
	return paths, nil
}

// keep holds back the last share of the documents, at least one and not all of them; of a single document, its tail.
func keep(all []source, share float64) (train, eval []source, err error) {
	n := int64(0)
	for _, s := range all {
		n += s.units()
	}
	part := func(n int64) int64 { return n - min(max(int64(math.Round(share*float64(n))), 1), n-1) }
	if n == 1 {
		head, tail, err := all[0].cut(part)
		if err != nil {
			return nil, nil, err
		}
		return []source{head}, []source{tail}, nil
	}
	first := part(n)
	for _, s := range all {
		switch u := s.units(); {
		case u <= first:
			train = append(train, s)
			first -= u
		case first <= 0:
			eval = append(eval, s)
		default:
			before, after := s.split(first)
			train, eval, first = append(train, before), append(eval, after), 0
		}
	}
	return train, eval, nil
}

// outside is the error of an id no model can embed.
func outside(where string, position, id, vocab int64) error {
	return status.Errorf(status.InvalidConfig, "%s, position %d: token id %d is outside the model's vocabulary of %d (ids 0 to %d): the tokens belong to another model, or vocab_size is too small",
		where, position, id, vocab, vocab-1)
}

// String counts a set for the log.
func (s *Set) String() string {
	return fmt.Sprintf("%d documents, %d tokens, %d rows of up to %d", s.documents, s.tokens, s.rows, s.longest)
}
