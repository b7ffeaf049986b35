package model

import (
	"strings"
	"testing"

	"ulysses/internal/status"
)

// A null in a config.json is not a missing field: it is refused where transformers 5.23 refuses it,
// fails with it or takes it for another value than the default.
func TestNullsAreRefused(t *testing.T) {
	for _, x := range []struct{ text, names string }{
		{glmAir, "n_shared_experts n_routed_experts first_k_dense_replace n_group topk_group norm_topk_prob use_qk_norm " +
			"attention_bias num_key_value_heads rms_norm_eps rope_theta partial_rotary_factor tie_word_embeddings"},
		{deepseek, "n_shared_experts norm_topk_prob rope_interleave kv_lora_rank v_head_dim routed_scaling_factor"},
		{glmLite, "n_shared_experts num_key_value_heads"},
		{deepseekLite, "n_shared_experts topk_method routed_scaling_factor"},
		{string(with(t, deepseekLite, deepseek2Router)), "topk_group"},
		{ernie21, "moe_num_shared_experts moe_layer_end_index moe_norm_min moe_k use_bias num_key_value_heads"},
		{miniMax, "head_dim num_experts_per_tok router_jitter_noise"},
		{qwen3moe, "num_experts norm_topk_prob decoder_sparse_step head_dim"},
		{llama31, "mlp_bias attention_dropout max_position_embeddings initializer_range hidden_act"},
		{gptOss, "num_local_experts swiglu_limit"},
		{phi4, "original_max_position_embeddings resid_pdrop head_dim"},
	} {
		for _, name := range strings.Fields(x.names) {
			_, err := ParseConfig(with(t, x.text, `"`+name+`": null`))
			if want := "config.json: " + name + " = null: give a value"; status.Of(err) != status.InvalidConfig ||
				!strings.HasPrefix(err.Error(), want) {
				t.Errorf("%v\nwant %q", err, want)
			}
		}
	}
}

// In tables of RoPE's parameters, null is the default of some fields in transformers, which fails
// with it in others.
func TestNullsOfRope(t *testing.T) {
	for _, x := range []struct{ table, name string }{
		{`"rope_type": "yarn", "factor": 4, "rope_theta": null`, "rope_theta"},
		{`"rope_type": null, "factor": 4, "rope_theta": 100`, "rope_type"},
		{`"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": null`, "original_max_position_embeddings"},
		{`"rope_type": "yarn", "factor": null, "attention_factor": null, "beta_fast": null, "beta_slow": null,
			"mscale": null, "mscale_all_dim": null, "truncate": null, "partial_rotary_factor": null`, ""},
	} {
		_, err := ParseConfig(with(t, lacking(t, llama31, "rope_scaling"), `"rope_parameters": {`+x.table+`}`))
		if x.name == "" && err == nil {
			continue
		}
		if want := "config.json: rope_parameters." + x.name + " = null: give a value"; status.Of(err) !=
			status.InvalidConfig || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v\nwant %q", err, want)
		}
	}
}

// Some fields may be null: transformers ignores them, or computes them from other fields.
func TestNullsAreAccepted(t *testing.T) {
	for _, x := range []struct{ text, names string }{
		{llama31, "dtype torch_dtype rope_scaling rope_parameters sliding_window attn_logit_softcapping num_experts " +
			"layer_types quantization_config partial_rotary_factor head_dim"},
		{deepseek, "scoring_func topk_method moe_layer_freq num_key_value_heads head_dim"},
		{deepseekLite, "scoring_func moe_layer_freq n_group topk_group norm_topk_prob num_key_value_heads q_lora_rank"},
		{seedOSS, "num_key_value_heads head_dim"},
		{qwen2, "mlp_bias attention_bias"},
		{miniMax, "attention_bias"},
		{glmLite, "mlp_layer_types"},
	} {
		for _, name := range strings.Fields(x.names) {
			if _, err := ParseConfig(with(t, x.text, `"`+name+`": null`)); err != nil {
				t.Error(err)
			}
		}
	}
	// These are not the defaults of a missing field, which are 2 and 128.
	ernie := `{"model_type": "ernie4_5", "hidden_size": 96, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 6}`
	if c := parse(t, ernie); c.NumKeyValueHeads != 2 || c.HeadDim != 128 {
		t.Errorf("%+v", c)
	}
	c := parse(t, string(with(t, ernie, `"num_key_value_heads": null, "head_dim": null`)))
	if f := c.fields(); c.NumKeyValueHeads != 6 || c.HeadDim != 16 || f["num_key_value_heads"] != int64(6) ||
		f["head_dim"] != int64(16) {
		t.Errorf("%+v", c)
	}
}
