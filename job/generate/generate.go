// Package generate continues a text with a model: the verb generate.
//
// Open reads a model folder into the memory of a device. Model.Text generates a text, token by
// token, with a model.Decoder and a Sampling.
package generate

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"
	"unicode/utf8"

	"ulysses/comm"
	"ulysses/data/tokenizer"
	"ulysses/device"
	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// chunk is the number of tokens of the prompt in one pass.
const chunk = 512

const defaultTokens = 128

// Tokenizer turns text into ids and back.
type Tokenizer interface {
	Encode(dst []int32, text []byte) ([]int32, error)
	Decode(ids []int32) string
}

// Model is a model on a device, with its tokenizer and the defaults of its generation_config.json.
type Model struct {
	Tokenizer Tokenizer
	Begin     []int32  // ids before a prompt that does not begin with them
	Sampling  Sampling // the defaults; greedy if the folder has none
	Ignored   []string // fields of generation_config.json without effect that would change a text, with their values
	Bytes     int64    // without a tokenizer.json: the vocabulary, whose ids are taken for bytes
	ends      []int32  // tokens that end a text
	limit     int64    // positions of the model, with those that RoPE scaling adds; 0 = no limit
	model     *model.Model
	weights   *device.Arena

	world comm.Comm // the ranks that divide the layers
	stage model.Stage
	files []comm.File // of the folder, while it is opened
}

// Open reads a Hugging Face folder. A folder without tokenizer.json is that of a model over bytes.
// compute is the type of weights and activations. The ranks of world divide the layers: each reads
// and keeps the weights of its layers alone. Collective.
func Open(folder string, d device.Device, compute tensor.DType, world comm.Comm) (m *Model, err error) {
	if m, err = open(folder, d, compute, world); err == nil && world.Size() > 1 {
		err = comm.SameFiles(world, "model-folder", m.files)
	}
	m.files = nil
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func open(folder string, d device.Device, compute tensor.DType, world comm.Comm) (m *Model, err error) {
	m = &Model{Tokenizer: bytesTokenizer{}, Sampling: Sampling{TopP: 1}, world: world}
	defer func() { err = comm.Agree(world, err) }()
	f, err := model.OpenFolder(folder, nil)
	if err != nil {
		return m, err
	}
	defer f.Close()
	m.files = f.Files()
	if n := f.Config.NumHiddenLayers; int64(world.Size()) > n {
		return m, status.Errorf(status.InvalidArgument,
			"generate: %d ranks, and the model has %d layers to divide; start at most %d ranks", world.Size(), n, n)
	}
	if err = m.openTokenizer(folder, f.Config.VocabSize); err != nil {
		return m, err
	}
	if err = m.readDefaults(folder); err == nil {
		err = m.Sampling.check(folder)
	}
	if err != nil {
		return m, err
	}
	m.limit = f.Config.Positions()
	if m.model, err = model.New(d, comm.Local(1)[0], f.Config, model.Options{Compute: compute}); err != nil {
		return m, err
	}
	m.stage = m.model.Stages(int64(world.Size()), int64(world.Rank()))
	bytes := int64(0)
	for i, g := range m.model.Groups() {
		if m.model.Uses(m.stage, i) {
			bytes += device.Padded(d, g.Numel()*compute.Size())
		}
	}
	if m.weights, err = device.NewArena(d, "weights", bytes); err != nil {
		return m, err
	}
	for i, g := range m.model.Groups() {
		if !m.model.Uses(m.stage, i) {
			g.Own(0, tensor.Of(nil, compute, 0), tensor.Tensor{})
			continue
		}
		values, err := m.weights.Tensor(compute, g.Numel())
		if err != nil {
			return m, err
		}
		g.Bind(values, tensor.Tensor{}, tensor.Tensor{})
	}
	return m, f.Load(m.model)
}

func (m *Model) openTokenizer(folder string, vocab int64) error {
	path := filepath.Join(folder, "tokenizer.json")
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		if vocab < 256 {
			return status.Errorf(status.InvalidConfig,
				"generate: %s has no tokenizer.json, and a vocabulary of %d is too small for bytes; add the tokenizer's files to the folder",
				folder, vocab)
		}
		m.Bytes = vocab
		return nil
	}
	t, err := tokenizer.Open(path)
	if err != nil {
		return err
	}
	if n := t.Size(); t.Words() > vocab {
		return status.Errorf(status.InvalidConfig,
			"generate: the tokenizer of %s has %d ids, the model's vocab_size is %d; add the tokenizer of the model",
			folder, n, vocab)
	}
	if id, ok := t.EOS(); ok {
		m.ends = append(m.ends, id)
	}
	m.Tokenizer, m.Begin = t, t.Begin()
	return nil
}

