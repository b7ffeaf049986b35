package job

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"ulysses/internal/status"
	"ulysses/job/file"
)

// A named pipe, a folder, a socket or a device that replaces a file that a job reads is refused by
// name and kind. No read waits for a writer or continues without end.
func TestSpecialFiles(t *testing.T) {
	kinds := map[string]func(path string) error{
		"a named pipe": func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"a folder":     func(path string) error { return os.Mkdir(path, 0o700) },
		"a socket": func(path string) error {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
			if err == nil {
				l.SetUnlinkOnClose(false)
				err = l.Close()
			}
			return err
		},
		"a device": func(path string) error { return os.Symlink("/dev/zero", path) },
	}
	text := strings.Repeat("the cat sat on the mat. ", 40)
	for _, file := range []string{"job.toml", "m/config.json", "m/model.safetensors", "m/model.safetensors.index.json",
		"m/tokenizer.json", "m/tokenizer_config.json",
		"m/generation_config.json", "d.txt", "d.jsonl", "d.bin", "d.idx", "d.safetensors", "out/metrics.jsonl",
		"new/metrics.jsonl", "out/checkpoints/step-00000001/rank-00000.safetensors"} {
		for kind, place := range kinds {
			dir, err := os.MkdirTemp("", "u") // the path of a socket is limited in length
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			job := filepath.Join(dir, "job.toml")
			if err := os.CopyFS(filepath.Join(dir, "m"),
				os.DirFS(filepath.Join(goldens, "models", "qwen3"))); err != nil {
				t.Fatal(err)
			}
			data := "d.txt"
			if strings.HasPrefix(file, "d.") {
				data = file
			}
			put(t, job, "[model]\npath = \"m\"\n[data]\npath = \""+data+
				"\"\ntokenizer = \"bytes\"\nsequence = 16\n[optimizer]\nlr = 1e-3\n[train]\nsteps = 1\n[checkpoint]\nevery = 1\n")
			put(t, filepath.Join(dir, "d.txt"), text)
			put(t, filepath.Join(dir, "d.bin"), text)
			put(t, filepath.Join(dir, "d.idx"), text)
			o := Options{Path: job, Ranks: 2, Stdout: io.Discard, Stderr: io.Discard}
			if strings.HasPrefix(file, "m/tokenizer") || strings.HasPrefix(file, "m/generation") {
				o.Sets = []string{"data.tokenizer=" + filepath.Join(dir, "m")}
				if err := os.CopyFS(filepath.Join(dir, "m"),
					os.DirFS(filepath.Join(goldens, "tokenizers", "pieces1"))); err != nil && !errors.Is(err,
					os.ErrExist) {
					t.Fatal(err)
				}
			}
			if strings.HasPrefix(file, "out/") {
				if err := Run(o); err != nil {
					t.Fatal(err)
				}
				o.Sets = []string{"train.steps=2", "checkpoint.accept=train.steps", "checkpoint.resume=" +
					filepath.Join(dir, "out", "checkpoints", "step-00000001")}
			}
			if strings.HasPrefix(file, "new/") {
				o.Sets = []string{"output.dir=" + filepath.Join(dir, "new")}
				if err := os.Mkdir(filepath.Join(dir, "new"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join(dir, file)
			os.Remove(path)
			if file == "m/model.safetensors.index.json" {
				os.Remove(filepath.Join(dir, "m", "model.safetensors"))
			}
			if err := place(path); err != nil {
				t.Fatal(err)
			}
			done := inBackground(func() error { return Run(o) })
			select {
			case err = <-done:
			case <-time.After(time.Minute):
				t.Fatalf("%s, %s: the job waits", file, kind)
			}
			// a link leads to the device, and links there are refused
			if strings.HasSuffix(file, "metrics.jsonl") && kind == "a device" {
				kind = "a symbolic link"
			}
			if code := status.Of(err); code != status.IO && code != status.InvalidConfig ||
				!strings.Contains(err.Error(), filepath.Base(path)) || !strings.Contains(err.Error(), kind) {
				t.Errorf("%s, %s: %v (%v)", file, kind, err, code)
			}
		}
	}
}

// inBackground calls f in a goroutine.
func inBackground(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return done
}

// A message shortens names of any length to one line.
func TestLongNames(t *testing.T) {
	long := strings.Repeat("k", 200000)
	for _, src := range []string{long + " = 1", "[" + long + "]\nx = 1", "[data]\n" + long + " = 1",
		"kind = \"" + long + "\"", "[model]\noverride = " + long} {
		_, err := file.Parse([]byte(src), "job.toml", nil, nil)
		if status.Of(err) != status.InvalidConfig || len(err.Error()) > 2000 ||
			!strings.Contains(err.Error(), "kkk… (20000") {
			t.Errorf("%.30s: an error of %d bytes: %.1000v", src, len(err.Error()), err)
		}
	}
	dir := t.TempDir()
	put(t, filepath.Join(dir, "job.toml"), strings.Replace(base, "a.txt", long, 1))
	if code, _, stderr := call("run", filepath.Join(dir, "job.toml")); code == status.OK || len(stderr) > 2000 {
		t.Errorf("%v, %d bytes", code, len(stderr))
	}
}
