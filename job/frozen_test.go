package job

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// A run that freezes parameters of a folder saves and exports a whole model, in which these are
// equal to the folder's. It resumes with the same losses. A changed list, and another base model,
// are refused by name.
func TestFreeze(t *testing.T) {
	dir, run := newKept(t, "model.new={}", "data.tokenizer=bytes", "data.sequence=40", "checkpoint.every=1",
		"checkpoint.keep=9")
	models, err := filepath.Abs("../testdata/goldens/models")
	if err != nil {
		t.Fatal(err)
	}
	base, out := filepath.Join(dir, "base"), filepath.Join(dir, "out")
	if err := os.CopyFS(base, os.DirFS(filepath.Join(models, "qwen3"))); err != nil {
		t.Fatal(err)
	}
	sets := []string{"model.path=" + base, `train.freeze=["*embed_tokens*", "*.mlp.*", "re:.*layernorm.*"]`,
		"train.steps=3", "optimizer.schedule=constant"}
	text, err := run(2, append(sets, "parallel.zero=3")...)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"frozen weights, shard", "trained: "} {
		if !strings.Contains(text, want) {
			t.Errorf("the run does not print %q:\n%s", want, text)
		}
	}
	want := losses(t, dir)
	folder := filepath.Join(dir, "exported")
	exports(t, filepath.Join(out, "checkpoints"), folder, "after step 3")
	alike(t, "frozen", folder, filepath.Join(out, "model"))
	before, after := readTensors(t, filepath.Join(base, "model.safetensors")),
		readTensors(t, filepath.Join(folder, "model.safetensors"))
	for name, x := range before {
		frozen := strings.Contains(name, "embed_tokens") || strings.Contains(name, ".mlp.") ||
			strings.Contains(name, "layernorm")
		if same := slices.Equal(x, after[name]); same != frozen {
			t.Errorf("%s: equal before and after training: %v", name, same)
		}
	}

	// In BF16, frozen weights are rounded in memory and not in the model, which is that of export.
	half := filepath.Join(dir, "half")
	if _, err := run(2, append(sets, append(inBF16, "parallel.zero=3", "output.dir="+half)...)...); err != nil {
		t.Fatal(err)
	}
	exports(t, filepath.Join(half, "checkpoints"), filepath.Join(dir, "exported half"), "after step 3")
	alike(t, "frozen in BF16", filepath.Join(dir, "exported half"), filepath.Join(half, "model"))

	drop(t, dir, 2, 3)
	if _, err := run(4, append(sets, "parallel.ulysses=2", "parallel.zero=1")...); err != nil {
		t.Fatal(err)
	}
	got := losses(t, dir)
	for i := range want {
		if d := got[i] - want[i]; d > 1e-5 || d < -1e-5 {
			t.Errorf("step %d: loss %v after a resume, %v without", i+1, got[i], want[i])
		}
	}
	_, err = run(1, append(sets, `train.freeze=["*embed_tokens*"]`, "train.steps=4")...)
	expectFault(t, err, status.InvalidConfig, []string{"train.freeze is", "it was", "embed_tokens"})
	if err := os.CopyFS(filepath.Join(dir, "other"), os.DirFS(folder)); err != nil {
		t.Fatal(err)
	}
	_, err = run(1, append(sets, "model.path="+filepath.Join(dir, "other"), "train.steps=4")...)
	expectFault(t, err, status.InvalidConfig, []string{"frozen weights of model.path is"})
	_, err = run(1, append(sets, `train.freeze=["*.no_such.weight"]`, "train.steps=4")...)
	expectFault(t, err, status.InvalidConfig, []string{`train.freeze: "*.no_such.weight" matches no parameter`})
	_, err = run(1, append(sets, `train.freeze=["re:("]`, "train.steps=4")...)
	expectFault(t, err, status.InvalidConfig, []string{"train.freeze: not patterns of names"})
	_, err = run(1, append(sets, `train.freeze=["*"]`, "train.steps=4")...)
	expectFault(t, err, status.InvalidConfig, []string{"train.freeze: all parameters of the model are frozen"})
	_, err = run(2, append(sets, `optimizer.group=[{match = ["*.mlp.*"], weight_decay = 0}]`, "train.steps=4")...)
	expectFault(t, err, status.InvalidConfig,
		[]string{`optimizer.group: "*.mlp.*" matches no trained parameter of the model`})
}

// readTensors returns the values of all tensors of a file, in F32.
func readTensors(t *testing.T, path string) map[string][]float32 {
	t.Helper()
	f, err := tensor.OpenSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all := map[string][]float32{}
	for _, e := range f.Entries() {
		if e.DType == tensor.I64 { // numbers of tokens
			continue
		}
		x := make([]float32, e.Numel())
		if err := f.ReadFloat32(e, 0, x); err != nil {
			t.Fatal(err)
		}
		all[e.Name] = x
	}
	return all
}
