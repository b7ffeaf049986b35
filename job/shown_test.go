package job

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/file"
)

// A run writes no secret of its environment into its files: no value of a variable outside
// shownVariables, no login of a URL, and no value of a variable in a path. The report shows the
// values of shownVariables.
func TestNoSecretIsWritten(t *testing.T) {
	secrets := map[string]string{}
	for i, name := range []string{"SLURM_JWT", "SLURM_EXPORT_ENV", "ULYSSES_APIKEY", "SLURM_SPANK_APIKEY",
		"ULYSSES_DB_PWD", "SLURM_PROXY_AUTH", "ULYSSES_PRIVATE", "SLURM_SSH_PRIVATE",
		"ULYSSES_HF", "SLURM_JOB_COMMENT", "HF_TOKEN", "NCCL_SECRET"} {
		secrets[name] = "hunter" + strings.Repeat("2", i+1) + "x"
		t.Setenv(name, secrets[name])
	}
	folder := filepath.Join(t.TempDir(), "folder-of-s3cr3t")
	t.Setenv("DATA_SECRET", folder)
	t.Setenv("SLURM_JOB_NAME", "<b>bold</b>")
	t.Setenv("OMP_NUM_THREADS", "1")
	t.Setenv("ULYSSES_TIMEOUT", "9m")
	t.Setenv("NCCL_SOCKET_IFNAME", "https://login:p4ssw0rd@host/x")
	if err := os.Mkdir(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(folder, "a.txt"), strings.Repeat("the cat sat on the mat. ", 90))
	dir, run := newKept(t, "checkpoint.every=3", "output.trace=[1, 2]", "data.path=${DATA_SECRET}/a.txt")
	source := text(t, filepath.Join(dir, "job.toml"))
	put(t, filepath.Join(dir, "job.toml"),
		"# mirrored from https://login:p4ssw0rd@example.org/books and ssh://git:p4ss/w0rd@host:22/x\n"+source)
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	files := 0
	err := filepath.WalkDir(filepath.Join(dir, "out"), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		b, err := os.ReadFile(path)
		for name, value := range secrets {
			if bytes.Contains(b, []byte(value)) {
				t.Errorf("%s holds the value of %s", path, name)
			}
		}
		for _, value := range []string{"s3cr3t", "p4ss", "login:"} {
			if at := bytes.Index(b, []byte(value)); at >= 0 {
				t.Errorf("%s: %q", path, b[max(0, at-60):min(len(b), at+60)])
			}
		}
		return err
	})
	if err != nil || files < 6 {
		t.Fatalf("%d files, %v", files, err)
	}
	p := readReport(t, filepath.Join(dir, "out", "report.html"))
	for name, want := range map[string]string{"SLURM_JOB_NAME": "<b>bold</b>", "OMP_NUM_THREADS": "1",
		"ULYSSES_TIMEOUT": "9m", "NCCL_SOCKET_IFNAME": "https://***@host/x"} {
		if r := p.row("environment", name); r[1] != want {
			t.Errorf("%s: %q", name, r)
		}
	}
	for _, want := range []string{"https://***@example.org/books", "ssh://***@host:22/x",
		"--set data.path=${DATA_SECRET}/a.txt"} {
		if !strings.Contains(p.text["job"], want) {
			t.Errorf("the job does not say %q: %s", want, p.text["job"])
		}
	}
	if r := p.row("job", "data.path"); r[1] != `["${DATA_SECRET}/a.txt"]` {
		t.Errorf("data.path: %q", r)
	}
	for name := range secrets {
		if r := p.row("environment", name); r[0] != "" {
			t.Errorf("%s is listed: %q", name, r)
		}
	}
	if r := p.row("environment", "other variables"); !strings.Contains(r[1], "10 of SLURM_ and ULYSSES_") {
		t.Errorf("other variables: %q", r)
	}
}

// Of a run that trains adapters, only manifest.json and adapter_config.json hold the whole path of
// model.path, as docs/job-file.md says.
func TestFilesWithThePathOfTheModel(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "folder-of-s3cr3t")
	t.Setenv("MODEL_SECRET", folder)
	if err := os.CopyFS(folder, os.DirFS("../testdata/goldens/models/qwen3")); err != nil {
		t.Fatal(err)
	}
	dir, run := newKept(t, "model.new={}", "model.path=${MODEL_SECRET}", "lora.rank=2", "optimizer.lr=1e-3",
		"data.tokenizer=bytes", "output.trace=[1, 2]", "output.tensorboard=true")
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	err := filepath.WalkDir(filepath.Join(dir, "out"), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if bytes.Contains(b, []byte("s3cr3t")) {
			found[filepath.Base(path)] = true
		}
		return err
	})
	if err != nil || len(found) != 2 || !found["manifest.json"] || !found["adapter_config.json"] {
		t.Errorf("%v %v", found, err)
	}
}

