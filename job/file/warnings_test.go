package file

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

const llamaNew = `
[model.new]
model_type = "llama"
vocab_size = 256
hidden_size = 48
intermediate_size = 80
num_hidden_layers = 2
num_attention_heads = 3
max_position_embeddings = 100
`

const hybridNew = `
[model.new]
model_type = "qwen3_5_text"
vocab_size = 256
hidden_size = 48
intermediate_size = 80
num_hidden_layers = 2
full_attention_interval = 2
num_attention_heads = 3
num_key_value_heads = 3
head_dim = 16
linear_num_key_heads = 2
linear_num_value_heads = 2
linear_key_head_dim = 16
linear_value_head_dim = 16
max_position_embeddings = 100
`

const smallData = "[data]\npath = [\"a.txt\"]\nsequence = 64\n"

// Each setting without an effect, or with an unintended one, gets one line, and no other setting
// gets one.
func TestWarnings(t *testing.T) {
	const pattern = "kind = \"attention\"\n[attention]\ninput = \"a\"\noutput = \"b\"\n[attention.pattern]\n"
	llama, err := filepath.Abs("../../testdata/goldens/models/llama")
	if err != nil {
		t.Fatal(err)
	}
	train := smallData + llamaNew
	sources := llamaNew + "[data]\nsequence = 64\n[[data.source]]\npath = \"a.jsonl\"\n"
	for _, c := range []struct {
		src, sets string
		want      []string // in each line, in order
	}{
		{train, "", nil},
		{train, "gdn.strategy=auto eval.split=0.1 eval.every=5 memory.host=1 optimizer.min_lr=1e-5 data.pack=false",
			nil},
		{smallData, "optimizer.lr=1e-4 model.path=" + llama + " model.override.rope_theta=1e6 lora.rank=2",
			[]string{
				`--set model.override.rope_theta=1e6: model.override: a folder of adapters does not have these fields`}},
		{smallData, "optimizer.lr=1e-4 model.path=" + llama + " model.override.rope_theta=1e6", nil},
		{smallData, "optimizer.lr=1e-4 model.path=" + llama + " lora.rank=2", nil},
		{train, "gdn.strategy=state",
			[]string{
				`--set gdn.strategy=state: gdn.strategy: no effect, because the model has no layers of linear attention; remove it`}},
		{train, "tile.gdn=64",
			[]string{
				`--set tile.gdn=64: tile.gdn: no effect, because the model has no layers of linear attention; remove it`}},
		{smallData + hybridNew, "gdn.strategy=state memory.head_groups=1 tile.gdn=64", nil},
		{smallData + hybridNew, "device.backend=cpu tile.gdn=64",
			[]string{"tile.gdn: no effect, because a CPU computes the gated delta rule without panels; remove it"}},
		{smallData + hybridNew, "device.backend=cuda tile.gdn=64", nil},
		{train, "memory.host=1 memory.block_input=recompute memory.attention=keep memory.qkv=keep memory.mlp=recompute",
			[]string{"memory.host: no effect, because no activations or optimizer states are offloaded"}},
		{train, "memory.host=1 memory.block_input=recompute memory.attention=keep memory.qkv=keep memory.mlp=offload",
			nil},
		{train, "optimizer.name=sgd optimizer.betas=[0.8,0.9] optimizer.eps=1e-6",
			[]string{"optimizer.betas, optimizer.eps: no effect"}},
		{train, "optimizer.schedule=constant optimizer.min_lr=1e-5", []string{"optimizer.min_lr: no effect"}},
		{train, "data.global_batch=4 data.accumulate=4",
			[]string{"data.accumulate: no effect, because data.global_batch sets it"}},
		{train, "data.text_field=body", []string{"data.text_field: no effect, because no .jsonl file is read"}},
		{train, "data.text_field=body data.path=x/*", nil},
		{train, "data.text_field=body data.path=x/*.jsonl", nil},
		{train, "data.path=x.bin data.tokenizer=bytes data.add_eos=false data.pack=false",
			[]string{"data.tokenizer, data.add_eos: no effect, because the files have tokens, not text"}},
		{train, "data.path=x.bin data.tokenizer=t.json data.add_bos=false data.add_eos=false eval.split=0.1 eval.sample=a",
			[]string{"=false: data.add_eos: no effect, because the files have tokens, not text"}},
		{train, "data.path=x.safetensors data.pack=false", []string{"data.pack: no effect"}},
		{train, "data.tokenizer=bytes data.add_eos=false",
			[]string{`data.add_eos: no effect, because data.tokenizer = "bytes" has no marks`}},
		{train, "data.tokenizer=tokenizer.json data.add_eos=false", nil},
		{train, "train.steps=20 output.trace=[21,30]",
			[]string{
				"output.trace = [21, 30]: the run has 20 steps, so it writes no trace.json; set steps of the run"}},
		{train, "train.steps=20 output.trace=[20,30]", nil},
		{train, "attention.input=q.safetensors",
			[]string{"attention.input: no effect, because it is a key of operator jobs"}},
		{train, "kind=eval optimizer.lr=1e-4 train.steps=7 memory.mlp=keep tile.mlp=16",
			[]string{
				`optimizer.lr, train.steps, memory.mlp: no effect, because kind = "eval" does not train; remove them`}},
		{sources, "data.format=text", []string{
			"--set data.format=text: data.format: no effect, because each table of data.source has a format; remove it"}},
		{sources, "data.format=text data.train_on=all", []string{"data.format: no effect"}},
		{train, "kind=eval eval.path=b.txt",
			[]string{"jobs/job.toml:2: data.path: no effect, because the evaluation reads eval.path"}},
		{train, "kind=eval", nil},
		{"kind = \"attention\"\n[attention]\ninput = \"a\"\noutput = \"b\"\nblock = [32, 32]\n[gdn]\nstrategy = \"state\"\n[data]\nsequence = 7\n[parallel]\nzero = 1\n",
			"",
			[]string{"jobs/job.toml:11: parallel.zero, data.sequence: no effect, because an operator job has no model",
				"gdn.strategy: no effect"}},
		{"kind = \"attention\"\nseed = 3\n[attention]\ninput = \"a\"\noutput = \"b\"\n", "",
			[]string{"seed: no effect, because an operator job draws only dropout and random blocks"}},
		{"kind = \"attention\"\nseed = 3\n[attention]\ninput = \"a\"\noutput = \"b\"\ndropout = 0.5\n", "", nil},
		{pattern + "kind = \"fixed\"\nwindow = 3\nlocal = 2\nglobal = 1\nrandom = 1\n", "",
			[]string{
				`attention.pattern.window: no effect, because only the patterns "bigbird", "longformer" and "sliding" have a window; remove it`,
				`attention.pattern.random: no effect, because only the patterns "variable" and "bigbird" have random columns`}},
		{pattern + "kind = \"variable\"\nlocal = 2\nglobal_patterns = 3\nglobal = 1\nwindows = [1]\nglobals = [1]\n",
			"",
			[]string{
				`attention.pattern.local, attention.pattern.global_patterns: no effect, because only the pattern "fixed" has groups of equal size; remove them`,
				`attention.pattern.global: no effect, because only the patterns "fixed" and "bigbird" have a number of global columns`}},
		{pattern + "kind = \"sliding\"\nwindow = 3\nwindows = [1]\nglobals = [1]\nglobal_ends = [2]\n", "",
			[]string{
				`attention.pattern.windows: no effect, because only the pattern "variable" has groups of several sizes`,
				`attention.pattern.globals, attention.pattern.global_ends: no effect, because only the patterns "variable" and "longformer" have a list of global columns; remove them`}},
		{pattern + "kind = \"bigbird\"\nwindow = 3\nglobal = 2\nrandom = 2\nper_head = true\n", "", nil},
		{"kind = \"gdn\"\n[gdn]\ninput = \"a\"\noutput = \"b\"\nstrategy = \"state\"\nchunk = 16\n", "", nil},
		{train, "train.steps=5",
			[]string{
				"jobs/job.toml:1: optimizer.warmup = 10: the run has 5 steps and ends at a learning rate of 0.0005, never at optimizer.lr = 0.001; set optimizer.warmup below 5"}},
		{train, "train.steps=10", nil},
		{train, "train.steps=5 optimizer.lr=0", nil},
		{train, `model.new.model_type="olmo3" model.new.sliding_window=4 model.new.rope_theta=300.0`,
			[]string{"model.new: rope_theta = 300 is not for layers with a window, which have 500000"}},
		{train, `model.new.model_type="olmo3" model.new.sliding_window=4 model.new.rope_theta=300.0 model.override.rope_parameters.sliding_attention.rope_theta=300.0`,
			nil},
		{train, "model.new.rope_theta=300.0", nil},
		{train, "train.steps=25 optimizer.begin=20",
			[]string{"optimizer.warmup = 10: the schedule has 5 steps and ends at a learning rate of 0.0005"}},
		{train, "train.steps=30 optimizer.begin=20", nil},
		{train, "eval.path=b.txt eval.every=1 eval.threshold=0.1 eval.sample_tokens=8 eval.sample_temperature=1",
			[]string{"eval.sample_tokens, eval.sample_temperature: no effect, because there is no eval.sample",
				"eval.threshold: no effect, because eval.patience is 0"}},
		{train, "eval.path=b.txt eval.every=1 eval.threshold=0.1 eval.patience=1 eval.sample=x eval.sample_tokens=8 checkpoint.best=true",
			nil},
		{train, "checkpoint.copy=off", []string{"checkpoint.copy: no effect, because checkpoint.every is 0"}},
		{train, "checkpoint.copy=on checkpoint.every=5", nil},
		{train, "checkpoint.copy=on checkpoint.every=5 memory.optimizer=offload",
			[]string{"checkpoint.copy: no effect, because the states of the optimizer are in host memory"}},
		{train + "[[eval.set]]\nname = \"s\"\npath = \"b.txt\"\n", "eval.metric=s",
			[]string{"eval.metric: no effect, because neither checkpoint.best nor eval.patience is set"}},
		{train + "[[eval.set]]\nname = \"s\"\npath = \"b.txt\"\n",
			"kind=eval eval.metric=s checkpoint.best=true checkpoint.resume=out",
			[]string{`eval.metric, checkpoint.best: no effect, because kind = "eval" does not train`,
				"data.path: no effect, because the evaluation reads eval.path or eval.set"}},
	} {
		j, err := parse(c.src, strings.Fields(c.sets)...)
		if err == nil {
			err = j.Resolve(1)
		}
		var config *model.Config
		if err == nil && j.IsModelJob() {
			config, err = j.ReadConfig()
		}
		if err != nil {
			t.Errorf("%s: %v", c.sets, err)
			continue
		}
		got := j.Warnings(config, nil, j.Train.Steps, j.Device.Backend == "cpu")
		same := len(got) == len(c.want)
		for i := range min(len(got), len(c.want)) {
			same = same && strings.Contains(got[i], c.want[i])
		}
		if !same {
			t.Errorf("%s\n%s: %q, want %q", c.src, c.sets, got, c.want)
		}
	}
}

