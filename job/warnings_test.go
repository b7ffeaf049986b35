package job

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// withVision returns a folder of Qwen3.5 with the tensors that its language model does not have.
func withVision(t *testing.T) string {
	t.Helper()
	from, dir := "../testdata/goldens/models/qwen3_5", t.TempDir()
	text, err := os.ReadFile(filepath.Join(from, "config.json"))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	file, err := tensor.OpenSafetensors(filepath.Join(from, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var items []tensor.Item
	for _, e := range file.Entries() {
		x := make([]float32, e.Numel())
		if err := file.ReadFloat32(e, 0, x); err != nil {
			t.Fatal(err)
		}
		items = append(items, tensor.Item{Name: e.Name, Tensor: tensor.OfFloat32(x, e.Shape...)})
	}
	for _, name := range []string{"model.visual.a", "model.visual.b", "mtp.fc"} {
		items = append(items, tensor.Item{Name: name, Tensor: tensor.OfFloat32(make([]float32, 256), 256)})
	}
	if err := tensor.WriteSafetensors(filepath.Join(dir, "model.safetensors"), nil, items); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Rank 0 prints each warning once, before the first step, and the report has it. An evaluation on
// eval.path does not open data.path.
func TestWarningsOfARun(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "a.txt")
	if err := os.WriteFile(text, []byte(strings.Repeat("all work and no play. ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "job.toml")
	job := fmt.Sprintf("[device]\nbackend = \"cpu\"\nthreads = 1\n[model]\npath = %q\n[data]\npath = [%q]\ntokenizer = \"bytes\"\nsequence = 64\n[optimizer]\nlr = 1e-3\nbetas = [0.8, 0.9]\n"+
		"name = \"sgd\"\nwarmup = 3\n[train]\nsteps = 2\n[output]\ndir = %q\nmodel = false\n", withVision(t), text,
		filepath.Join(dir, "out"))
	if err := os.WriteFile(path, []byte(job), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) (warnings []string) {
		t.Helper()
		code, out, errs := call(append([]string{path, "-n", "2", "--log", "json"}, args...)...)
		if code != status.OK {
			t.Fatalf("%v\n%s%s", code, out, errs)
		}
		stepped := false
		for line := range strings.SplitSeq(strings.TrimSpace(errs), "\n") {
			var x struct{ Level, Message string }
			if err := json.Unmarshal([]byte(line), &x); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			stepped = stepped || x.Message == "train"
			if x.Level == "warn" {
				if warnings = append(warnings, x.Message); stepped {
					t.Errorf("after the first step: %s", x.Message)
				}
			}
		}
		return warnings
	}
	shown := func(name string, warnings []string) {
		t.Helper()
		page, err := os.ReadFile(filepath.Join(dir, "out", name))
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range warnings {
			if first, _, _ := strings.Cut(w, "\""); !strings.Contains(string(page), `class="warning"`) ||
				!strings.Contains(string(page), first) {
				t.Errorf("%s lacks %s", name, w)
			}
		}
	}
	warnings := run()
	for i, want := range []string{"optimizer.betas: no effect", "optimizer.warmup = 3: the run has 2 steps",
		"2 tensors model.visual.* (2.0 KiB) are skipped", "1 tensor mtp.* (1.0 KiB) is skipped"} {
		if len(warnings) != 4 || !strings.Contains(warnings[i], want) {
			t.Errorf("%q, want %q in number %d of 4", warnings, want, i)
		}
	}
	shown("report.html", warnings)
	warnings = run("--set", "kind=eval", "--set", "eval.path="+text, "--set", "data.path=nowhere.txt")
	if !slices.ContainsFunc(warnings, func(w string) bool {
		return strings.Contains(w, "data.path: no effect, because the evaluation reads eval.path")
	}) {
		t.Errorf("%q", warnings)
	}
	shown("report-eval.html", warnings)
	cut := "data.pack = false: 1036 of the 1100 tokens of %s data (94 %%) are left out"
	warnings = run("--set", "data.pack=false", "--set", "eval.split=0.5",
		"--set", "output.dir="+filepath.Join(dir, "cut"))
	for _, of := range []string{"training", "evaluation"} {
		if want := fmt.Sprintf(cut, of); !slices.ContainsFunc(warnings, func(w string) bool {
			return strings.Contains(w, want)
		}) {
			t.Errorf("%q, want %q", warnings, want)
		}
	}
}
