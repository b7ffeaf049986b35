package file

import (
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"ulysses/data"
	"ulysses/data/chat"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/train"
)

// rule is a fault of a key that depends on other keys. holds reports whether the job has the fault;
// it is called after the checks of single keys.
type rule struct {
	key   string
	holds func(j *Job) bool
	text  string // what is wrong; the fix
}

// setName matches the names of evaluation sets.
var setName = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

// Tracks reports whether the run compares its evaluations: for checkpoint.best or eval.patience.
func (j *Job) Tracks() bool { return j.Checkpoint.Best || j.Eval.Patience > 0 }

// EvaluatesCheckpoint reports whether an evaluation reads its weights from a checkpoint.
func (j *Job) EvaluatesCheckpoint() bool {
	return j.Kind == "eval" && j.Checkpoint.Resume != "auto" && j.Checkpoint.Resume != "off"
}

// IsModelJob reports whether the job trains or evaluates a model.
func (j *Job) IsModelJob() bool { return j.Kind == "train" || j.Kind == "eval" }
func hasModel(j *Job) bool      { return j.Model.Path != "" || len(j.Model.New) > 0 }
func hasEval(j *Job) bool       { return len(j.evalFiles()) > 0 || j.Eval.Split > 0 }

// missing has the rules on missing keys. They do not apply to a file with syntax errors, whose keys
// may be lost.
var missing = []rule{
	{"model.path", func(j *Job) bool { return j.IsModelJob() && !hasModel(j) },
		"missing; name a Hugging Face folder, or write the fields of a config.json in [model.new] for a model from scratch"},
	{"data.path", func(j *Job) bool { return j.Kind == "train" && len(j.trainFiles()) == 0 },
		"missing; name .txt, .jsonl, .parquet, .bin (with .idx) or .safetensors files"},
	{"data.path", func(j *Job) bool { return j.Kind == "eval" && len(j.trainFiles()) == 0 && len(j.evalFiles()) == 0 },
		"missing, as is eval.path; name .txt, .jsonl, .parquet, .bin (with .idx) or .safetensors files"},
	{"optimizer.lr", func(j *Job) bool { return j.Kind == "train" && j.Model.Path != "" && !j.IsSet("optimizer.lr") },
		"missing; set it with model.path, for example to 2e-5: the default, 1e-3, would destroy a pretrained model"},
	{"attention.input", func(j *Job) bool { return j.Kind == "attention" && j.Attention.Input == "" },
		"missing; name a .safetensors file with q, k and v"},
	{"attention.output", func(j *Job) bool { return j.Kind == "attention" && j.Attention.Output == "" },
		"missing; name the .safetensors file to write"},
	{"gdn.input", func(j *Job) bool { return j.Kind == "gdn" && j.GDN.Input == "" },
		"missing; name a .safetensors file with q, k, v, g and beta"},
	{"gdn.output", func(j *Job) bool { return j.Kind == "gdn" && j.GDN.Output == "" },
		"missing; name the .safetensors file to write"},
}

