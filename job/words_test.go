package job

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/internal/units"
)

// The number of faults in a message is the number of the following lines. A single fault with
// several lines has no number.
func TestFaultCounts(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "job.toml")
	for _, x := range []struct {
		job   string
		code  status.Code
		lines int // 1 = without a number
		want  string
	}{
		{"[data]\nsequnce = 1\n[modle]\n", status.InvalidConfig, 4, ":3: modle: "},
		{"[data]\npath = \"a.txt\"\n[model.new]\nmodel_type = \"llama\"\nhidden_sise = 8\n", status.InvalidConfig, 6,
			path + ":3: model.new: vocab_size is missing"},
		{"[data]\npath = \"a.txt\"\n[model.new]\nmodel_type = \"llama4\"\nnum_experts = 8\nhidden_sise = 8\n",
			status.Unsupported, 1, path + `:4: model.new: model_type = "llama4" (mixture of experts) is not built`},
	} {
		put(t, path, x.job)
		put(t, filepath.Join(dir, "a.txt"), "text")
		for _, ranks := range []string{"1", "3"} {
			code, _, errs := call(path, "--ranks", ranks, "-q")
			lines := strings.Split(strings.TrimSuffix(errs, "\n"), "\n")
			faults := 0
			for _, line := range lines {
				if strings.HasPrefix(line, "  ") || strings.HasPrefix(line, path+":") && !strings.HasSuffix(line, ":") {
					faults++
				}
			}
			head := fmt.Sprintf("ulysses-mpi: %d faults, ", x.lines)
			if x.lines == 1 {
				head, faults = "ulysses-mpi: "+path, len(lines)
			}
			if code != x.code || faults != x.lines || !strings.HasPrefix(errs, head) ||
				!strings.Contains(errs, x.want) {
				t.Errorf("%v, %d faults, want %v, %d:\n%s", code, faults, x.code, x.lines, errs)
			}
		}
	}
	// A refusal whose explanation has several lines is one fault.
	dir, run := newKept(t, "checkpoint.every=1", "train.steps=1")
	if _, err := run(1); err != nil {
		t.Fatal(err)
	}
	code, _, errs := call(filepath.Join(dir, "job.toml"), "-q", "--set", "train.steps=9")
	if code != status.InvalidConfig || strings.Contains(errs, "faults") || strings.Count(errs, "\n") < 2 {
		t.Errorf("%v\n%s", code, errs)
	}
}

// A model that is not on this disk is refused with the line that names it and the command that
// downloads it. A URL is not a path.
func TestModelsAreFolders(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "job.toml")
	put(t, filepath.Join(dir, "a.txt"), "text")
	if err := os.Mkdir(filepath.Join(dir, "m"), 0o777); err != nil {
		t.Fatal(err)
	}
	for model, want := range map[string]string{
		"Qwen/Qwen3-0.6B": path + ":4: model.path: there is no folder " + dir +
			"/Qwen/Qwen3-0.6B, and models are read from disk; if this is a name on the Hugging Face hub, run hf download Qwen/Qwen3-0.6B --local-dir " +
			dir + "/Qwen/Qwen3-0.6B\n",
		"m/x": path + ":4: model.path: there is no folder " + dir +
			"/m/x; name a Hugging Face folder with config.json and *.safetensors\n",
		"/nowhere/at/all": path + ":4: model.path: there is no folder /nowhere/at/all; name",
		"m":               path + ":4: model.path: " + dir + "/m: no config.json here; give",
		"https://huggingface.co/Qwen/Qwen3-0.6B": path +
			`:4: model.path = "https://huggingface.co/Qwen/Qwen3-0.6B": a URL, and models are read from disk; run hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B and name that folder`,
		"s3://bucket/model": `model.path = "s3://bucket/model": a URL, and files are read from disk; download it and name the file`,
	} {
		put(t, path, fmt.Sprintf("[data]\npath = \"a.txt\"\n[model]\npath = %q\n[optimizer]\nlr = 1e-4\n", model))
		for _, verb := range []string{"run", "plan"} {
			if code, _, errs := call(verb, path); code != status.IO && code != status.InvalidConfig ||
				!strings.Contains(errs, "ulysses-mpi: "+want) && !strings.Contains(errs, want) {
				t.Errorf("%s %s: %v: %s\nwant %s", verb, model, code, errs, want)
			}
		}
	}
	if _, err := parse("[data]\npath = [\"a.txt\", \"https://example.org/b.txt\", \"file:///c.txt\"]\ntokenizer = \"http://x/y\"\n"+
		"[model]\nnew = { hidden_size = 8 }\n", "output.dir=gs://x"); err == nil ||
		strings.Count(err.Error(), "a URL, and") != 4 || strings.Contains(err.Error(), "https:/e") {
		t.Error(err)
	}
}

// Messages are trained with a template, and refused without one.
func TestChatData(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "job.toml")
	put(t, filepath.Join(dir, "a.jsonl"), `{"id": 3, "messages": [{"role": "user", "content": "hello"}]}`+"\n")
	put(t, path, "[data]\npath = \"a.jsonl\"\n[model.new]\nmodel_type = \"llama\"\nvocab_size = 256\nhidden_size = 32\nintermediate_size = 48\nnum_hidden_layers = 1\nnum_attention_heads = 2\n")
	for _, field := range []string{"text", "messages"} {
		code, _, errs := call(path, "--set", "data.text_field="+field)
		if code != status.InvalidConfig ||
			!strings.Contains(errs, `a.jsonl:1: no message of an assistant is trained; remove the record`) {
			t.Errorf("%s: %v %s", field, code, errs)
		}
	}
	if code, _, errs := call(path, "--set", "data.text_field=id", "--set",
		"data.format=text"); code != status.InvalidConfig || !strings.Contains(errs, `field "id" is not a string`) {
		t.Errorf("%v %s", code, errs)
	}
}

// Nouns agree with their numbers.
func TestPlurals(t *testing.T) {
	if units.Count(1, "rank") != "1 rank" || units.Count(int64(2), "rank") != "2 ranks" ||
		units.Count(0, "rank") != "0 ranks" {
		t.Error("plural")
	}
	dir, _ := newKept(t)
	_, out, _ := call("plan", filepath.Join(dir, "job.toml"), "--set", "train.steps=1", "--set", "device.threads=1",
		"--set", "parallel.ulysses=1")
	if strings.Contains(out, "1 ranks") || strings.Contains(out, "1 threads") || strings.Contains(out, "1 steps") ||
		!strings.Contains(out, "1 rank, ulysses 1") || !strings.Contains(out, "1 thread a rank") {
		t.Error(out)
	}
}

// The example of packaging/ulysses.def, whose image runs the program, begins with a verb or a job
// file.
func TestImageRunsAVerb(t *testing.T) {
	example := regexp.MustCompile(`(?m)^# .* run .*ulysses\.sif (\S+)`)
	found := example.FindAllStringSubmatch(text(t, "../packaging/ulysses.def"), -1)
	for _, f := range found {
		if verbOf(f[1]) == nil && filepath.Ext(f[1]) != ".toml" {
			t.Errorf("%s: %s is no verb", f[0], f[1])
		}
	}
	if len(found) == 0 {
		t.Error("no example")
	}
}
