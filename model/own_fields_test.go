package model

import (
	"encoding/json"
	"maps"
	"reflect"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/near"
)

// small returns the fields of a small model of a family, with further fields.
func small(modelType string, more map[string]any) map[string]any {
	fields := map[string]any{"model_type": modelType, "vocab_size": int64(8), "hidden_size": int64(32),
		"intermediate_size": int64(8), "num_hidden_layers": int64(4),
		"num_attention_heads": int64(4), "num_key_value_heads": int64(2), "head_dim": int64(8)}
	if f := families[modelType].experts; f != nil {
		fields[f.number], fields["num_experts_per_tok"], fields[f.size] = int64(4), int64(2), int64(8)
	}
	maps.Copy(fields, more)
	return fields
}

// A field that has no effect in the family is refused in [model.new] and in model.override, and
// accepted in a config.json. A neutral value is accepted.
func TestOwnFieldsWithoutEffect(t *testing.T) {
	kinds := []any{"full_attention", "full_attention", "full_attention", "full_attention"}
	for _, c := range []struct {
		model, name string
		value       any
		want        string // "" = accepted
	}{
		{"granite", "layer_types", kinds, "layer_types = "},
		{"mixtral", "layer_types", kinds, "layer_types = "},
		{"qwen3_moe", "layer_types", kinds, "has no effect in qwen3_moe; remove it"},
		{"llama", "layer_types", kinds, ""},
		{"mistral", "use_sliding_window", true, "use_sliding_window = true has no effect in mistral; remove it"},
		{"mistral", "use_sliding_window", false, ""},
		{"gemma2", "max_window_layers", int64(2), "max_window_layers = 2 has no effect in gemma2; remove it"},
		{"qwen3_moe", "max_window_layers", int64(2), "max_window_layers = 2 has no effect"},
		{"qwen2", "max_window_layers", int64(2), ""},
		{"qwen2", "use_sliding_window", true,
			"use_sliding_window = true: no layer has a window; set use_sliding_window = true and sliding_window, and name"},
		{"smollm3", "use_sliding_window", true, "use_sliding_window = true: no layer has a window"},
		{"qwen3_moe", "use_sliding_window", true, ""},
		{"gemma3_text", "attn_logit_softcapping", 20.0, "attn_logit_softcapping = 20 has no effect in gemma3_text"},
		{"gemma2", "attn_logit_softcapping", 20.0, ""},
		{"phi3", "embd_pdrop", 0.1, "embd_pdrop = 0.1 has no effect in phi3"},
		{"phi3", "embd_pdrop", 0.0, ""},
		{"mixtral", "router_aux_loss_coef", 0.1,
			"router_aux_loss_coef = 0.1 has no effect; set output_router_logits = true"},
		{"mixtral", "router_aux_loss_coef", 0.0, ""},
	} {
		own := map[string]any{c.name: c.value}
		_, fresh := ConfigFromMap(small(c.model, own))
		base, err := ConfigFromMap(small(c.model, nil))
		if err != nil {
			t.Fatal(err)
		}
		_, overridden := base.Override(own)
		for where, err := range map[string]error{"model.new": fresh, "model.override": overridden} {
			if c.want == "" && err != nil || c.want != "" &&
				(status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), where) ||
					!strings.Contains(err.Error(), c.want)) {
				t.Errorf("%s, %s = %v: %v, want %q", c.model, c.name, c.value, err, c.want)
			}
		}
		if _, err := read("config.json", small(c.model, own), false); err != nil {
			t.Errorf("%s, %s = %v in a config.json: %v", c.model, c.name, c.value, err)
		}
	}
	_, err := ConfigFromMap(small("gpt_oss", map[string]any{"num_local_experts": int64(0)}))
	if want := "num_experts_per_tok = 2 has no effect in gpt_oss; remove it, or set num_local_experts above 0"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("without experts: %v, want %q", err, want)
	}
	base, err := ConfigFromMap(small("mixtral", map[string]any{"output_router_logits": true}))
	if err == nil {
		base, err = base.Override(map[string]any{"router_aux_loss_coef": 0.5})
	}
	if err != nil || base.Experts.Balance != 0.5 {
		t.Errorf("%+v, %v", base, err)
	}
}

// A new model has no default of a published one, with an override as without.
func TestNewModelWithOverride(t *testing.T) {
	c, err := ConfigFromMap(small("glm4_moe", nil))
	if err != nil {
		t.Fatal(err)
	}
	o, err := c.Override(map[string]any{"vocab_size": int64(16)})
	if err != nil || o.VocabSize != 16 {
		t.Fatal(o, err)
	}
	for _, c := range []*Config{c, o} {
		if c.Experts.Shared != 0 || !c.Sparse(0) { // the published one has a shared expert and a dense layer
			t.Errorf("%+v", c)
		}
		// attention, the MLPs of 2 experts, routers and the head
		near.Value(t, "weights in products of a token", c.Flops(1, 0)/6,
			float64(4*(3*32*32+2*3*32*8+32*4)+32*c.VocabSize), 0)
	}
	c, err = ConfigFromMap(small("glm4_moe", map[string]any{"n_shared_experts": int64(1)}))
	if err != nil {
		t.Fatal(err)
	}
	near.Value(t, "with a shared expert", c.Flops(1, 0)/6, float64(4*(3*32*32+3*3*32*8+32*4)+32*8), 0) // no gate
}

