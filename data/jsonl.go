package data

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"ulysses/data/chat"
	"ulysses/data/tokenizer"
	"ulysses/internal/input"
	"ulysses/internal/status"
)

// maxLine is the largest line of a .jsonl file, in bytes. A goroutine has the line, its text and
// its tokens in memory, which together are about ten times as large. A file of another kind may
// have no newline.
const maxLine = 32 << 20

// jsonl is a .jsonl file: each line is a JSON object with a document, of a kind that package chat
// reads. Blank lines are skipped. The lines that start in a unit are a block.
type jsonl struct {
	name      string
	size      int64 // bytes of the file
	unitBytes int64
	format    string // what the lines are
	key       string // of format in the job file
	field     string // data.text_field
	limit     int64  // bytes of a line
}

func (f *jsonl) path() string { return f.name }
func (f *jsonl) work() int64  { return f.size }
func (f *jsonl) unit() int64  { return f.unitBytes }

func (f *jsonl) scan(d *decoder, lo, hi int64) (err error) {
	from := max(lo-1, 0) // the byte before the unit may be the newline before a line
	if d.raw, err = d.read(f.name, from, hi-from, d.raw[:0]); err != nil {
		return err
	}
	skip := int64(0)
	if lo > 0 {
		n := bytes.IndexByte(d.raw, '\n') + 1
		if n == 0 || n == len(d.raw) {
			return nil // no line starts in the unit
		}
		skip = int64(n)
	}
	// The last line may end after the unit. The size of the reads that look for its end doubles, so
	// that they take time proportional to the length of the line.
	open := int64(len(d.raw) - 1 - bytes.LastIndexByte(d.raw, '\n'))
	for more := int64(1 << 12); open > 0 && open <= f.limit && from+int64(len(d.raw)) < f.size; more *= 2 {
		at := len(d.raw)
		more = min(more, f.size-from-int64(at))
		if d.raw, err = d.read(f.name, from+int64(at), more, d.raw); err != nil {
			return err
		}
		if n := bytes.IndexByte(d.raw[at:], '\n'); n >= 0 {
			d.raw, open = d.raw[:at+n+1], 0
		} else {
			open += more
		}
	}
	return d.scanBlock(f, block{offset: from + skip}, d.raw[skip:])
}

func (f *jsonl) decode(d *decoder, b *block, raw []byte, p *decodedBlock) error {
	for len(raw) > 0 {
		n := bytes.IndexByte(raw, '\n') + 1
		ended := n > 0
		if !ended {
			n = len(raw)
		}
		if int64(n) > f.limit {
			return &fault{Line: p.lines, Doc: none, Code: status.InvalidConfig,
				Text: fmt.Sprintf(": the line is longer than %d bytes; write the document to a .txt file of its own",
					f.limit)}
		}
		// Concatenated files may have a byte order mark on any line.
		if doc := bytes.TrimSpace(input.TrimBOM(raw[:n])); len(doc) > 0 {
			if err := f.appendRecord(d, p, doc); err != nil {
				return err
			}
		}
		if ended {
			p.lines++
		}
		raw = raw[n:]
	}
	return nil
}

// appendRecord decodes a line and appends its document to a block.
func (f *jsonl) appendRecord(d *decoder, p *decodedBlock, line []byte) error {
	if f.format == chat.Auto || f.format == chat.Text {
		text, ok := fastTextField(d.text[:0], line, f.field, f.format == chat.Text)
		if d.text = text[:0]; ok {
			return d.appendDocument(p, text, p.lines)
		}
	}
	doc, err := d.chat.Read(line, f.format, f.field)
	if err == nil && (len(doc.IDs) > 0 || !doc.All || !doc.Marked) {
		p.chat = p.chat || len(doc.IDs) == 0
		err = d.appendLabelled(p, doc)
	} else if err == nil {
		return d.appendDocument(p, doc.Text, p.lines)
	}
	if two := new(chat.AmbiguousError); errors.As(err, &two) {
		err = fmt.Errorf("%w; set %s to one of them", err, f.key)
	}
	if err != nil {
		return &fault{Line: p.lines, Doc: none, Code: codeOf(err), Text: ": " + err.Error()}
	}
	return nil
}

// codeOf returns the code of an error, and InvalidConfig for an error without one.
func codeOf(err error) status.Code {
	if c := status.Of(err); c != status.Internal {
		return c
	}
	return status.InvalidConfig
}

