package model

import (
	"reflect"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

// GLM-4.5-Air and ERNIE-4.5-21B-A3B as they are published.
const (
	glmAir = `{"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": [151329, 151336],
 "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
 "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
 "norm_topk_prob": true, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
 "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": false,
 "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": true, "use_qk_norm": false, "vocab_size": 151552}`

	ernie21 = `{"architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 12288,
 "max_position_embeddings": 131072, "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6,
 "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": true, "num_attention_heads": 20,
 "num_hidden_layers": 28, "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16", "use_bias": false, "vocab_size": 103424}`
)

// MiniMax-M2 as it is published, with fewer entries in attn_type_list.
const miniMax = `{"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
 "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
 "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
 "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
 "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
 "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": false, "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true,
 "vocab_size": 200064}`

func TestParseSigmoidRouters(t *testing.T) {
	c := parse(t, glmAir)
	if e := c.Experts; e.Count != 128 || e.PerToken != 8 || e.Size != 1408 || e.Shared != 1408 || !e.Normalize ||
		!e.Sigmoid || !e.Biased || e.Groups != 1 || e.KeptGroups != 1 || e.Scale != 1 || c.SparseLayers() != 45 ||
		c.Sparse(0) || c.QKNorm() || !c.QKVBias() || c.OutBias() || c.RotaryDim != 64 || c.AddedBiases() {
		t.Errorf("%+v", c)
	}
	// attention 5.0e9, experts 7.1e9, the head 0.6e9; 12e9 are published
	near.Value(t, "weights in products of a token", c.Flops(1, 0)/6, 12.8e9, 0.05e9)
	c = parse(t, ernie21)
	if e := c.Experts; e.Count != 64 || e.PerToken != 6 || e.Size != 1536 || e.Shared != 3072 || !e.Normalize ||
		e.Sigmoid || !e.Biased || c.SparseLayers() != 27 || c.Sparse(0) || c.QKVBias() || !c.TieWordEmbeddings ||
		c.AddedBiases() {
		t.Errorf("%+v", c)
	}
	// attention 0.4e9, experts 2.6e9, the head 0.3e9; 3e9 are published
	near.Value(t, "weights in products of a token", c.Flops(1, 0)/6, 3.35e9, 0.05e9)
	c = parse(t, string(with(t, ernie21, `"moe_layer_start_index": 2, "moe_layer_end_index": 9, "moe_layer_interval": 3`)))
	for i := range c.NumHiddenLayers {
		if want := i == 2 || i == 5 || i == 8; c.Sparse(i) != want {
			t.Errorf("layer %d: experts %v, want %v", i, c.Sparse(i), want)
		}
	}
	c = parse(t, miniMax)
	if e := c.Experts; e.Count != 256 || e.PerToken != 8 || e.Size != 1536 || e.Shared != 0 || !e.Normalize ||
		!e.Sigmoid || !e.Biased || c.SparseLayers() != 62 || c.RotaryDim != 64 || c.QKNorm() || c.AddedBiases() ||
		c.packing.block != [2]int64{128, 128} {
		t.Errorf("%+v", c)
	}
	// attention 2.9e9, experts 7.1e9, the head 0.6e9; 10e9 are published
	near.Value(t, "weights in products of a token", c.Flops(1, 0)/6, 10.5e9, 0.1e9)
	for _, text := range []string{glmAir, ernie21, miniMax, string(with(t, glmAir, `"use_qk_norm": true, "n_group": 4, "topk_group": 2`))} {
		first := parse(t, text)
		again, err := first.JSON()
		if err != nil {
			t.Fatal(err)
		}
		second := parse(t, string(again))
		first.raw, second.raw = nil, nil
		first.packing = packing{} // the weights are not written in FP8
		if !reflect.DeepEqual(first, second) {
			t.Errorf("%+v is written as %+v", first, second)
		}
	}
}

// What is wrong, or not built, is refused by its field.
func TestSigmoidRouterFaults(t *testing.T) {
	for _, x := range []struct {
		text, fields string
		code         status.Code
		want         string
	}{
		{glmAir, `"n_group": 3`, status.InvalidConfig, "n_group = 3, n_routed_experts = 128: give groups of at least 2"},
		{glmAir, `"n_group": 32, "n_routed_experts": 32`, status.InvalidConfig, "n_group = 32, n_routed_experts = 32"},
		{glmAir, `"topk_group": 2`, status.InvalidConfig, "topk_group = 2, n_group = 1"},
		{glmAir, `"n_group": 32`, status.InvalidConfig, "num_experts_per_tok = 8: the 1 groups of topk_group have 4"},
		{glmAir, `"first_k_dense_replace": -1`, status.InvalidConfig, "first_k_dense_replace = -1: give a whole number from 0"},
		{glmAir, `"routed_scaling_factor": 0`, status.InvalidConfig, "routed_scaling_factor = 0: give a number above 0"},
		{glmAir, `"scoring_func": "softmax"`, status.Unsupported, `scoring_func = "softmax" is not built`},
		{glmAir, `"topk_method": "greedy"`, status.Unsupported, `topk_method = "greedy" is not built`},
		{glmAir, `"moe_layer_freq": 2`, status.Unsupported, "moe_layer_freq = 2 is not built"},
		{miniMax, `"output_router_logits": true`, status.Unsupported, "output_router_logits = true is not built: set it to false"},
		{miniMax, `"router_jitter_noise": 0.1`, status.Unsupported, "router_jitter_noise = 0.1 is not built"},
		{ernie21, `"moe_norm_min": 0.1`, status.Unsupported, "moe_norm_min = 0.1 is not built"},
		{ernie21, `"moe_k": 65`, status.InvalidConfig, "moe_k = 65, moe_num_experts = 64"},
		{ernie21, `"use_bias": true`, status.Unsupported, "use_bias = true is not built for ernie4_5_moe: false is"},
	} {
		if _, err := ParseConfig(with(t, x.text, x.fields)); status.Of(err) != x.code ||
			!strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.fields, err, x.want)
		}
	}
	// In a job's own table, fields without an effect are refused as well.
	fields := map[string]any{"model_type": "glm4_moe", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
		"num_hidden_layers": 2, "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
		"moe_intermediate_size": 4, "partial_rotary_factor": 1.0}
	if c, err := ConfigFromMap(fields); err != nil || c.Experts.Shared != 0 || c.SparseLayers() != 2 {
		t.Errorf("%+v, %v", c, err)
	}
	fields["output_router_logits"] = true
	if _, err := ConfigFromMap(fields); err == nil || !strings.Contains(err.Error(),
		"output_router_logits = true has no effect in glm4_moe; remove it, and set optimizer.expert_bias_rate") {
		t.Error(err)
	}
}

