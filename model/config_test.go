package model

import (
	"encoding/json"
	"math"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

const llama31 = `{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
 "eos_token_id": [128001, 128008], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
 "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
 "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
 "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
 "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}`

const qwen2 = `{"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
 "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
 "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false,
 "use_mrope": false, "vocab_size": 151936}`

const qwen3 = `{"model_type": "qwen3", "attention_bias": false, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
 "intermediate_size": 3072, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 40960,
 "num_attention_heads": 16, "num_hidden_layers": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
 "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": null, "dtype": "bfloat16", "vocab_size": 151936}`

// As Qwen3.5 models are published: a language model inside a model with vision.
const qwen35 = `{"model_type": "qwen3_5_text", "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
 "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3584,
 "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
 "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
 "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_attention_heads": 8,
 "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": true,
 "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}, "vocab_size": 248320}`

const seedOSS = `{"model_type": "seed_oss", "hidden_size": 160, "intermediate_size": 8, "num_hidden_layers": 1,
 "residual_dropout": 0}`

// As Phi-4 is published.
const phi4 = `{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 100257, "embd_pdrop": 0.0,
 "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17920,
 "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40, "num_hidden_layers": 2, "num_key_value_heads": 10,
 "original_max_position_embeddings": 16384, "pad_token_id": 100257, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null,
 "rope_theta": 250000, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 100352}`

const gemma2 = `{"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64,
 "intermediate_size": 96, "num_hidden_layers": 3, "sliding_window": 4096, "query_pre_attn_scalar": 144, "head_dim": 16}`

// As Gemma 3 is published: most fields are left to the defaults of transformers.
const gemma3 = `{"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "sliding_window": 1024,
 "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}`

const gemma3vision = `{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {"depth": 12},
 "mm_tokens_per_image": 256, "text_config": ` + gemma3 + `}`

const qwen35vision = `{"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056,
 "tie_word_embeddings": true, "vision_config": {"depth": 12}, "text_config": ` + qwen35 + `}`

func parse(t *testing.T, text string) *Config {
	t.Helper()
	c, err := ParseConfig([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestParseConfig(t *testing.T) {
	c := parse(t, llama31)
	if c.HeadDim != 64 || c.NumKeyValueHeads != 8 || !c.TieWordEmbeddings || c.DType != tensor.BF16 ||
		c.RMSNormEps != 1e-5 ||
		!reflect.DeepEqual(c.Rope,
			Rope{Type: "llama3", Theta: 500000, Factor: 32, LowFreqFactor: 1, HighFreqFactor: 4,
				OriginalMaxPositionEmbeddings: 8192}) || c.QKVBias() || c.OutBias() || c.QKNorm() {
		t.Errorf("%+v", c)
	}
	c = parse(t, qwen2)
	if c.HeadDim != 64 || c.VocabSize != 151936 ||
		!reflect.DeepEqual(c.Rope, Rope{Type: "default", Theta: 1e6, Factor: 1}) || !c.QKVBias() || c.OutBias() {
		t.Errorf("%+v", c)
	}
	c = parse(t, input.BOM+qwen3) // as an editor of Windows saves it
	if c.HeadDim != 128 || c.TieWordEmbeddings || c.Rope.Theta != 1e6 || c.DType != tensor.BF16 || c.QKVBias() ||
		!c.QKNorm() {
		t.Errorf("%+v", c)
	}
}

// hasMisread reports whether MLPs without experts cannot have adapters (leaveOutMisread).
func (f *family) hasMisread() bool {
	x := f.experts
	return x != nil && x.misread && (x.sparse == sparseUnlisted || x.shared || x.sharedCount != "")
}

// Refusals and documentation list all families, and the families with a feature.
func TestModelTypes(t *testing.T) {
	for _, name := range ModelTypes() {
		f, listed := families[name], regexp.MustCompile(`\b`+name+`\b`).MatchString
		for list, x := range map[string]struct {
			has  bool
			text string
		}{
			"ModelTypes":     {true, notbuilt.ModelTypes.Instead},
			"Experts":        {f.experts != nil, notbuilt.Experts.Name},
			"ExpertAdapters": {f.hasMisread(), notbuilt.ExpertAdapters.Name},
			"PartialRotary":  {f.rotaryShare > 0, notbuilt.PartialRotary.Where},
		} {
			if x.has != listed(x.text) {
				t.Errorf("notbuilt.%s lists %s: %v", list, name, !x.has)
			}
		}
		if why := notbuilt.ModelTypeReasons[name]; why != "" {
			t.Errorf("notbuilt.ModelTypeReasons lists %s", name)
		}
	}
}

func TestParsePhi(t *testing.T) {
	c := parse(t, phi4)
	if c.HeadDim != 128 || c.RotaryDim != 128 || c.Rope.Theta != 250000 || c.SlidingWindow != 0 || c.QKVBias() ||
		c.Sliding(0) {
		t.Errorf("%+v", c)
	}
	c = parse(t, string(with(t, phi4,
		`"sliding_window": 2047, "rope_scaling": {"type": "su", "long_factor": [2, 2], "short_factor": [1, 1]}, "partial_rotary_factor": 0.03125`)))
	if c.RotaryDim != 4 || c.SlidingWindow != 2047 || !c.Sliding(1) || c.Rope.Type != "longrope" {
		t.Errorf("%+v", c)
	}
}

// Where Seed-OSS has no fields of dropout, transformers drops. A new model does not, and its folder
// says so.
func TestParseSeedOss(t *testing.T) {
	published := parse(t, lacking(t, seedOSS, "residual_dropout"))
	if published.AttentionDropout != 0.1 || published.DropsResiduals() != "residual_dropout" {
		t.Errorf("%+v", published)
	}
	if c := parse(t, string(with(t, phi4, `"resid_pdrop": 0.2`))); c.DropsResiduals() != "resid_pdrop" {
		t.Errorf("%+v", c)
	}
	fresh, err := ConfigFromMap(small("seed_oss", nil))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*Config{fresh, parse(t, string(must1(fresh.JSON())))} {
		if c.AttentionDropout != 0 || c.DropsResiduals() != "" {
			t.Errorf("%+v", c)
		}
	}
}

func TestParseHybrid(t *testing.T) {
	for _, text := range []string{qwen35, qwen35vision} {
		c := parse(t, text)
		if c.ModelType != "qwen3_5_text" || c.HeadDim != 256 || c.RotaryDim != 64 || c.Rope.Theta != 1e7 ||
			c.DType != tensor.BF16 ||
			!c.QKNorm() || !c.OutputGate() || c.NormCentre() != 1 || c.LinearLayers() != 3 || c.Linear(3) ||
			c.convChannels() != 8192 ||
			c.TieWordEmbeddings != (text == qwen35vision) {
			t.Errorf("%+v", c)
		}
	}
	// defaults of transformers
	c := parse(t, `{"model_type": "qwen3_5_text", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 9, "num_attention_heads": 4}`)
	if c.HeadDim != 256 || c.RotaryDim != 64 || c.Rope.Theta != 10000 || c.LinearNumKeyHeads != 16 ||
		c.LinearNumValueHeads != 32 ||
		c.LinearKeyHeadDim != 128 || c.LinearValueHeadDim != 128 || c.LinearConvKernelDim != 4 ||
		c.LinearLayers() != 7 || c.Linear(3) || c.Linear(7) || !c.Linear(8) {
		t.Errorf("%+v", c)
	}
	// Fields are replaced in whichever place the file has them.
	for fields, want := range map[string]int64{"partial_rotary_factor": 128, "rope_theta": 64} {
		o, err := parse(t, qwen35).Override(map[string]any{fields: 0.5})
		if err != nil || o.RotaryDim != want || (o.Rope.Theta == 0.5) != (fields == "rope_theta") {
			t.Errorf("%s = 0.5: %+v, %v", fields, o, err)
		}
	}
	o, err := parse(t, qwen35).Override(
		map[string]any{"rope_scaling": map[string]any{"rope_type": "linear", "factor": 2.0}})
	if err != nil || o.RotaryDim != 64 || o.Rope.Type != "linear" || o.Rope.Theta != 1e7 {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestParseGemma(t *testing.T) {
	c := parse(t, gemma2)
	if c.VocabSize != 256000 || c.NumAttentionHeads != 8 || c.NumKeyValueHeads != 4 || c.HeadDim != 16 ||
		!c.TieWordEmbeddings || c.NormCentre() != 1 ||
		c.ScoreScale != 1./12 || c.ScoreSoftcap != 50 || c.LogitSoftcap != 30 || c.QKNorm() || c.LocalRope != nil ||
		c.MaxPositionEmbeddings != 8192 {
		t.Errorf("%+v", c)
	}
	// null and 0 are no cap, and are written as null
	for _, value := range []string{"null", "0"} {
		c = parse(t, strings.Replace(gemma2, `"head_dim"`, `"final_logit_softcapping": `+value+`, "head_dim"`, 1))
		if f := c.fields(); c.LogitSoftcap != 0 || c.ScoreSoftcap != 50 || f["final_logit_softcapping"] != nil {
			t.Errorf("%s: %+v", value, c)
		}
	}
	for _, text := range []string{gemma3, gemma3vision} {
		c = parse(t, text)
		if c.ModelType != "gemma3_text" || c.VocabSize != 262208 || c.HeadDim != 256 || !c.QKNorm() ||
			c.ScoreSoftcap != 0 || c.LogitSoftcap != 0 ||
			!reflect.DeepEqual(c.Rope, Rope{Type: "linear", Theta: 1e6, Factor: 8}) ||
			!reflect.DeepEqual(*c.LocalRope, Rope{Type: "default", Theta: 1e4, Factor: 1}) || !c.Sliding(0) ||
			c.Sliding(5) || !c.Sliding(6) {
			t.Errorf("%+v", c)
		}
	}
	// bf16 rounds the factor of embeddings
	for hidden, want := range map[int64]float64{3584: 59.75, 4608: 68, 640: 25.25, 1152: 34, 2560: 50.5, 3840: 62,
		5376: 73.5, 2304: 48} {
		c.HiddenSize = hidden
		near.Value(t, "scale", c.embeddingScale(tensor.BF16), want, 0)
		near.Value(t, "scale", c.embeddingScale(tensor.F32), float64(float32(math.Sqrt(float64(hidden)))), 0)
	}
}

// Old and new fields of Gemma 3's two sets of RoPE, their overrides, and what is written.
func TestLocalRope(t *testing.T) {
	const nested = `"rope_scaling": null, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, "sliding_attention": `
	linear := map[string]any{"rope_type": "linear", "factor": 2.0}
	for _, c := range []struct {
		fields      string
		override    map[string]any
		full, local Rope
	}{
		{nested + `{"rope_type": "default", "rope_theta": 300.0}}`, nil, Rope{Type: "linear", Theta: 5e5, Factor: 8},
			Rope{Type: "default", Theta: 300, Factor: 1}},
		{nested + `null}`, nil, Rope{Type: "linear", Theta: 5e5, Factor: 8},
			Rope{Type: "default", Theta: 1e4, Factor: 1}},
		{`"rope_theta": 100.0, "rope_local_base_freq": 10.0`, nil, Rope{Type: "linear", Theta: 100, Factor: 8},
			Rope{Type: "default", Theta: 10, Factor: 1}},
		{`"rope_theta": 100.0`, map[string]any{"rope_theta": 7.0}, Rope{Type: "linear", Theta: 7, Factor: 8},
			Rope{Type: "default", Theta: 1e4, Factor: 1}},
		{`"rope_theta": 100.0`, map[string]any{"rope_scaling": linear}, Rope{Type: "linear", Theta: 100, Factor: 2},
			Rope{Type: "default", Theta: 1e4, Factor: 1}},
		{nested + `{"rope_theta": 300.0}}`, map[string]any{"rope_local_base_freq": 8.0},
			Rope{Type: "linear", Theta: 5e5, Factor: 8}, Rope{Type: "default", Theta: 8, Factor: 1}},
		{nested + `{"rope_theta": 300.0}}`,
			map[string]any{"rope_parameters": map[string]any{"sliding_attention": linear}},
			Rope{Type: "linear", Theta: 5e5, Factor: 8}, Rope{Type: "linear", Theta: 300, Factor: 2}},
		{`"max_position_embeddings": 64`,
			map[string]any{"rope_scaling": map[string]any{"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
				"high_freq_factor": 4.0}},
			Rope{Type: "llama3", Theta: 1e6, Factor: 2, LowFreqFactor: 1, HighFreqFactor: 4,
				OriginalMaxPositionEmbeddings: 64}, Rope{Type: "default", Theta: 1e4, Factor: 1}},
	} {
		first, err := parseConfig(with(t, gemma3, c.fields), c.override)
		if err != nil {
			t.Errorf("%s: %v", c.fields, err)
			continue
		}
		text, err := first.JSON()
		if err != nil {
			t.Fatal(err)
		}
		for i, got := range []*Config{first, parse(t, string(text))} {
			if !reflect.DeepEqual(got.Rope, c.full) || !reflect.DeepEqual(*got.LocalRope, c.local) {
				t.Errorf("%s %v, read %d times: %+v, %+v", c.fields, c.override, i+1, got.Rope, got.LocalRope)
			}
		}
	}
	for _, override := range []map[string]any{{"rope_parameters": linear}, {"partial_rotary_factor": 0.5},
		{"rope_scaling": 3}, {"rope_parameters": 3}} {
		if _, err := parseConfig([]byte(gemma3), override); err == nil {
			t.Errorf("%v is accepted", override)
		}
	}
}

// with replaces fields of a JSON object.
func with(t *testing.T, text, fields string) []byte {
	t.Helper()
	var a, b map[string]any
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte("{"+fields+"}"), &b); err != nil {
		t.Fatal(err)
	}
	for k, v := range b {
		a[k] = v
	}
	out, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// lacking removes fields of a JSON object.
func lacking(t *testing.T, text string, names ...string) string {
	t.Helper()
	var fields map[string]any
	must(json.Unmarshal([]byte(text), &fields))
	for _, name := range names {
		delete(fields, name)
	}
	return string(must1(json.Marshal(fields)))
}

// gptOss is a gpt-oss with a dense MLP that has as few fields as possible.
const gptOss = `{"model_type": "gpt_oss", "vocab_size": 8, "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4,
	"num_key_value_heads": 2, "max_position_embeddings": 131072, "num_local_experts": 0}`

// gpt-oss has the defaults of transformers. An override of a parameter of RoPE keeps the
// other parameters, and a table in the file replaces the default table.
func TestGptOss(t *testing.T) {
	c := parse(t, gptOss)
	if !c.Sinks() || !c.QKVBias() || !c.OutBias() || c.QKNorm() || c.NormCentre() != 0 || c.HeadDim != 64 ||
		c.RMSNormEps != 1e-5 || c.TieWordEmbeddings ||
		c.Rope.Type != "yarn" || !c.Rope.Exact || c.Rope.Theta != 150000 || c.Rope.Factor != 32 ||
		c.Rope.OriginalMaxPositionEmbeddings != 4096 {
		t.Errorf("%+v", c)
	}
	near.Value(t, "factor of cos and sin", c.Rope.Scale, 1.34657359, 1e-8)
	f := c.Rope.Frequencies(64, 1) // of transformers 5.23
	for k, want := range map[int]float64{8: .05081327, 9: .0317057, 17: .0001293187, 18: 3.830881e-5} {
		near.Value(t, "frequency", float64(f[k]), want, 1e-6*want)
	}
	if c := must1(c.Override(map[string]any{"rope_theta": 1000.0})); c.Rope.Type != "yarn" || c.Rope.Theta != 1000 ||
		c.Rope.Factor != 32 {
		t.Errorf("%+v", c.Rope)
	}
	for _, table := range []string{`"rope_scaling": {"rope_type": "default"}`,
		`"rope_parameters": {"rope_type": "default", "rope_theta": 150000}`} {
		if c := parse(t, string(with(t, gptOss, table))); c.Rope.Type != "default" || c.Rope.Theta != 150000 {
			t.Errorf("%s: %+v", table, c.Rope)
		}
	}
	if c := parse(t, string(with(t, gptOss, `"attention_bias": false, "rope_scaling": null`))); c.QKVBias() ||
		c.OutBias() || c.Rope.Type != "yarn" {
		t.Errorf("%+v", c)
	}
}

func TestConfigFaults(t *testing.T) {
	const bad, no = status.InvalidConfig, status.Unsupported
	for _, c := range []struct {
		base, fields string
		code         status.Code
		want         []string
	}{
		{qwen2, `"hidden_size": null`, bad, []string{"hidden_size is missing"}},
		{lacking(t, qwen2, "hidden_size"), ``, bad, []string{"hidden_size is missing"}},
		{gptOss, `"num_local_experts": 3`, bad,
			[]string{
				"num_experts_per_tok = 4, num_local_experts = 3: a token cannot have more experts than there are"}},
		{gptOss, `"swiglu_limit": 5.0, "num_local_experts": 8`, no,
			[]string{"swiglu_limit = 5 is not built: the published ones are built"}},
		{gptOss, `"swiglu_alpha": 1`, no, []string{"swiglu_alpha = 1 is not built"}},
		{gptOss, `"mlp_bias": true`, bad, []string{"mlp_bias = true: gpt_oss has no biases there"}},
		{qwen2, `"hidden_size": "896"`, bad, []string{`hidden_size = "896": give a whole number`}},
		{qwen2, `"hidden_size": 896.5`, bad, []string{"hidden_size = 896.5"}},
		{qwen2, `"vocab_size": -3, "num_hidden_layers": 0, "rms_norm_eps": 0`, bad,
			[]string{"vocab_size = -3", "num_hidden_layers = 0", "rms_norm_eps = 0"}},
		{qwen2, `"vocab_size": 1e300`, bad, []string{"vocab_size"}},
		{qwen2, `"num_key_value_heads": 4`, bad,
			[]string{"num_key_value_heads = 4 does not divide num_attention_heads = 14"}},
		{qwen2, `"hidden_size": 900`, bad, []string{"hidden_size = 900 is not a multiple of num_attention_heads = 14"}},
		{qwen2, `"head_dim": 63`, bad, []string{"head_dim = 63 is odd"}},
		{qwen2, `"hidden_size": "` + strings.Repeat("n", 1<<20) + `"`, bad,
			[]string{`nnn… (1048576 bytes)": give a whole number`}},
		{qwen2, `"hidden_act": "` + strings.Repeat("n", 1<<20) + `"`, no, []string{`(1048576 bytes)" is not built`}},
		{qwen2, `"hidden_act": "gelu"`, no, []string{`hidden_act = "gelu" is not built`}},
		{qwen2, `"use_sliding_window": true, "sliding_window": 0`, bad, []string{"sliding_window = 0"}},
		{qwen2, `"hidden_act": "gelu", "use_sliding_window": 3, "vocab_size": 0`, bad,
			[]string{"gelu", "use_sliding_window", "vocab_size"}},
		{qwen2, `"rope_scaling": {"type": "axial", "factor": 4.0}`, no,
			[]string{`rope_scaling.rope_type = "axial" is not built`}},
		{qwen2, `"rope_scaling": {"rope_type": "dynamic"}`, bad, []string{"rope_scaling.factor is missing"}},
		{qwen2, `"rope_scaling": {"rope_type": "linear"}`, bad, []string{"rope_scaling.factor is missing"}},
		{qwen3, `"rope_parameters": {"rope_type": "llama3", "factor": 8}`, bad,
			[]string{"rope_parameters.low_freq_factor is missing", "rope_parameters.high_freq_factor"}},
		{qwen3, `"rope_parameters": {"rope_theta": 0}`, bad, []string{"rope_parameters.rope_theta = 0"}},
		{qwen3, `"rope_parameters": {"partial_rotary_factor": 0.25}`, no, []string{"partial_rotary_factor"}},
		{qwen3, `"layer_types": ["full_attention", "sliding_attention"]`, bad,
			[]string{`layer_types[1] = "sliding_attention", but there is no window; set use_sliding_window = true`}},
		{qwen3, `"layer_types": ["full_attention"]`, bad, []string{"layer_types has 1 entries"}},
		{llama31, `"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0`, no,
			[]string{"attn_logit_softcapping = 50", "final_logit_softcapping = 30"}},
		{llama31, `"attention_dropout": 1`, bad, []string{"attention_dropout = 1; set a probability"}},
		{llama31, `"quantization_config": {"bits": 4}`, no, []string{"quantization_config"}},
		{llama31, `"model_type": "gpt2"`, no, []string{`"gpt2" (learned positions) is not built`}},
		{olmoe, `"clip_qkv": 8.0`, no, []string{"clip_qkv = 8 is not built: set it to null"}},
		{llama31, `"model_type": "qwen3_5"`, no, []string{"qwen3_5"}},
		{llama31, `"model_type": "qwen2_vl"`, no, []string{"vision"}},
		{llama31, `"model_type": "phi"`, no,
			[]string{
				`"phi" is not built: llama, mistral, ministral, ministral3, mixtral, gemma2, gemma3_text, qwen2, qwen2_moe, qwen3, qwen3_moe, qwen3_5_text, qwen3_5_moe_text, qwen3_next, granite, smollm3, phi3, olmo2, olmo3, olmoe, glm, glm4, glm4_moe, glm4_moe_lite, deepseek_v2, deepseek_v3, minimax_m2, ernie4_5, ernie4_5_moe, seed_oss and gpt_oss are`}},
		{llama31, `"model_type": "llama4"`, no, []string{"mixture of experts"}},
		{qwen35, `"linear_num_value_heads": 24`, bad,
			[]string{"linear_num_value_heads = 24 is not a multiple of linear_num_key_heads = 16"}},
		{qwen35, `"linear_conv_kernel_dim": 0, "linear_key_head_dim": -1`, bad,
			[]string{"linear_conv_kernel_dim = 0", "linear_key_head_dim = -1"}},
		{qwen35, `"attn_output_gate": false`, no, []string{"attn_output_gate = false"}},
		{qwen35, `"full_attention_interval": 0`, bad, []string{"full_attention_interval = 0"}},
		{qwen35, `"layer_types": ["full_attention", "sliding_attention", "linear_attention", "linear_attention"]`, no,
			[]string{`layer_types[1] = "sliding_attention" is not built: full_attention and linear_attention are`}},
		{qwen35, `"layer_types": ["full_attention", true, "linear_attention", "linear_attention"]`, no,
			[]string{"layer_types[1] = true is not built"}},
		{qwen35, `"layer_types": ["full_attention", 3, "linear_attention", "linear_attention"]`, no,
			[]string{"layer_types[1] = 3 is not built"}},
		{qwen35, `"layer_types": ["linear_attention"]`, bad, []string{"layer_types has 1 entries"}},
		{qwen35, `"layer_types": "linear_attention"`, bad, []string{"layer_types = linear_attention: give a list"}},
		{qwen35, `"head_dim": 15`, bad, []string{"head_dim = 15 is odd"}},
		{qwen35, `"head_dim": 20`, bad, []string{"partial_rotary_factor = 0.25 of head_dim = 20 is 5 features"}},
		{qwen35, `"rope_parameters": {"partial_rotary_factor": 1.5}`, bad, []string{"partial_rotary_factor = 1.5"}},
		{qwen35, `"rope_parameters": {"partial_rotary_factor": 0}`, bad, []string{"partial_rotary_factor = 0"}},
		{qwen35, `"rope_parameters": {"rope_type": "yarn"}`, bad, []string{"rope_parameters.factor is missing"}},
		{qwen35, `"mlp_bias": true`, bad, []string{"mlp_bias"}},
		{qwen3, `"layer_types": ["full_attention", "linear_attention"]`, no,
			[]string{`layer_types[1] = "linear_attention" is not built: full_attention and sliding_attention are`}},
		{llama31, `"partial_rotary_factor": 0.5`, no, []string{"partial_rotary_factor = 0.5 is not built for llama"}},
		{gemma2, `"hidden_activation": "silu"`, no, []string{`hidden_activation = "silu" is not built`}},
		{gemma2, `"use_bidirectional_attention": true`, no,
			[]string{"use_bidirectional_attention = true is not built"}},
		{gemma2, `"attn_logit_softcapping": -1`, bad, []string{"attn_logit_softcapping = -1"}},
		{gemma2, `"attn_logit_softcapping": 1e-31`, bad,
			[]string{"attn_logit_softcapping = 1e-31: give a number from 1e-30 to 1e+30"}},
		{gemma2, `"final_logit_softcapping": 1e31`, bad, []string{"final_logit_softcapping = 1e+31"}},
		{gemma2, `"query_pre_attn_scalar": 0`, bad, []string{"query_pre_attn_scalar = 0"}},
		{gemma2, `"partial_rotary_factor": 0.5`, no, []string{"partial_rotary_factor = 0.5 is not built for gemma2"}},
		{gemma2, `"rope_parameters": {"full_attention": {}}`, no,
			[]string{"a table for each kind of layer, which is not built for gemma2"}},
		{gemma3, `"sliding_window_pattern": 0`, bad, []string{"sliding_window_pattern = 0"}},
		{gemma3, `"rope_parameters": {"rope_type": "default"}`, bad,
			[]string{"rope_parameters.rope_type and rope_theta belong into the tables"}},
		{gemma3, `"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}`, bad,
			[]string{"rope_parameters.sliding_attention.factor is missing"}},
		{gemma3, `"rope_local_base_freq": -1`, bad, []string{"rope_local_base_freq = -1"}},
		{gemma3, `"layer_types": ["linear_attention"]`, no, []string{"full_attention and sliding_attention are"}},
		{phi4, `"resid_pdrop": 1`, bad, []string{"resid_pdrop = 1; set a probability"}},
		{seedOSS, `"residual_dropout": -0.1`, bad, []string{"residual_dropout = -0.1; set a probability"}},
		{seedOSS, `"attention_out_bias": true`, no, []string{"attention_out_bias = true is not built"}},
		{phi4, `"rope_scaling": {"type": "linear", "factor": 2.0}`, no,
			[]string{`rope_scaling.type = linear is not built for phi3`}},
		{phi4, `"attention_bias": true`, bad, []string{"attention_bias = true: phi3 has no biases there"}},
		{phi4, `"partial_rotary_factor": 0.51`, bad,
			[]string{"partial_rotary_factor = 0.51 of head_dim = 128 is 65 features"}},
		{llama31, `"model_type": null`, bad, []string{"model_type is missing"}},
		{llama31, `"tie_word_embeddings": "yes"`, bad, []string{"tie_word_embeddings = \"yes\": give true or false"}},
		{llama31, `"torch_dtype": "float8_e4m3fn"`, no, []string{"float8_e4m3fn"}},
		{qwen2, `"attention_bias": true`, bad, []string{"attention_bias"}},
		{qwen2, `"mlp_bias": true`, bad, []string{"mlp_bias"}},
		{llama31, `"model_type": "mistral", "attention_bias": true`, bad,
			[]string{"attention_bias = true: mistral has no biases there"}},
	} {
		_, err := ParseConfig(with(t, c.base, c.fields))
		if status.Of(err) != c.code {
			t.Errorf("%s: code %v of %v, want %v", c.fields, status.Of(err), err, c.code)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v\nwant %q", c.fields, err, want)
			}
		}
		if n := strings.Count(err.Error(), "\n"); n != len(c.want) && (n != 0 || len(c.want) != 1) {
			t.Errorf("%s: %d lines for %d faults: %v", c.fields, n, len(c.want), err)
		}
	}
	for text, want := range map[string]string{"": "unexpected end", "[]": "not a JSON object",
		"null": "not a JSON object", "{": "unexpected end", `{"model_type": `: "unexpected end",
		`{"x": {"z": 1, "z": 2}}`: `the key "z" is there twice`, `{"x": 1} {`: "after top-level value"} {
		if _, err := ParseConfig([]byte(text)); status.Of(err) != status.InvalidConfig ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestConfigFromMap(t *testing.T) {
	_, err := ConfigFromMap(map[string]any{"model_type": "llama", "vocab_size": int64(256), "hidden_size": int64(64),
		"intermediate_sise": int64(128),
		"num_hidden_layers": int64(2), "num_attention_heads": int64(4)})
	for _, want := range []string{"intermediate_size is missing",
		"intermediate_sise: unknown field; did you mean intermediate_size?"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// A sliding window that a job sets and that has no effect is an error. In a config.json it is
// ignored.
func TestOwnWindow(t *testing.T) {
	fields := map[string]any{"model_type": "qwen3", "vocab_size": int64(256), "hidden_size": int64(64),
		"intermediate_size": int64(128),
		"num_hidden_layers": int64(2), "num_attention_heads": int64(4), "sliding_window": int64(8)}
	_, err := ConfigFromMap(fields)
	if status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), "sliding_window = 8: no layer has a window; set use_sliding_window = true") {
		t.Error(err)
	}
	if _, err = parse(t,
		qwen3).Override(map[string]any{"sliding_window": int64(8)}); status.Of(err) != status.InvalidConfig {
		t.Error(err)
	}
	if _, err = parse(t, llama31).Override(map[string]any{"sliding_window": int64(8)}); err == nil ||
		!strings.Contains(err.Error(), "llama has no sliding window") {
		t.Error(err)
	}
	fields["use_sliding_window"], fields["max_window_layers"] = true, int64(1)
	c, err := ConfigFromMap(fields)
	if err != nil || c.Sliding(0) || !c.Sliding(1) || c.SlidingWindow != 8 {
		t.Errorf("%+v, %v", c, err)
	}
	c, err = parse(t, qwen3).Override(map[string]any{"sliding_window": int64(8), "use_sliding_window": true,
		"layer_types": []any{"sliding_attention", "full_attention"}})
	if err != nil || !c.Sliding(0) || c.Sliding(1) {
		t.Errorf("%+v, %v", c, err)
	}
}

// A [model.new] of a model type that is not built has exactly one fault, because its other fields
// may have another meaning.
func TestUnbuiltModelFromScratch(t *testing.T) {
	_, err := ConfigFromMap(map[string]any{"model_type": "llama4", "num_local_experts": int64(8),
		"hidden_size": int64(64), "router_aux_loss_coef": 0.1, "sliding_window": int64(8)})
	if status.Of(err) != status.Unsupported || strings.Contains(err.Error(), "\n") ||
		!strings.Contains(err.Error(), `"llama4" (mixture of experts) is not built`) {
		t.Error(err)
	}
}

// Which layers have a window, and that config.json says the same again.
func TestWindows(t *testing.T) {
	base := map[string]string{"llama": llama31,
		"mistral":   string(with(t, llama31, `"model_type": "mistral", "num_hidden_layers": 3`)),
		"ministral": string(with(t, lacking(t, llama31, "head_dim"), `"model_type": "ministral", "num_hidden_layers": 3`)),
		"gemma2":    gemma2, "gemma3_text": string(with(t, gemma3, `"num_hidden_layers": 3`)),
		"qwen2":   string(with(t, qwen2, `"num_hidden_layers": 3`)),
		"qwen3":   string(with(t, qwen3, `"num_hidden_layers": 3, "layer_types": null`)),
		"gpt_oss": gptOss, "mixtral": string(with(t, mixtral, `"num_hidden_layers": 3`)),
		"qwen2_moe": string(with(t, qwen2moe, `"num_hidden_layers": 3`)),
		"qwen3_moe": string(with(t, qwen3moe, `"num_hidden_layers": 3`))}
	for _, c := range []struct {
		model, fields string
		window        int64
		sliding       string // of each layer: s or f
	}{
		{"llama", `"sliding_window": 7, "num_hidden_layers": 3`, 0, "fff"},
		{"mistral", `"sliding_window": 7`, 7, "sss"},
		{"mistral", ``, 4096, "sss"},
		{"mistral", `"sliding_window": null`, 0, "fff"},
		{"ministral", ``, 4096, "sss"},
		{"ministral", `"sliding_window": null`, 0, "fff"},
		{"ministral", `"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "attention"]`,
			5, "fsf"},
		{"ministral", `"model_type": "mistral", "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "attention"]`,
			5, "fsf"},
		{"gemma2", `"sliding_window": 5`, 5, "sfs"},
		{"gemma2", `"sliding_window": null`, 0, "fff"},
		{"gemma2", `"sliding_window": 5, "layer_types": ["full_attention", "full_attention", "sliding_attention"]`,
			5, "ffs"},
		{"gemma3_text", ``, 1024, "sss"},
		{"gemma3_text", `"sliding_window_pattern": 2`, 1024, "sfs"},
		{"gemma3_text", `"sliding_window_pattern": 1`, 0, "fff"},
		{"gemma3_text", `"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]`,
			5, "fsf"},
		{"qwen2", `"sliding_window": 5`, 0, "fff"},
		{"qwen2", `"sliding_window": 5, "use_sliding_window": true, "max_window_layers": 1`, 5, "fss"},
		{"qwen2", `"sliding_window": 5, "use_sliding_window": true, "max_window_layers": 0`, 5, "sss"},
		{"qwen2", `"sliding_window": 5, "use_sliding_window": true, "max_window_layers": 3`, 0, "fff"},
		{"qwen3", `"sliding_window": null, "use_sliding_window": true, "max_window_layers": 0`, 0, "fff"},
		{"qwen3", `"use_sliding_window": true, "max_window_layers": 2, "sliding_window": 4096`, 4096, "ffs"},
		{"qwen3", `"use_sliding_window": true, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "full_attention"]`,
			6, "sff"},
		{"mixtral", ``, 0, "fff"},
		{"mixtral", `"sliding_window": null`, 0, "fff"},
		{"mixtral", `"sliding_window": 8`, 8, "sss"},
		{"qwen3_moe", `"sliding_window": 8`, 0, "fff"},
		{"qwen3_moe", `"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2`, 8, "sss"},
		{"qwen2_moe", `"sliding_window": 0`, 0, "fff"},
		{"qwen2_moe", `"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 3`, 8, "sfs"},
		{"qwen2_moe", `"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2`, 8, "sff"},
		{"qwen2_moe", `"use_sliding_window": true, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]`,
			8, "fsf"},
		{"gpt_oss", ``, 128, "sfs"},
		{"gpt_oss", `"sliding_window": 9`, 9, "sfs"},
		{"gpt_oss", `"sliding_window": null`, 0, "fff"},
		{"gpt_oss", `"layer_types": ["full_attention", "full_attention", "sliding_attention"]`, 128, "ffs"},
	} {
		first := parse(t, string(with(t, base[c.model], c.fields)))
		text, err := first.JSON()
		if err != nil {
			t.Fatal(err)
		}
		for _, got := range []*Config{first, parse(t, string(text))} {
			sliding := ""
			for i := range int64(3) {
				sliding += map[bool]string{true: "s", false: "f"}[got.Sliding(i)]
			}
			if sliding != c.sliding || got.SlidingWindow != c.window || got.ModelType != c.model {
				t.Errorf("%s %s: %s, window %d, want %s, %d", c.model, c.fields, sliding, got.SlidingWindow, c.sliding,
					c.window)
			}
		}
	}
	// a window of 7 keys: 6 before the query, and its own
	c := parse(t, string(with(t, base["mistral"], `"sliding_window": 7`)))
	if w := c.window(slidingMask); w.Left != 6 || c.window(fullMask) != nil {
		t.Errorf("%+v", w)
	}
	near.Value(t, "pairs", c.Pairs(5), 12.5, 0)
	near.Value(t, "pairs", c.Pairs(20), 24.5+13*7, 0)
	// a job has no null: 0 is no window
	if c, err := c.Override(map[string]any{"sliding_window": int64(0)}); err != nil || c.SlidingWindow != 0 {
		t.Errorf("%+v, %v", c, err)
	}
}

// The file's own value of a field in model.override is not checked.
func TestOverrideBeforeRefusal(t *testing.T) {
	for fields, override := range map[string]map[string]any{
		`"use_sliding_window": 3`: {"use_sliding_window": false},
		`"attention_dropout": 3`:  {"attention_dropout": int64(0)},
		`"hidden_act": "gelu"`:    {"hidden_act": "silu"},
		`"rope_scaling": {"rope_type": "yarn"}`: {"rope_scaling": map[string]any{"rope_type": "linear",
			"factor": 2.0}},
		`"model_type": "gpt2"`:                    {"model_type": "qwen2"},
		`"max_position_embeddings": "many"`:       {"max_position_embeddings": int64(64)},
		`"final_logit_softcapping": 30.0`:         {"final_logit_softcapping": int64(0)},
		`"hidden_act": "gelu", "vocab_size": 100`: {"hidden_act": "silu", "vocab_size": int64(128)},
	} {
		if _, err := parseConfig(with(t, qwen2, fields), override); err != nil {
			t.Errorf("%s: %v", fields, err)
		}
		if _, err := ParseConfig(with(t, qwen2, fields)); err == nil {
			t.Errorf("%s is accepted", fields)
		}
		if _, err := parseConfig(with(t, qwen2, fields), map[string]any{"rms_norm_eps": 1e-5}); err == nil {
			t.Errorf("%s is accepted with another override", fields)
		}
	}
	if _, err := parseConfig(with(t, qwen2, `"model_type": "gpt2"`),
		map[string]any{"rope_teta": 1.0}); status.Of(err) != status.Unsupported || !strings.Contains(err.Error(),
		`"gpt2"`) {
		t.Error(err)
	}
}

func TestOverride(t *testing.T) {
	c, err := parse(t, qwen3).Override(map[string]any{"rope_theta": 5e6, "tie_word_embeddings": true,
		"dtype": "float32"})
	if err != nil || c.Rope.Theta != 5e6 || !c.TieWordEmbeddings || c.DType != tensor.F32 || !c.forced {
		t.Fatal(c, err)
	}
	text, _ := json.Marshal(c.fields())
	if again := parse(t, string(text)); !reflect.DeepEqual(again.Rope, c.Rope) || again.DType != c.DType {
		t.Errorf("written back: %+v", again)
	}
	if c, err = parse(t, llama31).Override(map[string]any{"rope_theta": int64(7)}); err != nil || c.Rope.Theta != 7 ||
		c.Rope.Type != "llama3" {
		t.Error(c, err)
	}
	c, err = parse(t, qwen3).Override(
		map[string]any{"rope_scaling": map[string]any{"rope_type": "linear", "factor": 2.0}})
	if err != nil || !reflect.DeepEqual(c.Rope, Rope{Type: "linear", Theta: 1e6, Factor: 2}) {
		t.Error(c, err)
	}
	_, err = parse(t, qwen3).Override(map[string]any{"rope_teta": 5e6})
	if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), "did you mean rope_theta?") {
		t.Error(err)
	}
	if _, err = parse(t, qwen3).Override(map[string]any{"model_type": "gpt2"}); status.Of(err) != status.Unsupported {
		t.Error(err)
	}
}

// An empty rope_scaling removes the scaling, also one that a family has by default, and the saved
// configuration can be read.
func TestOverrideWithoutScaling(t *testing.T) {
	for _, more := range []map[string]any{nil, {"rope_theta": 1000.0}} {
		base := must1(read("config.json", small("gpt_oss", more), false))
		for _, name := range []string{"rope_scaling", "rope_parameters"} {
			c, err := base.Override(map[string]any{name: map[string]any{}})
			if err != nil || c.Rope.Type != "default" || c.Rope.Theta != base.Rope.Theta {
				t.Errorf("%v, %s: %+v, %v", more, name, c.Rope, err)
				continue
			}
			text, err := c.JSON()
			if err != nil {
				t.Fatal(err)
			}
			if again, err := ParseConfig(text); err != nil || !reflect.DeepEqual(again.Rope, c.Rope) {
				t.Errorf("%v, %s, saved: %+v, %v", more, name, again, err)
			}
		}
	}
}

// The type of the weights has two names. The one that counts must not depend on a map's order.
func TestTwoDTypes(t *testing.T) {
	const want = `dtype = "float32" and torch_dtype = "bfloat16": they are names of the same field`
	both := map[string]any{"dtype": "float32", "torch_dtype": "bfloat16"}
	for range 50 {
		if _, err := parse(t, qwen3).Override(both); err == nil || !strings.Contains(err.Error(), want) {
			t.Fatal(err)
		}
	}
	if _, err := ConfigFromMap(small("llama", both)); err == nil || !strings.Contains(err.Error(), want) {
		t.Error(err)
	}
	both["dtype"] = "bfloat16"
	if c, err := parse(t, qwen3).Override(both); err != nil || c.DType != tensor.BF16 {
		t.Error(c, err)
	}
}

func FuzzConfig(f *testing.F) {
	for _, s := range []string{llama31, qwen2, qwen3, gemma2, gemma3, deepseek, glmLite,
		`{"model_type":"llama","num_attention_heads":3,"rope_scaling":[1]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseConfig(text)
		if err != nil {
			if code := status.Of(err); code != status.InvalidConfig && code != status.Unsupported {
				t.Fatal(code, err)
			}
			return
		}
		out, err := json.Marshal(c.fields())
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ParseConfig(out); err != nil || !reflect.DeepEqual(again.Rope, c.Rope) ||
			again.HeadDim != c.HeadDim || again.Latent != c.Latent {
			t.Fatalf("written back as %s: %v", out, err)
		}
	})
}
