package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"ulysses/testkit/need"
)

var soakCalls = flag.Int("soak", 300, "calls forward and backward of the C host in TestSoak")

var tiledFuzz = flag.Duration("tiledfuzz", time.Second, "how long TestTiledDescriptors runs")

func root(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

var library sync.Once

// built runs `make lib` once and returns the folder of the library.
func built(t *testing.T) string {
	t.Helper()
	need.Tool(t, "gcc", "run make deps-test")
	lib := filepath.Join(root(t), "lib")
	library.Do(func() { output(t, time.Minute*10, nil, "make", "-C", root(t), "lib") })
	return lib
}

// output runs a command, which must exit with 0, and returns its output.
func output(t *testing.T, limit time.Duration, env []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	timer := time.AfterFunc(limit, func() { cmd.Process.Kill() })
	defer timer.Stop()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	return string(out)
}

// compile builds a host program with the library and returns its path.
func compile(t *testing.T, compiler string, args ...string) string {
	t.Helper()
	need.Tool(t, compiler, "run make deps-test")
	lib := built(t)
	exe := filepath.Join(t.TempDir(), "host")
	args = append(args, "-I.", "-o", exe, "-L"+lib, "-lulysses", "-Wl,-rpath,"+lib, "-lm")
	output(t, time.Minute, nil, compiler, args...)
	return exe
}

// A host in C without MPI.
func TestHostInC(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "testdata/host.c")
	for _, mode := range []string{"attention", "hostile", "callbacks", "tiled", "overhead", "rounding"} {
		t.Run(mode, func(t *testing.T) { t.Log(output(t, time.Minute, nil, exe, mode)) })
	}
}

// Streams and user pointers may be any numbers, also small ones, which Go pointers must not be.
func TestOpaqueArguments(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "-D_GNU_SOURCE", "-pthread", "-Wall", "-Wextra", "-pedantic", "-Werror",
		"testdata/opaque.c")
	output(t, time.Minute, []string{"GOGC=1"}, exe)
}

// mpirun runs a program on n ranks, with Open MPI's settings for containers, and returns its
// output.
func mpirun(t *testing.T, n int, exe ...string) string {
	t.Helper()
	need.Tool(t, "mpirun", "run make deps-test")
	env := []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"OMPI_MCA_btl_vader_single_copy_mechanism=none", "OMPI_MCA_mpi_yield_when_idle=1"}
	return output(t, 3*time.Minute, env, "mpirun",
		append([]string{"--oversubscribe", "--bind-to", "none", "-n", strconv.Itoa(n)}, exe...)...)
}

// An abort is a failure for the launcher, also with a status of which the lowest 8 bits are 0: a
// process has no other bits in its exit code.
func TestAbortIsAFailure(t *testing.T) {
	exe := compile(t, "mpicc", "-std=c11", "-Wall", "-Wextra", "-Werror", "testdata/abort.c")
	for why, code := range map[string]string{"8": "8", "256": "10", "0": "10"} {
		script := `mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 "$0" "$1"; test $? = "$2"`
		output(t, time.Minute, nil, "sh", "-c", script, exe, why, code)
	}
}

// ulysses_build_info names the commit from which `make lib` has built the library; "+" marks a
// changed tree. Outside of a git checkout the commit is "".
func TestBuildInfo(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "testdata/host.c")
	var info struct{ Commit string }
	if err := json.Unmarshal([]byte(output(t, time.Minute, nil, exe, "info")), &info); err != nil {
		t.Fatal(err)
	}
	head, err := exec.Command("git", "-C", root(t), "rev-parse", "HEAD").Output()
	commit := strings.TrimSuffix(info.Commit, "+")
	if outside := err != nil; outside != (commit == "") || !strings.HasPrefix(string(head), commit) {
		t.Errorf("the library names commit %q, git names %q", info.Commit, strings.TrimSpace(string(head)))
	}
}

// Hosts in C with MPI.
func TestHostWithMPI(t *testing.T) {
	for _, c := range []struct {
		name  string
		ranks []int
	}{{"mpi", []int{1, 2, 4}}, {"layers", []int{1, 2, 4, 7}}, {"gdn", []int{1, 2, 3, 4, 8}},
		{"bf16", []int{1, 2, 4, 7}}, {"ring", []int{1, 2, 3, 6}}, {"agree", []int{2, 3}}} {
		exe := compile(t, "mpicc", "-std=c11", "-Wall", "-Wextra", "-Werror", "testdata/"+c.name+".c")
		for _, n := range c.ranks {
			t.Run(c.name+" "+strconv.Itoa(n), func(t *testing.T) {
				if out := mpirun(t, n, exe); !strings.Contains(out, fmt.Sprintf("ok %s %d", c.name, n)) {
					t.Error(out)
				}
			})
		}
	}
}