// Folders have layers behind the last that predict further tokens. They are left out, and no other
// layers are.
func TestFolderWithFurtherLayers(t *testing.T) {
	cfg := configs(t)["glm4_moe"]
	cfg.raw["num_nextn_predict_layers"] = 1
	onRank(t, cfg, func(r *rank) {
		list := items(r.Model, tensor.F32)
		for _, b := range r.Biases() {
			list = append(list, tensor.Item{Name: b.Name, Tensor: tensor.OfFloat32(b.Values, int64(len(b.Values)))})
		}
		odd := func(name string) tensor.Item {
			return tensor.Item{Name: name, Tensor: tensor.OfFloat32([]float32{1}, 1)}
		}
		further := append(list, odd("model.layers.3.eh_proj.weight"))
		dir := writeFolder(t, cfg, map[string][]tensor.Item{weightsFile: further})
		if err := load(t, dir, nil, nil); err != nil {
			t.Error(err)
		}
		f := must1(OpenFolder(dir, nil))
		if d := f.Dropped(); len(d) != 1 || d[0].Prefix != "model.layers.3." || d[0].Tensors != 1 {
			t.Errorf("dropped %+v", d)
		}
		f.Close()
		behind := append(list, odd("model.layers.4.eh_proj.weight"))
		err := load(t, writeFolder(t, cfg, map[string][]tensor.Item{weightsFile: behind}), nil, nil)
		if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), "model.layers.4.eh_proj.weight") {
			t.Error(err)
		}
		err = load(t, writeFolder(t, cfg, map[string][]tensor.Item{weightsFile: list[:len(list)-1]}), nil, nil)
		if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(),
			"model.layers.2.mlp.gate.e_score_correction_bias[9] is missing, and models of type glm4_moe have it") {
			t.Error(err)
		}
	})
}

// The work on a name does not grow with the number of further layers: a damaged config.json with
// 16384 of them took minutes.
func TestManyFurtherLayers(t *testing.T) {
	cfg := configs(t)["glm4_moe"]
	cfg.raw["num_nextn_predict_layers"] = int64(maxLayers)
	for name, dropped := range map[string]bool{"model.layers.2.x": false, "model.layers.3.x": true,
		"model.layers.16386.x": true, "model.layers.16387.x": false, "model.layers.99999999999999999999.x": false,
		"model.layers.3": false, "lm_head.weight": false} {
		if cfg.ignored(name) != dropped {
			t.Errorf("%s is dropped: %v, want %v", name, !dropped, dropped)
		}
		if n := testing.AllocsPerRun(3, func() { cfg.ignored(name) }); n > 100 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
