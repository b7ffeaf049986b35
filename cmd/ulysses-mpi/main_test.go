package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ulysses/internal/status"
	"ulysses/job"
)

// The exit code of the process is the code of the error (internal/status). The test binary is the
// program.
func TestMain(m *testing.M) {
	if os.Getenv("ULYSSES_TEST_AS_PROGRAM") != "" {
		// what the system says of the process when the run is over
		if file := os.Getenv("ULYSSES_TEST_STATUS"); file != "" {
			code := job.Main(os.Args[1:], os.Stdout, os.Stderr)
			text, _ := os.ReadFile("/proc/self/status")
			if err := os.WriteFile(fmt.Sprint(file, ".", os.Getpid()), text, 0o600); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = status.IO
			}
			os.Exit(int(code))
		}
		if os.Getenv("ULYSSES_TEST_FORBID_COPIES") != "" {
			if err := forbid(unix.SYS_PROCESS_VM_READV); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(int(status.Internal))
			}
		}
		if kind := os.Getenv("ULYSSES_TEST_CRASH"); kind != "" {
			catchCrashes()
			crashes[kind]()
		}
		main()
	}
	os.Exit(m.Run())
}

func TestExitCodes(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "job.toml")
	if err := os.WriteFile(bad, []byte("kind = 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	unbuilt := filepath.Join(t.TempDir(), "job.toml")
	if err := os.WriteFile(unbuilt,
		[]byte("model.new = { model_type = \"llama\", vocab_size = 256, hidden_size = 8, intermediate_size = 8, num_hidden_layers = 1, num_attention_heads = 1 }\ndata.path = \"x.txt\"\nlora.use_dora = true\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"version"}, 0, "ulysses-mpi"}, {[]string{"--help"}, 0, "usage"}, {[]string{"doctor"}, 0, "kernels"},
		{nil, 1, "--help"}, {[]string{"--nope"}, 1, "-nope"}, {[]string{bad}, 2, "job.toml:1: kind = 3"},
		{[]string{unbuilt}, 3, "job.toml:3: lora.use_dora: "},
		{[]string{unbuilt, "--set", "kind=trian"}, 2, `--set kind=trian: kind = "trian"`},
		{[]string{bad + "x"}, 7, "no such file"},
	} {
		cmd := exec.Command(os.Args[0], c.args...)
		cmd.Env = append(os.Environ(), "ULYSSES_TEST_AS_PROGRAM=1")
		out, _ := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.says) {
			t.Errorf("%v: exit code %d, want %d:\n%s", c.args, code, c.code, out)
		}
	}
}

// If the reader of standard output exits, the run continues to its end and then returns an error.
func TestReaderGoesAway(t *testing.T) {
	dir := t.TempDir()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	read.Close()
	defer write.Close()
	cmd := exec.Command(os.Args[0], "../../examples/quickstart.toml", "--set", "output.dir="+dir, "--set",
		"train.steps=1", "--set", "data.sequence=64", "--set", "parallel.ulysses=1",
		"--set", "eval.split=0.0")
	cmd.Env = append(os.Environ(), "ULYSSES_TEST_AS_PROGRAM=1")
	var stderr strings.Builder
	cmd.Stdout, cmd.Stderr = write, &stderr
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != int(status.IO) ||
		!strings.Contains(stderr.String(), "standard output: ") {
		t.Errorf("%v: %s", err, stderr.String())
	}
	if _, err := os.Stat(filepath.Join(dir, "report.html")); err != nil {
		t.Error(err)
	}
}
