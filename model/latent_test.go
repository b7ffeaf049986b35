package model

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/near"
)

// As DeepSeek-V3 is published, without its FP8.
const deepseek = `{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
 "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
 "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
 "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
 "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
 "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
 "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
 "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
 "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 129280}`

const glmLite = `{"model_type": "glm4_moe_lite", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}`

func TestParseLatent(t *testing.T) {
	c := parse(t, deepseek)
	if !c.IsLatent() || c.HeadDim != 192 || c.ValueDim() != 128 || c.RotaryDim != 64 || c.HeadFeatures() != 128*512 ||
		c.Latent != (Latent{1536, 512, 128, 64, 128, true}) || c.Rope.Scale != 1 || c.Positions() != 163840 {
		t.Errorf("%+v", c)
	}
	near.Value(t, "scale", c.ScoreScale, math.Pow(0.1*math.Log(40)+1, 2)/math.Sqrt(192), 1e-12)
	// attention, MLPs, 8 experts and the shared one, routers, and the head
	products := float64(61*(7168*(1536+576)+1536*128*192+512*128*256+128*128*7168) + 3*3*7168*18432 +
		58*(9*3*7168*2048+7168*256) + 7168*129280)
	near.Value(t, "weights in products of a token", c.Flops(1, 0)/6, products, 1)
	near.Value(t, "operations of a pair", c.Flops(0, 1), float64(61*6*128*(192+128)), 1)

	// Whatever head_dim says, heads have the features of the other fields.
	for _, fields := range []string{`"head_dim": 64`, `"head_dim": 192`, `"q_lora_rank": null`,
		`"rope_interleave": false`, `"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 0}`,
		`"rope_scaling": null`} {
		c := parse(t, string(with(t, deepseek, fields)))
		if c.HeadDim != 192 || c.RotaryDim != 64 || c.RopeInterleave == (fields == `"rope_interleave": false`) {
			t.Errorf("%s: %+v", fields, c)
		}
		if strings.Contains(fields, "rope_scaling") {
			near.Value(t, "scale", c.ScoreScale, 1/math.Sqrt(192), 1e-12)
		}
		text, err := c.JSON()
		must(err)
		again := parse(t, string(text))
		if f := again.fields(); again.Latent != c.Latent || again.ScoreScale != c.ScoreScale ||
			!reflect.DeepEqual(again.Rope, c.Rope) || f["head_dim"] != int64(64) {
			t.Errorf("%s, read again: %+v, head_dim %v", fields, again, f["head_dim"])
		}
	}
	if _, given := parse(t, string(with(t, deepseek, `"q_lora_rank": null`))).fields()["q_lora_rank"]; !given {
		t.Error("q_lora_rank = null is not written: transformers would take its default")
	}
	c = parse(t, glmLite)
	if c.Latent != (Latent{768, 512, 192, 64, 256, true}) || c.HeadDim != 256 || c.NumKeyValueHeads != 20 ||
		c.RMSNormEps != 1e-5 || c.Experts.Count != 64 || c.Experts.Scale != 1.8 || c.SparseLayers() != 0 {
		t.Errorf("%+v", c)
	}
	if c := parse(t, string(with(t, glmLite, `"num_hidden_layers": 3`))); c.Sparse(0) || c.SparseLayers() != 2 {
		t.Errorf("%+v", c)
	}
	for value, want := range map[int64]int64{0: 0, 8: 8} { // TOML has no null
		o, err := c.Override(map[string]any{"q_lora_rank": value})
		if err != nil || o.QLoraRank != want {
			t.Errorf("q_lora_rank = %d: %+v, %v", value, o, err)
		}
	}
}

