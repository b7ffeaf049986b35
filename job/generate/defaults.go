package generate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// defaults are the fields of generation_config.json that Open reads.
type defaults struct {
	EOS         json.RawMessage `json:"eos_token_id"`
	Sample      bool            `json:"do_sample"`
	Temperature *float64        `json:"temperature"`
	TopP        *float64        `json:"top_p"`
	TopK        *int64          `json:"top_k"`
}

// withoutEffect are the fields of generation_config.json by which transformers draws or ends texts
// in other ways than Sampling does, and their values that change nothing. Null and empty lists
// change nothing either.
var withoutEffect = []struct {
	name    string
	neutral any
	draws   bool // it counts only with do_sample
}{
	{"repetition_penalty", 1.0, false}, {"no_repeat_ngram_size", 0.0, false}, {"num_beams", 1.0, false},
	{"penalty_alpha", 0.0, false},
	{"guidance_scale", 1.0, false}, {"min_length", 0.0, false}, {"min_new_tokens", 0.0, false},
	{"stop_strings", nil, false},
	{"bad_words_ids", nil, false}, {"suppress_tokens", nil, false}, {"begin_suppress_tokens", nil, false},
	{"sequence_bias", nil, false},
	{"forced_bos_token_id", nil, false}, {"forced_eos_token_id", nil, false},
	{"exponential_decay_length_penalty", nil, false},
	{"min_p", 0.0, true}, {"top_h", nil, true}, {"typical_p", 1.0, true}, {"epsilon_cutoff", 0.0, true},
	{"eta_cutoff", 0.0, true},
}

// ignored returns the fields of a generation_config.json that have no effect here, with their
// values.
func ignored(text []byte, draws bool) (fields []string, err error) {
	var all map[string]any
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	for _, x := range withoutEffect {
		v := all[x.name]
		if list, ok := v.([]any); x.draws && !draws || v == nil || v == x.neutral || ok && len(list) == 0 {
			continue
		}
		value, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		fields = append(fields, fmt.Sprintf("%s = %s", x.name, input.Short(string(value))))
	}
	return fields, nil
}

// readDefaults reads generation_config.json. If the folder has none, the ids in config.json end a
// text, as in transformers.
func (m *Model) readDefaults(folder string) error {
	var c defaults
	path := filepath.Join(folder, "generation_config.json")
	text, err := readJSON(path, &c)
	if errors.Is(err, fs.ErrNotExist) {
		return m.readEnds(filepath.Join(folder, "config.json"))
	} else if err != nil {
		return err
	}
	if m.Ignored, err = ignored(text, c.Sample); err != nil {
		return status.Errorf(status.InvalidConfig, "generate: %s: %w", path, err)
	}
	if err := m.addEnds(path, c.EOS); err != nil {
		return err
	}
	if !c.Sample {
		return nil
	}
	s := &m.Sampling
	s.Temperature, s.TopK = 1, 50 // the defaults of transformers
	if c.Temperature != nil {
		s.Temperature = *c.Temperature
	}
	if c.TopP != nil {
		s.TopP = *c.TopP
	}
	if c.TopK != nil {
		s.TopK = *c.TopK
	}
	return nil
}

// readJSON reads a file of JSON and returns its text.
func readJSON(path string, to any) ([]byte, error) {
	text, err := input.Read(path, input.MaxConfig)
	if err != nil {
		return nil, status.Errorf(status.IO, "generate: %w", err)
	}
	text = input.TrimBOM(text)
	if err := input.JSON(text, to); err != nil {
		return nil, status.Errorf(status.InvalidConfig, "generate: %s: %w", path, err)
	}
	return text, nil
}

// readEnds reads the ids that end a text from a config.json, or from its text_config if it has
// none itself.
func (m *Model) readEnds(path string) error {
	var c struct {
		EOS  json.RawMessage `json:"eos_token_id"`
		Text struct {
			EOS json.RawMessage `json:"eos_token_id"`
		} `json:"text_config"`
	}
	if _, err := readJSON(path, &c); err != nil {
		return err
	}
	if len(c.EOS) == 0 || string(c.EOS) == "null" {
		c.EOS = c.Text.EOS
	}
	return m.addEnds(path, c.EOS)
}

// addEnds adds the ids of a file that end a text: null, a number, or a list of numbers.
func (m *Model) addEnds(path string, eos json.RawMessage) error {
	var ids []int32
	if len(eos) > 0 && json.Unmarshal(eos, &ids) != nil {
		var id int32
		if err := json.Unmarshal(eos, &id); err != nil {
			return status.Errorf(status.InvalidConfig,
				"generate: %s: eos_token_id is neither a number nor a list of numbers", path)
		}
		ids = []int32{id}
	}
	m.ends = append(m.ends, ids...)
	return nil
}

// check returns an error for a value of generation_config.json with which nothing can be drawn, or
// with which the least probable tokens would be.
func (s *Sampling) check(folder string) error {
	for _, x := range []struct {
		name  string
		right bool
		value any
		want  string
	}{
		{"temperature", s.Temperature >= 0, s.Temperature, "0 or more"},
		{"top_p", s.TopP > 0 && s.TopP <= 1, s.TopP, "a number above 0 and at most 1"},
		{"top_k", s.TopK >= 0, s.TopK, "0 or more"},
	} {
		if !x.right {
			return status.Errorf(status.InvalidConfig, "generate: %s: %s = %v; set %s",
				filepath.Join(folder, "generation_config.json"), x.name, x.value, x.want)
		}
	}
	return nil
}
