package file

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"ulysses/internal/status"
)

const (
	newModel = `{ model_type = "llama", vocab_size = 9, hidden_size = 8, intermediate_size = 8, num_hidden_layers = 1, num_attention_heads = 1 }`
	base     = "[model]\nnew = " + newModel + "\n[data]\npath = [\"a.txt\"]\n"
)

func parse(src string, sets ...string) (*Job, error) {
	return Parse([]byte(src), "jobs/job.toml", sets, func(name string) (string, bool) {
		v, ok := map[string]string{"DATA": "/data", "EMPTY": ""}[name]
		return v, ok
	})
}

func TestDefaults(t *testing.T) {
	j, err := parse(base)
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Path, want.at, want.written = "jobs/job.toml", j.at, map[string][]string{}
	want.Model.New = map[string]any{"model_type": "llama", "vocab_size": int64(9), "hidden_size": int64(8),
		"intermediate_size": int64(8), "num_hidden_layers": int64(1), "num_attention_heads": int64(1)}
	want.Data.Path = []string{"jobs/a.txt"}
	want.Output.Dir = "jobs/out"
	if !reflect.DeepEqual(*j, want) {
		t.Errorf("got  %+v\nwant %+v", *j, want)
	}
}

// The file of the product description with each default written out must be an empty file's job.
func TestEveryKeyIsAccepted(t *testing.T) {
	const full = `
kind = "train"
seed = 1
[parallel]
ulysses = 0
ring = 0
experts = 0
zero = 0
overlap = "auto"
gather = "auto"
two_level = "auto"
timeout = "auto"
[device]
backend = "auto"
dtype = "auto"
threads = 0
deterministic = false
comm = "auto"
[model]
new = ` + newModel + `
override = {}
[data]
path = ["a.txt"]
source = []
format = "auto"
train_on = "assistant"
chat_template = "auto"
chat_date = ""
tokenizer = "auto"
add_bos = true
add_eos = true
text_field = "text"
sequence = 4096
document = 0
batch = 1
accumulate = 1
global_batch = 0
budget = 0
pack = true
packing = "split"
shuffle = true
shuffle_documents = false
chat_variables = {}
[eval]
path = []
format = "auto"
set = []
split = 0.0
every = 0
metric = ""
patience = 0
threshold = 0.0
sample = []
sample_tokens = 64
sample_chat = false
sample_temperature = 0.0
[optimizer]
name = "adamw"
lr = 1e-3
min_lr = 0.0
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.0
clip = 1.0
schedule = "cosine"
warmup = 10
decay = 0.1
decay_shape = "cosine"
expert_bias_rate = 0.0
begin = 0
group = []
[train]
steps = 100
epochs = 0.0
on_nan = "stop"
time_limit = "auto"
freeze = []
[lora]
rank = 0
alpha = 0.0
rslora = false
dropout = 0.0
targets = ["all-linear"]
[tile]
mlp = "auto"
loss = "auto"
gdn = "auto"
[memory]
block_input = "auto"
attention = "auto"
qkv = "auto"
mlp = "auto"
segment = 0
head_groups = 0
optimizer = "auto"
gradients = "auto"
device = 0.0
host = 0.0
[checkpoint]
every = 0
keep = 2
copy = "auto"
best = false
dir = "checkpoints"
resume = "auto"
accept = []
[output]
dir = "out"
model = true
overwrite = false
trace = []
tensorboard = false
[attention]
causal = true
window = [-1, -1]
scale = 0.0
softcap = 0.0
dropout = 0.0
block = [64, 64]
seed = 0
[attention.pattern]
kind = "off"
per_head = false
horizontal = false
local = 0
global = 0
global_patterns = 0
window = 0
random = 0
windows = []
globals = []
global_ends = []
[gdn]
strategy = "auto"
qk_l2norm = true
scale = 0.0
chunk = 64
`
	j, err := parse(full)
	if err != nil {
		t.Fatal(err)
	}
	empty, err := parse(base)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range schema {
		if !j.IsSet(f.key) && !strings.HasSuffix(f.key, "put") && f.key != "model.path" && f.key != "lora.init" {
			t.Errorf("%s is not in the list above", f.key)
		}
		a, b := f.get(j), f.get(empty)
		if v := reflect.ValueOf(a); v.Kind() == reflect.Slice || v.Kind() == reflect.Map {
			if v.Len() == 0 && reflect.ValueOf(b).Len() == 0 {
				continue
			}
		}
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: %v written out, %v by default", f.key, a, b)
		}
	}
}

