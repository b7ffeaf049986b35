package cuda

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/need"
)

// library compiles C into a shared library.
func library(t *testing.T, source string) string {
	t.Helper()
	c, so := filepath.Join(t.TempDir(), "x.c"), filepath.Join(t.TempDir(), "x.so")
	if err := os.WriteFile(c, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	root, err := cudatest.Root()
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-I", filepath.Join(root, "cuda"), "-o", so,
		c).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return so
}

// TestRefusedPlugins: files that are not the plug-in of this program are errors. They do not count
// as "no plug-in".
func TestRefusedPlugins(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text.so")
	if err := os.WriteFile(text, []byte("not a library\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		path string
		want []string
	}{
		"cut short by a byte": {shortened(t, -1), []string{"cannot be opened", "truncated", "copy it again"}},
		"half":                {shortened(t, 0), []string{"cannot be opened", "truncated"}},
		"a page":              {shortened(t, 4096), []string{"cannot be opened", "truncated"}},
		"empty":               {written(t, nil), []string{"cannot be opened", "truncated"}},
		"without its headers": {headless(t), []string{"cannot be opened", "no segment contains its headers"}},
		"a folder":            {t.TempDir(), []string{"cannot be opened", "directory"}},
		"of another ABI": {
			library(t, `unsigned x; const void *uly_cuda_plugin(unsigned abi, unsigned *have) { *have = 999; return 0; }`),
			[]string{"version 999", fmt.Sprint("this program needs version ", interfaceVersion), "make cuda"}},
		"of another ABI, with a table": {library(t, `#include "kernels.h"
			static uly_cuda_api t = {.abi = ULY_CUDA_ABI + 1, .size = sizeof t};
			const uly_cuda_api *uly_cuda_plugin(uint32_t abi, uint32_t *have) { *have = abi; return &t; }`),
			[]string{fmt.Sprint("version ", interfaceVersion+1),
				fmt.Sprint("this program needs version ", interfaceVersion), "make cuda"}},
		"with a shorter table": {library(t, `#include "kernels.h"
			static uly_cuda_api t = {.abi = ULY_CUDA_ABI, .size = 40};
			const uly_cuda_api *uly_cuda_plugin(uint32_t abi, uint32_t *have) { *have = abi; return &t; }`),
			[]string{fmt.Sprint("both have version ", interfaceVersion), "40 bytes", "make cuda"}},
		"without the function": {library(t, `int uly_other;`), []string{"no function uly_cuda_plugin", variable}},
		"a text":               {text, []string{"cannot be opened", "text.so"}},
		"missing":              {filepath.Join(t.TempDir(), "none.so"), []string{"no such file", variable}},
		"of missing libraries": {needing(t), []string{"cannot be opened", "libabsent"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(variable, c.path)
			_, err := Open(Options{})
			if status.Of(err) != status.Device || errors.Is(err, ErrNoPlugin) {
				t.Fatalf("%v (status %v): want status device", err, status.Of(err))
			}
			for _, w := range append(c.want, c.path) {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v: want %q in it", err, w)
				}
			}
			if _, probed := Probe(); probed == nil || probed.Error() != err.Error() {
				t.Errorf("Probe returns %v, Open %v", probed, err)
			}
		})
	}
}

// shortened is the plug-in truncated to a number of bytes, to half of them (0), or by the last byte
// (-1).
func shortened(t *testing.T, bytes int64) string {
	t.Helper()
	whole, err := os.ReadFile(cudatest.Use(t))
	if err != nil {
		t.Fatal(err)
	}
	if bytes <= 0 {
		bytes = map[int64]int64{0: int64(len(whole)) / 2, -1: int64(len(whole)) - 1}[bytes]
	}
	return written(t, whole[:bytes])
}

// headless is the plug-in with a segment table whose first segment, which contains the headers, is
// not loaded.
func headless(t *testing.T) string {
	t.Helper()
	whole, err := os.ReadFile(cudatest.Use(t))
	if err != nil {
		t.Fatal(err)
	}
	whole[whole[32]] = 0 // e_phoff; the first word of the first is its type
	return written(t, whole)
}

func written(t *testing.T, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "plugin.so")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// needing is a library that needs a missing library.
func needing(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	build := func(so string, args ...string) {
		if out, err := exec.Command("cc",
			append([]string{"-shared", "-fPIC", "-Wl,--no-as-needed", "-o", filepath.Join(folder, so)},
				args...)...).CombinedOutput(); err != nil {
			t.Fatalf("cc: %v\n%s", err, out)
		}
	}
	empty := filepath.Join(folder, "empty.c")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	build("libabsent.so", empty)
	build("needing.so", empty, "-L"+folder, "-labsent")
	if err := os.Remove(filepath.Join(folder, "libabsent.so")); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(folder, "needing.so")
}