// A host that uses MPICH. The library refuses the file for another MPI library than the host's,
// although the host's library would answer the calls of such a file.
func TestHostWithMPICH(t *testing.T) {
	need.Tool(t, "mpiexec.mpich", "run make deps-test")
	folder := t.TempDir()
	shim := func(compiler, name string) string {
		file := filepath.Join(folder, name)
		output(t, time.Minute, nil, compiler, "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-shared", "-o", file,
			"../comm/mpi_calls.c")
		return file
	}
	host := func(compiler string) string {
		return compile(t, compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "../examples/c/attention_mpi.c")
	}
	mpich, ompi := shim("mpicc.mpich", "mpich.so"), shim("mpicc", "ompi.so")
	withMPICH, withOMPI := host("mpicc.mpich"), host("mpicc")
	t.Setenv("ULYSSES_MPI_SHIM", mpich)
	if out := output(t, time.Minute, nil, "mpiexec.mpich", "-n", "3", withMPICH); !strings.Contains(out, "3 ranks") ||
		strings.Contains(out, "NOT") {
		t.Error(out)
	}
	const refused = `! "$0"` // one rank, without a launcher
	if out := output(t, time.Minute, nil, "sh", "-c", refused, withOMPI); !strings.Contains(out,
		"uses MPICH, the host program uses Open MPI") {
		t.Error(out)
	}
	t.Setenv("ULYSSES_MPI_SHIM", ompi)
	if out := output(t, time.Minute, nil, "sh", "-c", refused, withMPICH); !strings.Contains(out,
		"uses Open MPI, the host program uses MPICH") {
		t.Error(out)
	}
}

// The library finds the file of the MPI calls beside itself, also if the loader has found the
// library by a path relative to a folder that the host has left.
func TestHostLeavesItsFolder(t *testing.T) {
	exe := compile(t, "mpicc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wl,--enable-new-dtags", "testdata/moved.c")
	// LD_LIBRARY_PATH comes before the absolute path in the program.
	out := mpirun(t, 1, "sh", "-c", `cd "$1" && LD_LIBRARY_PATH=lib exec "$0"`, exe, root(t))
	if !strings.Contains(out, "ok moved") {
		t.Error(out)
	}
}

// `make install` works for folders with spaces, also of the sources, and relative to the sources,
// and the flags of its pkg-config file work in every folder. Every user may read the files.
func TestInstall(t *testing.T) {
	need.Tool(t, "pkg-config", "run make deps-test")
	built(t)
	folder := t.TempDir()
	prefix, exe := filepath.Join(folder, "our libraries"), filepath.Join(folder, "host")
	relative, err := filepath.Rel(root(t), prefix)
	if err != nil {
		t.Fatal(err)
	}
	output(t, 10*time.Minute, nil, "make", "-C", root(t), "install", "PREFIX="+relative)
	flags := output(t, time.Minute, []string{"PKG_CONFIG_PATH=" + filepath.Join(prefix, "lib", "pkgconfig")},
		"pkg-config", "--cflags", "--libs", "ulysses")
	// As in a Makefile, the shell reads the flags.
	output(t, time.Minute, nil, "sh", "-c", `eval "gcc -std=c11 -o '$0' testdata/host.c $1 -lm"`, exe,
		strings.TrimSpace(flags))
	output(t, time.Minute, []string{"LD_LIBRARY_PATH=" + filepath.Join(prefix, "lib")}, exe, "attention")
	staged, sources := filepath.Join(folder, "a stage"), filepath.Join(folder, "our sources")
	if err := os.Symlink(root(t), sources); err != nil {
		t.Fatal(err)
	}
	output(t, 10*time.Minute, nil, "sh", "-c", `umask 077 && exec make "$@"`, "make", "-C", root(t), "install",
		"PREFIX="+prefix, "DESTDIR="+staged, "CURDIR="+sources)
	for _, file := range []string{"lib/libulysses.so.0", "lib/pkgconfig/ulysses.pc", "include/ulysses.h",
		"share/doc/ulysses/LICENSE"} {
		if info, err := os.Stat(filepath.Join(staged, prefix, file)); err != nil {
			t.Error(err)
		} else if info.Mode()&0o444 != 0o444 {
			t.Errorf("%s: %v: not every user may read it", file, info.Mode())
		}
	}
}