// conflicts has the rules on values that contradict other keys.
var conflicts = []rule{
	{"model.path", func(j *Job) bool { return j.Model.Path != "" && len(j.Model.New) > 0 },
		"set together with [model.new]; remove one (--set model.new={} removes the table)"},
	{"parallel.ring", func(j *Job) bool { return j.Parallel.Ring > 1 && j.Kind == "gdn" },
		"the gated delta rule has no ring; set parallel.ring = 1, and gdn.strategy chooses how ranks share a sequence"},
	{"attention.pattern.kind", func(j *Job) bool {
		return j.Kind == "attention" && j.Attention.Pattern.Kind != "off" &&
			j.Attention.Block[0] != j.Attention.Block[1]
	},
		"a pattern has square blocks; set attention.block to [n, n]"},
	{"data.document", func(j *Job) bool {
		return j.Data.Document > 0 && j.Data.Document < j.Data.Sequence && !j.Data.Pack
	},
		"without data.pack a sequence is one document; set data.pack = true, or remove it"},
	{"data.text_field", func(j *Job) bool { return j.Data.TextField == "" },
		"empty; name the field of a .jsonl line that has the text"},
	{"data.budget", func(j *Job) bool { return j.Data.Budget > 0 && j.Data.Pack },
		"data.budget needs sequences of one document, and data.pack packs several; set data.pack = false"},
	{"data.budget", func(j *Job) bool { return j.Data.Budget > 0 && j.Data.Budget < j.Data.Sequence },
		"smaller than data.sequence; set it to data.sequence or more"},
	{"eval.split", func(j *Job) bool { return j.Eval.Split > 0 && len(j.Eval.Path) > 0 },
		"set together with eval.path; remove one (--set eval.split=0 or --set eval.path=[])"},
	{"data.source", func(j *Job) bool { return len(j.Data.Source) > 0 && len(j.Data.Path) > 0 },
		"data.path is set as well; name all files in [[data.source]]"},
	{"data.source", func(j *Job) bool {
		return slices.ContainsFunc(j.Data.Source, func(s data.SourceConfig) bool { return len(s.Path) == 0 })
	}, "a table has an empty path; name its files"},
	{"eval.split", func(j *Job) bool { return j.Eval.Split > 0 && len(j.Data.Source) > 0 },
		"documents cannot be held out of data.source; name files to evaluate on with eval.path"},
	{"eval.split", func(j *Job) bool { return j.Eval.Split > 0 && len(j.trainFiles()) == 0 && j.IsModelJob() },
		"there is no data.path to hold out documents from; set data.path"},
	{"eval.set", func(j *Job) bool { return len(j.Eval.Set) > 0 && (len(j.Eval.Path) > 0 || j.Eval.Split > 0) },
		"set together with eval.path or eval.split; name all files in [[eval.set]]"},
	{"eval.set", func(j *Job) bool {
		seen := map[string]bool{}
		return slices.ContainsFunc(j.Eval.Set, func(s data.EvalSetConfig) bool {
			bad := !setName.MatchString(s.Name) || seen[s.Name]
			seen[s.Name] = true
			return bad
		})
	}, "each table needs a name of its own, of letters, digits, \".\", \"-\" and \"_\", which the keys of metrics.jsonl have"},
	{"eval.set", func(j *Job) bool {
		return slices.ContainsFunc(j.Eval.Set, func(s data.EvalSetConfig) bool { return len(s.Path) == 0 })
	}, "a table has an empty path; name its files"},
	{"eval.metric", func(j *Job) bool {
		return j.Eval.Metric != "" &&
			!slices.ContainsFunc(j.Eval.Set, func(s data.EvalSetConfig) bool { return s.Name == j.Eval.Metric })
	}, "no table [[eval.set]] has this name; name one, or remove it for the loss of all sets together"},
	{"eval.patience", func(j *Job) bool {
		return j.Kind == "train" && j.Eval.Patience > 0 && (j.Eval.Every == 0 || !hasEval(j))
	},
		"there are no evaluations during the run; set eval.every, and eval.path, eval.split or [[eval.set]]"},
	{"checkpoint.best", func(j *Job) bool {
		return j.Kind == "train" && j.Checkpoint.Best && (j.Eval.Every == 0 || !hasEval(j))
	},
		"there are no evaluations during the run; set eval.every, and eval.path, eval.split or [[eval.set]]"},
	{"eval.sample", func(j *Job) bool { return slices.Contains(j.Eval.Sample, "") },
		"has an empty prompt; give each at least one character"},
	{"eval.sample", func(j *Job) bool { return j.Kind == "train" && len(j.Eval.Sample) > 0 && !hasEval(j) },
		"samples are taken after evaluations, and there is nothing to evaluate; set eval.path, eval.split or [[eval.set]]"},
	{"eval.every", func(j *Job) bool { return j.Kind == "train" && j.Eval.Every > 0 && !hasEval(j) },
		"there is nothing to evaluate; set eval.path, eval.split or [[eval.set]]"},
	{"train.epochs", func(j *Job) bool { return j.Train.Epochs > 0 && j.IsSet("train.steps") && j.Train.Steps > 0 },
		"set together with train.steps; remove one (--set train.steps=0 or --set train.epochs=0)"},
	{"train.steps", func(j *Job) bool { return j.Kind == "train" && j.Train.Steps == 0 && j.Train.Epochs == 0 },
		"no steps to run; set train.steps or train.epochs above 0"},
	{"train.time_limit", func(j *Job) bool { return badTimeLimit(j.Train.TimeLimit) },
		`not a time limit; set a duration such as "3h30m", "auto" or "off"`},
	{"parallel.timeout", func(j *Job) bool { return badTimeLimit(j.Parallel.Timeout) },
		`not a duration; set for example "90s", "auto" (ten minutes) or "off"`},
	{"optimizer.warmup", func(j *Job) bool { return badSteps(j.Optimizer.Warmup) },
		"not a number of steps; set a whole number, or a share of all steps below 1"},
	{"optimizer.decay", func(j *Job) bool { return badSteps(j.Optimizer.Decay) },
		"not a number of steps; set a whole number, or a share of all steps below 1"},
	{"lora.rank", func(j *Job) bool {
		t := &j.LoRA
		return t.Rank == 0 &&
			(t.Alpha != 0 || t.RSLoRA || t.Dropout != 0 || t.Init != "" ||
				!slices.Equal(t.Targets, defaults.LoRA.Targets))
	}, "missing, and there are keys of [lora]; set it, for example to 16"},
	{"lora.rank", func(j *Job) bool { return j.LoRA.Rank > 0 && j.Model.Path == "" && j.IsModelJob() },
		"adapters belong to a model folder; set model.path"},
	{"lora.rank", func(j *Job) bool { return j.LoRA.Rank > 0 && !j.IsModelJob() },
		"an operator job has no model; remove it"},
	{"lora.init", func(j *Job) bool {
		return j.LoRA.Rank > 0 && j.Kind == "eval" && j.LoRA.Init == "" && !j.EvaluatesCheckpoint()
	}, "missing; name the folder of trained adapters, or a checkpoint with checkpoint.resume"},
	{"lora.targets", func(j *Job) bool { return len(j.LoRA.Targets) == 0 || slices.Contains(j.LoRA.Targets, "") },
		"names no matrices; name some, such as [\"q_proj\", \"v_proj\"], or \"all-linear\""},
	{"lora.dropout", func(j *Job) bool { return j.LoRA.Dropout >= 1 },
		"not a probability; set a number of at least 0 and below 1"},
	{"train.freeze", func(j *Job) bool { return len(j.Train.Freeze) > 0 && j.LoRA.Rank > 0 && j.Kind == "train" },
		"with [lora] only the adapters are trained; remove it"},
	{"train.freeze", func(j *Job) bool { _, err := model.ParsePatterns(j.Train.Freeze); return err != nil },
		"not patterns of names; write names with * and ?, or \"re:\" and a regular expression"},
	{"optimizer.group", func(j *Job) bool {
		return slices.ContainsFunc(j.Optimizer.Group, func(g train.GroupConfig) bool {
			_, err := model.ParsePatterns(g.Match)
			return err != nil || len(g.Match) == 0
		})
	}, "match has no patterns of names; write names with * and ?, or \"re:\" and a regular expression"},
	{"optimizer.expert_bias_rate", func(j *Job) bool {
		return j.Kind == "train" && j.IsSet("optimizer.expert_bias_rate") && j.LoRA.Rank > 0
	}, "a folder of adapters has no biases of experts; remove it, or train without [lora]"},
	{"optimizer.expert_bias_rate", func(j *Job) bool { return j.Optimizer.ExpertBiasRate >= 1 },
		"biases are added to probabilities; set a number below 1, such as 0.001"},
	{"optimizer.begin", func(j *Job) bool {
		return j.Kind == "train" && j.Optimizer.Begin > 0 && j.Train.Epochs == 0 && j.Optimizer.Begin >= j.Train.Steps
	}, "no step of the run is left for the schedule; set it to the steps that the checkpoint has, below train.steps"},
	{"optimizer.min_lr", func(j *Job) bool { return j.Optimizer.MinLR > j.Optimizer.LR },
		"larger than optimizer.lr; set it to optimizer.lr or less"},
	{"output.trace", func(j *Job) bool {
		t := j.Output.Trace
		return len(t) != 0 && (len(t) != 2 || t[0] > t[1])
	}, "not a range of steps; set [first, last], or []"},
	{"output.trace", func(j *Job) bool { return j.Kind != "train" && len(j.Output.Trace) > 0 },
		"only training has steps; remove it"},
	{"checkpoint.dir", func(j *Job) bool { return !filepath.IsLocal(j.Checkpoint.Dir) },
		"not inside output.dir; name a folder without .. and without a leading /"},
	{"checkpoint.dir", func(j *Job) bool {
		first, _, _ := strings.Cut(filepath.ToSlash(filepath.Clean(j.Checkpoint.Dir)), "/")
		return slices.Contains([]string{"metrics.jsonl", "report.html", "trace.json"}, first)
	}, "the run writes a file of that name; name another folder"},
	{"memory.block_input", func(j *Job) bool { return j.Memory.BlockInput == "keep" && j.Memory.Segment > 1 },
		"memory.segment above 1 keeps only the input of the first layer of each segment; set it to \"recompute\" or \"auto\""},
	{"memory.block_input", func(j *Job) bool { return j.Memory.BlockInput == "recompute" && j.Memory.Segment == 1 },
		"with memory.segment = 1 nothing is recomputed; set memory.segment to 0 or to at least 2"},
	{"memory.attention", func(j *Job) bool {
		return j.Memory.Attention == "recompute" && (j.Memory.QKV == "keep" || j.Memory.QKV == "offload")
	}, "recomputing attention includes queries, keys and values; set memory.qkv to \"recompute\" or \"auto\""},
	{"memory.gradients", func(j *Job) bool {
		return j.Kind == "train" && j.Memory.Gradients == "offload" && !j.Memory.OffloadsOptimizer()
	},
		"gradients are offloaded only with the optimizer's states; set memory.optimizer = \"offload\""},
	{"attention.output",
		func(j *Job) bool { return j.Attention.Input != "" && j.Attention.Input == j.Attention.Output },
		"the same file as attention.input; name another file"},
	{"gdn.output", func(j *Job) bool { return j.GDN.Input != "" && j.GDN.Input == j.GDN.Output },
		"the same file as gdn.input; name another file"},
}

