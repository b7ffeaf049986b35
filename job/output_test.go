package job

import (
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// baseModel copies a small model's folder, and returns the --set arguments that fine-tune it.
func baseModel(t *testing.T, dir string) (base string, sets []string) {
	t.Helper()
	base = filepath.Join(dir, "base")
	if err := os.CopyFS(base, os.DirFS("../testdata/goldens/models/llama3")); err != nil {
		t.Fatal(err)
	}
	return base, []string{"model.new={}", "model.path=" + base, "data.tokenizer=bytes", "optimizer.lr=1e-4",
		"train.steps=2"}
}

func link(t *testing.T, to, at string) string {
	t.Helper()
	if err := os.Symlink(to, at); err != nil {
		t.Fatal(err)
	}
	return at
}

// unchanged returns a function that checks that the files of a folder have not changed.
func unchanged(t *testing.T, dir string) func(what string) {
	t.Helper()
	before := contents(t, dir)
	return func(what string) {
		t.Helper()
		if !maps.Equal(contents(t, dir), before) {
			t.Errorf("%s: files of %s were changed", what, dir)
		}
		if left, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), ".*")); len(left) > 0 {
			t.Errorf("%s: left behind: %v", what, left)
		}
	}
}

// An export never overwrites the folder of the base model, under any name of it. It overwrites
// another model only with --force.
func TestExportOverwritesNothingUnasked(t *testing.T) {
	dir, run := newKept(t)
	base, sets := baseModel(t, dir)
	if _, err := run(2, sets...); err != nil {
		t.Fatal(err)
	}
	states := filepath.Join(dir, "out", "checkpoints")
	same := unchanged(t, base)
	if err := os.Mkdir(filepath.Join(base, "sub"), 0o777); err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{base, link(t, "base", filepath.Join(dir, "link")), filepath.Join(base, "sub"),
		filepath.Join(base, "new"), dir} {
		for _, force := range [][]string{nil, {"--force"}} {
			code, _, errs := call(append([]string{"export", states, folder}, force...)...)
			want := "the folder of the base model (model.path of the run), which is never overwritten; name another folder"
			if folder == dir { // the folder also holds the checkpoint
				want = "another folder for the model"
			}
			if code != status.InvalidArgument || !strings.Contains(errs, want) {
				t.Errorf("export to %s %v: %v: %s", folder, force, code, errs)
			}
			same("export to " + folder)
		}
	}
	folder := filepath.Join(dir, "exported")
	exports(t, states, folder)
	put(t, filepath.Join(folder, "config.json"), "mine")
	same = unchanged(t, folder)
	if code, _, errs := call("export", states, folder); code != status.InvalidArgument ||
		!strings.Contains(errs,
			folder+" holds a model (config.json, model.safetensors), which would be replaced; name another folder, or add --force") {
		t.Errorf("export for the second time: %v: %s", code, errs)
	}
	same("export for the second time")
	if code, _, errs := call("export", "--force", states, folder); code != status.OK {
		t.Errorf("export with --force: %v: %s", code, errs)
	}
	alike(t, "export with --force", folder, filepath.Join(dir, "out", "model"))
}

// No run writes into the folder of its base model, also with output.overwrite, under any name of
// the folder.
func TestRunLeavesItsBaseModelAlone(t *testing.T) {
	dir, run := newKept(t, "output.overwrite=true")
	base, sets := baseModel(t, dir)
	same := unchanged(t, base)
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := os.Mkdir(at("out"), 0o777); err != nil {
		t.Fatal(err)
	}
	link(t, "../base", at("out/model"))
	link(t, "base", at("checkpoints"))
	for _, x := range []struct{ name, out, want string }{
		{"the folder", base, "is, or is inside, model.path = "},
		{"a folder in it", filepath.Join(base, "new", "out"), "is, or is inside, model.path = "},
		{"a link to it", link(t, "base", at("link")), "is, or is inside, model.path = "},
		{"model/ is a link to it", at("out"), "the trained model would replace model.path = "},
		{"checkpoints is a link to it", dir, "whose checkpoints the run replaces"},
	} {
		for _, kind := range []string{"train", "eval"} {
			if kind == "eval" && !strings.HasPrefix(x.want, "is, ") {
				continue // writes no model and no checkpoint
			}
			_, err := run(2, append(sets, "output.dir="+x.out, "kind="+kind)...)
			expectFault(t, err, status.InvalidConfig, []string{"output.dir: ", x.want, "; choose another output.dir"})
			same(x.name)
		}
	}
	// A second stage that starts from the first stage's model writes to another folder.
	if _, err := run(2, append(sets, "output.dir="+at("first"))...); err != nil {
		t.Fatal(err)
	}
	second := append(sets, "model.path="+at("first/model"), "checkpoint.resume=off")
	same = unchanged(t, at("first/model"))
	_, err := run(2, append(second, "output.dir="+at("first"))...)
	expectFault(t, err, status.InvalidConfig, []string{"the trained model would replace model.path"})
	same("a second stage")
	if _, err := run(2, append(second, "output.dir="+at("second"))...); err != nil {
		t.Error(err)
	}
}

// All ranks refuse an existing output file of an operator job, unless output.overwrite is set,
// which replaces the file.
func TestOperatorOutputExists(t *testing.T) {
	for kind, job := range map[string]string{"attention": "attention-cross", "gdn": "gdn-plain"} {
		job = filepath.Join("../testdata/goldens", job, "job.toml")
		file := filepath.Join(t.TempDir(), "out.safetensors")
		put(t, file, "mine")
		run := func(sets ...string) error {
			return Run(Options{Path: job, Sets: append(sets, kind+".output="+file, "device.backend=cpu"), Ranks: 2,
				Stdout: io.Discard, Stderr: io.Discard})
		}
		expectFault(t, run(), status.InvalidConfig,
			[]string{kind + ".output: " + file +
				" exists; name another file, or set output.overwrite = true (--force)"})
		if text(t, file) != "mine" {
			t.Errorf("%s: the file was changed", kind)
		}
		if err := run("output.overwrite=true"); err != nil || text(t, file) == "mine" {
			t.Errorf("%s: output.overwrite = true: %v", kind, err)
		}
		put(t, file, "mine")
		if code, _, errs := call(job, "--force", "-n", "2", "--set", kind+".output="+file, "--set",
			"device.backend=cpu"); code != status.OK || text(t, file) == "mine" {
			t.Errorf("%s: --force: %v: %s", kind, code, errs)
		}
	}
}

// A run removes what killed runs have left in its folder while they wrote or started MPI, and
// nothing else.
func TestUnfinishedFilesAreRemoved(t *testing.T) {
	dir, run := newKept(t)
	out := filepath.Join(dir, "out")
	left := []string{".report.html.a294f23d", ".model.0123abcd/model.safetensors", "model/.model.0123abcd/config.json",
		".start-77/0", ".start-77.made"}
	other := []string{".model.backup/model.safetensors", ".report.html.a294f23d1", ".model.0123abcd.old/notes.txt",
		".starter"}
	for _, name := range append(slices.Clone(left), other...) {
		putIn(t, filepath.Join(out, name), "x")
	}
	if _, err := run(2, "output.overwrite=true"); err != nil {
		t.Fatal(err)
	}
	for _, name := range left {
		if _, err := os.Lstat(filepath.Join(out, name)); !os.IsNotExist(err) {
			t.Errorf("%s remains (%v)", name, err)
		}
	}
	for _, name := range other {
		if _, err := os.Lstat(filepath.Join(out, name)); err != nil {
			t.Errorf("%s is gone: %v", name, err)
		}
	}
}
