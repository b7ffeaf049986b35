package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/testkit/cudatest"
	"ulysses/testkit/need"
)

var update = flag.Bool("update", false, "write the table of docs/gpu-performance.md")

// emulated builds the program and returns its path and the environment with an emulated GPU.
func emulated(t *testing.T) (program string, env []string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "ulysses-bench")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	plugin := cudatest.Use(t)
	if !cudatest.Emulated() {
		t.Skip("SKIPPED: the emulated plug-in counts bytes and has less memory on request")
	}
	return program, append(os.Environ(), "ULYSSES_CUDA_PLUGIN="+plugin)
}

// TestCaseWithoutMemory: a case that does not fit into the GPU is named and skipped, and the cases
// before and after it are measured.
func TestCaseWithoutMemory(t *testing.T) {
	program, env := emulated(t)
	c := exec.Command(program, "gpu_layer", "--expected", "--cases", "llama8b-64k,llama8b-512k,dry-run")
	c.Env = append(env, "ULYSSES_EMULATED_SKIP=1", fmt.Sprintf("ULYSSES_EMULATED_MEMORY=%d", int64(80<<30)))
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{`"case":"llama8b-64k"`, "llama8b-512k: SKIPPED: memory for activations: ",
		`"case":"dry-run"`} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
}

// TestExpected: docs/gpu-performance.md has the table of expected times that gpu.py computes from
// expected.json and from the bytes and FLOP of all operations at full size. All suites call their
// operations on the emulated GPU, which checks the arguments and runs no kernel.
func TestExpected(t *testing.T) {
	const page, begin, end = "../docs/gpu-performance.md", "<!-- gpu.py --expected -->\n", "<!-- end -->\n"
	program, env := emulated(t)
	c := exec.Command(need.Tool(t, "python3", "install Python"), "gpu.py", "--expected", "--ulysses", program)
	c.Env = env
	table, err := c.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, err.(*exec.ExitError).Stderr)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(text), begin)
	old, tail, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no lines %s and %s", page, begin, end)
	}
	if *update {
		if err := os.WriteFile(page, []byte(head+begin+string(table)+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if old != string(table) {
		t.Errorf("the table of %s is not current; run go test ./benchmarks -run TestExpected -update\n%s", page, table)
	}
}