func TestLatentFaults(t *testing.T) {
	const bad, no = status.InvalidConfig, status.Unsupported
	for _, x := range []struct {
		base, fields string
		code         status.Code
		want         string
	}{
		{deepseek, `"quantization_config": {"quant_method": "fp8"}`, no,
			`quantization_config is not built for quant_method = "fp8": use a text model`},
		{deepseek, `"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}`, no,
			`not built for quant_method = "fp8", fmt = "e5m2", weight_block_size = [128 128]: use`},
		{deepseek, `"num_key_value_heads": 64`, bad, "num_key_value_heads = 64, num_attention_heads = 128"},
		{deepseek, `"qk_rope_head_dim": 63`, bad, "qk_rope_head_dim = 63 is odd"},
		{deepseek, `"q_lora_rank": -1`, bad, "q_lora_rank = -1"},
		{deepseek, `"kv_lora_rank": 0`, bad, "kv_lora_rank = 0"},
		{deepseek, `"rope_interleave": 1`, bad, "rope_interleave = 1: give true or false"},
		{deepseek, `"partial_rotary_factor": 0.5`, no, "partial_rotary_factor = 0.5 is not built"},
		{deepseek, `"first_k_dense_replace": -1`, bad, "first_k_dense_replace = -1"},
		{deepseek, `"scoring_func": "softmax"`, no, `scoring_func = "softmax" is not built`},
		{glmLite, `"mlp_layer_types": []`, bad, "mlp_layer_types = []: give a list with a kind for each of 1 layers"},
		{glmLite, `"mlp_layer_types": "dense"`, bad, `mlp_layer_types = "dense": give a list`},
		{glmLite, `"mlp_layer_types": ["linear"]`, bad, `mlp_layer_types[0] = "linear": give "dense" or "sparse"`},
	} {
		_, err := ParseConfig(with(t, x.base, x.fields))
		if status.Of(err) != x.code || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.fields, err, x.want)
		}
	}
	fields := latent(map[string]any{"model_type": "deepseek_v3", "vocab_size": 8, "hidden_size": 8,
		"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 6, "head_dim": 9,
		"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8})
	_, fresh := ConfigFromMap(fields)
	_, override := parse(t, deepseek).Override(map[string]any{"head_dim": 192})
	for _, err := range []error{fresh, override} {
		if want := "has no effect in deepseek_v3; set qk_nope_head_dim, qk_rope_head_dim and v_head_dim"; err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	// A new model has no default of the published one, also with an override.
	delete(fields, "head_dim")
	own := must1(ConfigFromMap(fields))
	for _, c := range []*Config{own, must1(own.Override(map[string]any{"num_hidden_layers": 2}))} {
		if c.QLoraRank != 0 || c.Experts.Shared != 0 || c.Experts.Scale != 1 || c.Experts.Groups != 1 || !c.Sparse(0) {
			t.Errorf("%+v", c)
		}
	}
}

// The order of rows in the files: of a head [5 features, 4 rotated ones], and of the compressed
// keys [10 features, 4 rotated ones].
func TestLatentRows(t *testing.T) {
	all := configs(t)
	for _, x := range []struct {
		model, name string
		want        []int64 // rows in the files of the first rows of the model
	}{
		{"deepseek_v3", "model.layers.0.self_attn.q_b_proj.weight",
			[]int64{5, 7, 6, 8, 0, 1, 2, 3, 4, 14, 16, 15, 17, 9}},
		{"deepseek_v3", "model.layers.1.self_attn.kv_a_proj_with_mqa.bias",
			[]int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 11, 13}},
		{"glm4_moe_lite", "model.layers.0.self_attn.q_proj.lora_B.weight", []int64{5, 6, 7, 8, 0, 1, 2, 3, 4, 14}},
	} {
		order := all[x.model].rowOrder(x.name)
		if order == nil {
			t.Errorf("%s: rows are in the order of the files", x.name)
			continue
		}
		for row, want := range x.want {
			if file := order.file(int64(row)); file != want || order.model(file) != int64(row) {
				t.Errorf("%s: row %d is %d in the files, which is %d; want %d", x.name, row, file, order.model(file),
					want)
			}
		}
	}
	for _, name := range []string{"kv_b_proj.weight", "q_a_proj.weight", "q_b_proj.lora_A.weight", "o_proj.weight"} {
		if all["deepseek_v3"].rowOrder("model.layers.0.self_attn."+name) != nil {
			t.Errorf("%s: rows are in another order", name)
		}
	}
}

// With Ulysses, the output of attention and the gradient of its input are bitwise equal to the
// results of one rank.
func TestLatentRanksBitwise(t *testing.T) {
	for _, name := range []string{"deepseek_v2", "deepseek_v3", "glm4_moe_lite"} {
		cfg := configs(t)[name]
		s := documents(cfg.VocabSize, 9, 1, 13)
		attention := func(n int) []map[string][]float32 { // of the ranks of this process
			shards := make([]map[string][]float32, n)
			train(t, n, cfg, s, func(r *rank) {
				own := map[string][]float32{}
				shards[r.comm.Rank()] = own
				r.c.Inspect = func(at string, x tensor.Tensor) error {
					if strings.HasSuffix(at, "attention output") || strings.HasSuffix(at, "gradient before attention") {
						own[at] = slices.Clone(x.Float32s())
					}
					return nil
				}
			})
			return shards
		}
		want, tokens := attention(1)[0], int64(len(s.ids))
		if len(want) != 4 {
			t.Errorf("%d tensors", len(want))
		}
		for _, n := range mpitest.Sizes() {
			found := 0
			for rank, own := range attention(n) {
				lo, hi := comm.Shard(tokens, n, rank)
				for at, x := range own {
					found++
					width := int64(len(want[at])) / tokens
					if !slices.Equal(x, want[at][lo*width:hi*width]) {
						t.Errorf("%s, rank %d of %d: %s differs", name, rank, n, at)
					}
				}
			}
			if found == 0 {
				t.Errorf("%s, %d ranks: nothing was compared", name, n)
			}
		}
	}
}

// Kimi K2 is a DeepSeek-V3 with a model type, and Python code, of its own.
func TestKimi(t *testing.T) {
	c := parse(t, string(with(t, deepseek,
		`"model_type": "kimi_k2", "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}, "n_group": 1, "topk_group": 1`)))
	if c.ModelType != "deepseek_v3" || c.Experts.Groups != 1 {
		t.Errorf("%+v", c)
	}
	fields := c.fields()
	if fields["model_type"] != "deepseek_v3" || fields["auto_map"] != nil ||
		!reflect.DeepEqual(fields["architectures"], []string{"DeepseekV3ForCausalLM"}) {
		t.Errorf("%v", fields)
	}
}

// Checkpoints have a digest of the configuration's JSON. Fields that other families have are left
// out of it, so that new families do not change the digests of existing runs.
func TestFieldsOfOtherFamiliesInDigests(t *testing.T) {
	text := string(must1(json.Marshal(configs(t)["llama"])))
	for _, name := range []string{"QLoraRank", "KVLoraRank", "QKNopeHeadDim", "QKRopeHeadDim", "VHeadDim",
		"RopeInterleave", "ScoreGain", "NoQKNorm", "Biased", "Sigmoid", "KeptGroups"} {
		if strings.Contains(text, name) {
			t.Errorf("%s is in %s", name, text)
		}
	}
}