func TestValuesAndPaths(t *testing.T) {
	_, err := parse(`
kind = "eval"
optimizer = { lr = 1, betas = [0, 0.5] }
model.path = "../m"
model."override".rope_theta = 5e6
[data]
path = ["/abs/x.txt", "${DATA}/*.jsonl", '*.txt']
"sequence" = 0x10
[eval]
path = "one.txt"
[output]
trace = [
]
`, "output.dir=here/there", "model.override.rope_scaling.factor=8", "data.text_field=17", "data.path+=x")
	if err == nil {
		t.Fatal("data.path+ was taken for a key")
	}
	j, err := parse(`
kind = "eval"
optimizer = { lr = 1, betas = [0, 0.5] }
model.path = "../m"
model."override".rope_theta = 5e6
[data]
path = ["/abs/x.txt", "${DATA}/*.jsonl", '*.txt']
"sequence" = 0x10
[eval]
path = "one.txt"
[checkpoint]
dir = "states${DATA}"
`, "output.dir=here/there", "model.override.rope_scaling.factor=8", "data.text_field=17", " tile.mlp = auto ", "eval.path=[\"p\", \"q\"]", "model.override.tie=true")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ got, want any }{
		{j.Optimizer.LR, 1.0}, {j.Optimizer.Betas, [2]float64{0, 0.5}}, {j.Model.Path, "m"},
		{j.Data.Sequence, int64(16)},
		{j.Data.Path, []string{"/abs/x.txt", "/data/*.jsonl", "jobs/*.txt"}}, {j.Eval.Path, []string{"p", "q"}},
		{j.Output.Dir, "here/there"}, {j.Checkpoint.Dir, "states/data"},
		{j.Data.TextField, "17"}, {j.Tile.MLP, "auto"},
		{j.Model.Override, map[string]any{"rope_theta": 5e6, "rope_scaling": map[string]any{"factor": int64(8)},
			"tie": true}},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("got %#v, want %#v", c.got, c.want)
		}
	}
	if err := j.Errorf(status.InvalidConfig, "model.override.rope_theta",
		"too large"); err.Error() != "jobs/job.toml:5: model.override.rope_theta: too large" {
		t.Error(err)
	}
	if err := j.Errorf(status.InvalidConfig, "model.override.rope_scaling.factor",
		"odd"); !strings.HasPrefix(err.Error(), "--set model.override.rope_scaling.factor=8: ") {
		t.Error(err)
	}
}

// A pattern is relative to the job file's folder, whatever characters that has.
func TestGlobInOddFolder(t *testing.T) {
	j, err := Parse([]byte(strings.Replace(base, "a.txt", "*.txt", 1)), "a[1]/job.toml", nil, nil)
	if err != nil || j.Data.Path[0] != `a\[1]/*.txt` {
		t.Fatal(j, err)
	}
	if ok, err := filepath.Match(j.Data.Path[0], "a[1]/x.txt"); !ok || err != nil {
		t.Fatal(ok, err)
	}
}

// The line of a key is also added to an error that begins with the name of a rank.
func TestDataFault(t *testing.T) {
	j, err := parse(base)
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		"data.path: a.txt: no such file":              "jobs/job.toml:4: ",
		"rank 1: data.path: a.txt: no such file":      "jobs/job.toml:4: ",
		"rank 12 on n-3: data.path: *: no file match": "jobs/job.toml:4: ",
		"a.txt (document 0): no data.path":            "",
	} {
		if got := j.DataFault(errors.New(text)).Error(); got != want+text {
			t.Errorf("%q, want %q", got, want+text)
		}
	}
}

