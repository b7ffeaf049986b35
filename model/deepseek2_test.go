package model

import (
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/near"
)

// As DeepSeek-V2-Lite is published.
const deepseekLite = `{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
 "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
 "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
 "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
 "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
 "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
 "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.0,
 "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
 "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}`

// The router of the large DeepSeek-V2.
const deepseek2Router = `"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
 "n_routed_experts": 160`

func TestParseDeepSeek2(t *testing.T) {
	c := parse(t, deepseekLite)
	if e := c.Experts; c.Latent != (Latent{0, 512, 128, 64, 128, true}) || e.Sigmoid || e.Normalize || e.Biased ||
		e.Scale != 1 || e.Groups != 1 || e.KeptGroups != 1 || e.Shared != 2*1408 || c.SparseLayers() != 26 {
		t.Errorf("%+v", c)
	}
	// attention, MLPs, 6 experts and two shared ones, routers, and the head: the 2.4 billion of the
	// paper
	products := float64(27*2048*(16*192+576+16*128) + 27*512*16*256 + 3*2048*10944 + 26*2048*(8*3*1408+64) +
		2048*102400)
	near.Value(t, "weights in products of a token", c.Flops(1, 0)/6, products, 1)
	c = parse(t, string(with(t, deepseekLite, deepseek2Router)))
	if e := c.Experts; e.Groups != 8 || e.KeptGroups != 3 || e.Scale != 16 {
		t.Errorf("%+v", e)
	}
	for _, fields := range []string{deepseek2Router, `"num_hidden_layers": 27`} {
		c := parse(t, string(with(t, deepseekLite, fields)))
		again := parse(t, string(must1(c.JSON())))
		if a, b := again.Experts, c.Experts; a.Groups != b.Groups || a.KeptGroups != b.KeptGroups ||
			a.Scale != b.Scale || a.Normalize || again.Latent != c.Latent || again.ScoreScale != c.ScoreScale {
			t.Errorf("%s, read again: %+v", fields, again)
		}
		if _, given := again.raw["rope_interleave"]; given {
			t.Error("rope_interleave is written, which has no effect in transformers")
		}
	}
}

func TestDeepSeek2Faults(t *testing.T) {
	const bad, no = status.InvalidConfig, status.Unsupported
	for _, x := range []struct {
		fields string
		code   status.Code
		want   string
	}{
		{`"norm_topk_prob": true`, no, "norm_topk_prob = true is not built"},
		{`"scoring_func": "sigmoid"`, no, `scoring_func = "sigmoid" is not built`},
		{`"topk_method": "noaux_tc"`, no, `topk_method = "noaux_tc" is not built`},
		{`"moe_layer_freq": 2`, no, "moe_layer_freq = 2 is not built"},
		{`"mlp_bias": true`, bad, "mlp_bias = true: deepseek_v2 has no biases there"},
		{`"num_experts_per_tok": null`, bad, "num_experts_per_tok is missing"},
		{deepseek2Router + `, "topk_group": 9`, bad, "topk_group = 9, n_group = 8"},
		{deepseek2Router + `, "n_routed_experts": 150`, bad, "n_group = 8, n_routed_experts = 150"},
		{deepseek2Router + `, "use_expert_bias": true`, no, "use_expert_bias with n_group = 8 is not built"},
	} {
		if _, err := ParseConfig(with(t, deepseekLite, x.fields)); status.Of(err) != x.code ||
			!strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.fields, err, x.want)
		}
	}
	// The router of groups has no biases, also if a job asks for them.
	if err := parse(t, string(with(t, deepseekLite, deepseek2Router))).AddExpertBias(); status.Of(err) != no ||
		!strings.Contains(err.Error(), "biases of experts are not built for deepseek_v2 with n_group = 8") {
		t.Error(err)
	}
	if err := parse(t, deepseekLite).AddExpertBias(); err != nil {
		t.Error(err)
	}
	// Groups have no effect with topk_method = "greedy". A job's own table may not have them.
	fields := latent(map[string]any{"model_type": "deepseek_v2", "vocab_size": 8, "hidden_size": 8,
		"intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
		"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4})
	if _, err := ConfigFromMap(fields); err != nil {
		t.Error(err)
	}
	fields["n_group"] = 2
	if _, err := ConfigFromMap(fields); err == nil || !strings.Contains(err.Error(),
		`n_group = 2 has no effect with topk_method = "greedy"; remove it, or set topk_method = "group_limited_greedy"`) {
		t.Error(err)
	}
	// What a job overrides has an effect or none by the method of the folder.
	for base, has := range map[string]bool{deepseekLite: false, string(with(t, deepseekLite, deepseek2Router)): true} {
		c, err := parse(t, base).Override(map[string]any{"topk_group": 4})
		if has && (err != nil || c.Experts.KeptGroups != 4) || !has && (err == nil || !strings.Contains(err.Error(),
			"model.override: topk_group = 4 has no effect")) {
			t.Errorf("%v %+v", err, c)
		}
	}
	// the published fields of a loss that another field sets here
	if _, err := parse(t, deepseekLite).Override(map[string]any{"aux_loss_alpha": 0.002}); err == nil ||
		!strings.Contains(err.Error(),
			"aux_loss_alpha: unknown field; set output_router_logits = true and router_aux_loss_coef") {
		t.Error(err)
	}
}
