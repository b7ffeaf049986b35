//go:build mpi

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Ranks that see different copies of a file, as on nodes of which one has a stale copy, are refused
// before the first step. The error names the file, the difference and both ranks. Equal copies are
// accepted. Two folders simulate the nodes.
func TestStaleCopies(t *testing.T) {
	nodes := []string{filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")}
	goldens := filepath.Join("..", "..", "testdata", "goldens")
	text := []byte(strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 40))
	job := filepath.Join(t.TempDir(), "job.toml")
	put := func(path string, text []byte) {
		t.Helper()
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(job, []byte("[model]\npath = \"m\"\n[data]\npath = \"d.txt\"\ntokenizer = \"bytes\"\nsequence = 64\n[optimizer]\nlr = 1e-3\n[train]\nsteps = 2\n[checkpoint]\nevery = 1\n"))
	program, err := filepath.Abs(program) // the ranks have other folders
	if err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "job.toml")
	put(empty, nil)
	argv := func(sets ...string) []string {
		file := job
		if slices.Contains(sets, "kind=attention") {
			file = empty
		} else {
			sets = append([]string{"model.path=m", "data.path=d.txt"}, sets...)
		}
		var commands [][]string
		for rank := range 4 {
			command := []string{"env", "-C", nodes[rank/2], program, file}
			for _, s := range sets {
				command = append(command, "--set", s)
			}
			commands = append(commands, command)
		}
		return append([]string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "4"}, eachRank(commands...)...)
	}
	for _, node := range nodes {
		if err := os.CopyFS(filepath.Join(node, "m"), os.DirFS(filepath.Join(goldens, "models", "qwen3"))); err != nil {
			t.Fatal(err)
		}
		put(filepath.Join(node, "t.json"),
			[]byte(`{"model": {"type": "BPE", "vocab": {"a": 0, "t": 1, " ": 2, "at": 3}, "merges": [["a", "t"]]}}`))
		put(filepath.Join(node, "t.jinja"), []byte("{{ messages[0].content }}"))
		put(filepath.Join(node, "d.txt"), text)
		q, err := os.ReadFile(filepath.Join(goldens, "attention-gqa-packed", "in.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		put(filepath.Join(node, "q.safetensors"), q)
	}
	out := t.TempDir()
	if code, _, stderr := launch(t, nil, argv("output.dir="+out)...); code != 0 {
		t.Fatalf("copies that are alike: exit %d: %s", code, stderr)
	}
	for _, node := range nodes {
		if err := os.CopyFS(filepath.Join(node, "ck"),
			os.DirFS(filepath.Join(out, "checkpoints", "step-00000001"))); err != nil {
			t.Fatal(err)
		}
	}
	b := nodes[1]
	host, _ := os.Hostname()
	between := " differs between rank 0 on " + host + " and rank 2 on " + host + ": "
	last := func(text []byte) []byte { text[len(text)-2] ^= 1; return text }
	for _, x := range []struct {
		file  string
		spoil func(text []byte) []byte
		sets  []string
		want  string
	}{
		{"m/model.safetensors", last, nil, "model.path: model.safetensors" + between + "tensor "},
		{"m/model.safetensors", last, []string{"parallel.zero=3"}, "model.path: model.safetensors" + between +
			"tensor "},
		{"m/config.json", func(text []byte) []byte { return bytes.Replace(text, []byte("}"), []byte(" }"), 1) }, nil,
			"model.path: config.json" + between},
		{"d.txt", func(text []byte) []byte { return bytes.Replace(text, []byte("cat"), []byte("cow"), 1) }, nil,
			"data.path: d.txt" + between},
		{"d.txt", func(text []byte) []byte { return text[1:] }, nil, "data.path: d.txt" + between +
			"it has 2080 bytes on the first and 2079 on the second"},
		{"t.json", func(text []byte) []byte {
			return bytes.Replace(text, []byte(`"a": 0, "t": 1`), []byte(`"a": 1, "t": 0`), 1)
		}, []string{"data.tokenizer=t.json"},
			"data.tokenizer: t.json" + between},
		{"t.jinja", func(text []byte) []byte { return append(text, '!') }, []string{"data.chat_template=t.jinja"},
			"data.chat_template: t.jinja" + between},
		{"q.safetensors", last,
			[]string{"kind=attention", "attention.input=q.safetensors",
				"attention.output=" + filepath.Join(out, "o.safetensors")}, "attention.input: q.safetensors" + between +
				"tensor "},
		{"ck/rank-00000.safetensors", last, []string{"checkpoint.resume=ck"},
			"rank 2: checkpoint ck: rank-00000.safetensors is damaged"},
		{"ck/manifest.json", func([]byte) []byte {
			text, err := os.ReadFile(filepath.Join(out, "checkpoints", "step-00000002", "manifest.json"))
			if err != nil {
				t.Fatal(err)
			}
			return text
		}, []string{"checkpoint.resume=ck"}, "checkpoint ck: manifest.json" + between},
	} {
		path := filepath.Join(b, x.file)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		spoilt := x.spoil(bytes.Clone(text))
		if bytes.Equal(spoilt, text) {
			t.Fatalf("%s is as it was", x.file)
		}
		put(path, spoilt)
		dir := t.TempDir()
		code, _, stderr := launch(t, nil, argv(append(slices.Clone(x.sets), "output.dir="+dir)...)...)
		if code != 2 || !strings.Contains(stderr, x.want) || strings.Contains(stderr, "while a job runs") {
			t.Errorf("%s %v: exit %d, want %q: %s", x.file, x.sets, code, x.want, stderr)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "metrics.jsonl")); len(left) > 0 {
			t.Errorf("%s: a step was taken", x.file)
		}
		put(path, text)
	}
}
