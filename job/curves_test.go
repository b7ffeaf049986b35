package job

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// Lines of metrics.jsonl are flat; run and total_tokens continue when a run resumes. Each part of
// the run has an event file, and a new run with output.overwrite removes them.
func TestCurves(t *testing.T) {
	dir, run := newKept(t, "checkpoint.every=2", "output.tensorboard=true", "optimizer.schedule=constant",
		"eval.split=0.2", "eval.every=2")
	parts := func() int {
		files, _ := filepath.Glob(filepath.Join(dir, "out", "tensorboard", "events.out.tfevents.*"))
		for _, path := range files {
			if text, err := os.ReadFile(path); err != nil || !bytes.Contains(text, []byte("train/loss")) ||
				!bytes.Contains(text, []byte("eval/loss")) {
				t.Errorf("%s has no losses: %v", path, err)
			}
		}
		return len(files)
	}
	for i, steps := range []string{"2", "4"} {
		if _, err := run(2, "train.steps="+steps); err != nil {
			t.Fatal(err)
		}
		if parts() != 1 && i == 0 {
			t.Error("not one event file")
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "out", "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var first string
	var total float64
	for line := range bytes.Lines(text) {
		var r map[string]any
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		for key, value := range r {
			switch value.(type) {
			case float64, bool, string:
			default:
				t.Errorf("%s is %v", key, value)
			}
		}
		if first == "" {
			first = r["run"].(string)
		}
		if r["run"] != first || len(first) != 12 || r["time"].(float64) < 1.7e9 {
			t.Errorf("run %v, time %v", r["run"], r["time"])
		}
		if tokens, ok := r["tokens"].(float64); ok {
			if total += tokens; r["total_tokens"] != total || r["phase_seconds/attention"] == nil {
				t.Errorf("total_tokens %v, want %v, phases %v", r["total_tokens"], total, r["phase_seconds/attention"])
			}
		}
	}
	if _, err := run(2, "train.steps=2", "output.overwrite=true", "checkpoint.resume=off"); err != nil || parts() != 1 {
		t.Errorf("a new run: %v, %d event files", err, parts())
	}
	// a run that resumes from a checkpoint of another folder is a new one here
	elsewhere := filepath.Join(dir, "elsewhere")
	if err := os.Rename(filepath.Join(dir, "out", "checkpoints"), elsewhere); err != nil {
		t.Fatal(err)
	}
	from := "checkpoint.resume=" + filepath.Join(elsewhere, "step-00000002")
	if _, err := run(2, "train.steps=4", "output.overwrite=true", from); err != nil || parts() != 1 {
		t.Errorf("a run with %s: %v, %d event files", from, err, parts())
	}
}
