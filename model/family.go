package model

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// family is a model type: everything in which the families of models differ. A field that is zero
// stands for what Llama has.
type family struct {
	class string // of transformers, that loads a folder of the family

	norms      norms   // of a layer
	normCentre float64 // 1 if weights of norms are stored as their distance from 1
	qkNorm     bool    // the heads of q and k have norms
	qkNormFlag bool    // they have norms only if use_qk_norm is true
	wholeNorm  bool    // q and k have norms over all heads
	outputGate bool    // the output of attention has a gate
	latent     bool    // attention is multi-head latent attention
	sinks      bool    // each query head has a sink
	biases     biases  // of the projections of attention
	mlpBias    string  // the field that gives biases to gate, up and down; "" = none

	activation  activation
	softcaps    bool // of scores and logits
	embedScaled bool // embeddings are multiplied by sqrt(hidden_size)

	residualDropout string  // the field with the probability of dropout of residuals; "" = none
	dropout         float64 // default of attention_dropout and of this field

	biased      bool             // default of attention_bias
	biasField   string           // the name of attention_bias; "" = this
	experts     *expertFields    // nil = the MLPs have no experts
	weightScale float64          // default of routed_scaling_factor; 0 = 1
	sizes       map[string]int64 // defaults of fields that other families require in a config.json
	tied        bool             // default of tie_word_embeddings
	eps         float64          // default of rms_norm_eps
	headDim     int64            // default of head_dim; 0 = hidden_size / num_attention_heads
	theta       float64          // default of rope_theta
	localTheta  float64          // theta of sliding layers without one; 0: they rotate as all others
	localField  string           // the field with this theta, besides the table of sliding layers; "" = none
	rotaryShare float64          // default of partial_rotary_factor; 0 = all features are rotated
	rope        map[string]any   // default of rope_parameters; nil = no scaling
	queryGain   bool             // queries are multiplied by a gain of their position (Rope.QueryBeta)

	kinds      []string  // the kinds of layers that layer_types may list; nil: it has no meaning
	window     int64     // default of sliding_window; 0: it is not read
	noWindow   bool      // without sliding_window there is no window
	windowFlag bool      // it has an effect only if use_sliding_window is true
	layers     layerRule // of layers that layer_types does not list; nil = full attention

	// read reads the fields that only this family has, and write puts them into a config.json. nil
	// = there are none.
	read  func(c *Config, r *reader)
	write func(c *Config, f fields)

	fusedLinear bool // the projections of linear attention are two tensors on disk (Qwen3-Next)
	files       files
}

// norms are the names of a layer's norms: before the mixer and on its output, before the MLP and on
// its output. "" = there is none.
type norms struct{ mixer, mixerOut, mlp, mlpOut string }

var (
	preNorms      = norms{mixer: "input_layernorm", mlp: "post_attention_layernorm"}
	postNorms     = norms{mixerOut: "post_attention_layernorm", mlpOut: "post_feedforward_layernorm"}
	sandwichNorms = norms{"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
		"post_feedforward_layernorm"}
)

// activation is the activation of gate in the MLP.
type activation struct {
	field, name string // in config.json
	gelu        bool   // GELU in the approximation by tanh, otherwise SiLU
}

// biasName returns the field that gives biases to projections of attention.
func (f *family) biasName() string { return cmp.Or(f.biasField, "attention_bias") }

// form returns the form of SwiGLU.
func (a *activation) form() form {
	if a.gelu {
		return formGELU
	}
	return formSiLU
}

var (
	silu = activation{field: "hidden_act", name: "silu"}
	gelu = activation{field: "hidden_activation", name: "gelu_pytorch_tanh", gelu: true}
)

// size returns the default of a field of a config.json, 0 if there is none. A job's own table has
// no defaults of one published model.
func (f *family) size(name string, r *reader) int64 {
	if r.fresh {
		return 0
	}
	return f.sizes[name]
}

// positions returns the default of max_position_embeddings.
func positions(n int64) map[string]int64 { return map[string]int64{"max_position_embeddings": n} }

// files are the differences between a folder of the text model and one of the multimodal model
// around it.
type files struct {
	outer   string      // model_type of the multimodal model, whose text_config is read
	named   bool        // text_config has the model_type; without one, the text model is of another type
	prefix  [][2]string // prefixes of the names of tensors there, and in the text model
	dropped []string    // prefixes of tensors that the text model does not have
	images  bool        // transformers loads such a folder as the multimodal model, not the text model
	further string      // the field with the number of further layers, which predict further tokens
	fused   []fused     // matrices that are one in the files
	pairs   bool        // rotated features that belong together are neighbours in the files
}