func TestFaults(t *testing.T) {
	const whole = "kind = \"train\"\n"
	for _, c := range []struct {
		name, src string
		sets      []string
		code      status.Code
		want      []string // exactly these lines, each containing the text
	}{
		{name: "unknown keys", code: status.InvalidConfig,
			src: base + "sequnce = 8\nmax_length = 9\nfrobnicate = 1\n[train]\nmax_grad_norm = 1.0\nweight_decay = 0.1\n[optimiser]\nlr = 1\nlearning_rate = 2\n[parallel]\nsp_size = 2\n[device]\ntype = \"cuda\"\n",
			want: []string{"job.toml:5: data.sequnce: unknown key; did you mean data.sequence?",
				"job.toml:6: data.max_length: unknown key; use data.sequence",
				"job.toml:7: data.frobnicate: unknown key; the keys of [data] are accumulate, add_bos, add_eos",
				"job.toml:9: train.max_grad_norm: unknown key; use optimizer.clip",
				"job.toml:10: train.weight_decay: unknown key; did you mean optimizer.weight_decay?",
				"job.toml:11: optimiser: unknown table; did you mean [optimizer]?",
				"job.toml:13: optimiser.learning_rate: unknown key; use optimizer.lr",
				"job.toml:15: parallel.sp_size: unknown key; use parallel.ulysses",
				"job.toml:17: device.type: unknown key; use device.backend"}},
		{name: "top level", code: status.InvalidConfig,
			src: "kinds = \"train\"\nsteps = 5\ngradient_accumulation_steps = 4\n[nonsense]\na = 1\n" + base,
			want: []string{":1: kinds: unknown key; did you mean kind?",
				":2: steps: unknown key; did you mean train.steps?",
				":3: gradient_accumulation_steps: unknown key; use data.accumulate",
				":4: nonsense: unknown table; the tables are parallel, device"}},
		{name: "features of other trainers", code: status.InvalidConfig,
			src: "chat = true\nwandb = \"x\"\nr = 1\n[peft]\nr = 8\nalpha = 16\n[deepspeed]\nzero_stage = 2\nx = 1\n" +
				base + "messages = \"m\"\nchta = 1\n[train]\nfp16 = true\n[devices]\n",
			want: []string{":1: chat: the lines of .jsonl files may be conversations",
				":2: wandb: no logger can be chosen",
				":3: r: unknown key; the keys outside of tables are kind, seed, and the tables are parallel",
				":4: peft: adapters other than plain LoRA are not built",
				":7: deepspeed: not a key of this program; set parallel.zero = 1",
				":8: deepspeed.zero_stage: unknown key; use parallel.zero",
				":14: data.messages: the lines of .jsonl files may be conversations",
				":15: data.chta: unknown key; the keys of [data] are accumulate",
				":17: train.fp16: computing in float16 is not built",
				":18: devices: unknown table; did you mean [device]?"}},
		{name: "keys of other trainers", code: status.InvalidConfig, src: "report_to = \"wandb\"\n" + base +
			"[train]\nearly_stopping_patience = 3\nddp_timeout = 60\nlogging_steps = 1\nload_best_model_at_end = true\n[parallel]\nsp = 2\n[lora]\nr = 8\n",
			want: []string{":1: report_to: no logger can be chosen; set output.tensorboard = true",
				":7: train.early_stopping_patience: unknown key; use eval.patience",
				":8: train.ddp_timeout: unknown key; use parallel.timeout",
				":9: train.logging_steps: output.dir/metrics.jsonl has a line for each step; remove it",
				":10: train.load_best_model_at_end: unknown key; use checkpoint.best",
				":12: parallel.sp: unknown key; use parallel.ulysses", ":14: lora.r: unknown key; use lora.rank"}},
		{name: "words of other trainers", code: status.InvalidConfig,
			src: base + "packing = \"bfd\"\n[device]\nbackend = \"gpu\"\ndtype = \"bfloat16\"\n[optimizer]\nname = \"adamw_torch\"\nschedule = \"gpu\"\n",
			want: []string{`:5: data.packing = "bfd": "split" or "best-fit" is needed; did you mean "best-fit"?`,
				`:7: device.backend = "gpu": "auto", "cpu" or "cuda" is needed; did you mean "cuda"?`,
				`:8: device.dtype = "bfloat16": "auto", "f32" or "bf16" is needed; did you mean "bf16"?`,
				`:10: optimizer.name = "adamw_torch": "adamw" or "sgd" is needed; did you mean "adamw"?`,
				`:11: optimizer.schedule = "gpu": "constant", "linear", "cosine" or "wsd" is needed`}},
		{name: "what is not built", code: status.Unsupported, src: base + "[lora]\nuse_dora = true\n[dpo]\nbeta = 1\n",
			want: []string{":6: lora.use_dora: adapters other than plain LoRA are not built",
				":7: dpo: training on preferences"}},
		{name: "no steps", code: status.InvalidConfig, src: base + "[train]\nsteps = 0\n",
			want: []string{":6: train.steps = 0: no steps to run; set train.steps or train.epochs above 0"}},
		{name: "types", code: status.InvalidConfig,
			src: base + "sequence = 64.0\nbatch = \"two\"\npack = 1\ntext_field = 3\n[optimizer]\nbetas = [0.9]\nlr = \"fast\"\neps = inf\n[output]\ntrace = [1, 2.5]\n[[train]]\nsteps = 3\n",
			want: []string{":5: data.sequence = 64.0: an integer is needed; write 64",
				`:6: data.batch = "two": an integer`, ":7: data.pack = 1: true or false",
				":8: data.text_field = 3: a string",
				":10: optimizer.betas = [0.9]: a list of 2 numbers", `:11: optimizer.lr = "fast": a number`,
				":12: optimizer.eps = Inf: a finite number", ":14: output.trace = 2.5: an integer",
				":15: train: one table is needed; write [train], not [[train]]"}},
		{name: "an integer of 65 bits", code: status.InvalidConfig, src: base,
			sets: []string{"seed=9223372036854775808"},
			want: []string{`seed = "9223372036854775808": out of range for int64`}},
		{name: "a large bound", code: status.InvalidConfig, src: base + "sequence = 2147483648\n",
			want: []string{"must be at most 2147483647"}},
		{name: "tables and values", code: status.InvalidConfig, src: "data = 3\nmodel.new = 4\n[seed]\nx = 1\n",
			want: []string{":1: data = 3: data is a table; write [data]",
				":2: model.new = 4: write a table of config.json fields", ":3: seed = a table: an integer"}},
		{name: "chat variables", code: status.InvalidConfig,
			src: base + "[data.chat_variables]\nthinking = false\nmessages = \"x\"\neffort = { high = 1 }\nsince = 2026-01-31\nlimit = inf\nlist = [\"a\", [1, 2.5]]\n",
			want: []string{
				":7: data.chat_variables.messages: not a variable, because each record has its own; remove it",
				":8: data.chat_variables.effort: a table; write a string",
				":9: data.chat_variables.since: a date; write it as a string",
				":10: data.chat_variables.limit: +Inf is not a finite number"}},
		{name: "bounds and words", code: status.InvalidConfig,
			src: base + "sequence = 0\n[device]\nbackend = \"cpuu\"\n[optimizer]\nclip = -1\nbetas = [0.9, 1.0]\nschedule = \"step\"\n[parallel]\nzero = 4\n[tile]\nmlp = 0\nloss = \"always\"\n[eval]\nsplit = 1\n",
			want: []string{":5: data.sequence = 0: must be at least 1",
				`:7: device.backend = "cpuu": "auto", "cpu" or "cuda" is needed; did you mean "cpu"?`,
				":9: optimizer.clip = -1: must be at least 0",
				":10: optimizer.betas = 1.0: must be below 1",
				`:11: optimizer.schedule = "step": "constant", "linear", "cosine" or "wsd" is needed`,
				":13: parallel.zero = 4: must be at most 3",
				`:15: tile.mlp = 0: "auto", "off" or an integer of at least 1 is needed`,
				`:16: tile.loss = "always": "auto", "off" or`, ":18: eval.split = 1: must be below 1"}},
		{name: "syntax, several", code: status.InvalidConfig,
			src: "kind = train\nseed = \n[data]\nsequnce = 1\npath = [\"a\"]\npath = [\"b\"]\n[device\nbackend = \"cpu\"\n[output]\ndri = \"x\"\n",
			want: []string{
				`:1: kind: not TOML: expected value but found "train" instead; write text in quotes: "train"`,
				":2: seed: not TOML", ":4: data.sequnce", ":6: data.path: set twice; keep one of the lines",
				":7: not TOML", ":10: output.dri: unknown key; did you mean output.dir?"}},
		{name: "Python's words", code: status.InvalidConfig, src: base + "shuffle = False\npack = TRUE\n",
			want: []string{"data.shuffle: not TOML: expected value but found \"False\" instead; write false",
				"data.pack: not TOML: expected value but found \"TRUE\" instead; write true"}},
		{name: "fields of a new model in [model]", code: status.InvalidConfig,
			src: "[data]\npath = \"x.txt\"\n[model]\nmodel_type = \"llama\"\nintermediate_size = 8\n",
			want: []string{":3: model.path: missing",
				":4: model.model_type: a field of config.json; set it in model.override, or in model.new for a new model",
				":5: model.intermediate_size: a field of config.json"}},
		{name: "no job file at all", code: status.InvalidConfig, src: strings.Repeat("x = \n", 2000),
			want: func() (w []string) {
				for n := range maxSyntaxFaults {
					w = append(w, fmt.Sprintf(":%d: x: not TOML", n+1))
				}
				return w
			}()},
		{name: "open list", code: status.InvalidConfig, src: base + "[eval]\npath = [\"x\",\nsplit = 0.1\nevery = 4\n",
			want: []string{":7: eval.path: not TOML: expected"}},
		{name: "open string", code: status.InvalidConfig, src: base + "text_field = \"\"\"x\n\n",
			want: []string{"data.text_field: not TOML: unexpected EOF"}},
		{name: "clash", code: status.InvalidConfig, src: "output.dir = \"x\"\noutput = 3\n" + base,
			want: []string{":2: output: already defined on line 1"}},
		{name: "double table", code: status.InvalidConfig, src: base + "[data]\nsequnce = 1\n",
			want: []string{":5: [data] stands twice in the file; write its keys below the first one"}},
		{name: "missing", code: status.InvalidConfig, src: whole,
			want: []string{":1: model.path: missing", ":1: data.path: missing"}},
		{name: "missing in a table", code: status.InvalidConfig,
			src: "\n\n[model]\npath = \"m\"\n[data]\nseed = 1\n[optimizer]\n",
			want: []string{":5: data.path: missing", ":6: data.seed: unknown key; did you mean seed or attention.seed?",
				":7: optimizer.lr: missing"}},
		{name: "attention", code: status.InvalidConfig, src: "kind = \"attention\"\n[attention]\nwindow = [4, 0]\n",
			want: []string{":2: attention.input: missing", ":2: attention.output: missing"}},
		{name: "conflicts", code: status.InvalidConfig,
			src: base + "[eval]\nsplit = 0.5\npath = [\"e.txt\"]\n[train]\nsteps = 3\nepochs = 1\ntime_limit = \"soon\"\n[checkpoint]\ndir = \"../x\"\n[output]\ntrace = [4, 2]\n[optimizer]\nlr = 0\nmin_lr = 1e-4\n",
			want: []string{":6: eval.split = 0.5: set together with eval.path",
				":10: train.epochs = 1.0: set together with train.steps",
				`:11: train.time_limit = "soon": not a time limit`,
				`:13: checkpoint.dir = "../x": not inside output.dir`,
				":15: output.trace = [4, 2]: not a range of steps", ":18: optimizer.min_lr = 0.0001: larger"}},
		{name: "an epsilon that is 0 in F32", code: status.InvalidConfig, src: base + "[optimizer]\neps = 1e-45\n",
			want: []string{":6: optimizer.eps = 1e-45: must be at least 1.2e-38"}},
		{name: "checkpoints in a file", code: status.InvalidConfig,
			src:  base + "[checkpoint]\ndir = \"./metrics.jsonl/x\"\n",
			want: []string{`:6: checkpoint.dir = "./metrics.jsonl/x": the run writes a file`}},
		{name: "a budget for split documents", code: status.InvalidConfig, src: base + "budget = 4000\n",
			want: []string{":5: data.budget = 4000: data.budget needs sequences of one document",
				":5: data.budget = 4000: smaller than data.sequence"}},
		{name: "refusals", code: status.Unsupported,
			src:  "kind = \"attention\"\n[attention]\ninput = \"a\"\noutput = \"b\"\n[parallel]\nring = 2\n[device]\nbackend = \"cpu\"\ncomm = \"nccl\"\n",
			want: []string{":9: device.comm"}},
		{name: "a ring of recurrent states", code: status.InvalidConfig,
			src:  "kind = \"gdn\"\n[gdn]\ninput = \"a\"\noutput = \"b\"\n[parallel]\nring = 2\n",
			want: []string{":6: parallel.ring = 2: the gated delta rule has no ring"}},
		{name: "memory", code: status.InvalidConfig,
			src: base + "[memory]\nblock_input = \"keep\"\nsegment = 2\nattention = \"recompute\"\nqkv = \"offload\"\nhost = -1\n",
			want: []string{`:6: memory.block_input = "keep": memory.segment above 1`,
				`:8: memory.attention = "recompute": recomputing attention includes queries, keys and values`,
				":10: memory.host = -1"}},
		{name: "memory with units", code: status.InvalidConfig,
			src: base + "[memory]\ndevice = \"80\"\nhost = \"10GB\"\n",
			want: []string{`:6: memory.device = "80": write the number of GiB alone, such as 80`,
				`:7: memory.host = "10GB": write the number of GiB alone, such as 80`}},
		{name: "one layer a segment", code: status.InvalidConfig,
			src:  base + "[memory]\nblock_input = \"recompute\"\nsegment = 1\n",
			want: []string{"with memory.segment = 1 nothing is recomputed"}},
		{name: "a trace of no steps", code: status.InvalidConfig, src: "kind = \"eval\"\n" + base +
			"[output]\ntrace = [1, 2]\n", want: []string{":7: output.trace = [1, 2]: only training has steps"}},
		{name: "gdn", code: status.InvalidConfig, src: "kind = \"gdn\"\n",
			want: []string{"gdn.input: missing", "gdn.output: missing"}},
		{name: "gdn over its input", code: status.InvalidConfig,
			src:  "kind = \"gdn\"\n[gdn]\ninput = \"a\"\noutput = \"a\"\n",
			want: []string{"the same file as gdn.input"}},
		{name: "gdn chunk", code: status.InvalidConfig,
			src:  "kind = \"gdn\"\n[gdn]\ninput = \"a\"\noutput = \"b\"\nchunk = 8\n",
			want: []string{":5: gdn.chunk = 8: must be at least 16"}},
		{name: "a large gdn chunk", code: status.InvalidConfig,
			src:  "kind = \"gdn\"\n[gdn]\ninput = \"a\"\noutput = \"b\"\nchunk = 65537\n",
			want: []string{":5: gdn.chunk = 65537: must be at most 65536"}},
		{name: "many threads", code: status.InvalidConfig,
			src:  base + "[device]\nthreads = 4097\n",
			want: []string{":6: device.threads = 4097: must be at most 4096"}},
		{name: "mixed", code: status.InvalidConfig,
			src:  base + "[device]\nbackend = \"cpu\"\ncomm = \"nccl\"\n[tile]\nmpl = 3\n",
			want: []string{":7: device.comm", ":9: tile.mpl"}},
		{name: "attention keys in training", code: status.InvalidConfig,
			src:  base + "[attention]\nwindow = [8, 0]\nscale = 0.0\n",
			want: []string{":6: attention.window = [8, 0]: no effect"}},
		{name: "tiles without a model", code: status.InvalidConfig,
			src:  "kind = \"attention\"\n[attention]\ninput = \"a\"\noutput = \"b\"\n[tile]\nmlp = 64\nloss = \"auto\"\n",
			want: []string{`:6: tile.mlp = "64": no effect with kind = "attention"`}},
		{name: "environment", code: status.InvalidConfig,
			src: base + "[output]\ndir = \"${NOWHERE}/x${EMPTY}${a b}\"\n",
			want: []string{
				`:6: output.dir: "${a b}" is not of the form ${NAME}, environment variable NOWHERE is not set`}},
		{name: "sets", code: status.InvalidConfig, src: base,
			sets: []string{"data.sequnce=3", "seed", "=1", "seed=-1", "data.batch=many", "data={path=3, sequence=0}",
				"train.steps.x=1", "output.dir=${NO}"},
			want: []string{"--set data.sequnce=3: data.sequnce: unknown key; did you mean data.sequence?",
				"--set seed: not table.key=value", "--set =1: not table.key=value",
				"--set seed=-1: seed = -1: must be at least 0",
				`--set data.batch=many: data.batch = "many": an integer`,
				"--set data={path=3, sequence=0}: data.path = 3: a list of strings",
				"--set data={path=3, sequence=0}: data.sequence = 0",
				"--set train.steps.x=1: train.steps = a table: an integer",
				"--set output.dir=${NO}: output.dir: environment variable NO is not set"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := parse(c.src, c.sets...)
			if status.Of(err) != c.code {
				t.Errorf("code %v, want %v", status.Of(err), c.code)
			}
			if err == nil {
				return
			}
			lines := strings.Split(err.Error(), "\n")
			for _, want := range c.want {
				n := 0
				for _, line := range lines {
					if strings.Contains(line, want) {
						n++
					}
				}
				if n != 1 {
					t.Errorf("%d lines with %q", n, want)
				}
			}
			if len(lines) != len(c.want) || t.Failed() {
				t.Errorf("%d faults, want %d:\n%s", len(lines), len(c.want), err)
			}
		})
	}
}