// An empty PREFIX is refused. The files would go into the folder of the sources.
func TestInstallWithoutPrefix(t *testing.T) {
	staged := filepath.Join(t.TempDir(), "staged")
	out, err := exec.Command("make", "-s", "-C", root(t), "install", "PREFIX= ", "DESTDIR="+staged).CombinedOutput()
	if _, statErr := os.Stat(staged); err == nil || statErr == nil ||
		!strings.Contains(string(out), "install: PREFIX is empty; set for example PREFIX=/usr/local") {
		t.Errorf("%v, %v: %s", err, statErr, out)
	}
}

// Over MPI, 10,000 calls forward and backward do not use C's allocator, and Go's garbage collector,
// which here runs for every 40 KiB, does not run.
func TestNoCallAllocatesOverMPI(t *testing.T) {
	exe := compile(t, "mpicc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "testdata/counted.c", "-ldl")
	t.Setenv("GODEBUG", "gctrace=1")
	t.Setenv("GOGC", "1")
	out := mpirun(t, 2, exe, "5000")
	_, rest, begun := strings.Cut(out, "begin\n")
	between, _, ended := strings.Cut(rest, "end\n")
	if !begun || !ended || !strings.Contains(out, "gc 1 @") || !strings.Contains(out, "ok counted 2") {
		t.Fatalf("unexpected output of the host or of Go's garbage collector:\n%s", out)
	}
	if n := strings.Count(between, "gc "); n > 2 { // each rank may run one for earlier allocations
		t.Errorf("%d collections in 10,000 calls:\n%s", n, between)
	}
}

// The examples compile and run.
func TestExamples(t *testing.T) {
	for _, e := range []struct {
		name, compiler string
		args           []string
	}{
		{"c", "mpicc", []string{"-std=c11", "-Wall", "-Wextra", "-Werror", "../examples/c/attention_mpi.c"}},
		{"cpp", "mpicxx",
			[]string{"-std=c++17", "-Wall", "-Wextra", "-Werror", "-I../examples/cpp", "-DOMPI_SKIP_MPICXX",
				"-DMPICH_SKIP_MPICXX", "../examples/cpp/attention.cpp"}},
		{"fortran", "mpif90", []string{"-std=f2008", "-Wall", "../examples/fortran/attention.f90"}},
	} {
		t.Run(e.name, func(t *testing.T) {
			if e.name == "fortran" {
				need.Tool(t, "gfortran", "run make deps-test")
				e.args = append(e.args, "-J"+t.TempDir())
			}
			exe := compile(t, e.compiler, e.args...)
			for _, n := range []int{1, 2, 4} {
				if out := mpirun(t, n, exe); !strings.Contains(out, fmt.Sprint(n, " ranks")) ||
					!strings.Contains(out, "equal") || strings.Contains(out, "NOT") {
					t.Errorf("%d ranks: %s", n, out)
				}
			}
			if out := mpirun(t, 4, exe, "3"); !strings.Contains(out, "3 ranks") || !strings.Contains(out, "equal") ||
				strings.Contains(out, "NOT") {
				t.Errorf("3 of 4 ranks: %s", out)
			}
			for _, word := range []string{"0", "-1", "abc"} {
				if out := mpirun(t, 2, "sh", "-c", `! "$0" "$@"`, exe, word); strings.Count(out, "usage: ") != 1 {
					t.Errorf("argument %s: %s", word, out)
				}
			}
		})
	}
}

// The host in C runs with the address and undefined-behavior sanitizers.
func TestHostUnderSanitizers(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
		"testdata/host.c")
	for _, mode := range []string{"attention", "hostile", "callbacks", "tiled"} {
		output(t, time.Minute, nil, exe, mode)
	}
	output(t, time.Minute, nil, exe, "soak", "300")
}

// Tiled compute is C code: testdata/fuzz_tiled.c calls it with random arguments, with sanitizers.
func TestTiledDescriptors(t *testing.T) {
	need.Tool(t, "gcc", "run make deps-test")
	exe := filepath.Join(t.TempDir(), "fuzz")
	output(t, time.Minute, nil, "gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g",
		"-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-I.",
		"-o", exe, "testdata/fuzz_tiled.c", "tiled.c")
	t.Log(output(t, *tiledFuzz+time.Minute, nil, exe, strconv.FormatFloat(tiledFuzz.Seconds(), 'f', 1, 64)))
}

