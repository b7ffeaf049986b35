package job

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/file"
)

// Folder names may have any characters. A run in such a folder trains, resumes after a kill during
// a checkpoint, is exported and reported. It leaves alone the folders that its name would match as
// a pattern.
func TestAnyName(t *testing.T) {
	// files of the runs beside it: a checkpoint that is written, a flight record, curves
	theirs := []string{"checkpoints/.step-00000004.part/rank-00000.safetensors", "flight/rank-00000.flight",
		"tensorboard/events.out.tfevents.1.host.1.0"}
	for _, name := range []string{"run[12]", "lr[a]", "x[1", "a*b", "q?", `back\slash`, " two  words ", "line\nbreak",
		"größe 数", "-n", "100%d", "a'b\"c$HOME"} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			dir := filepath.Join(root, name)
			// folders that the names match as patterns
			for _, decoy := range []string{"run1", "run2", "aXb", "qq", "lra"} {
				for _, name := range theirs {
					putIn(t, filepath.Join(root, decoy, "out", name), decoy)
				}
				putIn(t, filepath.Join(root, decoy, "b.txt"), "not this job's data")
			}
			putIn(t, filepath.Join(dir, "a.txt"),
				strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 40))
			putIn(t, filepath.Join(dir, "job.toml"), strings.Replace(kept, `"a.txt"`, `"*.txt"`, 1))
			job := filepath.Join(dir, "job.toml")
			if code, _, stderr := call(job, "--ranks", "2", "--set", "checkpoint.keep=9", "--set",
				"output.tensorboard=true"); code != status.OK {
				t.Fatalf("train: exit %d: %s", code, stderr)
			}
			want := losses(t, dir)
			drop(t, dir, 4, 6)
			states := filepath.Join(dir, "out", "checkpoints")
			putIn(t, filepath.Join(states, ".step-00000004.part", "model", "config.json"), "half")
			putIn(t, filepath.Join(states, ".step-00000004.part", "rank-00000.safetensors"), "half")
			putIn(t, filepath.Join(states, ".step-00000000.old", "rank-00000.safetensors"), "half")
			// a file that the manifest does not list
			putIn(t, filepath.Join(states, "step-00000002", "rank-00000.safetensors.keep"), "")
			if code, _, stderr := call(job, "--ranks", "2", "--set", "checkpoint.keep=9"); code != status.OK ||
				!slices.Equal(losses(t, dir), want) {
				t.Fatalf("resume: exit %d: %s", code, stderr)
			}
			whole(t, "resumed", states, "step-00000002", "step-00000004", "step-00000006")
			to := filepath.Join(dir, "exported")
			if code, _, stderr := call("export", states, to); code != status.OK {
				t.Fatalf("export: exit %d: %s", code, stderr)
			}
			a, err := os.ReadFile(filepath.Join(to, "model.safetensors"))
			b, err2 := os.ReadFile(filepath.Join(dir, "out", "model", "model.safetensors"))
			if err != nil || err2 != nil || !bytes.Equal(a, b) {
				t.Errorf("export: %v, %v, or other bytes", err, err2)
			}
			if _, err := os.Stat(filepath.Join(dir, "out", "report.html")); err != nil {
				t.Error(err)
			}
			for _, decoy := range []string{"run1", "run2", "aXb", "qq", "lra"} {
				for _, name := range theirs {
					if text, err := os.ReadFile(filepath.Join(root, decoy, "out", name)); err != nil ||
						string(text) != decoy {
						t.Errorf("of the run in %s: %v", decoy, err)
					}
				}
			}
		})
	}
}

// putIn creates the folder and calls put.
func putIn(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		t.Fatal(err)
	}
	put(t, path, text)
}

// Only characters in the job file form a pattern. The job file's folder and the values of variables
// are plain names, and the exact name of an existing file means that file.
func TestPatternsAreTheAuthors(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a[1]")
	for _, name := range []string{"x.txt", "y[2].txt", "z.txt"} {
		putIn(t, filepath.Join(dir, "in[1]", name), "the cat sat on the mat")
	}
	putIn(t, filepath.Join(dir, "in1", "x.txt"), "another")
	putIn(t, filepath.Join(filepath.Dir(dir), "a1", "in1", "none.txt"), "another")
	putIn(t, filepath.Join(dir, "job.toml"), "")
	getenv := func(name string) (string, bool) { return map[string]string{"IN": "in[1]"}[name], name == "IN" }
	for _, x := range []struct{ path, want string }{
		{"${IN}/*.txt", `in\[1]/*.txt`},
		{"${IN}/y[2].txt", "in[1]/y[2].txt"},
		{"${IN}/[xz].txt", `in\[1]/[xz].txt`},
		{"${IN}/none.txt", `in\[1]/none.txt`},
		{"in1/none.txt", "in1/none.txt"},
	} {
		src := strings.Replace(base, "a.txt", x.path, 1)
		j, err := file.Parse([]byte(src), filepath.Join(dir, "job.toml"), nil, getenv)
		if err != nil {
			t.Fatal(err)
		}
		got := strings.TrimPrefix(strings.TrimPrefix(j.Data.Path[0], filepath.Dir(dir)+"/"), "a[1]/")
		if got != x.want && got != `a\[1]/`+x.want {
			t.Errorf("%s: %s, want %s", x.path, got, x.want)
		}
	}
}
