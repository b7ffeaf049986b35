package model

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// As Ministral-3-3B is published: a language model inside a model with vision.
const ministral33B = `{"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
 "model_type": "mistral3", "multimodal_projector_bias": false, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
 "text_config": ` + ministral3 + `, "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1}`

const ministral3 = `{"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
 "intermediate_size": 9216, "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
 "num_hidden_layers": 26, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_parameters": {"beta_fast": 32.0,
 "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 262144, "mscale": 1.0,
 "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
 "type": "yarn"}, "sliding_window": null, "tie_word_embeddings": true, "use_cache": true, "vocab_size": 131072}`

// A published model, its text model, and the defaults of transformers have one RoPE, also when they
// are read again from what Save writes.
func TestParseMinistral3(t *testing.T) {
	want := Rope{Type: "yarn", Theta: 1e6, Factor: 16, OriginalMaxPositionEmbeddings: 16384, BetaFast: 32, BetaSlow: 1,
		Scale: 1, QueryBeta: 0.1, QueryLength: 16384}
	fresh, err := ConfigFromMap(small("ministral3", nil))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*Config{parse(t, ministral33B), parse(t, ministral3),
		parse(t, lacking(t, ministral3, "rope_parameters", "rms_norm_eps", "num_key_value_heads", "head_dim",
			"max_position_embeddings", "vocab_size", "sliding_window")), fresh} {
		for _, c := range []*Config{c, parse(t, string(must1(c.JSON())))} {
			if c.ModelType != "ministral3" || !reflect.DeepEqual(c.Rope, want) || c.Positions() != 262144 ||
				c.RMSNormEps != 1e-5 || c.SlidingWindow != 0 || c.RotaryDim != c.HeadDim || len(c.Warnings()) > 0 {
				t.Errorf("%+v", c)
			}
		}
		if got := c.YarnFields(); !strings.HasSuffix(got, ", llama_4_scaling_beta = 0.1") {
			t.Error(got)
		}
	}
	if c := parse(t, ministral33B); !c.TieWordEmbeddings || c.HeadDim != 128 || c.NumKeyValueHeads != 8 {
		t.Errorf("%+v", c)
	}
	fp8 := parse(t, strings.Replace(ministral33B, `"model_type": "mistral3",`, `"model_type": "mistral3",
 "quantization_config": {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": null},`, 1))
	if (fp8.packing != packing{fp8: true}) { // as the Instruct models are published
		t.Errorf("%+v", fp8.packing)
	}
	if c := parse(t, string(with(t, ministral3, `"sliding_window": 7`))); c.SlidingWindow != 7 || !c.Sliding(25) {
		t.Errorf("%+v", c)
	}
	// a text_config without a type is a mistral, as in transformers
	untyped := strings.Replace(ministral33B, `"model_type": "ministral3", `, "", 1)
	for range 20 { // in any order of the families
		if c := parse(t, untyped); c.ModelType != "mistral" || c.Rope.QueryBeta != 0 {
			t.Fatalf("%+v", c)
		}
	}
	// other types of RoPE have their own length, which is that of the gain alone
	c := parse(t, string(with(t, ministral3,
		`"rope_parameters": {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 1}`)))
	if c.Rope.QueryLength != 64 || c.Rope.OriginalMaxPositionEmbeddings != 262144 || c.Rope.QueryBeta != 1 {
		t.Errorf("%+v", c.Rope)
	}
}

// A gain without its fields, and fields without a gain, are refused.
func TestFaultsOfQueryGain(t *testing.T) {
	const yarn = `"rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16`
	for _, x := range []struct{ fields, want string }{
		{yarn + `}`, "rope_parameters.llama_4_scaling_beta is missing: give the number of the model"},
		{yarn + `, "llama_4_scaling_beta": null}`, "rope_parameters.llama_4_scaling_beta is missing"},
		{yarn + `, "llama_4_scaling_beta": "0.1"}`, `rope_parameters.llama_4_scaling_beta = "0.1": give a number`},
		{yarn + `, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}`,
			"partial_rotary_factor = 0.5 is not built for ministral3: 1 is"},
		{`"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}`,
			"rope_parameters.original_max_position_embeddings is missing: give a whole number of at least 1"},
		{`"rope_parameters": {}`, "rope_parameters.llama_4_scaling_beta is missing"},
		{`"rope_scaling": {"type": "linear", "factor": 2}`, "rope_scaling.llama_4_scaling_beta is missing"},
		{`"head_dim": null`, "head_dim = null: give a value"},
	} {
		if _, err := ParseConfig(with(t, ministral3, x.fields)); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.fields, err, x.want)
		}
	}
	// a job's table replaces the whole table
	table := map[string]any{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": int64(16384)}
	_, err := parse(t, ministral3).Override(map[string]any{"rope_parameters": table})
	if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), "llama_4_scaling_beta is missing") {
		t.Error(err)
	}
	table["llama_4_scaling_beta"] = math.Inf(1)
	if _, err = parse(t, ministral3).Override(map[string]any{"rope_parameters": table}); err == nil ||
		!strings.Contains(err.Error(), "llama_4_scaling_beta = +Inf: give a finite number") {
		t.Error(err)
	}
	// transformers ignores the field in other families
	table["llama_4_scaling_beta"] = 0.1
	_, err = ConfigFromMap(small("mistral", map[string]any{"rope_parameters": table}))
	if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), "llama_4_scaling_beta: unknown field") {
		t.Error(err)
	}
	c, err := read("config.json", small("mistral", map[string]any{"rope_parameters": table}), false)
	if err != nil || c.Rope.QueryBeta != 0 || strings.Contains(c.YarnFields(), "llama_4") {
		t.Error(c, err)
	}
}

// Without a gain, a model is a mistral, bitwise and with no further memory.
func TestNoQueryGain(t *testing.T) {
	plain := configs(t)["ministral3"]
	table := map[string]any{"rope_type": "yarn", "factor": 8.0, "rope_theta": 300.0,
		"original_max_position_embeddings": int64(4)}
	mistral, err := plain.Override(map[string]any{"model_type": "mistral", "rope_parameters": table})
	if err != nil {
		t.Fatal(err)
	}
	table["llama_4_scaling_beta"] = 0.0
	if plain, err = plain.Override(map[string]any{"rope_parameters": table}); err != nil {
		t.Fatal(err)
	}
	s := documents(plain.VocabSize, 9, 14)
	peaks := map[*Config]int64{}
	peak := func(r *rank) { peaks[r.Config] = r.c.Arena.Bytes() }
	a, b := train(t, 1, plain, s, peak), train(t, 1, mistral, s, peak)
	if a.Loss != b.Loss || peaks[plain] != peaks[mistral] || peaks[plain] == 0 {
		t.Errorf("loss %v, a mistral has %v; memory %v", a.Loss, b.Loss, peaks)
	}
	for name, g := range a.grads {
		if !slices.Equal(g, b.grads[name]) {
			t.Errorf("the gradient of %s differs", name)
		}
	}
	const q = "model.layers.0.self_attn.q_proj.weight"
	gain := train(t, 1, configs(t)["ministral3"], s, nil)
	if e := far(gain.grads[q], a.grads[q]); !(e > 0.05) {
		t.Errorf("the gain changes the gradient of %s by %v", q, e)
	}
}
