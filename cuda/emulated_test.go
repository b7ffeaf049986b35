package cuda

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The tests of the emulated plug-in mean what the emulator promises: here it is held to that, by a C++ program of its own
// (plugin/emulated/emulated_test.cpp), in several orders.
func TestEmulator(t *testing.T) {
	sources, err := filepath.Glob("plugin/emulated/*.cpp")
	if err != nil || len(sources) == 0 {
		t.Fatal("no sources", err)
	}
	program := filepath.Join(t.TempDir(), "emulated_test")
	compiler := os.Getenv("CXX")
	if compiler == "" {
		compiler = "g++"
	}
	args := append([]string{"-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-DULY_EMULATED", "-o", program}, sources...)
	if out, err := exec.Command(compiler, append(args, "-lpthread", "-ldl")...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range []string{"values", "roundings", "barriers", "divergence", "bounds", "order", "lazy", "processes", "death"} {
		t.Run(name, func(t *testing.T) {
			for seed := 1; seed <= 5; seed++ {
				c := exec.Command(program, name)
				c.Env = append(os.Environ(), fmt.Sprint("ULYSSES_EMULATED_SEED=", seed), "ULYSSES_EMULATED_TIMEOUT=20")
				if out, err := c.CombinedOutput(); err != nil {
					t.Fatalf("seed %d: %v\n%s", seed, err, out)
				}
			}
		})
	}
}