func TestSetOverrides(t *testing.T) {
	j, err := parse(base+"sequence = 8\n[parallel]\nring = 2\n", "parallel.ring=1", "data.sequence=16",
		"data.sequence=32", "model.new={}", "model.path=m", "optimizer.lr=1e-4", "train.time_limit=off")
	if err != nil {
		t.Fatal(err)
	}
	if j.Data.Sequence != 32 || j.Model.Path != "m" || len(j.Model.New) != 0 || j.Optimizer.LR != 1e-4 {
		t.Errorf("%+v", j)
	}
}

// An empty table in a --set gives the keys of the table their defaults. Later ones may set them.
func TestSetEmptyTable(t *testing.T) {
	src := base + "[lora]\nrank = 4\nalpha = 8\ninit = \"a\"\ntargets = [\"q_proj\"]\n"
	j, err := parse(src, "lora={}", "lora.dropout=0", "attention={}")
	if err != nil || !reflect.DeepEqual(j.LoRA, defaults.LoRA) || j.IsSet("lora.rank") {
		t.Errorf("%+v %v", j, err)
	}
	if j, err = parse(src, "model={}", "model.path=m", "optimizer.lr=1e-4", "lora={}", "lora.rank=2"); err != nil ||
		j.LoRA.Rank != 2 || j.LoRA.Alpha != 0 {
		t.Errorf("%+v %v", j, err)
	}
	if _, err = parse(src, "lorra={}"); err == nil {
		t.Error("a table that does not exist is accepted")
	}
}

