package job

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

// newLoRA writes a job with adapters beside a golden model. It returns the folders and a function
// that runs it.
func newLoRA(t *testing.T, model string) (dir, base string, run func(ranks int, sets ...string) (string, error)) {
	t.Helper()
	dir, kept := newKept(t, "model.new={}", "data.tokenizer=bytes", "data.sequence=40", "checkpoint.every=1",
		"checkpoint.keep=9", "train.steps=3",
		"optimizer.schedule=constant", "lora.rank=3", "lora.alpha=7")
	from, err := filepath.Abs(filepath.Join("../testdata/goldens/models", model))
	if err != nil {
		t.Fatal(err)
	}
	base = filepath.Join(dir, "base")
	if err := os.CopyFS(base, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return dir, base, func(ranks int, sets ...string) (string, error) {
		return kept(ranks, append([]string{"model.path=" + base}, sets...)...)
	}
}

// Adapters of a run are saved, exported, merged and resumed on other meshes. The merged model is
// the base model where there are no adapters, and an evaluation of it has the loss of an evaluation
// of the base model with the adapters.
func TestLoRA(t *testing.T) {
	dir, base, run := newLoRA(t, "qwen3_5")
	out := filepath.Join(dir, "out")
	text, err := run(2, "parallel.zero=3")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"frozen weights, shard", "trained: ", "out/adapter"} {
		if !strings.Contains(text, want) {
			t.Errorf("the run does not print %q:\n%s", want, text)
		}
	}
	for _, folder := range []string{out, filepath.Join(out, "adapter")} {
		want := "merge its adapters with ulysses-mpi export " + filepath.Join(out, "adapter") + " MODEL-FOLDER --merge"
		if code, _, errs := call("generate", folder, "the"); code != status.IO || !strings.Contains(errs, want) {
			t.Errorf("generate %s: %v %s", folder, code, errs)
		}
	}
	checkpoints := filepath.Join(out, "checkpoints")
	for _, folder := range []string{checkpoints, filepath.Join(checkpoints, "step-00000003")} {
		if code, _, errs := call("generate", folder, "the"); code != status.IO ||
			!strings.Contains(errs, "ulysses-mpi export "+folder+" MODEL-FOLDER") {
			t.Errorf("generate %s: %v %s", folder, code, errs)
		}
	}
	if code, _, errs := call("export", filepath.Join(out, "adapter"), filepath.Join(dir, "unmerged")); code !=
		status.InvalidArgument || !strings.Contains(errs, "--merge") {
		t.Errorf("export of adapters without --merge: %v %s", code, errs)
	}
	want := losses(t, dir)
	folder, merged, again := filepath.Join(dir, "exported"), filepath.Join(dir, "merged"), filepath.Join(dir, "again")
	exports(t, checkpoints, folder, "after step 3")
	alike(t, "adapters", folder, filepath.Join(out, "adapter"))
	for from, to := range map[string]string{checkpoints: merged, folder: again} {
		if code, _, errs := call("export", "--merge", from, to); code != status.OK {
			t.Fatalf("export --merge %s: %v: %s", from, code, errs)
		}
	}
	before, after, twice := readTensors(t, filepath.Join(base, "model.safetensors")),
		readTensors(t, filepath.Join(merged, "model.safetensors")),
		readTensors(t, filepath.Join(again, "model.safetensors"))
	for name, x := range before {
		target := strings.HasSuffix(name, "proj.weight") || strings.Contains(name, "in_proj")
		if same := slices.Equal(x, after[name]); same == target {
			t.Errorf("%s: merged without a change: %v", name, same)
		}
		if !slices.Equal(after[name], twice[name]) {
			t.Errorf("%s: the adapters of the checkpoint and of the folder are merged differently", name)
		}
	}
	evaluate := func(sets ...string) float64 {
		at := filepath.Join(dir, "eval"+sets[0])
		if _, err := run(2, append(sets[1:], "kind=eval", "output.dir="+at)...); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(at, "metrics.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		var line struct {
			Loss float64 `json:"eval_loss"`
		}
		if err := json.Unmarshal([]byte(strings.TrimSpace(string(text))), &line); err != nil || line.Loss == 0 {
			t.Fatalf("%v: %s", err, text)
		}
		return line.Loss
	}
	a, b := evaluate("1", "lora.init="+folder), evaluate("2", "model.path="+merged, "lora.rank=0", "lora.alpha=0")
	near.Value(t, "evaluation with adapters", a, b, 1e-5)

	drop(t, dir, 2, 3)
	if _, err := run(4, "parallel.ulysses=2", "parallel.zero=1"); err != nil {
		t.Fatal(err)
	}
	near.Slice(t, "losses after a resume", losses(t, dir), want, 1e-5)
	_, err = run(1, "lora.alpha=8", "train.steps=4")
	expectFault(t, err, status.InvalidConfig, []string{"lora is alpha 8, it was alpha 7;"})
}

