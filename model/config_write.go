package model

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// JSON returns the text of config.json.
func (c *Config) JSON() ([]byte, error) {
	text, err := json.MarshalIndent(c.fields(), "", "  ")
	if err != nil {
		return nil, status.Errorf(status.Internal, "model: config.json: %w", err)
	}
	return append(text, '\n'), nil
}

// Changes returns a sentence for each field that has another value in the config.json of a folder.
// There are none if that file cannot be read.
func (c *Config) Changes(dir string) (changes []string) {
	decode := func(text []byte, err error) map[string]json.RawMessage {
		var all map[string]json.RawMessage
		if err != nil || json.Unmarshal(text, &all) != nil {
			return nil
		}
		return all
	}
	was, now := decode(input.Read(filepath.Join(dir, configFile), input.MaxConfig)), decode(c.JSON())
	if was == nil || now == nil {
		return nil
	}
	show := func(value json.RawMessage) string {
		var text bytes.Buffer
		if len(value) == 0 || json.Compact(&text, value) != nil {
			return "not set"
		}
		return input.Short(text.String())
	}
	both := maps.Clone(was)
	maps.Copy(both, now)
	for _, name := range slices.Sorted(maps.Keys(both)) {
		if before, after := show(was[name]), show(now[name]); before != after {
			changes = append(changes, fmt.Sprintf("%s of the model is %s, it was %s", name, after, before))
		}
	}
	return changes
}

// fields are the fields of a config.json.
type fields map[string]any

// put sets a field that is missing or null.
func (f fields) put(name string, value any) {
	if f[name] == nil {
		f[name] = value
	}
}

// fields returns the fields of config.json: the source's, and all that are missing.
func (c *Config) fields() fields {
	f := fields{}
	if c.raw != nil {
		f = asFloats(c.raw).(map[string]any)
	}
	if c.packing != (packing{}) {
		delete(f, "quantization_config") // the weights are written as they are read
	}
	f.put("architectures", []string{c.family.class})
	f.put(c.family.activation.field, c.family.activation.name)
	f.put("num_key_value_heads", c.NumKeyValueHeads)
	f.put("head_dim", c.HeadDim)
	f.put("max_position_embeddings", c.MaxPositionEmbeddings)
	f.put("rms_norm_eps", asFloats(c.RMSNormEps))
	f.put("initializer_range", asFloats(c.InitializerRange))
	f.put("tie_word_embeddings", c.TieWordEmbeddings)
	c.ropeFields(f)
	if c.LayerTypes != nil && c.family.kinds != nil {
		f.put("layer_types", c.LayerTypes)
	} else if c.family.window > 0 && !c.family.windowFlag && c.family.kinds != nil {
		f.put("layer_types", slices.Repeat([]string{fullAttention}, int(c.NumHiddenLayers)))
	}
	switch {
	case c.SlidingWindow > 0:
		f.put("sliding_window", c.SlidingWindow)
	case c.family.window == 0 || c.family.windowFlag:
	case c.family.kinds == nil:
		f["sliding_window"] = nil // if it were missing, the window would be the family's default
	default: // layer_types has no layer with it, but transformers needs a number
		f.put("sliding_window", c.family.window)
	}
	if c.family.write != nil {
		c.family.write(c, f)
	}
	if c.family.biases == optionalBiases || c.family.biases == optionalQKVBiases {
		f.put(c.family.biasName(), c.AttentionBias)
	}
	if c.family.dropout > 0 { // which transformers has where the fields are missing
		f.put("attention_dropout", asFloats(c.AttentionDropout))
		f.put(c.family.residualDropout, asFloats(c.ResidualDropout))
	}
	if c.family.qkNormFlag {
		f.put("use_qk_norm", !c.NoQKNorm)
	}
	if f["dtype"] == nil && f["torch_dtype"] == nil {
		f["torch_dtype"] = "float32"
	}
	return f
}

// asFloats writes whole numbers of floating-point type with a decimal point, such as 8.0, because
// transformers checks the type of some fields.
func asFloats(v any) any {
	switch v := v.(type) {
	case float64:
		text := strconv.FormatFloat(v, 'g', -1, 64)
		if !strings.ContainsAny(text, ".eE") {
			text += ".0"
		}
		return json.Number(text)
	case map[string]any:
		m := make(map[string]any, len(v))
		for name, x := range v {
			m[name] = asFloats(x)
		}
		return m
	case []any:
		list := make([]any, len(v))
		for i, x := range v {
			list[i] = asFloats(x)
		}
		return list
	}
	return v
}
