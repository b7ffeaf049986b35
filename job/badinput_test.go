package job

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/job/launch"
	"ulysses/tensor"
)

// writeTensors writes a model file whose tensors were changed by edit.
func writeTensors(t *testing.T, from, to string, edit func(name string, shape []int64, x []float32) []int64) {
	t.Helper()
	s, err := tensor.OpenSafetensors(from)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var items []tensor.Item
	for _, e := range s.Entries() {
		x := make([]float32, e.Numel())
		if err := s.ReadFloat32(e, 0, x); err != nil {
			t.Fatal(err)
		}
		if shape := edit(e.Name, e.Shape, x); shape != nil {
			items = append(items, tensor.Item{Name: e.Name, Tensor: tensor.OfFloat32(x, shape...)})
		}
	}
	if err := tensor.WriteSafetensors(to, nil, items); err != nil {
		t.Fatal(err)
	}
}

// Every fault of a model, data or folder has an error that names it and the right code. All ranks
// return the same code, and no output remains.
func TestBadInput(t *testing.T) {
	source := filepath.Join(goldens, "models", "qwen3")
	keep := func(_ string, shape []int64, _ []float32) []int64 { return shape }
	pointer := func(name string, sets ...string) func(t *testing.T, model, data string) []string {
		return func(t *testing.T, _, data string) []string {
			path := filepath.Join(filepath.Dir(data), name)
			put(t, path, "version https://git-lfs.github.com/spec/v1\noid sha256:"+strings.Repeat("4d", 32)+
				"\nsize 3441185608\n")
			if filepath.Ext(name) != ".json" && filepath.Dir(name) == "." {
				return append(sets, "data.path=[\""+path+"\"]")
			}
			return sets
		}
	}
	for _, c := range []struct {
		name string
		edit func(t *testing.T, model, data string) []string // breaks something; more --set
		code status.Code
		want []string
	}{
		{"truncated weights", func(t *testing.T, m, _ string) []string {
			truncate(t, filepath.Join(m, "model.safetensors"), 100)
			return nil
		}, status.InvalidConfig, []string{"model.safetensors", "truncated"}},
		{"header longer than the file", func(t *testing.T, m, _ string) []string {
			put(t, filepath.Join(m, "model.safetensors"), "\xff\xff\xff\xff\xff\xff\xff\x00{}")
			return nil
		}, status.InvalidConfig, []string{"model.safetensors", "header"}},
		{"no weights", func(t *testing.T, m, _ string) []string {
			os.Remove(filepath.Join(m, "model.safetensors"))
			return nil
		}, status.IO, []string{"model.safetensors"}},
		{"no config", func(t *testing.T, m, _ string) []string {
			os.Remove(filepath.Join(m, "config.json"))
			return nil
		}, status.IO, []string{"config.json"}},
		{"no folder", func(*testing.T, string, string) []string { return []string{"model.path=/nowhere"} }, status.IO,
			[]string{"/nowhere"}},
		{"not a model", func(t *testing.T, m, _ string) []string {
			put(t, filepath.Join(m, "config.json"), `{"model_type": "gpt2", "n_embd": 4}`)
			return nil
		}, status.Unsupported, []string{"gpt2"}},
		{"a tensor is missing", func(t *testing.T, m, _ string) []string {
			writeTensors(t, filepath.Join(source, "model.safetensors"), filepath.Join(m, "model.safetensors"),
				func(n string, s []int64, x []float32) []int64 {
					if n == "model.norm.weight" {
						return nil
					}
					return s
				})
			return nil
		}, status.InvalidConfig, []string{"model.norm.weight"}},
		{"a shape disagrees with config.json", func(t *testing.T, m, _ string) []string {
			var fields map[string]any
			b, err := os.ReadFile(filepath.Join(m, "config.json"))
			if err != nil || json.Unmarshal(b, &fields) != nil {
				t.Fatal(err)
			}
			fields["intermediate_size"] = fields["intermediate_size"].(float64) + 8
			b, _ = json.Marshal(fields)
			put(t, filepath.Join(m, "config.json"), string(b))
			return nil
		}, status.InvalidConfig, []string{"mlp", "intermediate_size"}},
		{"NaN weights", func(t *testing.T, m, _ string) []string {
			writeTensors(t, filepath.Join(source, "model.safetensors"), filepath.Join(m, "model.safetensors"),
				func(n string, s []int64, x []float32) []int64 {
					if n == "model.layers.1.mlp.up_proj.weight" {
						x[7] = float32(math.NaN())
					}
					return s
				})
			return nil
		}, status.Numeric, []string{"model.layers.1.mlp.up_proj.weight", "NaN"}},
		{"ids outside the vocabulary", func(t *testing.T, _, d string) []string {
			tokens := make([]int32, 128)
			tokens[65] = 70000
			if err := tensor.WriteSafetensors(d, nil,
				[]tensor.Item{{Name: "input_ids", Tensor: tensor.OfInt32(tokens, 2, 64)}}); err != nil {
				t.Fatal(err)
			}
			return nil
		}, status.InvalidConfig, []string{"70000", "sequence 1", "position 1"}},
		{"empty data", func(t *testing.T, _, d string) []string {
			empty := strings.TrimSuffix(d, ".safetensors") + ".txt"
			put(t, empty, "")
			return []string{"data.path=[\"" + empty + "\"]"}
		}, status.InvalidConfig, []string{"empty"}},
		{"no such data", func(*testing.T, string, string) []string { return []string{`data.path=["/nowhere.txt"]`} },
			status.IO, []string{"/nowhere.txt"}},
		{"a pointer in place of model/model.safetensors", pointer("model/model.safetensors"), status.IO,
			[]string{"model/model.safetensors is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of model/config.json", pointer("model/config.json"), status.IO,
			[]string{"model/config.json is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of model/tokenizer.json", pointer("model/tokenizer.json", `data.path=["text.txt"]`),
			status.IO, []string{"model/tokenizer.json is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of data.safetensors", pointer("data.safetensors"), status.IO,
			[]string{"data.safetensors is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of data.txt", pointer("data.txt"), status.IO,
			[]string{"data.txt is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of data.jsonl", pointer("data.jsonl"), status.IO,
			[]string{"data.jsonl is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of data.jsonl.zst", pointer("data.jsonl.zst"), status.IO,
			[]string{"data.jsonl.zst is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of data.parquet", pointer("data.parquet"), status.IO,
			[]string{"data.parquet is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of data.idx", pointer("data.idx"), status.IO,
			[]string{"data.idx is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"a pointer in place of data.bin", pointer("data.bin"), status.IO,
			[]string{"data.bin is a Git LFS pointer", "; run `git lfs pull` in its folder"}},
		{"wrong width", func(*testing.T, string, string) []string { return []string{"data.sequence=65"} },
			status.InvalidConfig, []string{"65", "64"}},
		{"unwritable output", func(t *testing.T, _, d string) []string {
			return []string{"output.dir=" + filepath.Join(d, "out")}
		},
			status.IO, []string{"output.dir"}},
		{"ranks that do not divide", func(*testing.T, string, string) []string {
			return []string{"parallel.ulysses=2"}
		}, status.InvalidConfig,
			[]string{"parallel.ulysses", "3"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			m, d, out := filepath.Join(dir, "model"), filepath.Join(dir, "data.safetensors"), filepath.Join(dir, "out")
			if err := os.CopyFS(m, os.DirFS(source)); err != nil {
				t.Fatal(err)
			}
			writeTensors(t, filepath.Join(source, "model.safetensors"), filepath.Join(m, "model.safetensors"), keep)
			if err := tensor.WriteSafetensors(d, nil,
				[]tensor.Item{{Name: "input_ids", Tensor: tensor.OfInt32(make([]int32, 128), 2, 64)}}); err != nil {
				t.Fatal(err)
			}
			job := filepath.Join(dir, "job.toml")
			put(t, job, "[model]\npath = \"model\"\n[data]\npath = [\"data.safetensors\"]\nsequence = 64\n[optimizer]\nlr = 0.1\n[train]\nsteps = 1\n")
			sets := append([]string{"output.dir=" + out}, c.edit(t, m, d)...)
			err := Run(Options{Path: job, Sets: sets, Ranks: 3, Stdout: io.Discard, Stderr: io.Discard})
			if status.Of(err) != c.code {
				t.Fatalf("code %v, want %v: %v", status.Of(err), c.code, err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
			if strings.Contains(err.Error(), "panic") || strings.Contains(err.Error(), "goroutine") {
				t.Errorf("the error has a stack: %v", err)
			}
			if left, _ := filepath.Glob(filepath.Join(out, "model*")); len(left) > 0 {
				t.Errorf("partly written files remain: %v", left)
			}
		})
	}
}

// All ranks return the same code, also if only one rank has found the fault.
func TestRefusalsAreCommon(t *testing.T) {
	dir := t.TempDir()
	job := filepath.Join(dir, "job.toml")
	putIn(t, filepath.Join(dir, "m", "config.json"), `{"model_type": "llama", "hidden_size": 0}`)
	put(t, job, "[model]\npath = \"m\"\n[data]\npath = [\"x.txt\"]\n[optimizer]\nlr = 1e-3\n")
	var mu sync.Mutex
	var codes []status.Code
	err := onRanks(Options{Path: job, Ranks: 4, Stdout: io.Discard, Stderr: &bytes.Buffer{}}, func(e *Env) error {
		err := runKind(e)
		_ = e.world.Barrier() // all ranks have theirs before one returns
		mu.Lock()
		defer mu.Unlock()
		codes = append(codes, status.Of(err))
		return err
	})
	if len(codes) != 4 {
		t.Fatalf("%d ranks came back: %v", len(codes), err)
	}
	for _, c := range codes {
		if c != status.InvalidConfig {
			t.Errorf("codes %v", codes)
		}
	}
}

// Ranks with different command lines are refused together. The error names the rank and the
// difference.
func TestCommandLinesAreOne(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.toml"), filepath.Join(dir, "b.toml")
	for _, x := range []struct {
		name  string
		other Options
		want  string
	}{
		{"verb", Options{Path: a, verb: "verify"}, "command line: verb is verify on rank 2 and run on rank 0"},
		{"job file", Options{Path: b, verb: "run"}, "command line: job file is " + b + " on rank 2 and " + a +
			" on rank 0"},
		{"--set", Options{Path: a, verb: "run", Sets: []string{"seed=2"}},
			`command line: --set is ["seed=2"] on rank 2 and [] on rank 0`},
	} {
		err := comm.RunLocal(3, func(c comm.Comm) error {
			o := Options{Path: a, verb: "run"}
			if c.Rank() == 2 {
				o = x.other
			}
			o.Stdout, o.Stderr = io.Discard, io.Discard
			err, _ := runRank(launch.Rank{World: c, OnNode: 3, Local: c.Rank()}, o, runKind)
			if status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), x.want) {
				t.Errorf("%s: rank %d: %v", x.name, c.Rank(), err)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", x.name, err)
		}
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func truncate(t *testing.T, path string, by int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err = errors.Join(err, os.Truncate(path, info.Size()-by)); err != nil {
		t.Fatal(err)
	}
}