// Adapters of the language model in a gemma3 with vision get a warning: PEFT loads the whole model.
func TestAdaptersBesideVision(t *testing.T) {
	for tower, warned := range map[string]bool{"vision_tower.x": true, "model.vision_tower.x": true, "x": false} {
		dir := t.TempDir()
		err := errors.Join(os.WriteFile(filepath.Join(dir, "config.json"),
			[]byte(`{"model_type": "gemma3", "text_config": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1}}`),
			0o600), tensor.WriteSafetensors(filepath.Join(dir, "model.safetensors"), nil,
			[]tensor.Item{{Name: tower, Tensor: tensor.OfFloat32([]float32{1}, 1)}}))
		if err != nil {
			t.Fatal(err)
		}
		folder, err := model.OpenFolder(dir, nil)
		if err != nil {
			t.Fatal(err)
		}
		for sets, trains := range map[string]bool{"lora.rank=2": true, "lora.rank=0": false} {
			j, err := parse(smallData, "optimizer.lr=1e-4", "model.path="+dir, sets)
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Join(j.Warnings(folder.Config, folder, 100, true), "\n")
			if strings.Contains(got, "lora.rank: PEFT loads "+dir+" with its vision") != (warned && trains) {
				t.Errorf("%s, %s: %q", tower, sets, got)
			}
		}
		folder.Close()
	}
}

