package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"ulysses/tensor"
)

// stoppable is a job of many short steps that writes a checkpoint only when it is stopped.
const stoppable = `seed = 5
[model.new]
model_type = "qwen3"
vocab_size = 256
hidden_size = 24
intermediate_size = 40
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
tie_word_embeddings = true
[data]
path = "a.txt"
sequence = 48
global_batch = 4
[optimizer]
lr = 1e-3
[train]
steps = 400
`

// jobFolder returns a folder with the job and its data. A shell must quote the folder's name.
func jobFolder(t *testing.T) (dir, job string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "it's $HOME [1]")
	job = filepath.Join(dir, "job.toml")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"job.toml": stoppable,
		"a.txt": strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 40)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, job
}

// heard collects the output of a process while it runs.
type heard struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (h *heard) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.text.Write(p)
}

func (h *heard) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.text.String()
}

// begin starts a command line that receives all signals, also if the shell that runs the tests
// ignores some.
func begin(t *testing.T, env []string, stderr io.Writer, argv ...string) *exec.Cmd {
	t.Helper()
	all := make(chan os.Signal, 1)
	// signals that are handled here have their default action in the child
	signal.Notify(all, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(all)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"ULYSSES_TEST_AS_PROGRAM=1"), env...)
	cmd.Stderr, cmd.WaitDelay = stderr, 2*time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	guard := time.AfterFunc(5*time.Minute, func() { cmd.Process.Kill() })
	t.Cleanup(func() { guard.Stop() })
	return cmd
}

// until waits for a condition.
func until(t *testing.T, what string, true func() bool) {
	t.Helper()
	for range 24000 {
		if true() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("%s: not within 2 minutes", what)
}

// lines counts the lines of a run's metrics.
func lines(dir string) int {
	text, _ := os.ReadFile(filepath.Join(dir, "out", "metrics.jsonl"))
	return bytes.Count(text, []byte("\n"))
}

// The first SIGINT, SIGTERM or SIGHUP acts as SIGUSR1: the run finishes the step and writes a
// checkpoint and the report. The printed command resumes the run, with the losses of an
// uninterrupted run.
func TestFirstSignalStops(t *testing.T) {
	dir, job := jobFolder(t)
	if code := begin(t, nil, nil, os.Args[0], job, "--ranks", "2"); code.Wait() != nil {
		t.Fatal("undisturbed: ", code.ProcessState)
	}
	want, err := os.ReadFile(filepath.Join(dir, "out", "model", "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1} {
		if err := os.RemoveAll(filepath.Join(dir, "out")); err != nil {
			t.Fatal(err)
		}
		var said heard
		cmd := begin(t, nil, &said, os.Args[0], job, "--ranks", "2", "--set", "optimizer.name=adamw")
		until(t, "steps", func() bool { return lines(dir) > 1 })
		for range 2 { // timeout(1) sends it to the process and to its group
			if err := cmd.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
		}
		cmd.Wait()
		_, again, found := strings.Cut(said.String(), "; resume with: ")
		if code := cmd.ProcessState.ExitCode(); code != 75 || !found ||
			!strings.Contains(again, " --set optimizer.name=adamw") {
			t.Fatalf("%v: exit %d: %s", s, code, said.String())
		}
		stopped := lines(dir)
		if _, err := os.Stat(filepath.Join(dir, "out", "checkpoints", fmt.Sprintf("step-%08d", stopped))); err != nil ||
			stopped >= 400 {
			t.Errorf("%v: %v", s, err)
		}
		if _, err := os.Stat(filepath.Join(dir, "out", "report.html")); err != nil {
			t.Errorf("%v: %v", s, err)
		}
		resumed := begin(t, nil, &said, "sh", "-c", strings.TrimSpace(again))
		if err := resumed.Wait(); err != nil {
			t.Fatalf("%v: %s: %v: %s", s, again, err, said.String())
		}
		got, err := os.ReadFile(filepath.Join(dir, "out", "model", "model.safetensors"))
		if err != nil || !bytes.Equal(got, want) || lines(dir) != 400 {
			t.Errorf("%v: after %d steps and the others %d lines and other weights, or %v", s, stopped, lines(dir), err)
		}
	}
}

// The second SIGINT or SIGTERM ends a run at once with the exit code of a shell, and the terminal
// has no partial progress bar before the last line.
func TestSecondSignalEnds(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		dir, job := jobFolder(t)
		terminal, child := openTerminal(t)
		var said heard
		go io.Copy(&said, terminal)
		cmd := begin(t, []string{"ULYSSES_FAULT=late:1:4", "ULYSSES_TIMEOUT=0"}, child, os.Args[0], job, "--ranks", "2")
		child.Close()
		until(t, "the step that has no end", func() bool { return lines(dir) == 3 })
		name := map[syscall.Signal]string{syscall.SIGINT: "SIGINT", syscall.SIGTERM: "SIGTERM"}[s]
		cmd.Process.Signal(s)
		until(t, "the first is heard",
			func() bool { return strings.Contains(said.String(), "another "+name+" ends it at once") })
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		for waiting := true; waiting; { // two signals at the same moment count as one
			select {
			case <-ended:
				waiting = false
			case <-time.After(250 * time.Millisecond):
				cmd.Process.Signal(s)
			}
		}
		until(t, "the last line", func() bool { return strings.Contains(said.String(), name+": run ended at once") })
		if code := cmd.ProcessState.ExitCode(); code != 128+int(s) {
			t.Errorf("%v: exit %d: %s", s, code, said.String())
		}
		for _, line := range []string{"another " + name, "ulysses-mpi: " + name} {
			before, _, _ := strings.Cut(said.String(), line)
			before = before[strings.LastIndexAny(before, "\n\r")+1:]
			if strings.Contains(before, "%") || strings.Contains(before, "tokens/s") {
				t.Errorf("%v: a bar stands before %q: %q", s, line, before)
			}
		}
		if rest := said.String()[strings.LastIndex(said.String(), "ended at once"):]; strings.Contains(rest,
			"tokens/s") {
			t.Errorf("%v: a bar stands behind the last line: %q", s, rest)
		}
	}
}

// SIGQUIT ends the process at once and prints all stacks.
func TestQuit(t *testing.T) {
	dir, job := jobFolder(t)
	var said heard
	cmd := begin(t, nil, &said, os.Args[0], job, "--ranks", "2", "--set", "train.steps=100000")
	until(t, "steps", func() bool { return lines(dir) > 1 })
	cmd.Process.Signal(syscall.SIGQUIT)
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 131 || !strings.Contains(said.String(), "train.(*Trainer).Run") {
		t.Errorf("exit %d: %s", code, said.String())
	}
}

// openTerminal returns a pseudo-terminal: terminal reads the bytes that are written into child.
func openTerminal(t *testing.T) (terminal, child *os.File) {
	t.Helper()
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	var number, zero uint32
	for request, value := range map[uintptr]*uint32{syscall.TIOCGPTN: &number, syscall.TIOCSPTLCK: &zero} {
		if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, terminal.Fd(), request,
			uintptr(unsafe.Pointer(value))); e != 0 {
			t.Fatal(e)
		}
	}
	size := [4]uint16{40, 200}
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, terminal.Fd(), syscall.TIOCSWINSZ,
		uintptr(unsafe.Pointer(&size))); e != 0 {
		t.Fatal(e)
	}
	if child, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	return terminal, child
}

