// Package data reads files of text and tokens into sequences, the same on every rank.
//
// Open checks all files of [data] and [eval] and returns a Data with two Sets. A Set is a list of
// sequences with a training order, which is shuffled if data.shuffle is set. Set.MicroBatch reads
// the sequences of one replica and micro-batch. Balance assigns sequences of different lengths to
// micro-batches by a token budget.
//
// Package data/tokenizer tokenizes text; without a tokenizer each byte is a token. Open reads each
// file once and keeps an index of blocks. When a sequence is needed, its blocks are decoded again,
// and an error is returned if their checksums have changed.
package data

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"strings"

	"ulysses/internal/status"
)

// Data is the training set and the evaluation sets of a job. Every rank can read all sequences.
type Data struct {
	train    *Set
	evals    []NamedSet
	files    []*tokenFile
	expanded map[string]*os.File
	cache    *blockCache
}

// Train returns the training set; nil without data.path.
func (d *Data) Train() *Set { return d.train }

// NamedSet is an evaluation set. The name is that of eval.set; "" for eval.path and eval.split.
type NamedSet struct {
	Name string
	*Set
}

// Evals returns the evaluation sets in the order of the job file.
func (d *Data) Evals() []NamedSet { return d.evals }

// Eval returns the first evaluation set; nil if there is none.
func (d *Data) Eval() *Set {
	if len(d.evals) == 0 {
		return nil
	}
	return d.evals[0].Set
}

