// Package data reads files of text and tokens into sequences, the same on every rank.
//
// Open checks all files of [data] and [eval] and returns a Data with two Sets. A Set has sequences
// ("rows") in a training order, which is shuffled where data.shuffle asks for it. MicroBatch reads
// the sequences of one replica and micro-batch. Deal assigns sequences of different lengths to
// micro-batches by a token budget.
//
// Text is tokenized by package data/tokenizer or read as bytes. A file is an index of blocks: a
// block is decoded again when its sequences are needed, and its checksum must not have changed.
package data

import (
	"cmp"
	"fmt"
	"math"
	"strings"

	"ulysses/comm"
	"ulysses/internal/status"
)

// Ignore is the target of positions that have no loss, as in PyTorch.
const Ignore = -100

// Data is the training set and the evaluation set of a job. Every rank can read all of it; which
// sequences a rank reads is arithmetic.
type Data struct {
	train, eval *Set
	files       []*tokens
	reader      *reader
}

// Options is what Open needs beside the tables of the job file.
type Options struct {
	Vocab     int64     // the model's: no id lies outside it
	Seed      uint64    // decides the order of the rows where data.shuffle asks for one
	Tokenizer Tokenizer // nil = what data.tokenizer says
	Comm      comm.Comm // shares the pass over the files out; nil = this rank is alone
	Workers   int       // goroutines of this rank in that pass; 0 = one

	// for tests: bytes of a block, bytes of blocks that are kept; 0 = as it should be
	block, cache int64
}

// Train is the training set, nil without data.path.
func (d *Data) Train() *Set { return d.train }

// Eval is the evaluation set, nil when there is none.
func (d *Data) Eval() *Set { return d.eval }

// Close closes the files.
func (d *Data) Close() error {
	if d.reader != nil {
		d.reader.close()
	}
	var first error
	for _, f := range d.files {
		if err := f.file.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// source is a part of a set: documents, or the rows of one file of tokens.
type source interface {
	units() int64 // documents, as eval.split counts them; of a tokens file, its rows
	rows() int64
	tokens() int64
	longest() int64   // tokens of the longest row
	checksum() uint32 // of the files behind it, all of their documents or rows
	length(row int64) (int64, error)
	appendRow(m *MicroBatch, row int64) error                // adds a row to a micro batch
	split(unit int64) (before, after source, _ error)        // cuts between documents
	cut(at func(n int64) int64) (head, tail source, _ error) // cuts the only document in two
}

// Open opens and checks all files of [data] and [eval]: every token id against the vocabulary,
// labels, positions. It reads all files once, each rank its share, and keeps the index of their
// blocks; sequences are read again when they are needed. An error names the file and the document,
// line or row in it, and is that of the first fault in the order of the files. Empty documents are
// left out. Collective over o.Comm: all ranks get the same sequences, or the same error.
func Open(d Config, e EvalConfig, o Options) (*Data, error) {
	data := &Data{}
	if err := data.open(d, e, o); err != nil {
		data.Close()
		return nil, err
	}
	return data, nil
}

func (data *Data) open(d Config, e EvalConfig, o Options) error {
	var err error
	if d.Sequence < 1 || d.Sequence > math.MaxInt32 || o.Vocab < 1 {
		err = status.Errorf(status.InvalidArgument, "data.Open: data.sequence %d, vocabulary %d: both must be positive, the first below 2^31", d.Sequence, o.Vocab)
	} else if o.Tokenizer == nil {
		o.Tokenizer, err = openTokenizer(d.Tokenizer)
	}
	s := &opening{Options: o, config: d}
	if err = s.agree(err); err != nil {
		return err
	}
	if err = s.sameTokenizer(); err == nil {
		err = checkTokenizer(o.Tokenizer, o.Vocab, d.AddEOS) // the same on all ranks
	}
	if err != nil {
		return err
	}
	data.reader = newReader(s.decoder(), cmp.Or(o.cache, cacheBytes))
	var train, eval []source
	if len(d.Path) > 0 {
		if train, err = data.read(s, "data.path", d.Path); err != nil {
			return err
		}
	}
	switch {
	case len(e.Path) > 0:
		if eval, err = data.read(s, "eval.path", e.Path); err != nil {
			return err
		}
	case e.Split > 0 && len(train) > 0:
		train, eval, err = keep(train, e.Split)
		if err = s.agree(err); err != nil {
			return err
		}
	}
	if len(train) > 0 {
		data.train = newSet(train, d.Shuffle, o.Seed)
	}
	if len(eval) > 0 {
		data.eval = newSet(eval, false, o.Seed)
	}
	return nil
}

// read opens the files of a key in order. Adjacent files of documents form one source, so packing
// continues across the ends of files.
func (data *Data) read(o *opening, key string, patterns []string) ([]source, error) {
	list, err := listFiles(o, key, patterns)
	if err = o.agree(err); err != nil {
		return nil, err
	}
	if err = o.same(key, list); err != nil {
		return nil, err
	}
	var sources []source
	for len(list) > 0 {
		var run []format
		for len(list) > 0 && list[0].formats != nil {
			run, list = append(run, list[0].formats...), list[1:]
		}
		if len(run) > 0 {
			found, err := o.survey(run)
			if err != nil {
				return nil, err
			}
			x := newIndex(run, found, o.config.Sequence, data.reader)
			d := &documents{index: x, hi: x.tokens, count: x.docs, sequence: o.config.Sequence, pack: o.config.Pack}
			if err := o.agree(d.measure()); err != nil {
				return nil, err
			}
			if d.rows() > 0 {
				sources = append(sources, d)
			}
			continue
		}
		t, err := openTokens(o, list[0].path)
		if err != nil {
			return nil, err
		}
		list = list[1:]
		data.files = append(data.files, t)
		if t.rows() > 0 {
			sources = append(sources, t)
		}
	}
	if len(sources) == 0 {
		paths, _ := glob(key, patterns)
		return nil, status.Errorf(status.InvalidConfig, "%s: %s: no text and no tokens in it: give files that are not empty", key, strings.Join(paths, ", "))
	}
	return sources, nil
}

// keep reserves the last share of the documents for evaluation, at least one and not all of them.
// Of a single document it reserves the tail.
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
			before, after, err := s.split(first)
			if err != nil {
				return nil, nil, err
			}
			train, eval, first = append(train, before), append(eval, after), 0
		}
	}
	return train, eval, nil
}

// Identity returns a text that is the same for sets with the same sequences. Manifests of
// checkpoints hold it and a resumed run compares it, so its format must not change.
func (s *Set) Identity() string {
	return fmt.Sprintf("%d documents, %d tokens, %d rows of up to %d, checksum %08x", s.documents, s.tokens, s.rows, s.longest, s.Checksum())
}
