package data

import (
	"cmp"
	"path/filepath"
	"slices"

	"ulysses/comm"
	"ulysses/data/chat"
	"ulysses/data/tokenizer"
	"ulysses/internal/status"
)

// Tokenizer turns text into token ids. Several goroutines may call it at the same time.
type Tokenizer interface {
	// Encode appends the ids of a text to dst.
	Encode(dst []int32, text []byte) ([]int32, error)
	// EOS returns the id that ends a document; false if there is none.
	EOS() (int32, bool)
	// Begin returns the ids with which the tokenizer begins a text.
	Begin() []int32
	// Size is greater than every id, and Words than every id that is not of an added token.
	Size() int64
	Words() int64
	// Digest differs for tokenizers that encode differently. A resumed run compares it.
	Digest() string
}

// OpenTokenizer opens the tokenizer that data.tokenizer names, for generation; nil for "bytes".
func OpenTokenizer(name string) (*tokenizer.Tokenizer, error) {
	t, err := openTokenizer(name)
	if t == nil || err != nil {
		return nil, err
	}
	return t.(*tokenizer.Tokenizer), nil
}

// openTokenizer opens the tokenizer that data.tokenizer names. It returns nil for "bytes".
func openTokenizer(name string) (Tokenizer, error) {
	// Package job replaces "auto" by the tokenizer in the model's folder, if there is one.
	if name == "bytes" || name == "auto" {
		return nil, nil
	}
	t, err := tokenizer.Open(name)
	if err != nil {
		return nil, status.Errorf(status.Of(err), "data.%w", err)
	}
	return t, nil
}

// TokenizerPath returns the tokenizer.json that data.tokenizer names; "" for "bytes".
func TokenizerPath(name string) string {
	if name == "" || name == "bytes" || name == "auto" {
		return ""
	}
	return tokenizer.Path(name)
}

// ChatTemplates returns the texts of the chat templates that data.chat_template names, by name;
// none for "auto", and for a folder without a template.
func ChatTemplates(d Config) (map[string]string, error) {
	if d.ChatTemplate == "" || d.ChatTemplate == "auto" {
		return nil, nil
	}
	return chat.Texts(d.ChatTemplate)
}

// openChat opens the chat templates that data.chat_template names, or that are beside the
// tokenizer.
func openChat(d Config, of Tokenizer) (*chat.Reader, error) {
	o := chat.Options{Key: chat.Key, TrainOn: cmp.Or(d.TrainOn, chat.Assistant), Date: d.ChatDate,
		Variables: d.ChatVariables}
	if t, ok := of.(*tokenizer.Tokenizer); ok {
		o.Folder, o.Special = filepath.Dir(t.Files()[0]), t.Special()
	}
	o.Template = o.Folder
	if d.ChatTemplate != "" && d.ChatTemplate != "auto" {
		o.Template = d.ChatTemplate
	}
	return chat.Open(o)
}

// checkTokenizerFiles returns an error if the files of the tokenizer, or the chat templates, differ
// between ranks; nil c = one rank. Collective.
func checkTokenizerFiles(c comm.Comm, of Tokenizer, templates *chat.Reader) error {
	if c == nil {
		return nil
	}
	if t, ok := of.(*tokenizer.Tokenizer); ok {
		if err := comm.SameFiles(c, "data.tokenizer", commFiles(t.Files())); err != nil {
			return err
		}
	}
	return comm.SameFiles(c, chat.Key, commFiles(templates.Files()))
}

// commFiles returns files by their names.
func commFiles(paths []string) (files []comm.File) {
	for _, path := range paths {
		files = append(files, comm.File{Name: filepath.Base(path), Path: path})
	}
	return files
}

// TokenizerFiles returns the files of the tokenizer that data.tokenizer names, so that ranks can
// compare their copies; none for "bytes".
func TokenizerFiles(name string) ([]comm.File, error) {
	t, err := openTokenizer(name)
	if t == nil || err != nil {
		return nil, err
	}
	return commFiles(t.(*tokenizer.Tokenizer).Files()), nil
}

// ChatFiles returns the files of the chat templates of a job, so that ranks can compare their
// copies.
func ChatFiles(d Config) ([]comm.File, error) {
	t, err := openTokenizer(d.Tokenizer)
	if err != nil {
		return nil, err
	}
	r, err := openChat(d, t)
	if err != nil {
		return nil, err
	}
	return commFiles(r.Files()), nil
}

// SamplePrompts returns the prompts of eval.sample; with eval.sample_chat, in the chat template of
// the job, with the generation prompt. t is the result of OpenTokenizer.
func SamplePrompts(d Config, e EvalConfig, t *tokenizer.Tokenizer) ([]string, error) {
	if !e.SampleChat || len(e.Sample) == 0 {
		return e.Sample, nil
	}
	var of Tokenizer // not a nil pointer
	if t != nil {
		of = t
	}
	r, err := openChat(d, of)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, prompt := range e.Sample {
		text, err := r.Ask([]byte(prompt))
		if err != nil {
			return nil, status.Errorf(status.InvalidConfig, "eval.sample_chat: %w", err)
		}
		all = append(all, string(text))
	}
	return all, nil
}

// checkTokenizer returns an error for a tokenizer with ids outside the model's vocabulary. An added
// token outside of it is refused where a text has one.
func checkTokenizer(t Tokenizer, vocab int64, d *Config) error {
	if t == nil {
		return nil
	}
	if n := t.Size(); t.Words() > vocab {
		return status.Errorf(status.InvalidConfig,
			"data.tokenizer: the tokenizer has %d ids, the model's vocab_size is %d; use the tokenizer of the model",
			n, vocab)
	}
	if d.AddBOS && slices.ContainsFunc(t.Begin(), func(id int32) bool { return int64(id) >= vocab }) {
		return status.Errorf(status.InvalidConfig,
			"data.tokenizer: the ids %d that begin a document are outside the model's vocabulary of %d; set data.add_bos = false",
			t.Begin(), vocab)
	}
	if id, ok := t.EOS(); ok && d.AddEOS && (id < 0 || int64(id) >= vocab) {
		return status.Errorf(status.InvalidConfig,
			"data.tokenizer: the id %d that ends a document is outside the model's vocabulary of %d; set data.add_eos = false",
			id, vocab)
	}
	return nil
}
