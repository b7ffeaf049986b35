package file

import (
	"fmt"
	"sort"
	"strings"

	"ulysses/internal/status"
)

// foreign maps keys of other trainers (transformers, TRL, DeepSpeed, Megatron, axolotl,
// torchtitan), in lower case and without table unless the name alone is too short, to keys of job
// files. The remark names a difference in the value.
var foreign = map[string]struct{ ours, remark string }{
	"max_grad_norm": {"optimizer.clip", ""}, "grad_clip": {"optimizer.clip", ""},
	"gradient_clipping": {"optimizer.clip", ""},
	"clip_grad":         {"optimizer.clip", ""}, "clip_grad_norm": {"optimizer.clip", ""},
	"gradient_clip_val":           {"optimizer.clip", ""},
	"gradient_accumulation_steps": {"data.accumulate", ""}, "gradient_accumulation": {"data.accumulate", ""},
	"grad_accum":         {"data.accumulate", ""},
	"accumulation_steps": {"data.accumulate", ""}, "accumulate_grad_batches": {"data.accumulate", ""},
	"max_length": {"data.sequence", ""}, "max_seq_length": {"data.sequence", ""}, "max_seq_len": {"data.sequence", ""},
	"seq_len":    {"data.sequence", ""},
	"seq_length": {"data.sequence", ""}, "sequence_length": {"data.sequence", ""},
	"sequence_len": {"data.sequence", ""}, "cutoff_len": {"data.sequence", ""},
	"context_length": {"data.sequence", ""}, "block_size": {"data.sequence", ""},
	"model_max_length": {"data.sequence", ""},
	"learning_rate":    {"optimizer.lr", ""}, "adam_beta1": {"optimizer.betas", ", both in one list"},
	"adam_beta2": {"optimizer.betas", ", both in one list"},
	"beta1":      {"optimizer.betas", ", both in one list"}, "beta2": {"optimizer.betas", ", both in one list"},
	"adam_epsilon": {"optimizer.eps", ""}, "epsilon": {"optimizer.eps", ""}, "wd": {"optimizer.weight_decay", ""},
	"optim": {"optimizer.name", ""}, "optimizer.type": {"optimizer.name", ""},
	"lr_scheduler_type": {"optimizer.schedule", ""}, "lr_scheduler": {"optimizer.schedule", ""},
	"lr_decay_style": {"optimizer.schedule", ""}, "scheduler": {"optimizer.schedule", ""},
	"warmup_steps": {"optimizer.warmup", ""}, "num_warmup_steps": {"optimizer.warmup", ""},
	"lr_warmup_steps": {"optimizer.warmup", ""},
	"warmup_ratio":    {"optimizer.warmup", ""}, "lr_min": {"optimizer.min_lr", ""},
	"eta_min":    {"optimizer.min_lr", ""},
	"batch_size": {"data.batch", ""}, "micro_batch_size": {"data.batch", ""},
	"per_device_train_batch_size":    {"data.batch", ""},
	"train_micro_batch_size_per_gpu": {"data.batch", ""}, "train_batch_size": {"data.global_batch", ""},
	"global_batch_size": {"data.global_batch", ""},
	"num_train_epochs":  {"train.epochs", ""}, "num_epochs": {"train.epochs", ""}, "max_epochs": {"train.epochs", ""},
	"max_steps": {"train.steps", ""}, "train_iters": {"train.steps", ""}, "num_steps": {"train.steps", ""},
	"training_steps": {"train.steps", ""},
	"lora_r":         {"lora.rank", ""}, "lora.r": {"lora.rank", ""}, "lora_rank": {"lora.rank", ""},
	"lora_alpha": {"lora.alpha", ""}, "target_modules": {"lora.targets", ""},
	"lora_target_modules": {"lora.targets", ""}, "use_rslora": {"lora.rslora", ""},
	"lora_dropout": {"lora.dropout", ""}, "adapter_name_or_path": {"lora.init", ""},
	"lora_model_dir":         {"lora.init", ""},
	"sequence_parallel_size": {"parallel.ulysses", ""}, "sp": {"parallel.ulysses", ""}, "cp": {"parallel.ulysses", ""},
	"sp_size": {"parallel.ulysses", ""}, "ulysses_size": {"parallel.ulysses", ""},
	"ulysses_sequence_parallel_size": {"parallel.ulysses", ""}, "ulysses_degree": {"parallel.ulysses", ""},
	"context_parallel_size": {"parallel.ulysses", ""},
	"cp_size":               {"parallel.ulysses", ""}, "sequence_parallel_degree": {"parallel.ulysses", ""},
	"context_parallel_degree": {"parallel.ulysses", ""},
	"ring_degree":             {"parallel.ring", ""}, "ring_size": {"parallel.ring", ""},
	"ddp_timeout": {"parallel.timeout", ""},
	"zero_stage":  {"parallel.zero", ""}, "zero_optimization": {"parallel.zero", ""},
	"bf16": {"device.dtype", ` ("bf16")`}, "fp32": {"device.dtype", ` ("f32")`}, "torch_dtype": {"device.dtype", ""},
	"precision":       {"device.dtype", ""},
	"mixed_precision": {"device.dtype", ""}, "num_threads": {"device.threads", ""},
	"omp_num_threads":  {"device.threads", ""},
	"full_determinism": {"device.deterministic", ""}, "device_type": {"device.backend", ""},
	"device.type": {"device.backend", ""}, "device.kind": {"device.backend", ""}, "device.name": {"device.backend", ""},
	"device.device":      {"device.backend", ""},
	"model_name_or_path": {"model.path", ""}, "model_name": {"model.path", ""},
	"pretrained_model_name_or_path": {"model.path", ""}, "name_or_path": {"model.path", ""},
	"base_model": {"model.path", ""},
	"dataset":    {"data.path", ""}, "datasets": {"data.path", ""}, "dataset_path": {"data.path", ""},
	"data_path": {"data.path", ""}, "train_file": {"data.path", ""},
	"dataset_name": {"data.path", ""}, "dataset_text_field": {"data.text_field", ""}, "packing": {"data.pack", ""},
	"sample_packing":       {"data.pack", ""},
	"packing_strategy":     {"data.packing", ` ("best-fit" is TRL's "bfd_split")`},
	"chat_template_kwargs": {"data.chat_variables", ""},
	"tokenizer_name":       {"data.tokenizer", ""}, "tokenizer_path": {"data.tokenizer", ""},
	"val_set_size": {"eval.split", ""}, "validation_split": {"eval.split", ""}, "eval_steps": {"eval.every", ""},
	"eval_interval": {"eval.every", ""}, "validation_file": {"eval.path", ""},
	"early_stopping_patience": {"eval.patience", ""}, "early_stopping_threshold": {"eval.threshold", ""},
	"metric_for_best_model": {"eval.metric", ""}, "load_best_model_at_end": {"checkpoint.best", ""},
	"save_steps": {"checkpoint.every", ""}, "save_interval": {"checkpoint.every", ""},
	"save_total_limit":         {"checkpoint.keep", ""},
	"resume_from_checkpoint":   {"checkpoint.resume", ""},
	"gradient_checkpointing":   {"memory.block_input", ` ("recompute")`},
	"activation_checkpointing": {"memory.block_input", ` ("recompute")`},
	"recompute_granularity":    {"memory.block_input", ` ("recompute")`},
	"output_dir":               {"output.dir", ""}, "out_dir": {"output.dir", ""}, "save_dir": {"output.dir", ""},
	"random_seed": {"seed", ""}, "sliding_window": {"attention.window", " [left, right]"},
	"softmax_scale": {"attention.scale", ""}, "attn_logit_softcapping": {"attention.softcap", ""},
	"is_causal": {"attention.causal", ""}, "dropout_p": {"attention.dropout", ""},
}

