package file

import (
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"ulysses/model"
)

// idle lists keys that have no effect in some jobs. A job that sets them to a value other than the
// default runs, and prints one line.
type idle struct {
	keys []string                                     // or a table, with a trailing dot
	when func(j *Job, c *model.Config, cpu bool) bool // cpu: the device is a CPU
	why  string
}

// onConfig returns a condition that does not hold for operator jobs, which have no model.
func onConfig(holds func(j *Job, c *model.Config) bool) func(*Job, *model.Config, bool) bool {
	return func(j *Job, c *model.Config, _ bool) bool { return c != nil && holds(j, c) }
}

func onJob(holds func(j *Job) bool) func(*Job, *model.Config, bool) bool {
	return func(j *Job, _ *model.Config, _ bool) bool { return holds(j) }
}

// unlessPattern returns a condition that holds for patterns of blocks of other kinds.
func unlessPattern(kinds ...string) func(*Job, *model.Config, bool) bool {
	return onJob(func(j *Job) bool {
		return j.Kind == "attention" && j.Attention.Pattern.Kind != "off" &&
			!slices.Contains(kinds, j.Attention.Pattern.Kind)
	})
}

// hybridOnCPU holds for models with linear attention on a CPU.
func hybridOnCPU(_ *Job, c *model.Config, cpu bool) bool {
	return cpu && c != nil && c.LinearLayers() > 0
}

