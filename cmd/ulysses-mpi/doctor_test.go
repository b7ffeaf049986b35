//go:build mpi

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// wrong is a script that runs the program in folder a, but rank 2 as the test's argument says. A
// launcher starts it instead of the program.
func wrong(t *testing.T, rankTwo string) (script string, folders [2]string) {
	t.Helper()
	dir := t.TempDir()
	for i, name := range []string{"a", "b"} {
		folders[i] = filepath.Join(dir, name)
		if err := os.MkdirAll(folders[i], 0o700); err != nil {
			t.Fatal(err)
		}
		for file, text := range map[string]string{
			"job.toml": "[model.new]\nmodel_type = \"qwen3\"\nhidden_size = 64\nintermediate_size = 128\nnum_hidden_layers = 2\nnum_attention_heads = 4\nnum_key_value_heads = 2\nvocab_size = 256\n" +
				"[data]\npath = \"text.txt\"\nsequence = 64\n[optimizer]\nlr = 1e-3\n[train]\nsteps = 2\n",
			"text.txt": strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 40)} {
			if err := os.WriteFile(filepath.Join(folders[i], file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	self, err := filepath.Abs(program)
	if err != nil {
		t.Fatal(err)
	}
	script = filepath.Join(dir, "run")
	text := fmt.Sprintf(
		"#!/bin/sh\nprogram=%s\ncd %s\nif [ \"${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}\" = 2 ]; then %s; fi\nexec \"$program\" \"$@\"\n",
		self, folders[0], rankTwo)
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return script, folders
}

// slow matches findings about speed, which depend on what else runs on the machine.
var slow = regexp.MustCompile(`(?m)^slow (device|link): .*\n\n`)

// Before a job runs, doctor --cluster names the rank, its host and what differs on it.
func TestDoctorCluster(t *testing.T) {
	host, _ := os.Hostname()
	on := " on " + host
	for _, c := range []struct {
		name    string
		rankTwo string // shell commands; $dir is the test's folder
		spoil   func(b string) error
		code    int
		want    string // "" = nothing is wrong
	}{
		{"well", ":", nil, 0, ""},
		{"job file", "cd ../b", func(b string) error { return edit(filepath.Join(b, "job.toml"), "1e-3", "2e-3") }, 2,
			"job file: rank 2" + on + ": sha256 "},
		{"no job file", "cd ../b", func(b string) error { return os.Remove(filepath.Join(b, "job.toml")) }, 2,
			"job file: rank 2" + on + ": cannot be read: "},
		{"data", "cd ../b", func(b string) error { return edit(filepath.Join(b, "text.txt"), "cat", "cow") }, 2,
			"data.path: text.txt differs between rank 0" + on + " and rank 2" + on},
		{"no data", "cd ../b", func(b string) error { return os.Remove(filepath.Join(b, "text.txt")) }, 7,
			"data.path: rank 2" + on + ": text.txt: no such file"},
		{"program", `cp "$program" ../other; echo >>../other; program=../other`, nil, 1, "program: rank 2" + on +
			": ulysses-mpi "},
		{"variable", "export UCX_TLS=tcp", nil, 1, "environment: rank 2" + on + ": UCX_TLS=tcp; ranks 0, 1, 3" + on +
			": UCX_TLS is not set"},
		{"kernels", "export ULYSSES_ISA=portable", nil, 2, "kernels: rank 2" + on + ": portable"},
	} {
		t.Run(c.name, func(t *testing.T) {
			script, folders := wrong(t, c.rankTwo)
			if c.spoil != nil {
				if err := c.spoil(folders[1]); err != nil {
					t.Fatal(err)
				}
			}
			code, stdout, stderr := launch(t, nil, "mpirun", "--oversubscribe", "--bind-to", "none", "-n", "4", script,
				"doctor", "--cluster", "job.toml", "--set", "output.dir="+folders[0])
			found := slow.ReplaceAllString(stdout, "")
			if c.want == "" && len(found) == len(stdout) &&
				(code != 0 || !strings.Contains(stdout, "4 ranks on 1 node: nothing is wrong\n")) {
				t.Errorf("exit %d: %s%s", code, stdout, stderr)
			}
			if c.want != "" && (code != c.code || !strings.Contains(found, "\n"+c.want)) {
				t.Errorf("exit %d, want %d with %q: %s%s", code, c.code, c.want, stdout, stderr)
			}
			if n := strings.Count(found, "\n\n"); !strings.HasPrefix(stdout, "node ") || c.want == "" &&
				n != 1 || n > 3 {
				t.Errorf("%d paragraphs: %s", n, stdout)
			}
		})
	}
}

func edit(path, from, to string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(strings.ReplaceAll(string(text), from, to)), 0o600)
}