// withImages returns the differences of a multimodal model that has a tower for images.
func withImages(outer string) files {
	return files{outer: outer, images: true,
		prefix: [][2]string{{"model.language_model.", "model."}, {"language_model.model.", "model."},
			{"language_model.lm_head.", "lm_head."}},
		dropped: []string{"vision_tower.", "multi_modal_projector.", "model.vision_tower.",
			"model.multi_modal_projector."}}
}

// byName returns the files of a text model that the text_config of the multimodal model names.
func (f files) byName() files {
	f.named = true
	return f
}

// biases says which projections of attention have biases.
type biases uint8

const (
	optionalBiases    biases = iota // q, k, v and o, if attention_bias is true
	qkvBiases                       // always q, k and v, never o
	optionalQKVBiases               // q, k and v, if attention_bias is true, never o
	noBiases
)

// layerRule returns the kind of each layer, by the fields that it reads and by the window, which is
// 0 if there is none.
type layerRule func(r *reader, window int64) (kind func(layer int64) string)

// allSlide is the rule by which every layer slides if there is a window.
func allSlide(_ *reader, window int64) func(int64) string {
	return func(int64) string { return slidingIf(window > 0) }
}

// evenSlide is the rule by which the layers 0, 2, … slide if there is a window.
func evenSlide(_ *reader, window int64) func(int64) string {
	return func(layer int64) string { return slidingIf(window > 0 && layer%2 == 0) }
}

// threeOfFourSlide is the rule of OLMo 3: of every four layers, the last has full attention.
func threeOfFourSlide(_ *reader, window int64) func(int64) string {
	return func(layer int64) string { return slidingIf(window > 0 && (layer+1)%4 != 0) }
}

// lastSlide is the rule by which the layers from max_window_layers on slide.
func lastSlide(r *reader, window int64) func(int64) string {
	first := r.number("max_window_layers", 28)
	return func(layer int64) string { return slidingIf(window > 0 && float64(layer) >= first) }
}

// mostAreLinear is the rule of hybrid models: of every full_attention_interval layers, the last has
// softmax attention.
func mostAreLinear(r *reader, _ int64) func(int64) string {
	interval := r.extent("full_attention_interval", 4, maxLayers)
	return func(layer int64) string {
		if (layer+1)%interval == 0 {
			return fullAttention
		}
		return linearAttention
	}
}

// evenSlideFirst is the rule of Qwen2-MoE: of the layers before max_window_layers, 0, 2, … slide.
func evenSlideFirst(r *reader, window int64) func(int64) string {
	full := r.number("max_window_layers", 28)
	return func(layer int64) string {
		return slidingIf(window > 0 && layer%2 == 0 && float64(layer) < full)
	}
}

func slidingIf(slides bool) string {
	if slides {
		return slidingAttention
	}
	return fullAttention
}

