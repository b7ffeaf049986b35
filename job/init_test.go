package job

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/file"
)

// init writes a job file that trains once there is data, for each kind of model folder and from
// scratch. It does not overwrite an existing file.
func TestInit(t *testing.T) {
	models, err := filepath.Glob("../testdata/goldens/models/*/config.json")
	if err != nil || len(models) < 4 {
		t.Fatal(models, err)
	}
	root, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, config := range append(models, "") {
		dir := t.TempDir()
		t.Chdir(dir)
		put(t, "train.jsonl",
			strings.Repeat(`{"text": "the cat sat on the mat, and the dog sat on the log."}`+"\n", 200))
		put(t, "train.txt", strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 200))
		args, sets, folder := []string{"init"},
			[]string{"--ranks", "2", "--set", "data.tokenizer=bytes", "--set", "optimizer.warmup=0", "-q"}, ""
		if config != "" {
			folder = filepath.Dir(filepath.Join(root, config))
			args = append(args, folder)
		}
		code, out, errs := call(args...)
		if code != status.OK || errs != "" ||
			out != "wrote job.toml\nedit data.path in it, then: ulysses-mpi plan job.toml\n" {
			t.Fatalf("%s: %v\n%s%s", config, code, out, errs)
		}
		// a laptop without MPI, and comments in one column
		if s := text(t, "job.toml"); !strings.Contains(s, " ulysses-mpi job.toml --ranks 4") ||
			strings.Index(line(s, "sequence = "), "#") != strings.Index(line(s, "path = ["), "#") {
			t.Errorf("%s: %s", config, s)
		}
		j, err := file.Parse([]byte(text(t, "job.toml")), "job.toml", nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", config, err)
		}
		if folder != "" {
			c, err := j.ReadConfig()
			if err != nil || j.Model.Path != folder || j.Data.Sequence != min(c.Positions(), longestStart) ||
				!j.IsSet("optimizer.lr") || j.Kind != "train" {
				t.Errorf("%s: %v %+v", config, err, j)
			}
			sets = append(sets, "--set", "train.epochs=0", "--set", "train.steps=1")
		} else {
			sets = append(sets, "--set", "train.steps=1")
		}
		if code, out, errs := call(append([]string{"job.toml"}, sets...)...); code != status.OK ||
			!strings.HasPrefix(out, "finished its one step: loss ") || errs != "" {
			t.Errorf("%s: %v\n%s%s", config, code, out, errs)
		}
		before := text(t, "job.toml")
		if code, _, errs := call("init"); code != status.IO ||
			!strings.Contains(errs, "init: job.toml exists; name another file with -o") ||
			text(t, "job.toml") != before {
			t.Errorf("%v %s", code, errs)
		}
	}
}

// The job file names the folder relative to itself. A folder that cannot be named or read is
// refused, and no file is written.
func TestInitNamesTheFolder(t *testing.T) {
	golden, err := filepath.Abs("../testdata/goldens/models/qwen3/config.json")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	for _, dir := range []string{"models/a \"b\" [1]", "jobs", "models/${x}", "empty"} {
		if err := os.MkdirAll(dir, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"models/a \"b\" [1]", "models/${x}"} {
		put(t, filepath.Join(dir, "config.json"), text(t, golden))
	}
	if code, _, errs := call("init", "models/a \"b\" [1]", "-o", "jobs/x.toml"); code != status.OK {
		t.Fatal(code, errs)
	}
	j, err := file.Parse([]byte(text(t, "jobs/x.toml")), "jobs/x.toml", nil, nil)
	if err != nil || j.Model.Path != "models/a \"b\" [1]" || !strings.Contains(text(t, "jobs/x.toml"), "../models/a") {
		t.Errorf("%v %+v", err, j.Model)
	}
	for _, x := range []struct {
		args string
		code status.Code
		want string
	}{
		{"empty", status.IO, "init: empty: no config.json here"},
		{"Qwen/Qwen3-0.6B", status.IO, "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B"},
		{"https://huggingface.co/Qwen/Qwen3-0.6B", status.InvalidArgument,
			"hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"},
		{"models/${x}", status.InvalidArgument, "${ starts a variable"},
		{"a b", status.InvalidArgument, "init: there are 2 model-folders: a, b"},
		{"-o nowhere/y.toml", status.IO, "init: open nowhere/y.toml"},
		{"--ranks 2", status.InvalidArgument, "init: --ranks is a flag of run, plan, verify"},
	} {
		code, out, errs := call(append([]string{"init"}, strings.Fields(x.args)...)...)
		if _, err := os.Stat("job.toml"); code != x.code || out != "" || !strings.Contains(errs, x.want) || err == nil {
			t.Errorf("%s: %v %s%s, want %v %s; a file was written: %v", x.args, code, out, errs, x.code, x.want,
				err == nil)
		}
	}
}

// On a full disk, init and sbatch leave no incomplete file, which the next call would refuse.
func TestNewFileOnAFullDisk(t *testing.T) {
	dir, _ := newKept(t)
	disk := filepath.Join(dir, "disk")
	mkdir(t, disk)
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=4k"); err != nil {
		needsMounts(t, err)
	}
	defer syscall.Unmount(disk, syscall.MNT_DETACH)
	put(t, filepath.Join(disk, "full"), strings.Repeat("x", 4096))
	for _, args := range [][]string{{"init"}, {"sbatch", filepath.Join(dir, "job.toml")}} {
		code, _, stderr := call(append(args, "-o", filepath.Join(disk, "new"))...)
		if left := entries(t, disk); code != status.IO || len(left) != 1 {
			t.Errorf("%s: %v, %v, %s", args[0], code, left, stderr)
		}
	}
}

// line returns the first line of a text with the given beginning.
func line(text, begin string) string {
	for l := range strings.Lines(text) {
		if strings.HasPrefix(l, begin) {
			return l
		}
	}
	return ""
}