// attentionJob is an operator job that takes seconds.
func attentionJob(t *testing.T, dir string) string {
	t.Helper()
	var items []tensor.Item
	for _, name := range []string{"q", "k", "v"} {
		items = append(items,
			tensor.Item{Name: name, Tensor: tensor.OfFloat32(make([]float32, 24<<10*4*64), 24<<10, 4, 64)})
	}
	job := filepath.Join(dir, "job.toml")
	err := tensor.WriteSafetensors(filepath.Join(dir, "in.safetensors"), nil, items)
	if err == nil {
		err = os.WriteFile(job,
			[]byte("kind = \"attention\"\nattention.input = \"in.safetensors\"\nattention.output = \"out.safetensors\"\n"),
			0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return job
}

// Verbs and jobs that write no checkpoint end at the first signal and leave no files.
func TestSignalEndsWhatKeepsNothing(t *testing.T) {
	for _, x := range []struct {
		name string
		args []string
	}{
		{"eval", []string{"--set", "kind=eval"}},
		{"verify", []string{"verify"}},
		{"attention", nil},
	} {
		dir := t.TempDir()
		var said heard
		argv := []string{os.Args[0], "../../examples/quickstart.toml", "--ranks", "4", "--set",
			"output.dir=" + filepath.Join(dir, "out")}
		argv = append(append(argv[:1:1], x.args...), argv[1:]...)
		if x.name == "attention" {
			argv = []string{os.Args[0], attentionJob(t, dir), "--ranks", "2"}
		}
		if x.name == "verify" {
			argv = append(argv, "--set", "data.global_batch=400")
		}
		cmd := begin(t, nil, &said, argv...)
		until(t, x.name, func() bool { return strings.Contains(said.String(), "device: ") })
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 143 || !strings.Contains(said.String(), "SIGTERM: ") ||
			strings.Contains(said.String(), "checkpoint") {
			t.Errorf("%s: exit %d: %s", x.name, code, said.String())
		}
		filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && (strings.HasPrefix(d.Name(), ".") || d.Name() == "out.safetensors") {
				t.Errorf("%s: left behind: %s", x.name, path)
			}
			return nil
		})
	}
}