// Dropout of adapters drops the same elements on every mesh, for every data.batch, with tiles and
// with every policy for activations: losses are the losses of one rank within the rounding of F32.
// It changes with the seed, and an evaluation has none.
func TestLoRADropout(t *testing.T) {
	dir, _, run := newLoRA(t, "qwen3_5")
	n := 0
	train := func(ranks int, sets ...string) []float64 {
		t.Helper()
		n++
		out := filepath.Join(dir, fmt.Sprint("out", n))
		sets = append([]string{"output.dir=" + out, "parallel.ulysses=1", "data.global_batch=4", "checkpoint.every=0",
			"optimizer.lr=0.01", "lora.dropout=0.4"}, sets...)
		if _, err := run(ranks, sets...); err != nil {
			t.Fatal(err)
		}
		var all []float64
		for _, r := range readMetrics(t, filepath.Join(out, "metrics.jsonl")) {
			all = append(all, r.Loss)
		}
		return all
	}
	want := train(1)
	for _, sets := range [][]string{{"seed=99"}, {"lora.dropout=0.0"}, {"lora.dropout=0.41"}} {
		if got := train(1, sets...); slices.Equal(got[1:], want[1:]) {
			t.Errorf("%v: losses %v, the same as without", sets, got)
		}
	}
	if got := train(1); !slices.Equal(got, want) {
		t.Errorf("losses %v, and when repeated %v", want, got)
	}
	for _, m := range []struct {
		ranks int
		sets  []string
	}{
		{1, []string{"data.batch=2"}}, {1, []string{"tile.mlp=7", "tile.loss=9"}}, {2, []string{"parallel.ulysses=2"}},
		{4, []string{"parallel.ulysses=2", "parallel.ring=2", "parallel.zero=3", "tile.mlp=5"}},
		{3, []string{"parallel.ring=3"}},
		{4, []string{"parallel.zero=2", "memory.block_input=recompute", "memory.mlp=recompute"}},
		{2, []string{"parallel.ulysses=2", "parallel.overlap=on"}},
	} {
		got := train(m.ranks, m.sets...)
		for i := range want {
			if d := math.Abs(got[i] - want[i]); !(d <= 2e-6*want[i]) {
				t.Errorf("%v: step %d: loss %v, on one rank %v", m.sets, i+1, got[i], want[i])
			}
		}
	}
}

// A merge with an adapter that has NaN or Inf writes no model, and names the first such weight.
func TestMergeOfDamagedAdapters(t *testing.T) {
	dir, _, run := newLoRA(t, "qwen3")
	if _, err := run(1, "train.steps=1"); err != nil {
		t.Fatal(err)
	}
	from := filepath.Join(dir, "out", "adapter")
	for _, bad := range []float64{math.NaN(), math.Inf(1)} {
		to, merged := filepath.Join(dir, fmt.Sprint("adapter", bad)), filepath.Join(dir, "merged")
		if err := os.CopyFS(to, os.DirFS(from)); err != nil {
			t.Fatal(err)
		}
		const file = "adapter_model.safetensors"
		writeTensors(t, filepath.Join(from, file), filepath.Join(to, file),
			func(name string, shape []int64, x []float32) []int64 {
				if strings.HasSuffix(name, "layers.1.self_attn.q_proj.lora_B.weight") {
					x[shape[1]] = float32(bad)
				}
				return shape
			})
		code, _, errs := call("export", "--merge", to, merged)
		if want := "ulysses-mpi: tensor model.layers.1.self_attn.q_proj.weight: "; code != status.Numeric ||
			!strings.HasPrefix(errs, want) || !strings.Contains(errs, " at [1 0] after the merge: ") {
			t.Errorf("a merge with %v: %v %s", bad, code, errs)
		}
		if _, err := os.Stat(merged); err == nil {
			t.Errorf("a merge with %v has written a model", bad)
		}
	}
}

