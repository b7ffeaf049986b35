package cuda

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// hostProgram compiles a test of the headers that kernels include, and runs it on the host.
func hostProgram(t *testing.T, source string) {
	t.Parallel()
	t.Helper()
	hostProgramWith(t, source)
}

// hostProgramWith gives it arguments, and runs it beside no other test.
func hostProgramWith(t *testing.T, source string, args ...string) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "test")
	compile := exec.Command(cmp.Or(os.Getenv("CXX"), "g++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-fsanitize=undefined",
		"-fno-sanitize-recover=undefined", "-Iplugin", "-o", program, filepath.Join("plugin", source), "-ldl")
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", compile, err, out)
	}
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", source, err, out)
	}
}

// TestIndexArithmetic is of shapes that no memory has, too.
func TestIndexArithmetic(t *testing.T) { hostProgram(t, "kernels/index_test.cpp") }