// Result says how a text was generated.
type Result struct {
	Prompt, Tokens int64 // tokens of the prompt, and after it, without the one that ended the text
	Ended          bool  // by a token that ends a text
	Began          bool  // an error from before is of all ranks
	Read, Write    time.Duration
}

// Prompt returns the ids of a prompt.
func (m *Model) Prompt(text []byte) ([]int32, error) {
	ids, err := m.Tokenizer.Encode(nil, text)
	if err != nil {
		return nil, err
	}
	ids = tokenizer.InsertBegin(ids, 0, m.Begin)
	for _, id := range ids {
		if vocab := m.model.Config.VocabSize; int64(id) >= vocab {
			return nil, status.Errorf(status.InvalidArgument,
				"the prompt %s has a token with the id %d, outside the model's vocabulary of %d; remove it",
				input.Quote(string(text)), id, vocab)
		}
	}
	return ids, nil
}

// Text continues a prompt, the same on all ranks, by at most `most` tokens, until a token that ends
// a text, and passes the text to emit, as soon as its characters are complete. most = 0: 128, or as
// many as the model has positions for. Collective.
func (m *Model) Text(prompt []byte, most int64, s Sampling, emit func(text string) error) (r Result, err error) {
	ids, err := m.Prompt(prompt)
	if err != nil {
		return r, status.Errorf(status.Of(err), "generate: %w", err)
	}
	if len(ids) == 0 {
		return r, status.Errorf(status.InvalidArgument, "generate: the prompt is empty; give at least one token")
	}
	r.Prompt = int64(len(ids))
	if most == 0 {
		if most = defaultTokens; m.limit > 0 {
			most = max(1, min(most, m.limit-r.Prompt))
		}
	}
	limit := int64(math.MaxInt32) // positions are I32
	if m.limit > 0 {
		limit = min(limit, m.limit)
	}
	if most > limit-r.Prompt {
		return r, status.Errorf(status.InvalidArgument,
			"generate: %d tokens of the prompt and --max-tokens %d exceed the %d positions of the model; lower --max-tokens",
			r.Prompt, most, limit)
	}
	stage := m.stage
	stage.Receive = func(x []float32) error {
		return m.world.SendRecv(nil, tensor.OfFloat32(x, int64(len(x))), m.world.Rank()-1, tensor.Tensor{}, -1)
	}
	stage.Send = func(x []float32) error {
		return m.world.SendRecv(nil, tensor.Tensor{}, -1, tensor.OfFloat32(x, int64(len(x))), m.world.Rank()+1)
	}
	d, err := m.model.NewStage(r.Prompt+most, chunk, stage)
	if err = comm.Agree(m.world, err); err != nil {
		return r, err
	}
	defer d.Close()
	return m.Continue(d, ids, most, s, emit)
}

// Of returns a Model for a model whose parameters the caller attaches, such as one in training. t
// is nil for bytes. A text ends with the end mark of the tokenizer, or with a token that the
// generation_config.json of a folder names, or else its config.json; "" = no folder.
func Of(of *model.Model, t Tokenizer, folder string) (*Model, error) {
	m := &Model{Tokenizer: bytesTokenizer{}, Sampling: Sampling{TopP: 1}, limit: of.Config.Positions(), model: of,
		world: comm.Local(1)[0]}
	if t != nil {
		m.Tokenizer = t
	}
	if x, ok := t.(interface{ EOS() (int32, bool) }); ok {
		if id, has := x.EOS(); has {
			m.ends = append(m.ends, id)
		}
	}
	if folder == "" {
		return m, nil
	}
	err := m.readDefaults(folder)
	m.Sampling = Sampling{TopP: 1}
	return m, err
}

