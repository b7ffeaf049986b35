package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// file is the content of tokenizer.json. post_processor has no effect on Encode (see Begin).
// Truncation and padding, which are for batches of inference, have none at all.
type file struct {
	Version      string          `json:"version"`
	AddedTokens  []addedToken    `json:"added_tokens"`
	Normalizer   json.RawMessage `json:"normalizer"`
	PreTokenizer json.RawMessage `json:"pre_tokenizer"`
	Post         json.RawMessage `json:"post_processor"`
	Decoder      json.RawMessage `json:"decoder"`
	Model        modelFile       `json:"model"`
}

// addedToken is a token that is not in the vocabulary of the model, or is found in the text before
// the text is split. The id in the file is not used: as in the `tokenizers` package, a token has
// its id in the vocabulary of the model, or the next free id.
type addedToken struct {
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

type modelFile struct {
	Type         string     `json:"type"`
	Dropout      float64    `json:"dropout"`
	UnkToken     *string    `json:"unk_token"`
	Prefix       string     `json:"continuing_subword_prefix"`
	Suffix       string     `json:"end_of_word_suffix"`
	FuseUnk      bool       `json:"fuse_unk"`
	ByteFallback bool       `json:"byte_fallback"`
	IgnoreMerges bool       `json:"ignore_merges"`
	Vocab        vocabulary `json:"vocab"`
	Merges       merges     `json:"merges"`
}

// vocabulary is decoded only if it is an object. Other forms belong to other types of models, which
// are refused by their type.
type vocabulary map[string]int32

func (v *vocabulary) UnmarshalJSON(b []byte) error {
	if len(b) == 0 || b[0] != '{' {
		return nil
	}
	return json.Unmarshal(b, (*map[string]int32)(v))
}

// merges are pairs of tokens, written as ["a", "b"] or, in older files, as "a b".
type merges [][2]string

func (m *merges) UnmarshalJSON(b []byte) error {
	var pairs [][]string
	if err := json.Unmarshal(b, &pairs); err == nil {
		*m = make(merges, len(pairs))
		for i, p := range pairs {
			if len(p) != 2 {
				return fmt.Errorf("merge %d has %d tokens instead of 2", i+1, len(p))
			}
			(*m)[i] = [2]string(p)
		}
		return nil
	}
	var lines []string
	if err := json.Unmarshal(b, &lines); err != nil {
		return err
	}
	*m = make(merges, 0, len(lines))
	for _, l := range lines {
		if len(l) >= 8 && l[:8] == "#version" {
			continue
		}
		a, b, ok := bytes.Cut([]byte(l), []byte{' '})
		if !ok || bytes.IndexByte(b, ' ') >= 0 {
			return fmt.Errorf("merge %d is %s instead of two tokens separated by a space", len(*m)+1, input.Quote(l))
		}
		*m = append(*m, [2]string{string(a), string(b)})
	}
	return nil
}

// component is a normalizer, pre-tokenizer or decoder. It has the fields of all kinds; Kind
// determines which of them are used.
type component struct {
	Kind           string      `json:"type"`
	Normalizers    []component `json:"normalizers"`
	PreTokenizers  []component `json:"pretokenizers"`
	Decoders       []component `json:"decoders"`
	Prepend        string      `json:"prepend"`
	Pattern        patternFile `json:"pattern"`
	Content        string      `json:"content"`
	StripLeft      bool        `json:"strip_left"`
	StripRight     bool        `json:"strip_right"`
	Behavior       string      `json:"behavior"`
	Invert         bool        `json:"invert"`
	AddPrefixSpace *bool       `json:"add_prefix_space"`
	UseRegex       *bool       `json:"use_regex"`
	Individual     bool        `json:"individual_digits"`
	Replacement    string      `json:"replacement"`
	PrependScheme  string      `json:"prepend_scheme"`
	SplitWords     *bool       `json:"split"`
	Suffix         string      `json:"suffix"`
	Start          int         `json:"start"`
	Stop           int         `json:"stop"`
}

type patternFile struct {
	String *string `json:"String"`
	Regex  *string `json:"Regex"`
}

// program compiles the pattern. String matches itself.
func (p patternFile) program() (*program, error) {
	switch {
	case p.Regex != nil:
		return compile(*p.Regex)
	case p.String != nil:
		var all cat
		for _, r := range *p.String {
			all = append(all, (&set{spans: []rune{r, r}}).sealed())
		}
		return compileNode(all)
	}
	return nil, status.Errorf(status.InvalidConfig,
		"a pattern is neither {\"String\": …} nor {\"Regex\": …}; set one of them")
}

// readComponent decodes a normalizer, pre-tokenizer or decoder; nil if the file has null or
// nothing.
func readComponent(raw json.RawMessage, what string) (*component, error) {
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		return nil, nil
	}
	var p component
	if err := input.JSON(raw, &p); err != nil {
		return nil, status.Errorf(status.InvalidConfig, "%s: %w", what, err)
	}
	return &p, nil
}

// flat returns a component, or the members of a Sequence, recursively.
func flat(p *component, members func(*component) []component) []component {
	if p == nil {
		return nil
	}
	if p.Kind != "Sequence" {
		return []component{*p}
	}
	var all []component
	for _, x := range members(p) {
		all = append(all, flat(&x, members)...)
	}
	return all
}

// checkComponents refuses components that could use unlimited time or memory on a text.
func checkComponents(what string, components []component) error {
	if n := len(components); n > maxComponents {
		return status.Errorf(status.Unsupported,
			"%s: %d components, at most %d are supported; tokenize with the `tokenizers` package beforehand", what, n,
			maxComponents)
	}
	for i, p := range components {
		for field, text := range map[string]string{"content": p.Content, "prepend": p.Prepend} {
			if len(text) > maxContent {
				return status.Errorf(status.Unsupported,
					"%s, component %d (%s): %s is %s, at most %d bytes are supported; tokenize with the `tokenizers` package beforehand",
					what, i, input.Short(p.Kind), field, input.Quote(text), maxContent)
			}
		}
		for _, pattern := range []*string{p.Pattern.String, p.Pattern.Regex} {
			if pattern != nil && len(*pattern) > maxPattern {
				return status.Errorf(status.Unsupported,
					"%s, component %d (%s): the pattern is %s, at most %d bytes are supported; tokenize with the `tokenizers` package beforehand",
					what, i, input.Short(p.Kind), input.Quote(*pattern), maxPattern)
			}
		}
	}
	return nil
}