// Lists of layers that follow from an overridden field are made again, as saved files have both.
func TestDerivedLists(t *testing.T) {
	hybrid, err := ConfigFromMap(small("qwen3_5_text", nil))
	if err != nil {
		t.Fatal(err)
	}
	text, _ := hybrid.JSON()
	c, err := parse(t, string(text)).Override(map[string]any{"full_attention_interval": int64(2)})
	if err != nil || c.LinearLayers() != 2 {
		t.Errorf("%+v, %v", c, err)
	}
	smol, err := ConfigFromMap(small("smollm3",
		map[string]any{"no_rope_layers": []any{int64(1), int64(1), int64(1), int64(1)}}))
	if err != nil {
		t.Fatal(err)
	}
	c, err = smol.Override(map[string]any{"no_rope_layer_interval": int64(2)})
	if err != nil || !reflect.DeepEqual(c.NoRope, []bool{false, true, false, true}) {
		t.Errorf("%+v, %v", c, err)
	}
}

// An override of the number of rotated features, or of the size of a head, changes their share, in
// a configuration as it was published and as it was saved.
func TestRotaryNumber(t *testing.T) {
	published := must1(read("config.json", small("minimax_m2", map[string]any{"rotary_dim": int64(4)}), false))
	text, err := published.JSON()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*Config{published, parse(t, string(text))} {
		for _, x := range []struct {
			fields map[string]any
			want   int64
		}{
			{map[string]any{"rotary_dim": int64(2)}, 2},
			{map[string]any{"head_dim": int64(16)}, 4},
			{map[string]any{"head_dim": int64(16), "rotary_dim": int64(6)}, 6},
			{map[string]any{"head_dim": int64(16), "partial_rotary_factor": 0.5}, 8},
			{map[string]any{"rope_theta": 100.0}, 4},
		} {
			if o, err := c.Override(x.fields); err != nil || o.RotaryDim != x.want {
				t.Errorf("%v: %+v, %v: want %d features", x.fields, o, err, x.want)
			}
		}
	}
}

// transformers 5 reads num_experts as another name of Mixtral's num_local_experts.
func TestAlias(t *testing.T) {
	fields := small("mixtral", map[string]any{"num_experts": int64(6)})
	delete(fields, "num_local_experts")
	c, err := ConfigFromMap(fields)
	if err != nil || c.Experts.Count != 6 {
		t.Errorf("%+v, %v", c, err)
	}
}

// A model without windows is saved with layer_types and a number that transformers can load, and
// sliding_window = 0 in model.override removes the windows that layer_types names.
func TestNoWindows(t *testing.T) {
	for _, modelType := range []string{"ministral", "gemma2", "gemma3_text", "olmo3", "gpt_oss"} {
		full := []any{"full_attention", "full_attention", "full_attention", "full_attention"}
		kept, err := read("config.json",
			small(modelType, map[string]any{"sliding_window": int64(50), "layer_types": full}), false)
		if err != nil {
			t.Fatal(err)
		}
		sliding, err := read("config.json", small(modelType, map[string]any{"sliding_window": int64(50),
			"layer_types": []any{"sliding_attention", "full_attention", "full_attention", "full_attention"}}), false)
		if err != nil {
			t.Fatal(err)
		}
		removed, err := sliding.Override(map[string]any{"sliding_window": int64(0)})
		if err != nil {
			t.Errorf("%s: %v", modelType, err)
			continue
		}
		for c, want := range map[*Config]int64{kept: 50, removed: families[modelType].window} {
			text, _ := c.JSON()
			again := parse(t, string(text))
			if n, _ := asInt(again.raw["sliding_window"]); c.SlidingWindow != 0 || again.SlidingWindow != 0 ||
				n != want || again.LayerTypes != nil {
				t.Errorf("%s, %d: %s", modelType, want, text)
			}
		}
	}
}

// A config.json without max_position_embeddings has the default of transformers 5.23, which RoPE's
// scaling may need.
func TestDefaultPositions(t *testing.T) {
	want := map[string]int64{"llama": 2048, "mistral": 131072, "ministral": 131072, "ministral3": 262144,
		"qwen2": 32768, "qwen3": 32768, "mixtral": 131072, "qwen3_moe": 32768, "qwen2_moe": 32768,
		"olmoe": 4096, "granite": 2048, "smollm3": 32768, "olmo2": 2048, "olmo3": 2048, "glm": 131072,
		"glm4": 131072, "glm4_moe": 131072, "ernie4_5": 131072, "ernie4_5_moe": 131072, "deepseek_v2": 2048,
		"deepseek_v3": 4096, "glm4_moe_lite": 202752, "minimax_m2": 196608, "phi3": 4096, "seed_oss": 524288,
		"gpt_oss": 131072, "gemma2": 8192, "gemma3_text": 131072, "qwen3_5_text": 32768,
		"qwen3_5_moe_text": 32768, "qwen3_next": 32768}
	for modelType := range families {
		fields := small(modelType, map[string]any{"moe_k": 2, "n_group": 1, "topk_group": 1})
		if families[modelType].latent {
			fields["num_key_value_heads"] = 4
		}
		if c, err := ParseConfig(must1(json.Marshal(fields))); err != nil ||
			c.MaxPositionEmbeddings != want[modelType] {
			t.Errorf("%s: %v, want %d", modelType, err, want[modelType])
		}
	}
}