func TestResolve(t *testing.T) {
	for _, c := range []struct {
		world int
		sets  []string
		want  Mesh
		acc   int64
		err   string
	}{
		{world: 4, want: Mesh{World: 4, Ulysses: 4, Ring: 1, Replicas: 1, GlobalBatch: 1}, acc: 1},
		{world: 1, sets: []string{"parallel.ulysses=1", "data.batch=2", "data.accumulate=3"},
			want: Mesh{World: 1, Ulysses: 1, Ring: 1, Replicas: 1, GlobalBatch: 6}, acc: 3},
		{world: 8, sets: []string{"parallel.ulysses=2", "data.global_batch=16", "data.batch=2"},
			want: Mesh{World: 8, Ulysses: 2, Ring: 1, Replicas: 4, GlobalBatch: 16}, acc: 2},
		{world: 8, sets: []string{"parallel.ulysses=2", "data.global_batch=12", "data.batch=2"},
			err: "--set data.global_batch=12: data.global_batch: 12 is not a multiple of the 8 sequences of a micro-batch on all replicas (4 replicas x data.batch 2); use a multiple of 8"},
		{world: 3, sets: []string{"kind=eval", "parallel.ulysses=1", "data.global_batch=8"}, // has no steps
			want: Mesh{World: 3, Ulysses: 1, Ring: 1, Replicas: 3, GlobalBatch: 3}, acc: 1},
		{world: 2, sets: []string{"kind=eval", "data.global_batch=8", "data.batch=3"},
			want: Mesh{World: 2, Ulysses: 2, Ring: 1, Replicas: 1, GlobalBatch: 3}, acc: 1},
		{world: 6, sets: []string{"parallel.ulysses=4"},
			err: "--set parallel.ulysses=4: parallel.ulysses: ulysses 4 x ring 1 does not divide the 6 ranks; use parallel.ulysses = 3 or 6"},
		{world: 2, sets: []string{"parallel.ulysses=4"}, err: "use parallel.ulysses = 2"},
		{world: 2, sets: []string{"parallel.ulysses=9223372036854775807"}, err: "use parallel.ulysses = 2"},
		{world: 4, sets: []string{"parallel.ulysses=2", "parallel.ring=8"},
			err: "ulysses 2 x ring 8 does not divide the 4 ranks; use a number of ranks that is a multiple of 16"},
		{world: 1, sets: []string{"parallel.ring=2", "parallel.ulysses=0"},
			err: "parallel.ring: ulysses 1 x ring 2 does not divide the 1 rank; use a number of ranks that is a multiple of 2"},
		{world: 2, sets: []string{"parallel.ulysses=9223372036854775807", "parallel.ring=4"},
			err: "use a number of ranks that is a multiple of 4"},
		{world: 0, err: "at least 1 is needed"},
	} {
		j, err := parse(base, c.sets...)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // a second call must not depend on the first
			err = j.Resolve(c.world)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("%d %v: %v", c.world, c.sets, err)
				}
			} else if err != nil || j.Mesh != c.want || j.Data.Accumulate != c.acc {
				t.Errorf("%d %v: %v %+v", c.world, c.sets, err, j.Mesh)
			}
		}
	}
}