// families are the supported model types.
var families = map[string]*family{
	"llama": {class: "LlamaForCausalLM", norms: preNorms, activation: silu, mlpBias: "mlp_bias", eps: 1e-6,
		theta: 10000, kinds: []string{fullAttention}},
	"mistral": {class: "MistralForCausalLM", norms: preNorms, activation: silu, biases: noBiases, eps: 1e-6,
		theta: 10000, sizes: positions(131072), window: 4096, layers: allSlide, files: withImages("mistral3")},
	"ministral": {class: "MinistralForCausalLM", norms: preNorms, activation: silu, biases: noBiases, eps: 1e-6,
		theta: 10000, sizes: positions(131072), kinds: softmaxKinds, window: 4096, layers: allSlide},
	"ministral3": {class: "Ministral3ForCausalLM", norms: preNorms, activation: silu, biases: noBiases, eps: 1e-5,
		theta: 10000, headDim: 128, queryGain: true,
		sizes: map[string]int64{"vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 8,
			"max_position_embeddings": 262144},
		window: 4096, noWindow: true, layers: allSlide,
		rope: map[string]any{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
			"original_max_position_embeddings": int64(16384), "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
			"mscale_all_dim": 1.0, queryBeta: 0.1},
		files: withImages("mistral3").byName()},
	"qwen2": {class: "Qwen2ForCausalLM", norms: preNorms, activation: silu, biases: qkvBiases, eps: 1e-6, theta: 10000,
		sizes: positions(32768), kinds: softmaxKinds, window: 4096, windowFlag: true, layers: lastSlide},
	"qwen3": {class: "Qwen3ForCausalLM", norms: preNorms, activation: silu, qkNorm: true, eps: 1e-6, theta: 10000,
		sizes: positions(32768), headDim: 128, kinds: softmaxKinds, window: 4096, windowFlag: true, layers: lastSlide},
	"mixtral": {class: "MixtralForCausalLM", norms: preNorms, activation: silu, biases: noBiases, eps: 1e-5, theta: 1e6,
		sizes: map[string]int64{"vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8,
			"max_position_embeddings": 131072,
			"num_local_experts":       8, "num_experts_per_tok": 2},
		window: 4096, noWindow: true, layers: allSlide, experts: &mixtralExperts, read: readExperts,
		write: writeExperts},
	"qwen3_moe": {class: "Qwen3MoeForCausalLM", norms: preNorms, activation: silu, qkNorm: true, eps: 1e-6,
		theta: 10000,
		sizes: map[string]int64{"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4,
			"max_position_embeddings": 32768,
			"num_experts":             128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
		window: 4096, windowFlag: true, layers: allSlide, experts: &qwenExperts, read: readExperts,
		write: writeExperts},
	"qwen2_moe": {class: "Qwen2MoeForCausalLM", norms: preNorms, activation: silu, biases: optionalQKVBiases,
		biased: true, biasField: "qkv_bias", eps: 1e-6, theta: 10000,
		sizes: map[string]int64{"vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 16,
			"max_position_embeddings": 32768,
			"num_experts":             60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
			"shared_expert_intermediate_size": 5632},
		kinds: softmaxKinds, window: 4096, windowFlag: true, layers: evenSlideFirst, experts: &qwen2Experts,
		read: readExperts, write: writeExperts},
	"olmoe": {class: "OlmoeForCausalLM", norms: preNorms, wholeNorm: true, activation: silu, eps: 1e-5, theta: 10000,
		sizes: map[string]int64{"vocab_size": 50304, "num_attention_heads": 16, "max_position_embeddings": 4096,
			"num_experts": 64, "num_experts_per_tok": 8},
		experts: &olmoExperts, read: readOLMoE, write: writeExperts},
	"granite": {class: "GraniteForCausalLM", norms: preNorms, activation: silu, mlpBias: "mlp_bias", eps: 1e-6,
		theta: 10000, read: readGranite},
	"smollm3": {class: "SmolLM3ForCausalLM", norms: preNorms, activation: silu, mlpBias: "mlp_bias", tied: true,
		eps: 1e-6, theta: 2e6,
		sizes: map[string]int64{"vocab_size": 128256, "num_attention_heads": 16, "num_key_value_heads": 4,
			"max_position_embeddings": 32768},
		kinds: softmaxKinds, window: 4096, noWindow: true, windowFlag: true, layers: unrotatedSlide, read: readSmolLM3},
	"olmo2": {class: "Olmo2ForCausalLM", norms: postNorms, wholeNorm: true, activation: silu, eps: 1e-5, theta: 10000},
	"olmo3": {class: "Olmo3ForCausalLM", norms: postNorms, wholeNorm: true, activation: silu, eps: 1e-5, theta: 5e5,
		localTheta: 5e5, kinds: softmaxKinds, window: 4096, layers: threeOfFourSlide},
	"glm": {class: "GlmForCausalLM", norms: preNorms, activation: silu, biases: optionalQKVBiases, biased: true,
		eps: 1.5625e-7, theta: 10000, headDim: 128, rotaryShare: 0.5,
		sizes: map[string]int64{"vocab_size": 151552, "num_attention_heads": 32, "num_key_value_heads": 2,
			"max_position_embeddings": 131072},
		files: files{fused: []fused{fusedGateUp}, pairs: true}},
	"glm4": {class: "Glm4ForCausalLM",
		norms: norms{"input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
			"post_mlp_layernorm"},
		activation: silu, biases: optionalQKVBiases, biased: true, eps: 1.5625e-7, theta: 10000, headDim: 128,
		rotaryShare: 0.5,
		sizes: map[string]int64{"vocab_size": 151552, "num_attention_heads": 32, "num_key_value_heads": 2,
			"max_position_embeddings": 131072},
		files: files{fused: []fused{fusedGateUp}, pairs: true}},
	"glm4_moe": {class: "Glm4MoeForCausalLM", norms: preNorms, activation: silu, qkNorm: true, qkNormFlag: true,
		biases: optionalQKVBiases, eps: 1e-5, theta: 10000, rotaryShare: 0.5,
		sizes: map[string]int64{"vocab_size": 151552, "num_attention_heads": 96, "num_key_value_heads": 8,
			"max_position_embeddings": 131072,
			"n_routed_experts":        128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
			"first_k_dense_replace": 1},
		experts: &glmExperts, read: readExperts, write: writeExperts,
		files: files{further: "num_nextn_predict_layers"}},
	"ernie4_5": {class: "Ernie4_5ForCausalLM", norms: preNorms, activation: silu, biasField: "use_bias",
		mlpBias: "use_bias", tied: true, eps: 1e-5, theta: 5e5, headDim: 128,
		sizes: map[string]int64{"vocab_size": 103424, "num_attention_heads": 16, "num_key_value_heads": 2,
			"max_position_embeddings": 131072},
		files: files{pairs: true}},
	"ernie4_5_moe": {class: "Ernie4_5_MoeForCausalLM", norms: preNorms, activation: silu, biases: noBiases,
		biasField: "use_bias", tied: true, eps: 1e-5, theta: 5e5,
		sizes: map[string]int64{"vocab_size": 103424, "num_attention_heads": 20, "num_key_value_heads": 4,
			"max_position_embeddings": 131072,
			"moe_num_experts":         64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
			"moe_layer_start_index": 1},
		experts: &ernieExperts, read: readErnie, write: writeExperts,
		files: files{pairs: true, dropped: []string{"model.mtp_"}}},
	"deepseek_v2": {class: "DeepseekV2ForCausalLM", norms: preNorms, activation: silu, latent: true, eps: 1e-6,
		theta: 10000,
		sizes: map[string]int64{"vocab_size": 102400, "num_attention_heads": 32, "max_position_embeddings": 2048,
			"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
			"v_head_dim": 128, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2},
		experts: &deepSeek2Experts, read: readExperts, write: writeLatent, files: files{pairs: true}},
	"deepseek_v3": {class: "DeepseekV3ForCausalLM", norms: preNorms, activation: silu, latent: true, eps: 1e-6,
		theta: 10000, weightScale: 2.5,
		sizes: map[string]int64{"vocab_size": 129280, "num_attention_heads": 128, "max_position_embeddings": 4096,
			"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
			"v_head_dim": 128, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8,
			"moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8, "topk_group": 4},
		experts: &glmExperts, read: readExperts, write: writeLatent,
		files: files{further: "num_nextn_predict_layers"}},
	"glm4_moe_lite": {class: "Glm4MoeLiteForCausalLM", norms: preNorms, activation: silu, latent: true, eps: 1e-5,
		theta: 10000, weightScale: 1.8,
		sizes: map[string]int64{"vocab_size": 154880, "num_attention_heads": 20, "max_position_embeddings": 202752,
			"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
			"v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
			"n_shared_experts": 1},
		experts: &liteExperts, read: readExperts, write: writeLatent,
		files: files{further: "num_nextn_predict_layers"}},
	"minimax_m2": {class: "MiniMaxM2ForCausalLM", norms: preNorms, wholeNorm: true, activation: silu, biases: noBiases,
		eps: 1e-6, theta: 5e6, headDim: 128, rotaryShare: 1,
		sizes: map[string]int64{"vocab_size": 200064, "num_attention_heads": 48, "num_key_value_heads": 8,
			"max_position_embeddings": 196608,
			"num_local_experts":       256, "num_experts_per_tok": 8},
		experts: &miniMaxExperts, read: readMiniMax, write: writeExperts},
	"phi3": {class: "Phi3ForCausalLM", norms: preNorms, activation: silu, biases: noBiases, eps: 1e-5, theta: 10000,
		sizes: positions(4096), rotaryShare: 1, window: 4096, noWindow: true, layers: allSlide, read: readPhi3,
		write: writePhi3, residualDropout: "resid_pdrop",
		files: files{fused: []fused{fusedQKV, fusedGateUp}}},
	"seed_oss": {class: "SeedOssForCausalLM", norms: preNorms, activation: silu, biases: optionalQKVBiases,
		biased: true, mlpBias: "mlp_bias", residualDropout: "residual_dropout", dropout: 0.1, eps: 1e-6, theta: 10000,
		headDim: 128,
		sizes: map[string]int64{"vocab_size": 155136, "num_attention_heads": 80, "num_key_value_heads": 8,
			"max_position_embeddings": 524288},
		read: readSeedOss},
	"gpt_oss": {class: "GptOssForCausalLM", norms: preNorms, activation: silu, sinks: true, biased: true, eps: 1e-5,
		theta: 150000, headDim: 64, experts: &ossFields, read: readExperts, write: writeExperts,
		sizes: map[string]int64{"num_local_experts": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131072},
		kinds: softmaxKinds, window: 128, layers: evenSlide,
		rope: map[string]any{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
			"truncate": false, "original_max_position_embeddings": int64(4096)}},
	"gemma2": {class: "Gemma2ForCausalLM", norms: sandwichNorms, normCentre: 1, activation: gelu, softcaps: true,
		embedScaled: true, tied: true, eps: 1e-6, theta: 10000, headDim: 256,
		sizes: map[string]int64{"vocab_size": 256000, "num_attention_heads": 8,
			"num_key_value_heads": 4, "max_position_embeddings": 8192},
		kinds: softmaxKinds, window: 4096, layers: evenSlide, read: readGemma2, write: writeGemma},
	"gemma3_text": {class: "Gemma3ForCausalLM", norms: sandwichNorms, normCentre: 1, qkNorm: true, activation: gelu,
		softcaps: true, embedScaled: true, tied: true, eps: 1e-6, theta: 1e6, localTheta: 10000,
		localField: "rope_local_base_freq",
		headDim:    256, sizes: map[string]int64{"vocab_size": 262208,
			"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072},
		kinds: softmaxKinds, window: 4096, layers: mostSlide, read: readGemma3, write: writeGemma,
		files: withImages("gemma3")},
	"qwen3_5_text": {class: "Qwen3_5ForCausalLM", norms: preNorms, activation: silu, normCentre: 1, qkNorm: true,
		outputGate: true, eps: 1e-6, theta: 10000, sizes: positions(32768), headDim: 256, rotaryShare: 0.25,
		kinds: []string{fullAttention, linearAttention}, layers: mostAreLinear, read: readHybrid, write: writeHybrid,
		files: files{outer: "qwen3_5", prefix: [][2]string{{"model.language_model.", "model."}},
			dropped: []string{"model.visual.", "mtp."}}},
}

// The hybrids with experts differ from the dense one in their MLPs and in their folders.
func init() {
	f := *families["qwen3_5_text"]
	f.class, f.experts, f.read, f.write = "Qwen3_5MoeForCausalLM", &hybridExperts, readHybridExperts, writeHybridExperts
	f.sizes = map[string]int64{"vocab_size": 248320, "num_attention_heads": 16, "num_key_value_heads": 2,
		"max_position_embeddings": 32768,
		"num_experts":             256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
		"shared_expert_intermediate_size": 512}
	f.files.outer = "qwen3_5_moe"
	families["qwen3_5_moe_text"] = &f

	next := f
	next.class, next.experts, next.fusedLinear, next.files = "Qwen3NextForCausalLM", &nextExperts, true,
		files{dropped: []string{"mtp."}}
	next.sizes = map[string]int64{"vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 2,
		"max_position_embeddings": 32768,
		"num_experts":             512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
		"shared_expert_intermediate_size": 512}
	families["qwen3_next"] = &next
}

var softmaxKinds = []string{fullAttention, slidingAttention}

// ModelTypes returns the supported model types.
func ModelTypes() []string { return slices.Sorted(maps.Keys(families)) }

// textOf returns the fields of the language model in the config.json of a multimodal model:
// text_config, and fields that the file has for the whole model. It returns any other file
// unchanged.
func textOf(raw map[string]any) map[string]any {
	text, ok := raw["text_config"].(map[string]any)
	if !ok {
		return raw
	}
	for modelType, f := range families {
		if f.files.outer == "" || f.files.outer != raw["model_type"] || f.files.named {
			continue
		}
		text = maps.Clone(text)
		for _, name := range []string{"tie_word_embeddings", "quantization_config", "dtype", "torch_dtype"} {
			if raw[name] != nil {
				text[name] = raw[name]
			}
		}
		if text["model_type"] == nil {
			text["model_type"] = modelType
		}
		return text
	}
	return raw
}

// textName returns the name in the text model of a tensor of either folder.
func (f *files) textName(name string) string {
	for _, p := range f.prefix {
		if rest, ok := strings.CutPrefix(name, p[0]); ok {
			return p[1] + rest
		}
	}
	return name
}
