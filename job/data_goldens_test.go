package job

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/data"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/job/plan"
)

// The data of the goldens, read through the job file and the loader, has the number of targets that
// PyTorch counted in each step.
func TestGoldenTargets(t *testing.T) {
	cases, err := filepath.Glob("../testdata/goldens/*/case.json")
	if err != nil || len(cases) == 0 {
		t.Fatal("no goldens", err)
	}
	counted := 0
	for _, path := range cases {
		var c struct {
			Kind, Name, Job, Model string
			Ranks                  int
			TargetTokens           []int64 `json:"target_tokens"`
			Tokens                 []int64
		}
		b, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(b, &c)
		}
		if err != nil {
			t.Fatal(path, err)
		}
		name := filepath.Join(filepath.Dir(path), c.Job)
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		j, err := file.Parse(src, name, nil, nil)
		if err == nil {
			err = j.Resolve(c.Ranks)
		}
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		if c.Kind != "train" {
			continue
		}
		counted++
		var config struct {
			Vocab int64 `json:"vocab_size"`
		}
		if b, err = os.ReadFile(filepath.Join(j.Model.Path, "config.json")); err == nil {
			err = json.Unmarshal(b, &config)
		}
		if err != nil {
			t.Fatal(err)
		}
		opened, err := data.Open(j.Data, j.Eval, data.Options{Vocab: config.Vocab, Seed: uint64(j.Seed)})
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		for step, want := range c.TargetTokens {
			targets, tokens := int64(0), int64(0)
			for a := range j.Data.Accumulate {
				for d := range j.Mesh.Replicas {
					m, err := opened.Train().MicroBatch(int64(step), a, d, j.Mesh.Replicas, j.Data.Batch,
						j.Data.Accumulate, nil)
					if err != nil {
						t.Fatal(err)
					}
					targets, tokens = targets+m.Valid, tokens+int64(len(m.IDs))
				}
			}
			if targets != want || step < len(c.Tokens) && tokens != c.Tokens[step] {
				t.Errorf("%s: step %d: %d targets of %d tokens, PyTorch counted %d", c.Name, step+1, targets,
					tokens, want)
			}
		}
		opened.Close()
	}
	if counted == 0 {
		t.Error("no training case")
	}
}

func TestTokenizerOfTheModel(t *testing.T) {
	dir := t.TempDir()
	own := filepath.Join(dir, "tokenizer.json")
	if err := os.WriteFile(own, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		sets []string
		want string
	}{
		{[]string{"data.path=a.txt"}, own},
		{[]string{"data.path=a.txt", "data.tokenizer=bytes"}, "bytes"},
		{[]string{"data.path=a.txt", "data.tokenizer=auto"}, own},
		{[]string{"data.path=a.txt", "data.tokenizer=b/tokenizer.json"}, "b/tokenizer.json"},
		{[]string{"data.path=a.safetensors"}, "bytes"},
		{[]string{"data.path=a.bin"}, "bytes"},
		{[]string{"data.path=a.safetensors", "eval.path=b.jsonl"}, own},
		{[]string{"data.path=a.bin", "eval.split=0.1", "eval.sample=the whale"}, own},
		{[]string{"data.path=a.bin", "eval.split=0.1", "eval.sample=the whale", "data.tokenizer=bytes"}, "bytes"},
	} {
		j, err := parse("[optimizer]\nlr = 1e-5\n[model]\npath = \""+dir+"\"", c.sets...)
		if err != nil {
			t.Fatal(err)
		}
		if err := j.Resolve(1); err != nil || j.Data.Tokenizer != c.want {
			t.Errorf("%v: %q, want %q: %v", c.sets, j.Data.Tokenizer, c.want, err)
		}
	}
	if err := os.Rename(own, filepath.Join(dir, "tokenizer.model")); err != nil {
		t.Fatal(err)
	}
	j, err := parse("[optimizer]\nlr = 1e-5\n[model]\npath = \"" + dir + "\"\n[data]\npath = \"a.txt\"")
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Resolve(1); status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), "tokenizer.model") {
		t.Error(err)
	}
}

// Every example is a valid job for its number of ranks: four for the small ones that the
// documentation runs.
func TestExamplesAreJobs(t *testing.T) {
	files, err := filepath.Glob("../examples/*.toml")
	if err != nil || len(files) == 0 {
		t.Fatal("no examples", err)
	}
	for _, name := range files {
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		j, err := file.Parse(src, name, nil, nil)
		if err == nil {
			err = j.Resolve(plan.RanksOfReplica(j))
		}
		want := map[string]int64{"llama-70b.toml": 64, "llama-8b-one-gpu.toml": 1}[filepath.Base(name)]
		if want == 0 {
			want = 4
		}
		if err == nil && filepath.Base(name) != "llama-8b.toml" && j.Mesh.World != want {
			t.Errorf("%s is for %d ranks", name, j.Mesh.World)
		}
		if err != nil {
			t.Error(err)
		}
	}
}