func TestKeyLines(t *testing.T) {
	got := keyLines(`# a comment with = and [brackets]
a = 1
b.c = """
x = 1
"""  # d = 2
"q.r" = '''
'z' = 3'''
[t]  # t
  list = [ # 1
    "]", '[', # ]
    { k = 1, l = [2] },
  ]
  inl = { m = 1, n = { o = "}" } }
  date = 1979-05-27 07:32:00
[t.'u']
v = "\"\\"
[[w]]
x = 1
`).lines
	for key, line := range map[string]int{"a": 2, "b": 3, "b.c": 3, `"q.r"`: 6, "t": 8, "t.list": 9, "t.list.k": 11,
		"t.list.l": 11, "t.inl": 13, "t.inl.m": 13, "t.inl.n.o": 13,
		"t.date": 14, "t.u": 15, "t.u.v": 16, "w": 17, "w.x": 18, "x": 0, "z": 0, "d": 0} {
		if got[key] != line {
			t.Errorf("%s: line %d, want %d", key, got[key], line)
		}
	}
}

var faultLine = regexp.MustCompile(`^(jobs/job\.toml:[1-9][0-9]*|--set .*): `)

func FuzzParse(f *testing.F) {
	for _, s := range []string{"", base, "a = [1,\n2\nb=3", "[a\nb", "kind = train", "x=\"abc\ny=1", "a.b=1\na=2",
		"[[data]]\n[[data]]", "\xff\xfea\x00", "a = {b=1\nc=2}", "data.path = '${X'", "a={a={a={",
		"[model.new]\nx = 1979-05-27 07:32:00\ny = [{a=1},{b=2}]", "\"\\u0041\" = 1", "a=\"\"\"\"\"\"\"",
		"[" + strings.Repeat("a.", 60) + "a]", "\ufeffseed = 1\r\n[data]\r\nx = 1"} {
		f.Add(s, "seed=1")
		f.Add(base, s)
	}
	f.Fuzz(func(t *testing.T, src, set string) {
		j, err := parse(src, set)
		if (j == nil) == (err == nil) {
			t.Fatalf("job %v and error %v", j, err)
		}
		if err == nil {
			return
		}
		var e *status.Error
		if !errors.As(err, &e) || e.Code != status.InvalidConfig && e.Code != status.Unsupported {
			t.Fatalf("code %v", status.Of(err))
		}
		if !faultLine.MatchString(err.Error()) {
			t.Fatalf("no line in %q", err)
		}
	})
}