// Continue is Text for the ids of a prompt, with a decoder of the model that has memory for them
// and for `most` tokens more, and has no tokens yet.
func (m *Model) Continue(d *model.Decoder, ids []int32, most int64, s Sampling, emit func(text string) error) (r Result,
	err error) {
	r.Prompt, r.Began = int64(len(ids)), true
	begin := time.Now()
	logits, err := d.Append(ids)
	r.Read = time.Since(begin)
	begin = time.Now()
	defer func() { r.Write = time.Since(begin) }()
	var said []int32
	shown := 0
	for r.Tokens < most && err == nil {
		var id int32
		if id, err = m.next(&s, logits, d.Length()); err != nil {
			break
		}
		if slices.Contains(m.ends, id) {
			r.Ended = true
			break
		}
		said = append(said, id)
		r.Tokens++
		if text := m.Tokenizer.Decode(said); len(text) > shown && (whole(text) || r.Tokens == most) {
			if err := emit(text[shown:]); err != nil {
				return r, err
			}
			shown = len(text)
		}
		if r.Tokens < most {
			logits, err = d.Append([]int32{id})
		}
	}
	if err != nil {
		return r, err
	}
	if text := m.Tokenizer.Decode(said); len(text) > shown {
		return r, emit(text[shown:])
	}
	return r, nil
}

// next returns the next token. The last rank, which has the logits, draws it for all. Logits that
// are NaN or +Inf give an error on all ranks.
func (m *Model) next(s *Sampling, logits []float32, position int64) (int32, error) {
	last := m.world.Size() - 1
	id := []int64{0}
	if m.world.Rank() == last {
		if slices.ContainsFunc(logits, notFinite) {
			id[0] = -1
		} else {
			id[0] = int64(s.Next(logits, position))
		}
	}
	if last > 0 {
		if err := m.world.Broadcast(nil, tensor.OfInt64(id, 1), last); err != nil {
			return 0, err
		}
	}
	if id[0] < 0 {
		return 0, status.Errorf(status.Numeric,
			"generate: a logit after %d tokens is NaN or Inf: weights are NaN or Inf, or values overflow; choose another checkpoint, or compute in f32",
			position)
	}
	return int32(id[0]), nil
}

// notFinite reports whether a logit is NaN or +Inf. A logit of -Inf is a token that never follows.
func notFinite(x float32) bool { return !(float64(x) < math.Inf(1)) }

// whole reports whether a text does not end within a character: tokens may be parts of one.
func whole(text string) bool {
	for i := 1; i <= min(utf8.UTFMax, len(text)); i++ {
		if b := text[len(text)-i]; utf8.RuneStart(b) {
			return utf8.FullRuneInString(text[len(text)-i:]) && text[len(text)-i:] != "\uFFFD"
		}
	}
	return true
}

// Close frees the memory.
func (m *Model) Close() {
	if m.model != nil {
		m.model.Close()
	}
	if m.weights != nil {
		m.weights.Free()
	}
}

// bytesTokenizer is the tokenizer "bytes": a token is a byte.
type bytesTokenizer struct{}

func (bytesTokenizer) Encode(dst []int32, text []byte) ([]int32, error) {
	for _, b := range text {
		dst = append(dst, int32(b))
	}
	return dst, nil
}

func (bytesTokenizer) Decode(ids []int32) string {
	var text []byte
	for _, id := range ids {
		if id > 255 {
			text = append(text, "\uFFFD"...) // not a byte
		} else {
			text = append(text, byte(id))
		}
	}
	return string(text)
}
