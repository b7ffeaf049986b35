package cuda

import (
	"os"
	"os/exec"
	"testing"
)

// TestMatrix runs some cases of make cuda-matrix: cuDNN has an engine, with the expected workspace,
// for the attention that it is expected to support.
func TestMatrix(t *testing.T) {
	needBuilt(t)
	make := exec.Command("flock", "build/cuda/lock", "make", "-s", "-f", "cuda/plugin.mk", "check-matrix", "PART=small",
		"FETCH=--with-libs")
	make.Dir = ".."
	make.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
	if out, err := make.CombinedOutput(); err != nil {
		t.Fatalf("%v: lines that are not in cuda/matrix/expected.md:\n%s", err, out)
	}
}