// A path without a folder names a file of the working directory.
func TestBareName(t *testing.T) {
	plugin := cudatest.Use(t)
	t.Chdir(filepath.Dir(plugin))
	t.Setenv(variable, filepath.Base(plugin))
	if _, err := Probe(); err != nil {
		t.Error(err)
	}
}

func TestNoPlugin(t *testing.T) {
	t.Setenv(variable, "")
	for name, f := range map[string]func() error{
		"Open":  func() error { _, err := Open(Options{}); return err },
		"Probe": func() error { _, err := Probe(); return err },
	} {
		if err := f(); !errors.Is(err, ErrNoPlugin) || status.Of(err) != status.Device ||
			!strings.Contains(err.Error(), "make cuda") {
			t.Errorf("%s: %v: want %v with a fix", name, err, ErrNoPlugin)
		}
	}
}

// TestInstalled: an installed program finds the plug-in beside it, also through a link to the
// program.
func TestInstalled(t *testing.T) {
	folder := t.TempDir()
	program, link := filepath.Join(folder, "bin", "program"), filepath.Join(folder, "link")
	if err := os.Mkdir(filepath.Dir(program), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(program, link); err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Join(folder, "bin", fileName), filepath.Join(folder, "lib", fileName)}
	for _, p := range []string{program, link} {
		if got := beside(p); len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
			t.Errorf("beside(%s) = %v, want %v", p, got, want)
		}
	}
}

// A program in bin of the source tree finds the plug-in that make cuda has built, also through a
// link to the program. A program in a similar folder does not.
func TestInTree(t *testing.T) {
	folder := t.TempDir()
	file := func(name string) string {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tree, elsewhere, deeper := file("tree/bin/program"), file("usr/bin/program"), file("tree/other/program")
	file("tree/cuda/plugin.mk")
	link := filepath.Join(folder, "link")
	if err := os.Symlink(tree, link); err != nil {
		t.Fatal(err)
	}
	want := filepath.Join(folder, "tree", "build", "cuda", fileName)
	for _, p := range []string{tree, link} {
		if got := inTree(p); len(got) != 1 || got[0] != want {
			t.Errorf("inTree(%s) = %v, want %s", p, got, want)
		}
	}
	for _, p := range []string{elsewhere, deeper, ""} {
		if got := inTree(p); got != nil {
			t.Errorf("inTree(%s) = %v", p, got)
		}
	}
}

// TestProgramInTree: a program in bin of a source tree, run without the variable, opens the plug-in
// in build/cuda of the tree. The program is this test.
func TestProgramInTree(t *testing.T) {
	const child = "ULYSSES_TEST_PROGRAM_IN_TREE"
	if os.Getenv(child) != "" {
		found, err := Probe()
		fmt.Println("plug-in:", found.Plugin, err)
		return
	}
	plugin := cudatest.Use(t)
	tree := t.TempDir()
	copied := func(from, to string) string {
		content, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		to = filepath.Join(tree, to)
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, content, 0o700); err != nil {
			t.Fatal(err)
		}
		return to
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	copied("plugin.mk", "cuda/plugin.mk")
	want := copied(plugin, Built)
	c := exec.Command(copied(program, "bin/program"), "-test.run=^TestProgramInTree$")
	c.Env = append(os.Environ(), child+"=1", variable+"=")
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "plug-in: "+want+" <nil>") {
		t.Errorf("%v\n%swant %s", err, out, want)
	}
}

// TestWithoutDriver opens the real plug-in on a machine without a GPU: a message and a status.
func TestWithoutDriver(t *testing.T) {
	path := os.Getenv(variable)
	if path == "" {
		root, err := cudatest.Root()
		if err != nil {
			t.Fatal(err)
		}
		path = filepath.Join(root, "build", "cuda", fileName)
	}
	t.Setenv(variable, need.File(t, path, "run make cuda"))
	found, err := Probe()
	if err != nil {
		t.Fatal(err)
	}
	if found.Count > 0 {
		t.Skipf("SKIPPED: there are %d GPUs", found.Count)
	}
	if found.Plugin != path || !strings.Contains(found.Text, "no CUDA driver") {
		t.Errorf("%+v: want a message about the driver", found)
	}
	if len(found.Libraries) == 0 {
		t.Errorf("%+v: want all libraries", found)
	}
	for _, l := range found.Libraries {
		if l.Name == "" || l.Found == "" || (l.Effect == "") != (l.Fix == "") {
			t.Errorf("%+v: want the version, or the effect and the fix", l)
		}
	}
	_, err = Open(Options{})
	if status.Of(err) != status.Device || !strings.Contains(err.Error(), "no CUDA driver") {
		t.Errorf("Open: %v (status %v): want a message about the driver", err, status.Of(err))
	}
}
