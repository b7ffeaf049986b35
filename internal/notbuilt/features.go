// Package notbuilt lists the features that the program and the library do not have. Every refusal
// of a feature takes its words from this list, and Page makes docs/not-built.md of it, so the two
// agree.
package notbuilt

// Feature is something that is not built.
type Feature struct {
	Name    string // as in "ring attention"; without an article
	Where   string // the keys, fields or options that ask for the feature, in Markdown
	Instead string // the fix: what is built, or what to do
	Many    bool   // Name is a plural: "are not built"

	Names []string // the feature's names in the C library's build information
}

// Refused returns the sentence that the feature is not built.
func (f *Feature) Refused() string {
	if f.Many {
		return f.Name + " are not built"
	}
	return f.Name + " is not built"
}

// Text returns the sentence of a refusal: the feature is not built, and what to do.
func (f *Feature) Text(fix string) string { return f.Refused() + "; " + fix }

// Area is a section of the page: a heading and its features.
type Area struct {
	Name     string
	Features []*Feature
}

// Areas are all features, in the order of the page.
var Areas = []Area{
	{"Parallelism", []*Feature{ModelParallelism, ExpertLimits}},
	{"Attention", []*Feature{SoftCaps}},
	{"Models", []*Feature{ModelTypes, Experts, Routers, GroupBiases, SigmoidBalance, RouterNoise, Clamps, Clips,
		ExpertAdapters, Multimodal, LayerTypes, HybridLayerTypes, WindowLayerTypes, Activations, BidirectionalModels,
		OutputGates, PartialRotary, LayerRoPE, RoPETypes, PhiRoPE, Biases, ResidualDropout, StorageTypes}},
	{"Training", []*Feature{Adapters, Preferences, LowPrecision, Float16, Extras}},
	{"Tokenizers", []*Feature{TokenizerModels, MergeDropout, Normalizers, EmptyReplacements, PreTokenizers,
		SplitBehaviors, PrependSchemes, LateMetaspace, Patterns, Decoders, ManyAddedTokens}},
	{"The C library", []*Feature{SaveLess, Timeouts, SharedNCCL}},
}

