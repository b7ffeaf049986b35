//go:build mpi

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Processes decide alike which checkpoint is the best and when the run ends, and show samples.
// Other numbers of processes evaluate its checkpoints, and compare them with the model folder.
func TestEvaluateUnderMPI(t *testing.T) {
	out := t.TempDir()
	job := small(out, "train.steps=9", "parallel.ulysses=2", "parallel.zero=3", "eval.split=0.1", "eval.every=1",
		"eval.patience=1", "eval.threshold=100.0", "checkpoint.best=true", "checkpoint.every=5", "checkpoint.keep=1",
		`eval.sample=["the "]`, "eval.sample_tokens=4")
	code, stdout, stderr := mpirun(t, "4", nil, append(job, "--log", "json")...)
	if code != 0 || !strings.Contains(stdout, "ended early") || strings.Count(stderr, `"message":"sample"`) != 2 {
		t.Fatalf("exit %d\n%s\n%s", code, stdout, stderr)
	}
	losses := map[int64]float64{}
	text, err := os.ReadFile(filepath.Join(out, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		var x struct {
			Step int64
			Loss *float64 `json:"eval_loss"`
		}
		if err := json.Unmarshal([]byte(line), &x); err != nil {
			t.Fatal(err)
		}
		if x.Loss != nil {
			losses[x.Step] = *x.Loss
		}
	}
	if len(losses) != 2 { // the second one has not improved by 100
		t.Fatalf("evaluations %v", losses)
	}
	var texts []string
	for _, n := range []string{"1", "2"} { // which divide the layers
		code, stdout, stderr := mpirun(t, n, nil, "generate", filepath.Join(out, "model"), "the ", "--max-tokens",
			"12", "-q")
		if code != 0 {
			t.Fatalf("%s ranks: exit %d\n%s", n, code, stderr)
		}
		texts = append(texts, stdout)
	}
	if texts[0] != texts[1] || len(texts[0]) < 12 {
		t.Errorf("generated %q on one rank, %q on two", texts[0], texts[1])
	}
	for _, n := range []string{"1", "3"} {
		eval := append([]string{"eval"}, job...)
		eval = append(eval, "--set", "parallel.ulysses=0", "--set", "eval.sample=[]", "--log", "json")
		code, stdout, stderr := mpirun(t, n, nil, eval...)
		if code != 0 || !strings.Contains(stderr, "step-00000002") {
			t.Fatalf("%s ranks: exit %d\n%s\n%s", n, code, stdout, stderr)
		}
		compare := append([]string{"logits"}, job...)
		compare = append(compare, filepath.Join(out, "checkpoints"), "--set", "parallel.ulysses=0", "--compare",
			filepath.Join(out, "model"), "--json")
		code, stdout, stderr = mpirun(t, n, nil, compare...)
		var x struct {
			Loss     float64
			Compared struct{ Bitwise bool }
		}
		if err := json.Unmarshal([]byte(stdout), &x); code != 0 || err != nil || !x.Compared.Bitwise {
			t.Fatalf("%s ranks: exit %d, %v\n%s\n%s", n, code, err, stdout, stderr)
		}
		same(t, n+" ranks", []float64{x.Loss}, []float64{losses[2]}, 1e-5)
	}
}

// A folder that one node does not have is named with the rank, and one that no node has is named
// once.
func TestEvaluateAFolderOfOneNode(t *testing.T) {
	job, err := filepath.Abs(quick)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, folder := range []string{"0/model", "1"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "0/model/config.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	on := func(rank string, words ...string) []string {
		return append([]string{"sh", "-c", `cd "$0" && exec "$@"`, filepath.Join(dir, rank), program}, words...)
	}
	for want, words := range map[string][]string{
		"ulysses-mpi: rank 1: eval: model: no such folder":   {"eval", job, "model"},
		"ulysses-mpi: rank 1: logits: model: no such folder": {"logits", job, "model", "--compare", "model"},
		"ulysses-mpi: logits: none: no such folder":          {"logits", job, "none"},
	} {
		argv := append([]string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2"},
			eachRank(on("0", words...), on("1", words...))...)
		if code, _, stderr := launch(t, nil, argv...); code != int(status.InvalidConfig) ||
			strings.Count(stderr, want) != 1 || strings.Count(stderr, "no such folder") != 1 {
			t.Errorf("%q: exit %d: %s", words, code, stderr)
		}
	}
}