// foreignWords maps values of other trainers to words of job files. A word that only looks like
// one of the choices, as gpu like cpu, must not be answered with that.
var foreignWords = map[string]string{
	"gpu": "cuda", "bfloat16": "bf16", "float32": "f32", "bfd": "best-fit", "bfd_split": "best-fit",
	"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "fusedadam": "adamw",
	"cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
	"constant_with_warmup": "constant",
}

// plain returns a name in the spelling of the tables foreign and features.
func plain(name string) string { return strings.ToLower(strings.ReplaceAll(name, "-", "_")) }

// unknownKey returns the error text for an unknown key. The fix is the key that was probably meant:
// the key of another trainer may have another name here, the key may be in the wrong table or
// misspelled, or the program may have the feature without a key.
func unknownKey(key string) (text string, code status.Code) {
	code = status.InvalidConfig
	table, leaf := "", key
	if dot := strings.LastIndexByte(key, '.'); dot >= 0 {
		table, leaf = key[:dot], key[dot+1:]
	}
	for _, name := range []string{key, leaf} {
		if f, ok := foreign[plain(name)]; ok {
			return fmt.Sprintf("unknown key; use %s%s", f.ours, f.remark), code
		}
	}
	if f := featureOf(plain(leaf)); f != nil {
		return f.text, f.code()
	}
	var here, elsewhere, near []string
	for _, f := range schema {
		at := strings.LastIndexByte(f.key, '.')
		if rest, ok := strings.CutPrefix(f.key, table+"."); ok || table == "" && at < 0 {
			if !ok {
				rest = f.key
			}
			here = append(here, rest)
		}
		if f.key[at+1:] == leaf || strings.HasSuffix(f.key, "."+leaf) {
			elsewhere = append(elsewhere, f.key)
		} else if Nearest(leaf, []string{f.key[at+1:]}) != "" && Nearest(key, []string{f.key}) != "" {
			near = append(near, f.key)
		}
	}
	switch hit := Nearest(leaf, here); {
	case hit != "" && table != "":
		return fmt.Sprintf("unknown key; did you mean %s.%s?", table, hit), code
	case hit != "":
		return fmt.Sprintf("unknown key; did you mean %s?", hit), code
	case len(elsewhere) > 0:
		return fmt.Sprintf("unknown key; did you mean %s?", strings.Join(elsewhere, " or ")), code
	case len(near) > 0:
		return fmt.Sprintf("unknown key; did you mean %s?", closest(key, near)), code
	case table != "" && len(here) > 0:
		sort.Strings(here)
		return fmt.Sprintf("unknown key; the keys of [%s] are %s", table, strings.Join(here, ", ")), code
	}
	return fmt.Sprintf("unknown key; the keys outside of tables are %s, and the tables are %s",
		strings.Join(topLevel(), ", "), strings.Join(tables, ", ")), code
}