// idleKeys has all rules on keys without an effect. In check.go such keys are faults, if the job
// would compute something else than the user expects.
var idleKeys = []idle{
	{[]string{"optimizer.", "train.",
		"checkpoint.every", "checkpoint.keep", "checkpoint.copy", "checkpoint.best", "checkpoint.dir",
		"checkpoint.accept", "eval.every", "eval.metric", "eval.patience", "eval.threshold",
		"data.accumulate", "data.global_batch", "data.shuffle", "data.shuffle_documents", "memory.block_input",
		"memory.attention", "memory.qkv",
		"memory.mlp", "memory.segment", "memory.head_groups", "memory.optimizer", "memory.gradients", "memory.host",
		"output.model", "output.trace", "output.tensorboard"},
		onJob(func(j *Job) bool { return j.Kind == "eval" && !j.ByVerb }), `kind = "eval" does not train`},
	{[]string{"data.path"}, onJob(func(j *Job) bool { return j.Kind == "eval" && len(j.evalFiles()) > 0 && !j.ByVerb }),
		"the evaluation reads eval.path or eval.set"},
	{[]string{"seed"}, onJob(func(j *Job) bool { return !j.IsModelJob() && (!j.draws() || j.Attention.Seed > 0) }),
		"an operator job draws only dropout and random blocks of a pattern, with attention.seed if it is set"},
	{[]string{"attention.seed"}, onJob(func(j *Job) bool { return j.Kind == "attention" && !j.draws() }),
		"there is no dropout and no pattern with random blocks"},
	{patternKeys, onJob(func(j *Job) bool { return j.Kind == "attention" && j.Attention.Pattern.Kind == "off" }),
		`attention.pattern.kind is "off"`},
	{[]string{"attention.pattern.local", "attention.pattern.global_patterns"}, unlessPattern("fixed"),
		`only the pattern "fixed" has groups of equal size`},
	{[]string{"attention.pattern.global"}, unlessPattern("fixed", "bigbird"),
		`only the patterns "fixed" and "bigbird" have a number of global columns`},
	{[]string{"attention.pattern.window"}, unlessPattern("bigbird", "longformer", "sliding"),
		`only the patterns "bigbird", "longformer" and "sliding" have a window`},
	{[]string{"attention.pattern.random"}, unlessPattern("variable", "bigbird"),
		`only the patterns "variable" and "bigbird" have random columns`},
	{[]string{"attention.pattern.windows"}, unlessPattern("variable"),
		`only the pattern "variable" has groups of several sizes`},
	{[]string{"attention.pattern.globals", "attention.pattern.global_ends"}, unlessPattern("variable", "longformer"),
		`only the patterns "variable" and "longformer" have a list of global columns`},
	{[]string{"parallel.gather"}, onJob(func(j *Job) bool {
		return j.Kind == "gdn" || j.Parallel.Ring <= 1 && (j.Parallel.Ulysses > 0 || j.Parallel.Ring == 1)
	}), "there is no ring"},
	{[]string{"model.", "data.", "eval.", "optimizer.", "train.", "checkpoint.", "output.dir", "output.model",
		"output.trace", "output.tensorboard", "parallel.zero", "parallel.experts", "parallel.overlap"},
		onJob(func(j *Job) bool { return !j.IsModelJob() }), "an operator job has no model"},
	{[]string{"gdn."}, onJob(func(j *Job) bool { return j.Kind == "attention" }),
		`kind = "attention" does not read it`},
	{[]string{"attention."}, onJob(func(j *Job) bool { return j.Kind == "gdn" }), `kind = "gdn" does not read it`},
	{[]string{"gdn.input", "gdn.output", "attention.input", "attention.output", "attention.block",
		"attention.pattern."}, onJob((*Job).IsModelJob), "it is a key of operator jobs"},
	{[]string{"gdn.strategy", "tile.gdn"},
		onConfig(func(j *Job, c *model.Config) bool { return c.LinearLayers() == 0 }),
		"the model has no layers of linear attention"},
	{[]string{"tile.gdn"}, hybridOnCPU, "a CPU computes the gated delta rule without panels"},
	{[]string{"memory.head_groups"},
		onConfig(func(j *Job, c *model.Config) bool { return c.LinearLayers() == c.NumHiddenLayers }),
		"the model has no layers of softmax attention"},
	{[]string{"memory.host"}, onJob(func(j *Job) bool {
		m := &j.Memory
		may := func(word string) bool { return word == "auto" || word == "offload" }
		return j.Kind == "train" && !m.OffloadsOptimizer() && !may(m.BlockInput) && !may(m.Attention) && !may(m.QKV) &&
			!may(m.MLP)
	}), "no activations or optimizer states are offloaded"},
	{[]string{"optimizer.betas", "optimizer.eps"},
		onJob(func(j *Job) bool { return j.Kind == "train" && j.Optimizer.Name == "sgd" }),
		`optimizer.name = "sgd" has none`},
	{[]string{"optimizer.min_lr"},
		onJob(func(j *Job) bool { return j.Kind == "train" && j.Optimizer.Schedule == "constant" }),
		`optimizer.schedule = "constant" does not decay`},
	{[]string{"optimizer.decay", "optimizer.decay_shape"},
		onJob(func(j *Job) bool { return j.Kind == "train" && j.Optimizer.Schedule != "wsd" }),
		`only optimizer.schedule = "wsd" has a decay`},
	{[]string{"data.accumulate"}, onJob(func(j *Job) bool { return j.Kind == "train" && j.Data.GlobalBatch > 0 }),
		"data.global_batch sets it"},
	{append([]string{"data.text_field", "data.format", "eval.format", "data.train_on"}, templateKeys...),
		onJob(func(j *Job) bool { return j.IsModelJob() && j.noFiles(".jsonl") && !j.Eval.SampleChat }),
		"no .jsonl file is read"},
	{[]string{"data.text_field", "data.format", "eval.format", "data.train_on"},
		onJob(func(j *Job) bool { return j.IsModelJob() && j.noFiles(".jsonl") && j.Eval.SampleChat }),
		"no .jsonl file is read"},
	{append([]string{"data.train_on"}, templateKeys...), onJob(func(j *Job) bool {
		return j.IsModelJob() && !j.Eval.SampleChat && j.Data.Format == "text" && len(j.Data.Source) == 0 &&
			(j.Eval.Format == "text" || len(j.Eval.Path) == 0) && len(j.Eval.Set) == 0
	}),
		`data.format is "text"`},
	{[]string{"checkpoint.copy"},
		onJob(func(j *Job) bool { return j.Kind == "train" && j.Checkpoint.Every == 0 && !j.Checkpoint.Best }),
		"checkpoint.every is 0, and a run that is stopped writes its checkpoint without a copy"},
	{[]string{"checkpoint.copy"}, onJob(func(j *Job) bool { return j.Kind == "train" && j.Memory.OffloadsOptimizer() }),
		"the states of the optimizer are in host memory, and checkpoints are written from there"},
	{[]string{"eval.metric"}, onJob(func(j *Job) bool { return j.Kind == "train" && !j.Tracks() }),
		"neither checkpoint.best nor eval.patience is set"},
	{[]string{"eval.sample_chat", "eval.sample_tokens", "eval.sample_temperature"},
		onJob(func(j *Job) bool { return j.IsModelJob() && len(j.Eval.Sample) == 0 }), "there is no eval.sample"},
	{[]string{"eval.threshold"}, onJob(func(j *Job) bool { return j.Kind == "train" && j.Eval.Patience == 0 }),
		"eval.patience is 0"},
	{[]string{"data.format"}, onJob(func(j *Job) bool { return j.IsModelJob() && len(j.Data.Source) > 0 }),
		"each table of data.source has a format"},
	{[]string{"eval.format"}, onJob(func(j *Job) bool { return j.IsModelJob() && len(j.Eval.Path) == 0 }),
		"there is no eval.path"},
	{[]string{"data.tokenizer", "data.add_bos", "data.add_eos"}, onJob(func(j *Job) bool {
		return j.IsModelJob() && j.noFiles(".jsonl", ".txt") && len(j.Eval.Sample) == 0
	}), "the files have tokens, not text"},
	{[]string{"data.add_eos"}, onJob(func(j *Job) bool {
		return j.IsModelJob() && j.noFiles(".jsonl", ".txt") && len(j.Eval.Sample) > 0
	}), "the files have tokens, not text"},
	{[]string{"data.add_bos", "data.add_eos"}, onJob(func(j *Job) bool {
		return j.IsModelJob() && j.Data.Tokenizer == "bytes" && !j.noFiles(".jsonl", ".txt")
	}), `data.tokenizer = "bytes" has no marks`},
	{[]string{"data.shuffle_documents"}, onJob(func(j *Job) bool { return j.IsModelJob() && !j.Data.Pack }),
		"data.pack is false, and data.shuffle shuffles whole documents"},
	{[]string{"data.packing"}, onJob(func(j *Job) bool { return j.IsModelJob() && !j.Data.Pack }),
		"data.pack is false"},
	{[]string{"data.pack", "data.packing", "data.shuffle_documents"},
		onJob(func(j *Job) bool { return j.IsModelJob() && j.noFiles(".jsonl", ".txt", ".bin", ".idx") }),
		"the files have whole sequences"},
}

