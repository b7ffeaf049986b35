package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// file is tokenizer.json. Its post_processor adds tokens around a text, which Encode never does;
// its truncation and padding are for batches of inference and are left alone, as transformers
// leaves them.
type file struct {
	Version      string          `json:"version"`
	AddedTokens  []addedToken    `json:"added_tokens"`
	Normalizer   json.RawMessage `json:"normalizer"`
	PreTokenizer json.RawMessage `json:"pre_tokenizer"`
	Decoder      json.RawMessage `json:"decoder"`
	Model        modelFile       `json:"model"`
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

// vocabulary is read only where it is an object: that of other models is refused by the model's
// name, not for its form.
type vocabulary map[string]int32

func (v *vocabulary) UnmarshalJSON(b []byte) error {
	if len(b) == 0 || b[0] != '{' {
		return nil
	}
	return json.Unmarshal(b, (*map[string]int32)(v))
}

// merges come as ["a", "b"] or, in older files, as "a b".
type merges [][2]string

func (m *merges) UnmarshalJSON(b []byte) error {
	var pairs [][]string
	if err := json.Unmarshal(b, &pairs); err == nil {
		*m = make(merges, len(pairs))
		for i, p := range pairs {
			if len(p) != 2 {
				return fmt.Errorf("merge %d has %d parts, not 2", i+1, len(p))
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
			return fmt.Errorf("merge %d is %s, not two parts with a space between", len(*m)+1, input.Quote(l))
		}
		*m = append(*m, [2]string{string(a), string(b)})
	}
	return nil
}

// part is one normalizer, pre-tokenizer or decoder of the file. Fields of all kinds stand together;
// kind says which of them count.
type part struct {
	Kind           string      `json:"type"`
	Normalizers    []part      `json:"normalizers"`
	PreTokenizers  []part      `json:"pretokenizers"`
	Decoders       []part      `json:"decoders"`
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

// program is what finds the pattern: a String is found as it stands.
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
	return nil, status.Errorf(status.InvalidConfig, "a pattern is neither {\"String\": …} nor {\"Regex\": …}")
}

// readPart decodes one of the file's parts; nil where the file has null or nothing.
func readPart(raw json.RawMessage, what string) (*part, error) {
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		return nil, nil
	}
	var p part
	if err := input.JSON(raw, &p); err != nil {
		return nil, status.Errorf(status.InvalidConfig, "%s: %w", what, err)
	}
	return &p, nil
}

// flat is a part with the members of sequences in their place.
func flat(p *part, members func(*part) []part) []part {
	if p == nil {
		return nil
	}
	if p.Kind != "Sequence" {
		return []part{*p}
	}
	var all []part
	for _, x := range members(p) {
		all = append(all, flat(&x, members)...)
	}
	return all
}
