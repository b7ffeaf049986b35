// Package cudatest gives tests a CUDA plug-in: the one that ULYSSES_CUDA_PLUGIN names, on a machine
// with a GPU, else the one that is built from the same sources for the host.
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

// Use makes cuda.Open find a plug-in for the rest of the test, and returns its path. Programs that
// the test starts find it too.
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

// Emulated reports whether the plug-in that Use found is the one for the host, on which a step of
// training takes seconds.
func Emulated() bool { return strings.HasSuffix(os.Getenv(variable), "_emulated.so") }

// emulated builds the plug-in in which the host stands in for a GPU, if it is not up to date.
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

// Root is the folder of the sources: around this file or, where the build has taken its path away
// (-trimpath), around the working directory.
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
	return "", fmt.Errorf("%s names no plug-in, and the sources to build one are neither at %s nor around %s", variable, file, here)
}
