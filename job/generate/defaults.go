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
}{
	{"repetition_penalty", 1.0}, {"no_repeat_ngram_size", 0.0}, {"min_p", 0.0}, {"top_h", nil}, {"typical_p", 1.0}, {"epsilon_cutoff", 0.0},
	{"eta_cutoff", 0.0}, {"num_beams", 1.0}, {"penalty_alpha", 0.0}, {"guidance_scale", 1.0}, {"min_length", 0.0}, {"min_new_tokens", 0.0},
	{"stop_strings", nil}, {"bad_words_ids", nil}, {"suppress_tokens", nil}, {"begin_suppress_tokens", nil}, {"sequence_bias", nil},
	{"forced_bos_token_id", nil}, {"forced_eos_token_id", nil}, {"exponential_decay_length_penalty", nil},
}

// ignored returns the fields of a generation_config.json that have no effect here, with their
// values.
func ignored(text []byte) (fields []string, err error) {
	var all map[string]any
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	for _, x := range withoutEffect {
		v := all[x.name]
		if list, ok := v.([]any); v == nil || v == x.neutral || ok && len(list) == 0 {
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

// readDefaults reads generation_config.json, if the folder has it.
func (m *Model) readDefaults(folder string) error {
	path := filepath.Join(folder, "generation_config.json")
	text, err := input.Read(path, input.MaxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return status.Errorf(status.IO, "generate: %w", err)
	}
	text = input.TrimBOM(text)
	var c defaults
	if err := input.JSON(text, &c); err != nil {
		return status.Errorf(status.InvalidConfig, "generate: %s: %w", path, err)
	}
	if m.Ignored, err = ignored(text); err != nil {
		return status.Errorf(status.InvalidConfig, "generate: %s: %w", path, err)
	}
	var ids []int32
	if len(c.EOS) > 0 && json.Unmarshal(c.EOS, &ids) != nil {
		var id *int32
		if err := json.Unmarshal(c.EOS, &id); err != nil {
			return status.Errorf(status.InvalidConfig, "generate: %s: eos_token_id is neither a number nor a list of numbers", path)
		}
		if id != nil {
			ids = []int32{*id}
		}
	}
	m.ends = append(m.ends, ids...)
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
			return status.Errorf(status.InvalidConfig, "generate: %s: %s = %v; set %s", filepath.Join(folder, "generation_config.json"), x.name, x.value, x.want)
		}
	}
	return nil
}