// templateKeys are the keys of chat templates.
var templateKeys = []string{"data.chat_template", "data.chat_date", "data.chat_variables"}

// patternKeys are the parameters of a pattern of blocks.
var patternKeys = []string{"attention.pattern.per_head", "attention.pattern.horizontal", "attention.pattern.local",
	"attention.pattern.global", "attention.pattern.global_patterns",
	"attention.pattern.window", "attention.pattern.random", "attention.pattern.windows", "attention.pattern.globals",
	"attention.pattern.global_ends"}

// draws reports whether an operator job has random numbers.
func (j *Job) draws() bool {
	p := &j.Attention.Pattern
	random := p.Kind == "bigbird" && p.Random >= 0 || p.Kind == "variable" && p.Random > 0
	return j.Kind == "attention" && (j.Attention.Dropout > 0 || random)
}

// files returns the patterns of the data that the job reads.
func (j *Job) files() []string {
	if all := j.evalFiles(); j.Kind == "eval" && len(all) > 0 {
		return all
	}
	return append(j.trainFiles(), j.evalFiles()...)
}

// evalFiles returns the patterns of eval.path and eval.set.
func (j *Job) evalFiles() []string {
	all := slices.Clone(j.Eval.Path)
	for _, s := range j.Eval.Set {
		all = append(all, s.Path...)
	}
	return all
}

// trainFiles returns the patterns of the training data.
func (j *Job) trainFiles() []string {
	all := slices.Clone(j.Data.Path)
	for _, s := range j.Data.Source {
		all = append(all, s.Path...)
	}
	return all
}

// noFiles reports whether none of the job's files has one of the extensions. A pattern without an
// extension may match any file.
func (j *Job) noFiles(extensions ...string) bool {
	return !slices.ContainsFunc(j.files(), func(path string) bool {
		ext := strings.ToLower(filepath.Ext(path))
		packed := ext == ".gz" || ext == ".zst" || ext == ".parquet"
		return ext == "" || packed || strings.ContainsAny(ext, "*?[") || slices.Contains(extensions, ext)
	})
}

// idleWarnings returns one line for each reason why keys have no effect in this job. The config is
// nil in operator jobs. cpu says that the device is a CPU.
func (j *Job) idleWarnings(c *model.Config, cpu bool) (lines []string) {
	for _, rule := range idleKeys {
		if !rule.when(j, c, cpu) {
			continue
		}
		var set []string
		for i := range schema {
			f := &schema[i]
			named := slices.ContainsFunc(rule.keys,
				func(k string) bool { return k == f.key || strings.HasSuffix(k, ".") && strings.HasPrefix(f.key, k) })
			if named && j.IsSet(f.key) && !reflect.DeepEqual(f.get(j), f.get(&defaults)) {
				set = append(set, f.key)
			}
		}
		if len(set) == 0 {
			continue
		}
		it := "it"
		if len(set) > 1 {
			it = "them"
		}
		lines = append(lines,
			fmt.Sprintf("%v: %s: no effect, because %s; remove %s", j.Origin(set[0]), strings.Join(set, ", "),
				rule.why, it))
	}
	return lines
}
