// Package cudatest provides a CUDA plug-in to tests: the file that ULYSSES_CUDA_PLUGIN names, on a
// machine with a GPU, otherwise the emulated plug-in, built from the same sources for the CPU.
package cudatest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
)

const variable = "ULYSSES_CUDA_PLUGIN"

// Use sets ULYSSES_CUDA_PLUGIN for the rest of the test, so that cuda.Open and programs that the
// test starts find a plug-in, and returns its path.
func Use(t testing.TB) string {
	t.Helper()
	path := os.Getenv(variable)
	if path != "" {
		return path
	}
	path, err := emulated()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(variable, path)
	return path
}

// Emulated reports whether the plug-in of Use is the emulated one, on which a training step takes
// seconds.
func Emulated() bool { return strings.HasSuffix(os.Getenv(variable), "_emulated.so") }

// emulated builds the emulated plug-in if it is not up to date, and returns its path.
var emulated = sync.OnceValues(func() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	build := exec.Command("make", "-s", "-C", root, "cuda-emulated")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %v\n%s", build, err, out)
	}
	return filepath.Join(root, "build", "cuda", "libulysses_cuda_emulated.so"), nil
})

// Root returns the root folder of the sources: a parent of this file or, if the path of this file
// is not in the binary (-trimpath), of the working directory.
func Root() (string, error) {
	_, file, _, _ := runtime.Caller(0)
	here, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for _, root := range []string{filepath.Dir(file), here} {
		for ; root != filepath.Dir(root); root = filepath.Dir(root) {
			if _, err := os.Stat(filepath.Join(root, "cuda", "plugin.mk")); err == nil {
				return root, nil
			}
		}
	}
	return "", fmt.Errorf("%s is not set, and the sources to build a plug-in are in no parent folder of %s or %s",
		variable, file, here)
}