var (
	ModelParallelism = &Feature{Name: "tensor and pipeline parallelism",
		Where: "keys of other trainers such as `tensor_parallel` and `pp_size`", Many: true,
		Instead: "set parallel.ulysses for long sequences and parallel.zero = 3 to shard weights"}

	ExpertLimits = &Feature{Name: "limits of an expert's tokens",
		Where: "keys of other trainers such as `expert_capacity`", Many: true,
		Instead: "leave it out: no token is dropped, and tile.mlp bounds the memory of a layer"}

	SoftCaps = &Feature{Name: "soft caps of scores and logits, except in gemma2 and gemma3_text",
		Where: "`attn_logit_softcapping` and `final_logit_softcapping` of a config.json", Many: true,
		Instead: "set it to 0 with model.override if the model was trained without it"}

	Clamps = &Feature{Name: "other constants of the activation of gpt_oss",
		Where: "`swiglu_alpha` and `swiglu_limit` of a config.json", Many: true,
		Instead: "the published ones are built, swiglu_alpha = 1.702 and swiglu_limit = 7"}

	Clips = &Feature{Name: "clipping of q, k and v in olmoe", Where: "`clip_qkv` of a config.json",
		Instead: "set it to null if the model was trained without it"}

	ModelTypes = &Feature{Name: "other model types", Where: "`model_type` of a config.json or of [model.new]",
		Instead: "llama, mistral, ministral, ministral3, mixtral, gemma2, gemma3_text, qwen2, qwen2_moe, qwen3, qwen3_moe, qwen3_5_text, qwen3_5_moe_text, qwen3_next, granite, smollm3, phi3, olmo2, olmo3, olmoe, glm, glm4, glm4_moe, glm4_moe_lite, deepseek_v2, deepseek_v3, minimax_m2, ernie4_5, ernie4_5_moe, seed_oss and gpt_oss are",
		Many:    true}
	Experts = &Feature{
		Name:  "mixture of experts in other families than mixtral, qwen2_moe, qwen3_moe, qwen3_next, qwen3_5_moe_text, olmoe, glm4_moe, glm4_moe_lite, deepseek_v2, deepseek_v3, minimax_m2, ernie4_5_moe and gpt_oss",
		Where: "`num_experts` and `num_local_experts` of a config.json", Instead: "use one of these or a dense model"}
	Routers = &Feature{Name: "other routers in glm4_moe, glm4_moe_lite, deepseek_v2, deepseek_v3 and ernie4_5_moe",
		Where:   "`scoring_func`, `topk_method`, `norm_topk_prob`, `moe_layer_freq` and `moe_norm_min` of a config.json",
		Many:    true,
		Instead: "the published ones are built: scoring_func = \"sigmoid\" with topk_method = \"noaux_tc\", in deepseek_v2 \"softmax\" with \"greedy\" or \"group_limited_greedy\" and norm_topk_prob = false, moe_layer_freq = 1, moe_norm_min = 1e-12"}
	GroupBiases = &Feature{Name: "biases of experts in deepseek_v2 with groups",
		Where:   "`use_expert_bias` of a config.json, and `optimizer.expert_bias_rate`",
		Instead: "set output_router_logits to true to balance the experts", Many: true}
	SigmoidBalance = &Feature{Name: "the loss that balances experts in minimax_m2",
		Where:   "`output_router_logits` of a config.json",
		Instead: "set it to false, and optimizer.expert_bias_rate to balance the experts"}
	RouterNoise = &Feature{Name: "noise on the input of experts",
		Where: "`router_jitter_noise` of a config.json", Instead: "set it to 0 with model.override"}
	ExpertAdapters = &Feature{
		Name:  "adapters of experts, of routers, and of the other MLPs of qwen2_moe, qwen3_moe, qwen3_next, glm4_moe, ernie4_5_moe, deepseek_v2, deepseek_v3 and glm4_moe_lite",
		Where: "`lora.targets`", Instead: "name other matrices, or \"all-linear\", which leaves these out", Many: true}
	Multimodal = &Feature{Name: "models of images, and quantized models except gpt_oss in MXFP4 and FP8 with scales of blocks or matrices",
		Where:   "`vision_config` and `quantization_config` of a config.json",
		Instead: "use a text model with weights in F32, BF16 or F16, or in FP8 with quant_method = \"fp8\" and weight_block_size, which may be null", Many: true}
	LayerTypes = &Feature{Name: "other kinds of layers in llama", Where: "`layer_types` of a config.json",
		Instead: "full_attention is", Many: true}
	HybridLayerTypes = &Feature{Name: "other kinds of layers in qwen3_5_text",
		Where: "`layer_types` of a config.json", Instead: "full_attention and linear_attention are", Many: true}
	WindowLayerTypes = &Feature{
		Name:  "other kinds of layers in ministral, gemma2, gemma3_text, qwen2, qwen2_moe, qwen3, smollm3, olmo3 and gpt_oss",
		Where: "`layer_types` of a config.json", Instead: "full_attention and sliding_attention are", Many: true}
	Activations = &Feature{Name: "other activations",
		Where:   "`hidden_act` and `hidden_activation` of a config.json",
		Instead: "silu is, and in gemma2 and gemma3_text gelu_pytorch_tanh", Many: true}
	BidirectionalModels = &Feature{Name: "gemma2 and gemma3_text without a causal mask",
		Where: "`use_bidirectional_attention` of a config.json", Instead: "false is", Many: true}
	LayerRoPE = &Feature{Name: "a RoPE for each kind of layer, except in gemma3_text and olmo3",
		Where: "`rope_parameters` with a table for each kind", Instead: "one table for all layers is"}
	OutputGates = &Feature{Name: "qwen3_5_text without an output gate",
		Where: "`attn_output_gate` of a config.json", Instead: "true is"}
	PartialRotary = &Feature{Name: "RoPE on a share of a head",
		Where:   "`partial_rotary_factor` of a config.json; qwen3_5_text, qwen3_5_moe_text, qwen3_next, phi3, glm, glm4, glm4_moe and minimax_m2 have it",
		Instead: "1 is"}
	Biases = &Feature{Name: "biases of projections in ernie4_5_moe, and of attention's output in seed_oss",
		Where: "`use_bias` and `attention_out_bias` of a config.json", Instead: "false is", Many: true}
	ResidualDropout = &Feature{Name: "dropout of residuals in phi3 and seed_oss",
		Where:   "`resid_pdrop` and `residual_dropout` of a config.json",
		Instead: "set it to 0 with model.override"}
	PhiRoPE = &Feature{Name: "other kinds of RoPE scaling in phi3", Where: "`rope_type` of a config.json",
		Instead: "default and longrope are, as in transformers", Many: true}
	RoPETypes = &Feature{Name: "other kinds of RoPE scaling", Where: "`rope_type` of a config.json",
		Instead: "default, linear, dynamic, yarn, longrope, llama3 and proportional are", Many: true}
	StorageTypes = &Feature{Name: "other element types of a model's folder", Where: "`dtype` of a config.json",
		Instead: "float32, bfloat16 and float16 are", Many: true}

	Adapters = &Feature{Name: "adapters other than plain LoRA",
		Where:   "keys of other trainers such as `use_dora` and `modules_to_save`; keys of an `adapter_config.json`",
		Instead: "set lora.rank, lora.alpha, lora.targets and lora.rslora", Many: true}
	Preferences = &Feature{Name: "training on preferences or rewards",
		Where: "keys of other trainers such as `dpo_beta`", Instead: "train on text, or on `input_ids` with `labels`"}
	LowPrecision = &Feature{Name: "quantized weights and FP8",
		Where:   "keys of other trainers such as `load_in_4bit` and `fp8`",
		Instead: "set `device.dtype = \"bf16\"` or `\"f32\"`", Many: true}
	Float16 = &Feature{Name: "computing in float16", Where: "keys of other trainers such as `fp16`",
		Instead: `set device.dtype = "bf16" or "f32"`}
	Extras = &Feature{Name: "averages of weights, label smoothing, distillation and other additions to the loss",
		Where: "keys of other trainers such as `ema_decay`", Instead: "leave it out", Many: true}

	TokenizerModels = &Feature{Name: "tokenizers other than byte pair encoding",
		Where: "`model.type` of a tokenizer.json", Many: true,
		Instead: "only byte pair encoding (\"BPE\") is; tokenize with the `tokenizers` package beforehand and name the .safetensors file with the tokens"}
	MergeDropout = &Feature{Name: "dropout of merges", Where: "`model.dropout` of a tokenizer.json",
		Instead: "set it to null"}
	Normalizers = &Feature{Name: "other normalizers", Where: "`normalizer`",
		Instead: "there are NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Strip, StripAccents, ByteLevel and Sequence",
		Many:    true}
	EmptyReplacements = &Feature{Name: "Replace with a pattern that matches nothing", Where: "`normalizer`",
		Instead: "use Prepend"}
	PreTokenizers = &Feature{Name: "other pre-tokenizers", Where: "`pre_tokenizer`",
		Instead: "there are ByteLevel, Split, Metaspace, Digits, Punctuation, Whitespace, WhitespaceSplit and Sequence",
		Many:    true}
	SplitBehaviors = &Feature{Name: "other behaviors of a split", Where: "`pre_tokenizer`",
		Instead: "there are Isolated, Removed, MergedWithPrevious, MergedWithNext and Contiguous", Many: true}
	PrependSchemes = &Feature{Name: "other prepend schemes of Metaspace", Where: "`pre_tokenizer`",
		Instead: "there are always, first and never", Many: true}
	LateMetaspace = &Feature{
		Name:  "Metaspace with the prepend_scheme \"first\" behind a step that splits or replaces text",
		Where: "`pre_tokenizer`", Instead: "put Metaspace first"}
	Patterns = &Feature{Name: "some constructs of regular expressions",
		Where: "the patterns of a tokenizer.json", Instead: "write an equivalent pattern, or tokenize beforehand",
		Many: true}
	Decoders = &Feature{Name: "other decoders", Where: "`decoder`",
		Instead: "there are ByteLevel, ByteFallback, Metaspace, Replace, Strip, Fuse, BPEDecoder and Sequence",
		Many:    true}
	ManyAddedTokens = &Feature{Name: "very large numbers of added tokens", Where: "`added_tokens`",
		Instead: "tokenize with the `tokenizers` package beforehand", Many: true}

	SaveLess = &Feature{Name: "a forward pass that saves less", Names: []string{"save_less"},
		Where: "`ULYSSES_SAVE_LESS`", Instead: "plan without it"}
	Timeouts = &Feature{Name: "a timeout of a context's collectives", Names: []string{"timeout"}, Where: "`timeout`",
		Instead: "use 0: calls then wait as long as MPI or the host's collectives do"}
	SharedNCCL = &Feature{Name: "a shared ncclComm_t", Names: []string{"nccl_comm"}, Where: "`nccl_comm`",
		Instead: "use NULL"}
)

// withoutText is the reason for model types whose published folders are read: they have a
// text_config.
const withoutText = "vision, and no text_config; with one, the language model is read and trained"

// ModelTypeReasons are the model types that are known and not built, with the reason.
var ModelTypeReasons = map[string]string{
	"gpt2": "learned positions", "gpt_neo": "learned positions", "opt": "learned positions", "gptj": "parallel blocks",
	"llama4":   "mixture of experts",
	"qwen2_vl": "vision", "qwen2_5_vl": "vision", "qwen3_vl": "vision", "llava": "vision", "mllama": "vision",
	"gemma3":      withoutText,
	"mistral3":    withoutText,
	"qwen3_5":     withoutText,
	"qwen3_5_moe": withoutText,
	"chatglm":     "weights for code of their own; GLM-4-9B is also published as glm, in folders that end with -hf",
	"t5":          "encoder-decoder", "bart": "encoder-decoder",
	"mamba": "state space layers", "mamba2": "state space layers",
}