// Close closes the files.
func (d *Data) Close() error {
	if d.cache != nil {
		d.cache.close()
	}
	var first error
	for _, f := range d.expanded {
		f.Close()
	}
	for _, f := range d.files {
		if err := f.file.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// Tokenizer describes the tokenizer: its digest and the ids that end and begin documents. It
// returns "" for bytes. Manifests of checkpoints contain this text, so its format must not change.
func (d *Data) Tokenizer() string { return d.TokenizerDigest() + d.Conversations() }

// TokenizerDigest is Tokenizer without the templates of conversations.
func (d *Data) TokenizerDigest() string {
	t := d.cache.tokenizer
	if t == nil {
		return ""
	}
	s := ", tokenizer " + t.Digest()[:min(16, len(t.Digest()))]
	if id, ok := t.EOS(); ok && d.cache.addEOS {
		s += fmt.Sprintf(" with end mark %d", id)
	}
	if len(d.cache.begin) > 0 {
		s += fmt.Sprintf(" with begin marks %d", d.cache.begin)
	}
	return s
}

// Conversations describes how conversations become texts with labels; "" if none are trained. A
// resumed run may evaluate other files.
func (d *Data) Conversations() string {
	if d.train != nil && d.train.conversations() {
		return ", conversations " + d.cache.chat.Digest()[:16]
	}
	return ""
}

// Open opens and checks all files of [data] and [eval]: every token id against the vocabulary,
// labels, and position ids. Each file is read once; each rank reads a share. Sequences are read
// again when they are needed. Empty documents are left out. An error names the file and the
// document, line or sequence in it; of several faults it reports the first in the order of the
// files. All ranks get the same sequences, or all get an error; the error of files that only some
// ranks can open names a rank. Collective over o.Comm.
func Open(d Config, e EvalConfig, o Options) (*Data, error) {
	data := &Data{}
	if err := data.open(d, e, o); err != nil {
		data.Close()
		return nil, err
	}
	return data, nil
}

func (data *Data) open(d Config, e EvalConfig, options Options) error {
	var err error
	if d.Sequence < 1 || d.Sequence > math.MaxInt32 || options.Vocab < 1 {
		err = status.Errorf(status.InvalidArgument,
			"data.Open: data.sequence %d, vocabulary %d: both must be positive and data.sequence below 2^31",
			d.Sequence, options.Vocab)
	} else if options.Tokenizer == nil {
		options.Tokenizer, err = openTokenizer(d.Tokenizer)
	}
	data.expanded = map[string]*os.File{}
	o := &opener{Options: options, config: d, expanded: data.expanded}
	if err == nil {
		o.chat, err = openChat(d, options.Tokenizer)
	}
	if err = o.agreeOnFiles(err); err != nil {
		return err
	}
	if err = checkTokenizerFiles(o.Comm, o.Tokenizer, o.chat); err == nil {
		err = checkTokenizer(o.Tokenizer, o.Vocab, &d) // the same on all ranks
	}
	if err != nil {
		return err
	}
	data.cache = newBlockCache(o.decoder(), cmp.Or(o.cache, cacheBytes))
	var train, eval []source
	if len(d.Path) > 0 {
		if train, err = data.read(o, "data.path", d.Path, d.Format); err != nil {
			return err
		}
	}
	var counts []int // sources of each table of data.source
	for _, s := range d.Source {
		found, err := data.read(o, "data.source", s.Path, s.Format)
		if err != nil {
			return err
		}
		train, counts = append(train, found...), append(counts, len(found))
	}
	add := func(name string, found []source) {
		data.evals = append(data.evals, NamedSet{name, newSet(o.arrange(found, false), false, o.Seed)})
	}
	for _, x := range e.Set {
		found, err := data.read(o, "eval.set", x.Path, x.Format)
		if err != nil {
			return err
		}
		add(x.Name, found)
	}
	switch {
	case len(e.Path) > 0:
		if eval, err = data.read(o, "eval.path", e.Path, e.Format); err != nil {
			return err
		}
	case e.Split > 0 && len(train) > 0:
		train, eval, err = splitForEval(train, e.Split)
		if err = o.agree(err); err != nil {
			return err
		}
	}
	if len(train) > 0 {
		data.train = newSet(o.arrange(train, d.ShuffleDocuments), d.Shuffle, o.Seed)
		if len(d.Source) > 0 {
			data.train.mixture = mixtureOf(d.Source, data.train.sources, counts)
		}
	}
	if len(eval) > 0 {
		add("", eval)
	}
	return nil
}

// read opens the files of a key in order. Adjacent files of documents form one source, so a packed
// sequence may have documents of several files. Collective.
func (data *Data) read(o *opener, key string, patterns []string, lines string) ([]source, error) {
	list, err := listFiles(o, key, patterns, lines)
	if err = o.agreeOnFiles(err); err != nil {
		return nil, err
	}
	if err = checkSameFiles(o.Comm, key, list); err != nil {
		return nil, err
	}
	var sources []source
	for len(list) > 0 {
		var adjacent []format
		for len(list) > 0 && list[0].formats != nil {
			adjacent, list = append(adjacent, list[0].formats...), list[1:]
		}
		if len(adjacent) > 0 {
			found, starts, err := o.scan(adjacent)
			if err != nil {
				return nil, err
			}
			x := newIndex(adjacent, found, starts, o.config.Sequence, data.cache)
			d := &documentRange{index: x, hi: x.tokens, count: x.docs, maxLength: o.config.Sequence,
				pack: o.config.Pack}
			if err := o.agree(d.measure()); err != nil {
				return nil, err
			}
			if d.sequences() > 0 {
				sources = append(sources, d)
			}
			continue
		}
		t, err := openTokenFile(o, list[0].path)
		if err != nil {
			return nil, err
		}
		list = list[1:]
		data.files = append(data.files, t)
		if t.sequences() > 0 {
			sources = append(sources, t)
		}
	}
	if len(sources) == 0 {
		paths, _ := glob(key, patterns)
		return nil, status.Errorf(status.InvalidConfig,
			"%s: %s: the files have no text and no tokens; name files that are not empty", key,
			strings.Join(paths, ", "))
	}
	return sources, nil
}

// splitForEval reserves the given share of the documents for evaluation, from the end: at least one
// document and not all. If there is only one document, it reserves the end of it.
func splitForEval(all []source, share float64) (train, eval []source, err error) {
	n := int64(0)
	for _, s := range all {
		n += s.documents()
	}
	trained := func(n int64) int64 { return n - min(max(int64(math.Round(share*float64(n))), 1), n-1) }
	if n == 1 {
		head, tail, err := all[0].splitDocument(trained)
		if err != nil {
			return nil, nil, err
		}
		return []source{head}, []source{tail}, nil
	}
	left := trained(n)
	for _, s := range all {
		switch docs := s.documents(); {
		case docs <= left:
			train = append(train, s)
			left -= docs
		case left <= 0:
			eval = append(eval, s)
		default:
			before, after, err := s.split(left)
			if err != nil {
				return nil, nil, err
			}
			train, eval, left = append(train, before), append(eval, after), 0
		}
	}
	return train, eval, nil
}