// appendLabelled appends a document whose tokens have labels to a block. A document without tokens
// is left out.
func (d *decoder) appendLabelled(p *decodedBlock, doc *chat.Document) error {
	at := len(p.ids)
	if len(p.labels) == 0 {
		p.labels = append(p.labels, p.ids...)
	}
	var err error
	if len(doc.IDs) > 0 {
		err = d.appendReady(p, doc)
	} else {
		err = d.appendMasked(p, doc)
	}
	if err == nil && len(p.ids) > at {
		p.starts = append(p.starts, int64(at))
	}
	return err
}

// appendReady appends token ids with labels.
func (d *decoder) appendReady(p *decodedBlock, doc *chat.Document) error {
	for i, id := range doc.IDs {
		if id < 0 || int64(id) >= d.vocab {
			return fmt.Errorf("input_ids%s", outsideVocabulary(int64(i), int64(id), d.vocab))
		}
		if label := doc.Labels[i]; label != Ignore && (label < 0 || int64(label) >= d.vocab) {
			return fmt.Errorf("labels (%d = ignored)%s", Ignore, outsideVocabulary(int64(i), int64(label), d.vocab))
		}
	}
	p.ids, p.labels = append(p.ids, doc.IDs...), append(p.labels, doc.Labels...)
	return nil
}

// speller is a tokenizer that tells where tokens stand in a text.
type speller interface {
	Spans(dst [][2]int, text []byte, ids []int32) ([][2]int, error)
	Canonical(text []byte) ([]byte, bool)
}

// appendMasked appends the tokens of a text, of which some bytes are trained.
func (d *decoder) appendMasked(p *decodedBlock, doc *chat.Document) error {
	at := len(p.ids)
	var err error
	if p.ids, err = d.encode(p.ids, doc.Text, 0, 0); err != nil {
		return err
	}
	if !doc.All {
		if err = d.locate(doc, p.ids[at:]); err != nil {
			return err
		}
		d.mask = doc.Mask(d.mask[:0], d.spans)
	} else {
		d.mask = append(d.mask[:0], slices.Repeat([]bool{true}, len(p.ids)-at)...)
	}
	if doc.Marked {
		n := len(p.ids)
		p.ids = tokenizer.InsertBegin(p.ids, at, d.begin)
		for range len(p.ids) - n {
			p.labels, at = append(p.labels, Ignore), at+1
		}
	}
	trained := false
	for i, id := range p.ids[at:] {
		if trained = trained || d.mask[i]; !d.mask[i] {
			id = Ignore
		}
		p.labels = append(p.labels, id)
	}
	if !trained && len(p.ids) > at {
		fix := "use another template or tokenizer"
		if doc.Marked { // a prompt and its completion, without a template
			fix = "begin the completion with the white space that ends the prompt"
		}
		return fmt.Errorf("no token is trained: each token with a trained byte has other bytes as well; %s", fix)
	}
	if doc.Marked && len(p.ids) > at {
		n := len(p.ids)
		p.ids = d.appendEOS(p.ids)
		p.labels = append(p.labels, p.ids[n:]...)
	}
	return nil
}

// locate stores in d.spans where the tokens of a document's text stand. If the tokenizer brings
// texts into a normal form, the text of the document becomes the one in this form.
func (d *decoder) locate(doc *chat.Document, ids []int32) error {
	d.spans = d.spans[:0]
	if d.tokenizer == nil {
		for i := range ids {
			d.spans = append(d.spans, [2]int{i, i + 1})
		}
		return nil
	}
	s, ok := d.tokenizer.(speller)
	if !ok {
		return status.Errorf(status.Unsupported,
			"the tokenizer does not tell where tokens stand; set data.train_on = \"all\"")
	}
	var err error
	if d.spans, err = s.Spans(d.spans, doc.Text, ids); err == nil {
		return nil
	}
	same := doc.Canonical(s.Canonical)
	if same {
		again, e := d.tokenizer.Encode(nil, doc.Text)
		same = e == nil && slices.Equal(again, ids)
	}
	if same {
		if d.spans, err = s.Spans(d.spans[:0], doc.Text, ids); err == nil {
			return nil
		}
	}
	return status.Errorf(status.Unsupported, "data.tokenizer: %w; set data.train_on = \"all\"", err)
}
