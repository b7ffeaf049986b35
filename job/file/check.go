package file

import (
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// rule is a fault that shows only when the whole job is known. holds is asked with every key
// checked by itself.
type rule struct {
	key   string
	holds func(j *Job) bool
	text  string
}

func (j *Job) IsModelJob() bool { return j.Kind == "train" || j.Kind == "eval" }
func hasModel(j *Job) bool      { return j.Model.Path != "" || len(j.Model.New) > 0 }
func hasEval(j *Job) bool       { return len(j.Eval.Path) > 0 || j.Eval.Split > 0 }

// missing are rules about what a file lacks; they are not asked of a file that could not be read
// whole.
var missing = []rule{
	{"model.path", func(j *Job) bool { return j.IsModelJob() && !hasModel(j) },
		"missing: give a Hugging Face folder, or the fields of its config.json in [model.new] for a model from scratch"},
	{"data.path", func(j *Job) bool { return j.Kind == "train" && len(j.Data.Path) == 0 },
		"missing: give .txt, .jsonl, .bin (with .idx) or .safetensors files"},
	{"data.path", func(j *Job) bool { return j.Kind == "eval" && len(j.Data.Path) == 0 && len(j.Eval.Path) == 0 },
		"missing, with no eval.path either: give .txt, .jsonl, .bin (with .idx) or .safetensors files"},
	{"optimizer.lr", func(j *Job) bool { return j.Kind == "train" && j.Model.Path != "" && !j.IsSet("optimizer.lr") },
		"missing: it must be given with model.path, because the default, 1e-3, ruins a fine-tune"},
	{"attention.input", func(j *Job) bool { return j.Kind == "attention" && j.Attention.Input == "" },
		"missing: give a .safetensors file with q, k and v"},
	{"attention.output", func(j *Job) bool { return j.Kind == "attention" && j.Attention.Output == "" },
		"missing: give the .safetensors file to write"},
	{"gdn.input", func(j *Job) bool { return j.Kind == "gdn" && j.GDN.Input == "" },
		"missing: give a .safetensors file with q, k, v, g and beta"},
	{"gdn.output", func(j *Job) bool { return j.Kind == "gdn" && j.GDN.Output == "" },
		"missing: give the .safetensors file to write"},
}

var conflicts = []rule{
	{"model.path", func(j *Job) bool { return j.Model.Path != "" && len(j.Model.New) > 0 },
		"given together with [model.new]: keep one (--set model.new={} takes the table out)"},
	{"data.text_field", func(j *Job) bool { return j.Data.TextField == "" }, "empty: name the field of a .jsonl line that holds the text"},
	{"data.budget", func(j *Job) bool { return j.Data.Budget > 0 && j.Data.Pack },
		"it deals whole documents, and data.pack cuts rows from all of them: set data.pack = false, or data.budget = 0"},
	{"data.budget", func(j *Job) bool { return j.Data.Budget > 0 && j.Data.Budget < j.Data.Sequence },
		"a row of data.sequence tokens must fit: set it to data.sequence or more"},
	{"eval.split", func(j *Job) bool { return j.Eval.Split > 0 && len(j.Eval.Path) > 0 }, "given together with eval.path: keep one"},
	{"eval.split", func(j *Job) bool { return j.Eval.Split > 0 && len(j.Data.Path) == 0 && j.IsModelJob() }, "there is no data.path to keep a share of"},
	{"eval.every", func(j *Job) bool { return j.Kind == "train" && j.Eval.Every > 0 && !hasEval(j) }, "there is nothing to evaluate: set eval.path or eval.split"},
	{"train.epochs", func(j *Job) bool { return j.Train.Epochs > 0 && j.IsSet("train.steps") && j.Train.Steps > 0 },
		"given together with train.steps: keep one (--set train.steps=0 or --set train.epochs=0 takes one out)"},
	{"train.steps", func(j *Job) bool { return j.Kind == "train" && j.Train.Steps == 0 && j.Train.Epochs == 0 }, "no steps to run; set train.steps or train.epochs above 0"},
	{"train.time_limit", func(j *Job) bool { return badTimeLimit(j.Train.TimeLimit) }, `a duration such as "3h30m", "auto" or "off" is needed`},
	{"optimizer.min_lr", func(j *Job) bool { return j.Optimizer.MinLR > j.Optimizer.LR }, "larger than optimizer.lr"},
	{"output.trace", func(j *Job) bool {
		t := j.Output.Trace
		return len(t) != 0 && (len(t) != 2 || t[0] > t[1])
	}, "[first, last] step is needed, or []"},
	{"output.trace", func(j *Job) bool { return j.Kind != "train" && len(j.Output.Trace) > 0 }, "only training has steps: take it out"},
	{"checkpoint.dir", func(j *Job) bool { return !filepath.IsLocal(j.Checkpoint.Dir) }, "it must be a folder inside output.dir, without .. or a leading /"},
	{"checkpoint.dir", func(j *Job) bool {
		first, _, _ := strings.Cut(filepath.ToSlash(filepath.Clean(j.Checkpoint.Dir)), "/")
		return slices.Contains([]string{"metrics.jsonl", "report.html", "trace.json"}, first)
	}, "the run writes a file of that name: name another folder"},
	{"checkpoint.resume", func(j *Job) bool {
		return j.Kind == "eval" && j.Checkpoint.Resume != "auto" && j.Checkpoint.Resume != "off"
	}, "an evaluation reads model.path alone: ulysses-mpi export writes a checkpoint as a folder for it"},
	{"memory.block_input", func(j *Job) bool { return j.Memory.BlockInput == "keep" && j.Memory.Segment > 1 },
		"memory.segment is above 1, which keeps the first layer's of each segment alone: set it to \"recompute\" or \"auto\""},
	{"memory.block_input", func(j *Job) bool { return j.Memory.BlockInput == "recompute" && j.Memory.Segment == 1 },
		"memory.segment = 1 leaves none to compute again: set it to 0 or to 2 and more"},
	{"memory.attention", func(j *Job) bool {
		return j.Memory.Attention == "recompute" && (j.Memory.QKV == "keep" || j.Memory.QKV == "offload")
	}, "queries, keys and values come along with it: set memory.qkv to \"recompute\" or \"auto\""},
	{"attention.output", func(j *Job) bool { return j.Attention.Input != "" && j.Attention.Input == j.Attention.Output },
		"the same file as attention.input: name another"},
	{"gdn.output", func(j *Job) bool { return j.GDN.Input != "" && j.GDN.Input == j.GDN.Output },
		"the same file as gdn.input: name another"},
}

func badTimeLimit(s string) bool {
	d, err := time.ParseDuration(s)
	return s != "auto" && s != "off" && (err != nil || d <= 0)
}

// onlySaved lists keys that change what an operator job computes. In a training job a
// model's config.json decides that, so setting them there would silently do nothing.
var onlySaved = []string{"attention.causal", "attention.window", "attention.scale", "attention.softcap", "attention.dropout", "gdn.qk_l2norm", "gdn.scale", "gdn.chunk"}

// onlyModels lists keys that would silently do nothing in an operator job.
var onlyModels = []string{"tile.mlp", "tile.loss", "memory.block_input", "memory.attention", "memory.qkv", "memory.mlp", "memory.segment", "memory.head_groups",
	"memory.device", "memory.host"}

// refusals are right but not built. A job says so before anything starts, rather than do something
// else.
var refusals = []rule{
	{"parallel.ring", func(j *Job) bool { return j.Parallel.Ring > 1 }, notbuilt.Ring.Text("set parallel.ring = 1")},
	{"device.comm", func(j *Job) bool {
		return (j.Device.Comm == "nccl" || j.Device.Comm == "ipc") && j.Device.Backend == "cpu"
	},
		`it moves memory of GPUs, and device.backend = "cpu" has none: set device.comm = "auto", "mpi" or "local"`},
	{"attention.softcap", func(j *Job) bool { return j.Kind == "attention" && j.Attention.Softcap != 0 }, notbuilt.SoftCaps.Text("set attention.softcap = 0")},
	{"attention.dropout", func(j *Job) bool { return j.Kind == "attention" && j.Attention.Dropout != 0 }, notbuilt.Dropout.Text("set attention.dropout = 0")},
}

// check asks the rules. A key with a fault of its own is not asked about again.
func (l *loader) check() {
	apply := func(rules []rule, code status.Code) {
		for _, r := range rules {
			if !l.bad[r.key] && r.holds(l.job) {
				l.faults.add(l.job.Origin(r.key), code, "%s%s: %s", r.key, l.value(r.key), r.text)
			}
		}
	}
	apply(conflicts, status.InvalidConfig)
	apply(refusals, status.Unsupported)
	if !l.broken && !l.bad["kind"] {
		l.bad["model.path"] = l.bad["model.path"] || l.bad["model"] || l.bad["model.new"]
		l.bad["data.path"] = l.bad["data.path"] || l.bad["data"]
		apply(missing, status.InvalidConfig)
	}
	if l.bad["kind"] {
		return
	}
	idle, why := onlyModels, "which has no model"
	if l.job.IsModelJob() {
		idle, why = onlySaved, "where the model's config.json decides"
	}
	for _, key := range idle {
		if f := byKey[key]; !l.bad[key] && l.job.IsSet(key) && !reflect.DeepEqual(f.get(l.job), f.get(&defaults)) {
			l.faults.add(l.job.Origin(key), status.InvalidConfig, "%s%s: it has no effect with kind = %q, %s: take it out", key, l.value(key), l.job.Kind, why)
		}
	}
}

var defaults = Default()

func (f *field) get(j *Job) any { return reflect.ValueOf(j).Elem().FieldByIndex(f.index).Interface() }

// value is " = x" for a key that was set.
func (l *loader) value(key string) string {
	f := byKey[key]
	if f == nil || !l.job.IsSet(key) {
		return ""
	}
	switch v := f.get(l.job).(type) {
	case string, int64, float64, bool:
		return " = " + show(v)
	case []string:
		return ""
	default:
		return " = " + strings.ReplaceAll(fmt.Sprint(v), " ", ", ")
	}
}
