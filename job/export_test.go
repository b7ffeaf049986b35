package job

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// contents returns the files of a folder with their content.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all, root := map[string]string{}, os.DirFS(dir)
	err := fs.WalkDir(root, ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := fs.ReadFile(root, path)
		all[path] = string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// alike compares the files of two folders byte for byte.
func alike(t *testing.T, what, got, want string) {
	t.Helper()
	a, b := contents(t, got), contents(t, want)
	for name := range b {
		if a[name] != b[name] {
			t.Errorf("%s: %s differs", what, name)
		}
	}
	if len(a) != len(b) || len(b) < 2 {
		t.Errorf("%s: %d files, %d in the run's own folder", what, len(a), len(b))
	}
}

// exports runs the verb export, which must succeed.
func exports(t *testing.T, checkpoint, folder string, want ...string) {
	t.Helper()
	code, out, errs := call("export", checkpoint, folder)
	if code != status.OK || errs != "" {
		t.Fatalf("export %s: %v: %s", checkpoint, code, errs)
	}
	for _, w := range append(want, folder) {
		if !strings.Contains(out, w) {
			t.Errorf("export says %q, not %q", out, w)
		}
	}
}

// The export of a checkpoint is equal to the run's model folder, byte for byte, on every mesh and
// ZeRO stage: for a model from scratch and for folders in F32 and BF16, with tied tensors, several
// files and a tokenizer.
func TestExport(t *testing.T) {
	dir, run := newKept(t)
	out := filepath.Join(dir, "out")
	models, err := filepath.Abs("../testdata/goldens/models")
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(dir, "source")
	if err := os.CopyFS(source, os.DirFS(filepath.Join(models, "qwen3_5-tied"))); err != nil {
		t.Fatal(err)
	}
	named := "additional_chat_templates/tool_use.jinja"
	for _, name := range []string{"tokenizer.json", "chat_template.jinja", named} {
		putIn(t, filepath.Join(source, name), name)
	}
	from := func(path string, more ...string) []string {
		return append([]string{"model.new={}", "model.path=" + path, "data.tokenizer=bytes"}, more...)
	}
	for _, x := range []struct {
		ranks int
		sets  []string
	}{
		{1, nil},
		{2, []string{"parallel.zero=1"}},
		{4, []string{"parallel.ulysses=2", "parallel.zero=2"}},
		{3, []string{"parallel.zero=3", "model.new.tie_word_embeddings=false"}},
		{2, []string{"parallel.zero=3", "model.override.torch_dtype=bfloat16"}},
		{2, from(filepath.Join(models, "llama3"), "parallel.zero=0")},
		{2, from(source, "parallel.zero=3")},
	} {
		if err := os.RemoveAll(out); err != nil {
			t.Fatal(err)
		}
		if _, err := run(x.ranks,
			append(x.sets, "train.steps=3", "checkpoint.every=1", "data.sequence=40")...); err != nil {
			t.Fatalf("%+v: %v", x, err)
		}
		folder := filepath.Join(t.TempDir(), "new", "model")
		exports(t, filepath.Join(out, "checkpoints"), folder, "after step 3", "step-00000003")
		alike(t, strings.Join(x.sets, " "), folder, filepath.Join(out, "model"))
	}
	if got := contents(t, filepath.Join(out, "model")); got["tokenizer.json"] != "tokenizer.json" ||
		got["chat_template.jinja"] == "" || got[named] != named {
		t.Error("the tokenizer and its chat templates were not beside the weights")
	}
}

// The export of an earlier checkpoint is the model folder of a run that ends there. Other files of
// the folder stay. A folder of checkpoints is not a model folder.
func TestExportOnTheWay(t *testing.T) {
	dir, run := newKept(t, "optimizer.schedule=constant", "checkpoint.keep=9")
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	states, folder := filepath.Join(dir, "out", "checkpoints"), filepath.Join(dir, "exported")
	four := filepath.Join(states, "step-00000004")
	exports(t, four, folder, "after step 4")
	if _, err := run(2, "output.dir="+filepath.Join(dir, "short"), "train.steps=4", "checkpoint.every=0"); err != nil {
		t.Fatal(err)
	}
	alike(t, "step 4", folder, filepath.Join(dir, "short", "model"))

	put(t, filepath.Join(folder, "notes.txt"), "mine")
	if code, out, errs := call("export", "--force", states, folder); code != status.OK ||
		!strings.Contains(out, "after step 6") {
		t.Errorf("export --force: %v: %s%s", code, out, errs)
	}
	if got, want := contents(t, folder), contents(t, filepath.Join(dir, "out", "model")); got["notes.txt"] != "mine" ||
		got["model.safetensors"] != want["model.safetensors"] {
		t.Error("a folder that was there: the notes or the weights are wrong")
	}
	before := contents(t, four)
	for _, target := range []string{four, filepath.Join(four, "model"), states, filepath.Join(dir, "out"),
		filepath.Join(states, "step-00000002")} {
		code, _, errs := call("export", four, target)
		if code != status.InvalidArgument || !strings.Contains(errs, "another folder for the model") {
			t.Errorf("export to %s: %v: %s", target, code, errs)
		}
	}
	file := filepath.Join(folder, "notes.txt")
	if code, _, errs := call("export", four, file); code != status.IO || !strings.Contains(errs, "is a file") {
		t.Errorf("export to a file: %v: %s", code, errs)
	}
	after := contents(t, four)
	for name := range before {
		if before[name] != after[name] {
			t.Errorf("%s of the checkpoint has changed", name)
		}
	}
}

// A checkpoint that is damaged, of another program, newer, older or missing is refused with the
// reason, and no folder is created.
func TestExportFaults(t *testing.T) {
	dir, run := newKept(t, "train.steps=2")
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	whole := os.DirFS(filepath.Join(dir, "out", "checkpoints", "step-00000002"))
	flip := func(name string) func(state string) error {
		return func(state string) error {
			path := filepath.Join(state, name)
			data, err := os.ReadFile(path)
			if err == nil {
				data[len(data)-3] ^= 1
				err = os.WriteFile(path, data, 0o644)
			}
			return err
		}
	}
	for _, x := range []struct {
		name  string
		spoil func(state string) error
		code  status.Code
		want  string
	}{
		{"weights", flip("rank-00001.safetensors"), status.InvalidConfig, "rank-00001.safetensors is damaged"},
		{"config", flip("model/config.json"), status.InvalidConfig, "config.json is damaged"},
		{"no config", func(state string) error { return os.Remove(filepath.Join(state, "model", "config.json")) },
			status.InvalidConfig, "no such file"},
		{"older", older, status.Unsupported, "older programs"},
		{"newer", edit("format", 3), status.Unsupported, "format 3"},
		{"foreign", edit("producer", "another"), status.InvalidConfig, "not written by this program"},
		{"type", func(state string) error {
			path := filepath.Join(state, "manifest.json")
			text, err := os.ReadFile(path)
			if err == nil {
				err = os.WriteFile(path, []byte(strings.Replace(string(text), `"dtype":"F32"`, `"dtype":"F33"`, 1)),
					0o644)
			}
			return errors.Join(err, edit("format", 1)(state), edit("sha256", nil)(state))
		}, status.InvalidConfig, `element type "F33"`},
		{"none", os.RemoveAll, status.IO, "there is no such folder"},
		{"empty", func(state string) error { return errors.Join(os.RemoveAll(state), os.Mkdir(state, 0o777)) },
			status.IO, "neither a manifest.json nor"},
	} {
		state, folder := filepath.Join(t.TempDir(), "step-00000002"), filepath.Join(t.TempDir(), "model")
		if err := os.CopyFS(state, whole); err != nil {
			t.Fatal(err)
		}
		if err := x.spoil(state); err != nil {
			t.Fatal(err)
		}
		code, out, errs := call("export", state, folder)
		if code != x.code || out != "" || !strings.Contains(errs, x.want) {
			t.Errorf("%s: %v: %s", x.name, code, errs)
		}
		if left, _ := os.ReadDir(filepath.Dir(folder)); len(left) > 0 {
			t.Errorf("%s: left behind: %v", x.name, left)
		}
	}
	// If model.path is a checkpoint, the error has the command that exports it.
	checkpoints := filepath.Join(dir, "out", "checkpoints")
	for _, path := range []string{checkpoints, filepath.Join(checkpoints, "step-00000002")} {
		_, err := run(2, "kind=eval", "model.new={}", "model.path="+path)
		if status.Of(err) != status.IO ||
			!strings.Contains(err.Error(), "write a model folder with ulysses-mpi export "+
				filepath.Join(checkpoints, "step-00000002")+" FOLDER") {
			t.Errorf("%s as a model: %v", path, err)
		}
	}
	// A state of an older program goes on all the same.
	if err := older(filepath.Join(dir, "out", "checkpoints", "step-00000002")); err != nil {
		t.Fatal(err)
	}
	if _, err := run(2, "train.steps=4"); err != nil {
		t.Error(err)
	}
}

// older converts a manifest to format 1, without the model's files.
func older(state string) error {
	return errors.Join(edit("model", nil)(state), edit("format", 1)(state), edit("sha256", nil)(state),
		edit("settings", nil)(state))
}

// Of several checkpoints the newest undamaged one is exported, and the output names newer ones with
// their faults. A checkpoint that is named is not replaced by another.
func TestExportSkipsDamaged(t *testing.T) {
	dir, run := newKept(t)
	if _, err := run(1); err != nil {
		t.Fatal(err)
	}
	all := filepath.Join(dir, "out", "checkpoints")
	newest := filepath.Join(all, "step-00000006")
	if err := os.Truncate(filepath.Join(newest, "rank-00000.safetensors"), 100); err != nil {
		t.Fatal(err)
	}
	// no manifest has a checksum of this file
	put(t, filepath.Join(all, "step-00000004", "model", "generation_config.json"), "{}")
	code, out, errs := call("export", all, filepath.Join(dir, "model"))
	if _, err := os.Stat(filepath.Join(dir, "model", "generation_config.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is not in the manifest was exported: %v", err)
	}
	if code != status.OK ||
		!strings.Contains(out, "skipped: checkpoint "+newest+": rank-00000.safetensors has 100 bytes") ||
		!strings.Contains(out, "model after step 4, from "+filepath.Join(all, "step-00000004")) {
		t.Errorf("%v: %s%s", code, out, errs)
	}
	if code, _, errs = call("export", newest, filepath.Join(dir, "another")); code != status.InvalidConfig ||
		!strings.Contains(errs, "has 100 bytes") {
		t.Errorf("%v: %s", code, errs)
	}
	file := filepath.Join(newest, "manifest.json")
	if code, _, errs := call("export", file, filepath.Join(dir, "another")); code != status.IO ||
		!strings.Contains(errs, "checkpoint "+file+": it is a file; name a checkpoint") {
		t.Errorf("%v: %s", code, errs)
	}
	if code, _, errs := call("export", file+"-none", filepath.Join(dir, "new")); code != status.IO ||
		!strings.Contains(errs, "checkpoint "+file+"-none: there is no such folder; name a checkpoint") {
		t.Errorf("%v: %s", code, errs)
	}
	if code, _, errs := call("export", all, file); code != status.IO ||
		!strings.HasPrefix(errs, "ulysses-mpi: "+file+" is a file; remove it") {
		t.Errorf("%v: %s", code, errs)
	}
	// the output.dir of the run stands for its folder of checkpoints
	out = filepath.Join(dir, "out")
	if code, said, errs := call("export", out, filepath.Join(dir, "of-output")); code != status.OK ||
		!strings.Contains(said, "model after step 4, from "+filepath.Join(all, "step-00000004")) {
		t.Errorf("%v: %s%s", code, said, errs)
	}
	if code, _, errs := call("export", "--force", out, out); code != status.InvalidArgument ||
		!strings.Contains(errs, "is, or holds, a checkpoint") {
		t.Errorf("%v: %s", code, errs)
	}
	if err := os.Remove(filepath.Join(all, "step-00000004", "manifest.json")); err != nil {
		t.Fatal(err)
	}
	if code, _, errs = call("export", all, filepath.Join(dir, "another")); code != status.InvalidConfig ||
		!strings.Contains(errs, "no checkpoint in "+all+" is whole") {
		t.Errorf("%v: %s", code, errs)
	}
}

// A model that has been trained with the tokenizer and the chat template of the job is saved with
// them, in model/, in checkpoints and in folders of adapters. Files of the tokenizer of model.path
// are not mixed with them; its generation_config.json stays.
func TestTokenizerOfTheJob(t *testing.T) {
	dir, run := newKept(t, "train.steps=1", "checkpoint.every=1", "model.new.vocab_size=400")
	tokenizer := filepath.Join(dir, "tokenizer")
	if err := os.CopyFS(tokenizer, os.DirFS("../testdata/goldens/tokenizers/pieces1")); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(tokenizer, "special_tokens_map.json"), `{}`)
	template := filepath.Join(dir, "a.jinja")
	put(t, template, "{% for m in messages %}{{ m.content }}{% endfor %}")
	base := filepath.Join(dir, "base")
	if _, err := run(1, "output.dir="+filepath.Join(dir, "first"), "data.tokenizer=bytes"); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(base, os.DirFS(filepath.Join(dir, "first", "model"))); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(base, "vocab.json"), "of another tokenizer")
	putIn(t, filepath.Join(base, "additional_chat_templates", "of_base.jinja"), "of another tokenizer")
	putIn(t, filepath.Join(tokenizer, "additional_chat_templates", "of_tokenizer.jinja"), "not of the job")
	templates := filepath.Join(dir, "templates") // in JSON, which is saved as files
	putIn(t, filepath.Join(templates, "tokenizer_config.json"),
		`{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}`)
	put(t, filepath.Join(base, "generation_config.json"), `{}`)

	own := []string{"data.tokenizer=" + tokenizer, "data.chat_template=" + template}
	from := append([]string{"model.new={}", "model.path=" + base}, own...)
	one := map[string]string{"chat_template.jinja": contents(t, dir)["a.jinja"]}
	two := map[string]string{"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "T"}
	of := map[string]string{"additional_chat_templates/of_tokenizer.jinja": "not of the job"}
	for _, x := range []struct {
		sets      []string
		folder    string
		more      []string          // files beside the tokenizer
		templates map[string]string // by the paths of their files
	}{
		{own, "model", nil, one},
		{from, "model", []string{"generation_config.json"}, one},
		{append([]string{"lora.rank=2"}, from...), "adapter", []string{"generation_config.json"}, one},
		{append(slices.Clip(from), "lora.rank=2", "data.chat_template="+templates), "adapter",
			[]string{"generation_config.json"}, two},
		{append(slices.Clip(from), "data.chat_template=auto"), "model", []string{"generation_config.json"}, of},
	} {
		out := filepath.Join(dir, "out")
		if err := os.RemoveAll(out); err != nil {
			t.Fatal(err)
		}
		if _, err := run(2, x.sets...); err != nil {
			t.Fatalf("%v: %v", x.sets, err)
		}
		folder := filepath.Join(dir, "exported")
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
		exports(t, filepath.Join(out, "checkpoints"), folder, "after step 1")
		alike(t, strings.Join(x.sets, " "), folder, filepath.Join(out, x.folder))
		if x.folder == "adapter" { // the merged model of the checkpoint and of the folder
			merged := filepath.Join(t.TempDir(), "merged")
			for from, to := range map[string]string{"checkpoints": merged + "1", "adapter": merged + "2"} {
				if code, _, errs := call("export", "--merge", filepath.Join(out, from), to); code != status.OK {
					t.Fatal(errs)
				}
				os.Remove(filepath.Join(to, "model.safetensors")) // the order of tensors may differ
			}
			alike(t, "merged", merged+"2", merged+"1")
			for name, text := range x.templates {
				if got := contents(t, merged+"1")[name]; got != text {
					t.Errorf("%s of the merged model is %q", name, got)
				}
			}
		}
		got := contents(t, folder)
		want := contents(t, tokenizer)
		delete(want, "expected.json") // of the goldens
		maps.DeleteFunc(want, func(name, _ string) bool { return strings.HasSuffix(name, ".jinja") })
		maps.Copy(want, x.templates)
		for _, name := range x.more {
			want[name] = contents(t, base)[name]
		}
		for name := range got {
			if strings.HasSuffix(name, ".safetensors") || name == "config.json" || name == "adapter_config.json" {
				delete(got, name)
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("%v: files %v, want %v", x.sets, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
		}
	}
	if code, _, errs := call("generate", filepath.Join(dir, "first", "model"), "a"); code != status.OK ||
		strings.Count(errs, "has no tokenizer.json, and a vocabulary of 400: ") != 1 {
		t.Errorf("generate: %v %s", code, errs)
	}
}

// A tokenizer and a chat template that somebody removes during a run do not take the model with
// them: it is saved without them, and a warning names them.
func TestTokenizerThatIsRemoved(t *testing.T) {
	dir, _ := newKept(t)
	tokenizer, template := filepath.Join(dir, "tokenizer"), filepath.Join(dir, "a.jinja")
	if err := os.CopyFS(tokenizer, os.DirFS("../testdata/goldens/tokenizers/pieces1")); err != nil {
		t.Fatal(err)
	}
	put(t, template, "{{ messages }}")
	log := ""
	said := onLine(func(line string) {
		if log += line; strings.Contains(line, "train") {
			os.Remove(template)
			os.RemoveAll(tokenizer)
		}
	})
	err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: []string{"train.steps=2", "checkpoint.every=2",
		"model.new.vocab_size=400", "data.tokenizer=" + tokenizer, "data.chat_template=" + template},
		Stdout: io.Discard, Stderr: said})
	if err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	for _, want := range []string{"data.tokenizer: ", "data.chat_template: "} {
		if !strings.Contains(log, want) {
			t.Errorf("no warning of %s: %s", want, log)
		}
	}
	for _, path := range []string{"model/model.safetensors", "checkpoints/step-00000002/manifest.json"} {
		if _, err := os.Stat(filepath.Join(dir, "out", path)); err != nil {
			t.Error(err)
		}
	}
}