// A folder of PEFT may name its targets by a regular expression. Their names are read from its
// tensors.
func TestTargetsOfARegularExpression(t *testing.T) {
	dir, base, run := newLoRA(t, "qwen3")
	targets := `lora.targets=["q_proj", "down_proj"]`
	if _, err := run(1, targets); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(dir, "out", "adapter")
	results := func(name string) (loss, merged string) {
		t.Helper()
		code, out, errs := call("eval", filepath.Join(dir, "job.toml"), folder, "-q", "--set", "model.new={}",
			"--set", "model.path="+base, "--set", "data.tokenizer=bytes", "--set", "data.sequence=40",
			"--set", "output.dir="+filepath.Join(dir, name))
		if code != status.OK {
			t.Fatalf("eval: %v %s", code, errs)
		}
		merged = filepath.Join(dir, name+"-merged")
		if code, _, errs := call("export", "--merge", folder, merged); code != status.OK {
			t.Fatalf("export --merge: %v %s", code, errs)
		}
		loss, _, _ = strings.Cut(out, ",")
		return loss, merged
	}
	loss, merged := results("listed")
	path := filepath.Join(folder, "adapter_config.json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var config map[string]any
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	config["target_modules"] = `^model(?=\.).*\.(self_attn\.q|mlp\.down)_proj$`
	if text, err = json.Marshal(config); err != nil {
		t.Fatal(err)
	}
	put(t, path, string(text))
	if again, to := results("expression"); again != loss {
		t.Errorf("eval: %q, with a list of names %q", again, loss)
	} else {
		alike(t, "merged", to, merged)
	}
}

// Settings of adapters that contradict each other, or that are not built, are refused by name.
func TestLoRAIsRefused(t *testing.T) {
	dir, base, run := newLoRA(t, "qwen3")
	init := filepath.Join(dir, "init")
	if _, err := run(1, "train.steps=1", "output.dir="+dir+"/first"); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(init, os.DirFS(filepath.Join(dir, "first", "adapter"))); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		sets []string
		code status.Code
		want string
	}{
		{[]string{"lora.rank=0"}, status.InvalidConfig, "lora.rank = 0: missing, and there are keys of [lora]"},
		{[]string{`train.freeze=["*"]`}, status.InvalidConfig,
			"train.freeze: with [lora] only the adapters are trained"},
		{[]string{"kind=eval"}, status.InvalidConfig, "lora.init: missing"},
		{[]string{"lora.targets=[]"}, status.InvalidConfig, "lora.targets: names no matrices"},
		{[]string{`lora.targets=["q_proj", "w_proj"]`}, status.InvalidConfig,
			`lora.targets: "w_proj" matches no module of the model; name matrices of the layers (down_proj, gate_proj, `},
		{[]string{`lora.targets=["embed_tokens"]`}, status.InvalidConfig,
			"lora.targets: model.embed_tokens is not a matrix of a layer"},
		{[]string{`lora.targets=["proj"]`}, status.InvalidConfig, `"proj" matches no module`},
		{[]string{"lora.dropout=1"}, status.InvalidConfig, "lora.dropout = 1.0: not a probability"},
		{[]string{"lora.dropout=-0.1"}, status.InvalidConfig, "lora.dropout = -0.1: must be at least 0"},
		{[]string{"lora.lora_dropout=0.1"}, status.InvalidConfig, "lora.lora_dropout: unknown key; use lora.dropout"},
		{[]string{"lora.use_dora=true"}, status.Unsupported,
			"lora.use_dora: adapters other than plain LoRA are not built"},
		{[]string{`lora.modules_to_save=["lm_head"]`}, status.Unsupported,
			"lora.modules_to_save: adapters other than plain LoRA are not built"},
		{[]string{"lora.lora_alpha=3"}, status.InvalidConfig, "lora.lora_alpha: unknown key; use lora.alpha"},
		{[]string{"lora.init=" + init, "lora.rank=4"}, status.InvalidConfig, "lora_A.weight is [3 "},
		{[]string{"lora.init=" + init, "lora.alpha=9"}, status.InvalidConfig, "the scale of the adapters is 2.33"},
		{[]string{"lora.init=" + init, `lora.targets=["q_proj"]`}, status.InvalidConfig,
			"is not an adapter of the model with these lora.targets"},
		{[]string{"lora.init=" + base}, status.IO, "name a folder that PEFT has saved"},
	} {
		_, err := run(2, append(x.sets, "output.dir="+filepath.Join(dir, "refused"))...)
		expectFault(t, err, x.code, []string{x.want})
	}
	path := filepath.Join(init, "adapter_config.json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for key, value := range map[string]any{"use_dora": true, "modules_to_save": []string{"lm_head"},
		"target_parameters": []string{"x"}, "rank_pattern": map[string]int{"q": 2},
		"bias": "all", "layers_to_transform": []int{0}, "peft_type": "IA3", "new_feature": 3,
		"init_lora_weights": "pissa", "r": 0.5} {
		var all map[string]any
		if err := json.Unmarshal(text, &all); err != nil {
			t.Fatal(err)
		}
		all[key] = value
		changed, err := json.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		put(t, path, string(changed))
		_, err = run(1, "lora.init="+init, "output.dir="+filepath.Join(dir, "refused"))
		if err == nil || !strings.Contains(err.Error(), key+" ") {
			t.Errorf("%s = %v: %v", key, value, err)
		}
		if shown, _ := json.Marshal(value); status.Of(err) == status.Unsupported &&
			!strings.Contains(err.Error(), fmt.Sprintf("%s = %s: ", key, shown)) {
			t.Errorf("%s: the value is not shown as in the file: %v", key, err)
		}
	}
	put(t, path, string(text))
	for _, name := range []string{"model.embed_tokens.lora_embedding_A", "model.embed_tokens.base_layer.weight",
		"lm_head.lora_A.weight"} {
		tensors := []tensor.Item{{Name: "base_model.model." + name, Tensor: tensor.OfFloat32(make([]float32, 6), 3, 2)}}
		if err := tensor.WriteSafetensors(filepath.Join(init, "adapter_model.safetensors"), nil, tensors); err != nil {
			t.Fatal(err)
		}
		want := name[:strings.Index(name+".lora", ".lora")]
		want = strings.TrimSuffix(want, ".base_layer.weight") +
			" is not a matrix of a layer; train adapters of matrices of the layers"
		if _, err := run(1, "lora.init="+init, "output.dir="+filepath.Join(dir, "refused")); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("lora.init with %s: %v", name, err)
		}
		if strings.HasPrefix(name, "lm_head") { // this model's own matrix, with which it can be merged
			continue
		}
		if code, _, errs := call("export", "--merge", init, filepath.Join(dir, "x")); code != status.InvalidConfig ||
			!strings.Contains(errs, want) || strings.Contains(errs, "own base model") {
			t.Errorf("export --merge with %s: %v %s", name, code, errs)
		}
	}
	if code, _, errs := call("export", "--merge", filepath.Join(dir, "first", "checkpoints"),
		base); code != status.InvalidArgument || !strings.Contains(errs, "never overwritten") {
		t.Errorf("a merge into the base model: %v %s", code, errs)
	}
	adapters := filepath.Join(dir, "first", "adapter")
	link := filepath.Join(dir, "link")
	if err := os.Symlink(adapters, link); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{adapters, link} { // otherwise the adapters would be lost
		if code, _, errs := call("export", "--merge", "--force", adapters, to); code != status.InvalidArgument ||
			!strings.Contains(errs, to+" has the adapters") {
			t.Errorf("a merge into the folder of the adapters: %v %s", code, errs)
		}
	}
	other, err := os.ReadFile("../testdata/goldens/models/qwen2/model.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(base, "model.safetensors"), string(other))
	if code, _, errs := call("export", "--merge", filepath.Join(dir, "first", "checkpoints"),
		filepath.Join(dir, "x")); code != status.InvalidConfig || !strings.Contains(errs,
		"differ from the base model of checkpoint") {
		t.Errorf("a merge with another base model: %v %s", code, errs)
	}
}
