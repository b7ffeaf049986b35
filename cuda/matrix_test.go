package cuda

import (
	"os"
	"os/exec"
	"testing"
)

// TestMatrix is a part of make cuda-matrix: cuDNN has an engine, with the workspace that is
// expected, for the attention that it is said to serve.
func TestMatrix(t *testing.T) {
	needBuilt(t)
	make := exec.Command("flock", "build/cuda/lock", "make", "-s", "-f", "cuda/plugin.mk", "check-matrix", "PART=small", "FETCH=--with-libs")
	make.Dir = ".."
	make.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
	if out, err := make.CombinedOutput(); err != nil {
		t.Fatalf("%v: lines that are not in cuda/matrix/expected.md:\n%s", err, out)
	}
}