func badSteps(x float64) bool { return x >= 1 && x != math.Trunc(x) || x > 1e9 }

func badTimeLimit(s string) bool {
	d, err := time.ParseDuration(s)
	return s != "auto" && s != "off" && (err != nil || d <= 0)
}

// onlyOperators lists keys that change the result of an operator job. They would silently have no
// effect in a training job, where the model's config.json has these values.
var onlyOperators = []string{"attention.causal", "attention.window", "attention.scale", "attention.softcap",
	"attention.dropout", "attention.seed",
	"attention.pattern.kind", "gdn.qk_l2norm", "gdn.scale", "gdn.chunk"}

// onlyModels lists keys that would silently have no effect in an operator job.
var onlyModels = []string{"tile.mlp", "tile.loss", "tile.gdn", "memory.block_input", "memory.attention", "memory.qkv",
	"memory.mlp", "memory.segment", "memory.head_groups", "memory.optimizer",
	"memory.gradients", "memory.device", "memory.host"}

// refusals has the rules on valid values that are not supported. The job is refused.
var refusals = []rule{
	{"device.comm", func(j *Job) bool {
		return (j.Device.Comm == "nccl" || j.Device.Comm == "ipc") && j.Device.Backend == "cpu"
	},
		`only for GPU memory, and device.backend is "cpu"; set device.comm = "auto", "mpi" or "local"`},
}