// The memory of a host does not grow with the number of calls.
func TestSoak(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "-O1", "-g", "testdata/host.c")
	few, many := *soakCalls/10+100, *soakCalls+100
	least, most := residentAfter(t, exe, few), residentAfter(t, exe, many)
	t.Logf("peak resident memory: %[2]d KiB after %[1]d calls forward and backward, %[4]d KiB after %[3]d", few, least,
		many, most)
	if most > least+least/10+2048 {
		t.Errorf("memory grows: the peak is %d KiB after few calls and %d KiB after many", least, most)
	}
	if _, err := exec.LookPath("valgrind"); err != nil {
		t.Log("valgrind is not installed: only resident memory was compared")
		return
	}
	// C's heap may differ by the threads that Go starts, but not in proportion to the calls.
	a, b := heapUnderValgrind(t, exe, few), heapUnderValgrind(t, exe, many)
	t.Logf("under valgrind: %d allocations and %d bytes left after %d calls, %d and %d after %d", a[0], a[1], few, b[0],
		b[1], many)
	if b[0]-a[0] > 50 || b[1]-a[1] > 20000 {
		t.Error("C's heap grows with the calls")
	}
}

var heapTexts = [2]*regexp.Regexp{regexp.MustCompile(`total heap usage: ([0-9,]+) allocs`),
	regexp.MustCompile(`in use at exit: ([0-9,]+) bytes`)}

// goFrames match the names of Go's functions in valgrind, and of functions that cgo generates.
// valgrind treats memory below the stack pointer as invalid, but Go reuses the stacks of goroutines
// for other goroutines and for its heap. Therefore accesses by Go code are not errors. C code runs
// on the thread's stack and is checked.
var goFrames = []string{"_cgo*", "crosscall*", "aeshashbody", "cmpbody", "indexbytebody", "memeqbody", "bytes.*",
	"context.*", "encoding/*", "errors.*", "fmt.*", "gogo*", "github.com/*", "internal/*", "io.*", "iter.*", "main.*",
	"maps.*",
	"math/*", "os.*", "reflect.*", "runtime.*", "runtime/*", "slices.*", "sort.*", "strconv.*", "strings.*", "sync.*",
	"sync/*", "syscall.*", "time.*", "type:*", "ulysses/*",
	"unicode/*"}

// suppressions writes a file for valgrind that suppresses errors in goFrames, and returns its path.
func suppressions(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, frame := range goFrames {
		for _, size := range []int{1, 2, 4, 8, 16, 32} {
			fmt.Fprintf(&b, "{\n  go\n  Memcheck:Addr%d\n  fun:%s\n}\n", size, frame)
		}
	}
	path := filepath.Join(t.TempDir(), "go.supp")
	if err := os.WriteFile(path, []byte(b.String()), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// heapUnderValgrind returns the number of allocations of a run of the host, and the bytes that were
// not freed. Errors and lost memory fail the test.
func heapUnderValgrind(t *testing.T, exe string, calls int) (found [2]int) {
	t.Helper()
	out := output(t, 20*time.Minute, []string{"GODEBUG=asyncpreemptoff=1"}, "valgrind", "--leak-check=full",
		"--errors-for-leak-kinds=definite", "--undef-value-errors=no",
		"--suppressions="+suppressions(t), "--error-exitcode=9", exe, "soak", strconv.Itoa(calls))
	for i, text := range heapTexts {
		m := text.FindStringSubmatch(out)
		if m == nil {
			t.Fatalf("valgrind's output has no %v:\n%s", text, out[max(0, len(out)-2000):])
		}
		found[i], _ = strconv.Atoi(strings.ReplaceAll(m[1], ",", ""))
	}
	return found
}

// residentAfter returns the peak resident memory of a run of the host, in KiB.
func residentAfter(t *testing.T, exe string, calls int) int64 {
	t.Helper()
	cmd := exec.Command(exe, "soak", strconv.Itoa(calls))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	return maxResident(cmd.ProcessState)
}

// The library matches the header (make check-abi).
func TestABI(t *testing.T) {
	need.Tool(t, "g++", "run make deps-test")
	built(t)
	t.Log(output(t, time.Minute, nil, filepath.Join(root(t), "scripts", "check-abi.sh"),
		filepath.Join(root(t), "lib", "libulysses.so.0")))
}