func ExampleParse() {
	_, err := Parse([]byte("[data]\nsequnce = 8\n[parallel]\nzero = 4\n"), "job.toml",
		[]string{"kind=eval", "model.path=m", "eval.path=x.txt"}, nil)
	fmt.Println(err)
	// Output:
	// job.toml:2: data.sequnce: unknown key; did you mean data.sequence?
	// job.toml:4: parallel.zero = 4: must be at most 3
}

// A chosen mesh is for its number of ranks, keeps the sequences of a step, and is in the resolved
// job.
func TestChosenMesh(t *testing.T) {
	j, err := parse(base, "data.accumulate=4")
	if err != nil {
		t.Fatal(err)
	}
	j.Choose(Mesh{World: 8, Ulysses: 2, Ring: 2, Replicas: 2, Gather: true})
	for range 2 {
		want := Mesh{World: 8, Ulysses: 2, Ring: 2, Replicas: 2, GlobalBatch: 4, Gather: true}
		if err := j.Resolve(8); err != nil || j.Mesh != want || j.Data.Accumulate != 2 {
			t.Errorf("%+v, accumulate %d, %v", j.Mesh, j.Data.Accumulate, err)
		}
		text := j.Resolved(1)
		for _, line := range []string{"ulysses = 2 ", "ring = 2 ", "accumulate = 2 "} {
			if !strings.Contains(text, line+" # chosen by the program") {
				t.Errorf("no %q in\n%s", line, text)
			}
		}
		if err := j.Resolve(2); err != nil ||
			j.Mesh != (Mesh{World: 2, Ulysses: 2, Ring: 1, Replicas: 1, GlobalBatch: 4}) || j.Data.Accumulate != 4 {
			t.Errorf("%+v, accumulate %d, %v", j.Mesh, j.Data.Accumulate, err)
		}
	}
	if s := (Mesh{Ulysses: 4, Ring: 2, Replicas: 3}).String(); s != "ulysses 4 x ring 2 x data 3" {
		t.Error(s)
	}
}

// Paths of Windows are faults with a fix. A file whose name has a backslash can be named.
func TestPathsOfWindows(t *testing.T) {
	for src, want := range map[string]string{
		"[data]\npath = \"a\\\\train.txt\"\n":  `data.path = "a\\train.txt": a \ does not separate folders here; write /`,
		"[data]\npath = \"C:\\data\\a.txt\"\n": `invalid escape in string '\d'; write / between folders, or \\ for a \`,
	} {
		if _, err := parse(src); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", src, err, want)
		}
	}
	dir := t.TempDir()
	name := filepath.Join(dir, `a\b.txt`)
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{name, `a\[b.txt`} {
		if _, err := parse(base, "data.path="+path); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}