// topLevel returns the keys outside of tables.
func topLevel() (keys []string) {
	for _, f := range schema {
		if !strings.Contains(f.key, ".") {
			keys = append(keys, f.key)
		}
	}
	return keys
}

// unknownTable returns the error text for an unknown table, as unknownKey does.
func unknownTable(name string) (text string, code status.Code) {
	code = status.InvalidConfig
	if f, ok := foreign[plain(name)]; ok {
		return fmt.Sprintf("unknown table; use %s%s", f.ours, f.remark), code
	}
	if f := featureOf(plain(name)); f != nil {
		return f.text, f.code()
	}
	if near := Nearest(name, tables); near != "" {
		return fmt.Sprintf("unknown table; did you mean [%s]?", near), code
	}
	return fmt.Sprintf("unknown table; the tables are %s", strings.Join(tables, ", ")), code
}

// Nearest returns the candidate with the least edit distance, if the distance is at most a third of
// the word, otherwise "".
func Nearest(word string, candidates []string) string {
	best := closest(word, candidates)
	if n := distance(strings.ToLower(word), best); best == "" || n > max(1, len(word)/3) {
		return ""
	}
	return best
}

// closest returns the candidate with the least edit distance.
func closest(word string, candidates []string) string {
	best, least := "", 1<<30
	for _, c := range candidates {
		if n := distance(strings.ToLower(word), c); n < least {
			best, least = c, n
		}
	}
	return best
}

// distance counts the insertions, deletions, replacements and swaps of neighbours that turn a into
// b (optimal string alignment).
func distance(a, b string) int {
	if len(a) > 100 || len(b) > 100 {
		return max(len(a), len(b))
	}
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
