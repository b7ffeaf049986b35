package model

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// olmo3 is the config.json of a family with a RoPE for each kind of layer.
const olmo3 = `{"model_type": "olmo3", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 4}`

// A theta that the model does not read, or not for all layers, is named.
func TestThetaWarnings(t *testing.T) {
	const (
		tables  = `"rope_parameters": {"full_attention": {"rope_theta": 900}, "sliding_attention": {"rope_theta": 800}}`
		windows = "config.json: rope_theta = 300 is not for layers with a window, which have 500000"
	)
	gemma := strings.Replace(olmo3, "olmo3", "gemma3_text", 1)
	for _, c := range []struct {
		source, fields string
		override       map[string]any
		want           []string
	}{
		{olmo3, `"rope_theta": 500000`, nil, nil},
		{olmo3, tables, nil, nil},
		{olmo3, `"rope_theta": 900, ` + tables, nil, nil},
		{olmo3, `"rope_theta": 300`, nil, []string{windows}},
		{olmo3, `"rope_theta": 300`,
			map[string]any{"rope_scaling": map[string]any{"rope_type": "linear", "factor": 2.0}}, []string{windows}},
		{olmo3, `"rope_theta": 300`, map[string]any{"sliding_window": int64(8)},
			[]string{"config.json with model.override: rope_theta = 300 is not"}},
		{olmo3, `"rope_theta": 300`,
			map[string]any{"rope_parameters": map[string]any{"sliding_attention": map[string]any{"rope_theta": 300.0}}},
			nil},
		{olmo3, `"rope_theta": 300, "rope_parameters": {"full_attention": {"rope_theta": 900}}`, nil,
			[]string{
				"config.json: rope_theta = 300 has no effect, because the table of RoPE's parameters has rope_theta = 900",
				windows}},
		{olmo3, `"rope_theta": 300, ` + tables, nil, []string{"rope_theta = 300 has no effect"}},
		{gemma, `"rope_theta": 300`, nil, nil}, // rope_local_base_freq is for layers with a window
		{gemma, `"rope_theta": 300, "rope_local_base_freq": 70, ` + tables, nil,
			[]string{"rope_theta = 300 has no effect",
				"rope_local_base_freq = 70 has no effect, because rope_parameters.sliding_attention has rope_theta = 800"}},
		{qwen3, `"rope_theta": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 5}`, nil,
			[]string{"rope_theta = 7 has no effect"}},
		{qwen3, `"rope_theta": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 5}`, nil, nil},
		{qwen3, `"rope_theta": 7, "rope_parameters": {"rope_type": "default"}`, nil, nil},
	} {
		config, err := parseConfig(with(t, c.source, c.fields), c.override)
		if err != nil {
			t.Fatal(err)
		}
		got := config.Warnings()
		same := len(got) == len(c.want)
		for i := range min(len(got), len(c.want)) {
			same = same && strings.Contains(got[i], c.want[i])
		}
		if !same {
			t.Errorf("%s, %v: %q, want %q", c.fields, c.override, got, c.want)
		}
		// the saved file says what was read
		text, err := json.Marshal(config.fields())
		if err != nil {
			t.Fatal(err)
		}
		if again := parse(t, string(text)); len(again.Warnings()) > 0 || !reflect.DeepEqual(again.Rope, config.Rope) ||
			!reflect.DeepEqual(again.LocalRope, config.LocalRope) {
			t.Errorf("%s: %s is read with %q", c.fields, text, again.Warnings())
		}
	}
}
