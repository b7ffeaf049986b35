package data

import (
	"fmt"
	"path/filepath"

	"ulysses/comm"
	"ulysses/data/tokenizer"
	"ulysses/internal/status"
)

// Tokenizer makes token ids of text. Calls may come from several goroutines at once.
type Tokenizer interface {
	// Encode appends the ids of a text to dst.
	Encode(dst []int32, text []byte) ([]int32, error)
	// EOS is the id that ends a document; false where there is none.
	EOS() (int32, bool)
	// Size is the number of ids: all lie below it.
	Size() int64
	// Digest stands for what Encode and EOS do, so that a run is resumed with the same one alone.
	Digest() string
}

// add appends a document to a piece; one without tokens is none. Line and document of a fault are
// counted from the block's first.
func (d *decoder) add(p *piece, text []byte, line int64) error {
	at := len(p.ids)
	var err error
	if p.ids, err = d.encode(p.ids, text, line, int64(len(p.starts))); err != nil || len(p.ids) == at {
		return err
	}
	p.starts = append(p.starts, int64(at))
	p.ids = d.end(p.ids)
	return nil
}

// end appends the mark that ends a document, where there is one.
func (d *decoder) end(ids []int32) []int32 {
	if d.encoder != nil && d.addEOS {
		if id, ok := d.encoder.EOS(); ok {
			return append(ids, id)
		}
	}
	return ids
}

// encode appends the ids of a text and checks that all are in the vocabulary. Without a tokenizer
// each byte is a token.
func (d *decoder) encode(ids []int32, text []byte, line, doc int64) ([]int32, error) {
	at := len(ids)
	if d.encoder != nil {
		var err error
		if ids, err = d.encoder.Encode(ids, text); err != nil {
			return ids, &fault{Line: line, Doc: doc, Code: status.Of(err), Rest: ": data.tokenizer: " + err.Error()}
		}
	} else {
		ids = extend(ids, len(text))
		for i, b := range text {
			ids[at+i] = int32(b)
		}
		if d.vocab >= 256 {
			return ids, nil
		}
	}
	for i, id := range ids[at:] {
		if int64(id) >= d.vocab || id < 0 {
			return ids, &fault{Line: line, Doc: doc, Code: status.InvalidConfig, Rest: outside(d.before+int64(i), int64(id), d.vocab)}
		}
	}
	return ids, nil
}

// openTokenizer opens the tokenizer of data.tokenizer; nil means bytes.
func openTokenizer(name string) (Tokenizer, error) {
	// job has settled what auto is; without a model's folder it is bytes
	if name == "bytes" || name == "auto" {
		return nil, nil
	}
	t, err := tokenizer.Open(name)
	if err != nil {
		return nil, status.Errorf(status.Of(err), "data.%w", err)
	}
	return t, nil
}

// sameTokenizer refuses a tokenizer whose files differ between the ranks. Collective.
func (o *opening) sameTokenizer() error {
	t, ok := o.Tokenizer.(*tokenizer.Tokenizer)
	if !ok || o.Comm == nil {
		return nil
	}
	var files []comm.File
	for _, path := range t.Files() {
		files = append(files, comm.File{Name: filepath.Base(path), Path: path})
	}
	return comm.SameFiles(o.Comm, "data.tokenizer", files)
}

// Tokenizer is what the tokens depend on beside the text, in a few words; nothing for bytes.
func (d *Data) Tokenizer() string {
	t := d.reader.encoder
	if t == nil {
		return ""
	}
	s := ", tokenizer " + t.Digest()[:min(16, len(t.Digest()))]
	if id, ok := t.EOS(); ok && d.reader.addEOS {
		s += fmt.Sprintf(" with end mark %d", id)
	}
	return s
}

// checkTokenizer refuses one whose ids the model cannot embed.
func checkTokenizer(t Tokenizer, vocab int64, addEOS bool) error {
	if t == nil {
		return nil
	}
	if n := t.Size(); n > vocab {
		return status.Errorf(status.InvalidConfig, "data.tokenizer: it has %d ids and the model's vocab_size is %d: it belongs to another model, or vocab_size is too small", n, vocab)
	}
	if id, ok := t.EOS(); ok && addEOS && (id < 0 || int64(id) >= vocab) {
		return status.Errorf(status.InvalidConfig, "data.tokenizer: its end mark %d is outside the model's vocabulary of %d: set data.add_eos = false, or give the model's own tokenizer", id, vocab)
	}
	return nil
}
