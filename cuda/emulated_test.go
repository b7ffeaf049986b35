package cuda

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// The tests of the emulated plug-in rely on the emulator. A C++ program
// (plugin/emulated/emulated_test.cpp and the test files beside it) tests the emulator itself, in
// several orders.
func TestEmulator(t *testing.T) {
	t.Parallel()
	sources := emulatorSources(t)
	program := filepath.Join(t.TempDir(), "emulated_test")
	compileEmulator(t, append(sources, "-fsanitize=alignment", "-o", program, "-lpthread", "-ldl")...)
	for _, name := range []string{"values", "roundings", "barriers", "divergence", "bounds", "guards", "alignment",
		"devices", "peers", "warpgroups", "order", "lazy", "processes", "death", "late", "reuse", "ptx"} {
		t.Run(name, func(t *testing.T) {
			for seed := 1; seed <= 5; seed++ {
				c := exec.Command(program, name)
				c.Env = append(os.Environ(), fmt.Sprint("ULYSSES_EMULATED_SEED=", seed), "ULYSSES_EMULATED_TIMEOUT=20")
				if name == "ptx" {
					c.Env = append(c.Env, "ULYSSES_EMULATED_PTX=plugin/emulated/ptx/testdata")
				}
				if out, err := c.CombinedOutput(); err != nil {
					t.Fatalf("seed %d: %v\n%s", seed, err, out)
				}
			}
		})
	}
}

// emulatorSources returns the emulator's sources and tests, without libraries.cpp, which is part of
// the plug-in.
func emulatorSources(t *testing.T) []string {
	t.Helper()
	sources, err := filepath.Glob("plugin/emulated/*.cpp")
	instructions, _ := filepath.Glob("plugin/emulated/ptx/*.cpp")
	if err != nil || len(sources) == 0 || len(instructions) == 0 {
		t.Fatal("no sources", err)
	}
	sources = append(sources, instructions...)
	return slices.DeleteFunc(sources, func(s string) bool { return filepath.Base(s) == "libraries.cpp" })
}

// compileEmulator compiles sources of the emulator, or links them.
func compileEmulator(t *testing.T, args ...string) {
	t.Helper()
	flags := []string{"-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-DULY_EMULATED",
		"-Iplugin"}
	if out, err := exec.Command(cmp.Or(os.Getenv("CXX"), "g++"),
		append(flags, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// TestRaces tests the detection of make cuda-races: a program that orders its accesses passes; for
// a program that does not, the message names two accesses.
func TestRaces(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	program := filepath.Join(folder, "emulated_test")
	link := []string{"-o", program, "plugin/emulated/races/races.cpp"}
	for _, source := range emulatorSources(t) {
		switch name := filepath.Base(source); name {
		case "emulated_test.cpp", "warpgroups_test.cpp": // the kernels that are checked
			compileEmulator(t, "-fsanitize=thread", "-c", "-o", filepath.Join(folder, name+".o"), source)
			source = filepath.Join(folder, name+".o")
		}
		link = append(link, source)
	}
	compileEmulator(t, append(link, "-lpthread", "-ldl")...)
	for _, name := range []string{"values", "order", "lazy", "races", "warpgroup_races"} {
		if out, err := exec.Command(program, name).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

// A kernel that writes outside of its memory fails the stream with a message, and the device
// permanently. Other devices still work.
func TestStrayWrite(t *testing.T) {
	cudatest.Use(t)
	d, other := opener(Options{})(t, 1).(*Device), opener(Options{})(t, 1).(*Device)
	defer d.Close()
	defer other.Close()
	if !d.Details().Emulated {
		t.Skip("SKIPPED: on a GPU, compute-sanitizer checks this")
	}
	for _, x := range []struct {
		d    *Device
		n    int64
		want string
	}{{d, 257, "byte 1024 of an allocation of 1024 bytes"}, {other, 256, ""}} {
		b, err := x.d.Alloc(1024)
		if err != nil {
			t.Fatal(err)
		}
		s, err := x.d.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		dst := tensor.Tensor{Data: b.Pointer(), DType: tensor.F32, Where: tensor.CUDA, NDim: 1, Shape: [8]int64{x.n},
			Stride: [8]int64{1}}
		if err := x.d.Fill(s, dst, 1); err != nil {
			t.Fatal(err)
		}
		err = s.Sync()
		if x.want == "" {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		for _, e := range []error{err, s.Sync(), x.d.Fill(s, dst, 1)} {
			if status.Of(e) != status.Device || !strings.Contains(fmt.Sprint(e), x.want) {
				t.Errorf("%v", e)
			}
		}
	}
}
