package file

import (
	"regexp"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// feature is a feature for which other trainers have keys. This program has not built it, or needs
// no key for it.
type feature struct {
	names *regexp.Regexp // of keys and tables, in lower case with _ for -
	text  string
	built bool // true: always on, or set by another key; false: not built
}

const configField = "a field of config.json; set it in model.override, or in model.new for a new model"

// features lists features of other trainers. The first entry that matches a key counts.
var features = []feature{
	{words(`lora_.*|qlora|dora|use_dora|peft|peft_.*|adapter|adapters|adapter_.*|modules_to_save|target_parameters|rank_pattern|alpha_pattern|layers_to_transform|exclude_modules|ia3|prefix_tuning|loftq.*`),
		notbuilt.Adapters.Text(notbuilt.Adapters.Instead), false},
	{words(`dpo|dpo_.*|ppo|ppo_.*|grpo|grpo_.*|orpo|kto|simpo|rlhf|reward|reward_.*|rl`),
		notbuilt.Preferences.Text("remove it"), false},
	{words(`chat|messages|conversation|conversations|sharegpt|alpaca|roles|dataset_type`),
		`the lines of .jsonl files may be conversations; set data.format, or leave it out`, true},
	{words(`chat_template|prompt_template|custom_chat_template`),
		"not a key of this program; set data.chat_template to a .jinja file", true},
	{words(`train_on_responses_only|train_on_inputs|completion_only_loss|assistant_only_loss`),
		`not a key of this program; set data.train_on = "assistant", "last" or "all"`, true},
	{words(`quantization|quantization_.*|quantize|load_in_4bit|load_in_8bit|bnb_.*|bits|gptq|awq|fp8|fp8_.*`),
		notbuilt.LowPrecision.Text("remove it"), false},
	{words(`fp16|float16|half`), notbuilt.Float16.Text(notbuilt.Float16.Instead), false},
	{words(`tensor_parallel|tensor_parallel_.*|tensor_model_parallel_size|tp|tp_size|tp_degree|pipeline|pipeline_.*|pipeline_model_parallel_size|pp|pp_size|num_stages`),
		notbuilt.ModelParallelism.Text(notbuilt.ModelParallelism.Instead), false},
	{words(`num_experts|num_local_experts|num_experts_per_tok|norm_topk_prob|router_aux_loss_coef|output_router_logits`),
		configField, true},
	{words(`.*bias_update_rate|.*bias_update_speed|.*enable_expert_bias|load_balance_coeff`),
		"not a key of this program; set optimizer.expert_bias_rate, for example to 0.001", true},
	{words(`expert_capacity.*|moe_capacity.*|capacity_factor|.*token_drop.*|moe_min_capacity`),
		notbuilt.ExpertLimits.Text(notbuilt.ExpertLimits.Instead), false},
	{words(`moe|moe_.*|expert_.*|experts|ep|ep_.*|autoep.*|router_.*`),
		"not a key of this program; set parallel.experts to divide the experts among ranks, and fields of config.json in model.override",
		true},
	{words(`ema|ema_.*|label_smoothing|label_smoothing_factor|neftune_noise_alpha|z_loss|z_loss_.*|distillation|distill|gradient_noise.*`),
		notbuilt.Extras.Text("remove it"), false},
	{words(`wandb|wandb_.*|report_to|tensorboard|mlflow|comet|logging_dir`),
		"no logger can be chosen; set output.tensorboard = true for TensorBoard, or run python -m ulysses.track for Weights & Biases and MLflow",
		true},
	{words(`early_stopping|early_stopping_.*`), "not a key of this program; set eval.patience to end a run early",
		true},
	{words(`logging|logging_.*|log_interval`), "output.dir/metrics.jsonl has a line for each step; remove it", true},
	{words(`push_to_hub|hub|hub_.*`), "the program uploads nothing; upload output.dir/model after the run", true},
	{words(`fsdp|fsdp_.*|deepspeed|ddp|ddp_.*|zero_stage_.*|accelerate|megatron`),
		"not a key of this program; set parallel.zero = 1, 2 or 3 to shard optimizer states, gradients and weights",
		true},
	{words(`offload|offload_.*|cpu_offload`),
		`not a key of this program; set keys of [memory] to "offload" to offload activations`, true},
	{words(`flash_attention|flash_attn|use_flash_.*|attn_implementation|sdp_attention|xformers|torch_compile|compile|liger.*|use_liger.*`),
		"attention never stores the scores, and there is nothing to choose; remove it", true},
	{words(`local_rank|world_size|num_gpus|gpus|nnodes|nodes|num_nodes|nproc_per_node|master_addr|master_port|num_processes`),
		"mpirun or srun starts the ranks; remove it", true},
	{words(`streaming|num_workers|dataloader_.*|preprocessing_.*|dataset_num_proc|pin_memory|prefetch_factor`),
		"data is always read in the background; remove it", true},
	{words(`model_type|rope_theta|rope_scaling|rope_parameters|vocab_size|hidden_size|intermediate_size|num_hidden_layers|num_attention_heads|num_key_value_heads|head_dim|hidden_act|max_position_embeddings|rms_norm_eps|initializer_range|attention_bias|tie_word_embeddings`),
		configField, true},
}

func words(pattern string) *regexp.Regexp { return regexp.MustCompile(`^(?:` + pattern + `)$`) }

// featureOf returns the feature that a key or table of a job file asks for, or nil if no entry
// matches.
func featureOf(name string) *feature {
	for i := range features {
		if features[i].names.MatchString(name) {
			return &features[i]
		}
	}
	return nil
}

// code returns the error class of a fault that names the feature.
func (f *feature) code() status.Code {
	if f.built {
		return status.InvalidConfig
	}
	return status.Unsupported
}