// A sequence that is longer than the model's positions is refused, and the error has the line that
// extends the model: with it, the same job is accepted.
func TestPositions(t *testing.T) {
	const llama3 = `model.override.rope_scaling={rope_type="llama3",factor=4.0,low_freq_factor=1.0,high_freq_factor=4.0,original_max_position_embeddings=40}`
	path, err := filepath.Abs("../../testdata/goldens/models/llama") // 512 positions
	if err != nil {
		t.Fatal(err)
	}
	folder := smallData + "[optimizer]\nlr = 1e-4\n[model]\npath = \"" + path + "\"\n"
	for _, c := range []struct {
		src, sets string
		want      string // "" = accepted
		accepted  string // settings of the fix
	}{
		{smallData + llamaNew, "data.sequence=100", "", ""},
		{smallData + llamaNew, "data.sequence=101",
			"--set data.sequence=101: data.sequence: 101, the model has 100 positions; set data.sequence = 100, or add max_position_embeddings = 101 to [model.new]",
			"model.new.max_position_embeddings=101"},
		{folder, "data.sequence=512", "", ""},
		{folder, "data.sequence=2049",
			"or add override = { max_position_embeddings = 2049, rope_scaling = { rope_type = \"yarn\", factor = 4.002, original_max_position_embeddings = 512 } } to [model]",
			`model.override={max_position_embeddings=2049,rope_scaling={rope_type="yarn",factor=4.002,original_max_position_embeddings=512}}`},
		{folder, `data.sequence=2048 model.override.rope_scaling={rope_type="yarn",factor=4.0,original_max_position_embeddings=512}`,
			"", ""},
		{folder, `data.sequence=2049 model.override.rope_scaling={rope_type="yarn",factor=4.0,original_max_position_embeddings=512,mscale=0.707,truncate=false}`,
			`or add override = { max_position_embeddings = 2049, rope_scaling = { rope_type = "yarn", factor = 4.002, original_max_position_embeddings = 512, mscale = 0.707, truncate = false } } to [model]`,
			`model.override={max_position_embeddings=2049,rope_scaling={rope_type="yarn",factor=4.002,original_max_position_embeddings=512,mscale=0.707,truncate=false}}`},
		{folder, `data.sequence=2048 model.override.rope_scaling={rope_type="linear",factor=4.0}`, "", ""},
		{folder, `data.sequence=2560 model.override.rope_scaling={rope_type="dynamic",factor=4.0}`,
			`or add override = { rope_scaling = { rope_type = "dynamic", factor = 5.0 } } to [model]`,
			`model.override={rope_scaling={rope_type="dynamic",factor=5.0}}`},
		{folder, "data.sequence=2049 model.override.model_type=\"phi3\"",
			"the model has 512 positions; set data.sequence = 512", ""},
		{folder, `data.sequence=2049 model.override={model_type="ministral3",rope_scaling={rope_type="yarn",factor=4.0,original_max_position_embeddings=512,llama_4_scaling_beta=0.1}}`,
			`or add override = { max_position_embeddings = 2049, rope_scaling = { rope_type = "yarn", factor = 4.002, original_max_position_embeddings = 512, llama_4_scaling_beta = 0.1 } } to [model]`,
			`model.override={model_type="ministral3",max_position_embeddings=2049,rope_scaling={rope_type="yarn",factor=4.002,original_max_position_embeddings=512,llama_4_scaling_beta=0.1}}`},
		{folder, `data.sequence=1025 model.override={model_type="ministral3",rope_scaling={rope_type="linear",factor=2.0,original_max_position_embeddings=64,llama_4_scaling_beta=0.1}}`,
			"the model has 1024 positions; set data.sequence = 1024", ""},
		{smallData + llamaNew, "data.sequence=160 " + llama3, "", ""},
		{smallData + llamaNew, "data.sequence=161 " + llama3,
			"rope_type = \"llama3\", factor = 4.025, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 40",
			`model.override={max_position_embeddings=161,rope_scaling={rope_type="llama3",factor=4.025,low_freq_factor=1.0,high_freq_factor=4.0,original_max_position_embeddings=40}}`},
	} {
		read := func(sets ...string) error {
			j, err := parse(c.src, sets...)
			if err == nil {
				err = j.Resolve(1)
			}
			if err == nil {
				_, err = j.ReadConfig()
			}
			return err
		}
		sets := strings.Fields(c.sets)
		err := read(sets...)
		if c.want == "" && err != nil || c.want != "" &&
			(status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", c.sets, err, c.want)
		}
		if c.accepted != "" {
			if err := read(sets[0], c.accepted); err != nil {
				t.Errorf("%s: with the fix: %v", c.sets, err)
			}
		} else if c.want != "" && strings.Contains(err.Error(), "or add") {
			t.Errorf("%s: %v, whose fix is not tested", c.sets, err)
		}
	}
}

// The table has only names of existing keys and tables: otherwise a renamed key would never get a
// warning.
func TestIdleKeysExist(t *testing.T) {
	for _, rule := range idleKeys {
		for _, key := range rule.keys {
			if table, ok := strings.CutSuffix(key, "."); ok && !isTable(table) || !ok && byKey[key] == nil {
				t.Errorf("%q is neither a key nor a table", key)
			}
		}
	}
}