// An error that ends a run names paths in the report as the job file writes them, and on the
// terminal in full.
func TestErrorsOfTheReportNamePathsAsWritten(t *testing.T) {
	env := map[string]string{"TOP": "/data/s3cr3t", "SUB": "t0ken", "ONE": "1", "ODD": "a[b]"}
	getenv := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	j, err := file.Parse(
		[]byte("kind = \"train\"\n[model]\npath = \"${TOP}/m/${SUB}-x\"\n[data]\npath = [\"${TOP}/*.txt\", \"run-${SUB}.txt\", \"${TOP}/${ODD}/x\"]\n[output]\ndir = \"${ONE}\"\n[optimizer]\nlr = 1e-4\n"),
		"jobs/job.toml", nil, getenv)
	if err != nil {
		t.Fatal(err)
	}
	if j.Output.Dir != "jobs/1" || j.Data.Path[1] != "jobs/run-t0ken.txt" {
		t.Fatalf("%q %q", j.Output.Dir, j.Data.Path)
	}
	for text, want := range map[string]string{
		"/data/s3cr3t/m/t0ken-x: no config.json here":    "${TOP}/m/${SUB}-x: no config.json here",
		"/data/s3cr3t/m/t0ken-x/config.json: bad":        "${TOP}/m/${SUB}-x/config.json: bad",
		"open /data/s3cr3t/b.txt: gone":                  "open ${TOP}/b.txt: gone",
		"jobs/run-t0ken.txt: gone":                       "jobs/run-${SUB}.txt: gone",
		"/data/s3cr3t/a[b]/x: gone":                      "${TOP}/${ODD}/x: gone",
		`/data/s3cr3t/a\[b]/x: gone`:                     "${TOP}/${ODD}/x: gone",
		"jobs/1/metrics.jsonl: step 1 of 10":             "jobs/${ONE}/metrics.jsonl: step 1 of 10",
		"https:/me:pw@host/model: no config.json here":   "https:/***@host/model: no config.json here",
		"postgres://u:p@ss@db/x, https://token@host/x":   "postgres://***@db/x, https://***@host/x",
		"https://host:8080/x, a@b.c, https://h/u@1, 9:5": "https://host:8080/x, a@b.c, https://h/u@1, 9:5",
		`path = "sftp://u:p/w@host/a"`:                   `path = "sftp://***@host/a"`,
	} {
		if got := j.Shown(text); got != want {
			t.Errorf("%s\n got %s\nwant %s", text, got, want)
		}
	}
}

// No error and no log line shows the login of a URL.
func TestNoLoginIsPrinted(t *testing.T) {
	dir, _ := newKept(t)
	var stdout, stderr bytes.Buffer
	code := Main([]string{filepath.Join(dir, "job.toml"), "--set", "model.path=https://login:p4ssw0rd@host/model",
		"--ranks", "2"}, &stdout, &stderr)
	if s := stdout.String() + stderr.String(); code != status.InvalidConfig || strings.Contains(s, "p4ssw0rd") ||
		!strings.Contains(s, "***@host/model") {
		t.Errorf("%v: %s", code, s)
	}
	for _, form := range logForms {
		stderr.Reset()
		log := (&Options{log: form}).logger(&screen{to: &stderr}, 0, "node1")
		log.Info().Str("from", "https://login:p4ssw0rd@host/x").Msg("read ssh://token@host/y")
		if s := stderr.String(); strings.Contains(s, "p4ssw0rd") || strings.Contains(s, "token") ||
			strings.Count(s, "***@host") != 2 {
			t.Errorf("--log %s: %s", form, s)
		}
	}
	stdout.Reset()
	tables := &printer{to: &stdout}
	if _, err := tables.Write([]byte("data https://login:p4ssw0rd@host/x\n")); err != nil ||
		stdout.String() != "data https://***@host/x\n" {
		t.Errorf("%v %s", err, stdout.String())
	}
}
