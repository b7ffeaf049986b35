package job

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/near"
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
	near.Slice(t, "losses after a resume", losses(t, dir), want, 1e-5)
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

// In BF16, frozen weights are saved from the model's folder. If its files are written to during the
// run, they are saved from memory. If the folder is removed, its files are still open.
func TestFrozenFolderChanges(t *testing.T) {
	dir, _ := newKept(t)
	models, err := filepath.Abs("../testdata/goldens/models")
	if err != nil {
		t.Fatal(err)
	}
	changes := map[string]func(weights string) error{
		"removed":   func(weights string) error { return os.RemoveAll(filepath.Dir(weights)) },
		"truncated": func(weights string) error { return os.Truncate(weights, 1000) },
		"overwritten": func(weights string) error {
			f, err := os.OpenFile(weights, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			info, err := f.Stat()
			if err == nil {
				_, err = f.WriteAt(make([]byte, info.Size()/2), info.Size()/2)
			}
			return err
		},
	}
	// In F32, weights in memory are exact.
	changes["overwritten, F32"] = changes["overwritten"]
	for name, change := range changes {
		compute := inBF16
		if strings.HasSuffix(name, "F32") {
			compute = nil
		}
		base, saved := filepath.Join(dir, name), filepath.Join(dir, "saved "+name)
		if err := os.CopyFS(base, os.DirFS(filepath.Join(models, "qwen3"))); err != nil {
			t.Fatal(err)
		}
		weights := filepath.Join(base, "model.safetensors")
		before := readTensors(t, weights)
		var log strings.Builder
		err := onRanks(Options{Path: filepath.Join(dir, "job.toml"), Ranks: 2, Stdout: io.Discard, Stderr: &log,
			Sets: append([]string{"model.new={}", "model.path=" + base, `train.freeze=["*proj.weight", "*norm*"]`, "data.tokenizer=bytes",
				"parallel.zero=3"}, compute...)}, func(e *Env) error {
			s, err := prepare(e, true)
			if err != nil {
				return err
			}
			defer s.close()
			if e.Mesh.World.Rank() == 0 {
				err = change(weights)
			}
			if err = comm.Agree(e.Mesh.World, err); err != nil {
				return err
			}
			return s.save(saved)
		})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		rounded := strings.Count(log.String(), "were changed during the run; frozen weights are saved as rounded to bf16")
		if all := strings.Count(log.String(), "were changed during the run"); all != rounded {
			t.Errorf("%s: %d warnings, %d of them of bf16", name, all, rounded)
		}
		if want := map[string]int{"truncated": 1, "overwritten": 1}[name]; rounded != want {
			t.Errorf("%s: %d warnings:\n%s", name, rounded, log.String())
		}
		tolerance := 0.0
		if rounded > 0 {
			tolerance = 1.0 / 256
		}
		for of, x := range readTensors(t, filepath.Join(saved, "model.safetensors")) {
			near.Relative(t, name+": "+of, x, before[of], tolerance)
		}
	}
}