// check applies the rules to keys that have no fault yet.
func (l *loader) check() {
	apply := func(rules []rule, code status.Code) {
		for _, r := range rules {
			if !l.bad[r.key] && r.holds(l.job) {
				l.faults.add(l.job.Origin(r.key), code, "%s%s: %s", r.key, l.value(r.key), r.text)
			}
		}
	}
	apply(conflicts, status.InvalidConfig)
	for _, name := range slices.Sorted(maps.Keys(l.job.Data.ChatVariables)) {
		key := "data.chat_variables." + name
		if err := chat.CheckVariable(name, l.job.Data.ChatVariables[name]); err != nil {
			l.faults.add(l.job.Origin(key), status.InvalidConfig, "%s: %v", key, err)
		}
	}
	apply(refusals, status.Unsupported)
	if !l.broken && !l.bad["kind"] {
		l.bad["model.path"] = l.bad["model.path"] || l.bad["model"] || l.bad["model.new"]
		l.bad["data.path"] = l.bad["data.path"] || l.bad["data"] || l.bad["data.source"]
		apply(missing, status.InvalidConfig)
	}
	if l.bad["kind"] {
		return
	}
	if j := l.job; j.IsModelJob() && len(j.Model.New) > 0 && j.Model.Path == "" && !l.bad["model.new"] &&
		!l.bad["model.override"] {
		_, err := j.NewConfig()
		l.modelFaults(err)
	}
	idle, why := onlyModels, "which has no model"
	if l.job.IsModelJob() {
		idle, why = onlyOperators, "where the model's config.json decides"
	}
	for _, key := range idle {
		if f := byKey[key]; !l.bad[key] && l.job.IsSet(key) && !reflect.DeepEqual(f.get(l.job), f.get(&defaults)) {
			l.faults.add(l.job.Origin(key), status.InvalidConfig, "%s%s: no effect with kind = %q, %s; remove it", key,
				l.value(key), l.job.Kind, why)
		}
	}
}

// modelFaults adds the faults of [model.new] and [model.override], each with its own line.
func (l *loader) modelFaults(err error) {
	for _, text := range status.Faults(err) {
		l.faults.add(l.job.Origin(modelKey(text, "model.new")), status.Of(err), "%s", text)
	}
}

var defaults = Default()

// get returns the value of a key.
func (f *field) get(j *Job) any { return reflect.ValueOf(j).Elem().FieldByIndex(f.index).Interface() }

// value returns " = x" for a key that was set, otherwise "".
func (l *loader) value(key string) string {
	f := byKey[key]
	if f == nil || !l.job.IsSet(key) {
		return ""
	}
	switch v := f.get(l.job).(type) {
	case string, int64, float64, bool:
		return " = " + show(v)
	case []string, []data.SourceConfig, []data.EvalSetConfig, []train.GroupConfig:
		return ""
	default:
		return " = " + strings.ReplaceAll(fmt.Sprint(v), " ", ", ")
	}
}
