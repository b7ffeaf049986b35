package main

import (
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

var soakCalls = flag.Int("soak", 300, "calls forward and backward of the C host under valgrind")

var tiledFuzz = flag.Duration("tiledfuzz", time.Second, "how long descriptors of tiled compute are drawn")

func root(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

var library sync.Once

// built makes the library and gives its folder.
func built(t *testing.T) string {
	t.Helper()
	need.Tool(t, "gcc", "run make deps-test")
	lib := filepath.Join(root(t), "lib")
	library.Do(func() { output(t, time.Minute*10, nil, "make", "-C", root(t), "lib") })
	return lib
}

// output runs a command that must end with 0.
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

// compile builds a host against the library.
func compile(t *testing.T, compiler string, args ...string) string {
	t.Helper()
	need.Tool(t, compiler, "run make deps-test")
	lib := built(t)
	exe := filepath.Join(t.TempDir(), "host")
	args = append(args, "-I.", "-o", exe, "-L"+lib, "-lulysses", "-Wl,-rpath,"+lib, "-lm")
	output(t, time.Minute, nil, compiler, args...)
	return exe
}

func TestHostInC(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "testdata/host.c")
	for _, mode := range []string{"attention", "hostile", "callbacks", "tiled", "overhead"} {
		t.Run(mode, func(t *testing.T) { t.Log(output(t, time.Minute, nil, exe, mode)) })
	}
}

// mpirun is Open MPI's, with the manners of containers.
func mpirun(t *testing.T, n int, exe ...string) string {
	t.Helper()
	need.Tool(t, "mpirun", "run make deps-test")
	env := []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_btl_vader_single_copy_mechanism=none", "OMPI_MCA_mpi_yield_when_idle=1"}
	return output(t, 3*time.Minute, env, "mpirun", append([]string{"--oversubscribe", "--bind-to", "none", "-n", strconv.Itoa(n)}, exe...)...)
}

func TestHostWithMPI(t *testing.T) {
	for _, c := range []struct {
		name  string
		ranks []int
	}{{"mpi", []int{1, 2, 4}}, {"layers", []int{1, 2, 4, 7}}, {"gdn", []int{1, 2, 3, 8}}, {"bf16", []int{1, 2, 4, 7}}, {"agree", []int{2, 3}}} {
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

// Over MPI the library takes nothing from C's allocator in calls, and Go's collector, which runs
// here for every 40 KiB, has nothing to do: 10,000 calls forward and backward.
func TestNoCallAllocatesOverMPI(t *testing.T) {
	exe := compile(t, "mpicc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "testdata/counted.c", "-ldl")
	t.Setenv("GODEBUG", "gctrace=1")
	t.Setenv("GOGC", "1")
	out := mpirun(t, 2, exe, "5000")
	_, rest, begun := strings.Cut(out, "begin\n")
	between, _, ended := strings.Cut(rest, "end\n")
	if !begun || !ended || !strings.Contains(out, "gc 1 @") || !strings.Contains(out, "ok counted 2") {
		t.Fatalf("the host, or Go's collector, did not say what it should:\n%s", out)
	}
	if n := strings.Count(between, "gc "); n > 2 { // one of each rank may be due
		t.Errorf("%d collections in 10,000 calls:\n%s", n, between)
	}
}

// The examples are what users copy: they run as they are.
func TestExamples(t *testing.T) {
	for _, e := range []struct {
		name, compiler string
		args           []string
	}{
		{"c", "mpicc", []string{"-std=c11", "-Wall", "-Wextra", "-Werror", "../examples/c/attention_mpi.c"}},
		{"cpp", "mpicxx", []string{"-std=c++17", "-Wall", "-Wextra", "-Werror", "-I../examples/cpp", "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX", "../examples/cpp/attention.cpp"}},
		{"fortran", "mpif90", []string{"-std=f2008", "-Wall", "../examples/fortran/attention.f90"}},
	} {
		t.Run(e.name, func(t *testing.T) {
			if e.name == "fortran" {
				need.Tool(t, "gfortran", "run make deps-test")
				e.args = append(e.args, "-J"+t.TempDir())
			}
			exe := compile(t, e.compiler, e.args...)
			for _, n := range []int{1, 2, 4} {
				if out := mpirun(t, n, exe); !strings.Contains(out, fmt.Sprint(n, " ranks")) || !strings.Contains(out, "equal") || strings.Contains(out, "NOT") {
					t.Errorf("%d ranks: %s", n, out)
				}
			}
			if out := mpirun(t, 4, exe, "3"); !strings.Contains(out, "3 ranks") || !strings.Contains(out, "equal") || strings.Contains(out, "NOT") {
				t.Errorf("3 of 4 ranks: %s", out)
			}
		})
	}
}

// The same host under the compiler's sanitizers: what it brings lies in memory that they guard, and
// nothing of it may be left behind.
func TestHostUnderSanitizers(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "testdata/host.c")
	for _, mode := range []string{"attention", "hostile", "callbacks", "tiled"} {
		output(t, time.Minute, nil, exe, mode)
	}
	output(t, time.Minute, nil, exe, "soak", "300")
}

// Tiled compute is C alone: its descriptors are driven in C, with the sanitizers in it.
func TestTiledDescriptors(t *testing.T) {
	need.Tool(t, "gcc", "run make deps-test")
	exe := filepath.Join(t.TempDir(), "fuzz")
	output(t, time.Minute, nil, "gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-I.",
		"-o", exe, "testdata/fuzz_tiled.c", "tiled.c")
	t.Log(output(t, *tiledFuzz+time.Minute, nil, exe, strconv.FormatFloat(tiledFuzz.Seconds(), 'f', 1, 64)))
}

// TestSoak looks at what the process still holds after many calls, against a few: it must not grow
// with their number.
func TestSoak(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "-O1", "-g", "testdata/host.c")
	few, many := *soakCalls/10+100, *soakCalls+100
	least, most := residentAfter(t, exe, few), residentAfter(t, exe, many)
	t.Logf("%d calls forward and backward: %d KiB at most; %d: %d KiB", few, least, many, most)
	if most > least+least/10+2048 {
		t.Errorf("memory grows: %d KiB after few calls, %d KiB after many", least, most)
	}
	if _, err := exec.LookPath("valgrind"); err != nil {
		t.Log("no valgrind: resident memory alone was looked at")
		return
	}
	// What C takes from its heap may differ by the threads that Go starts, and by nothing that
	// counts calls.
	a, b := heapUnderValgrind(t, exe, few), heapUnderValgrind(t, exe, many)
	t.Logf("under valgrind: %d allocations and %d bytes left after %d calls, %d and %d after %d", a[0], a[1], few, b[0], b[1], many)
	if b[0]-a[0] > 50 || b[1]-a[1] > 20000 {
		t.Error("C's heap grows with the calls")
	}
}

var heapTexts = [2]*regexp.Regexp{regexp.MustCompile(`total heap usage: ([0-9,]+) allocs`), regexp.MustCompile(`in use at exit: ([0-9,]+) bytes`)}

// goFrames are the names of Go's functions as valgrind sees them, and of what cgo writes for them.
// valgrind takes memory below the stack pointer for lost, and Go uses the stacks of goroutines
// again, for other goroutines and for its heap: what Go code itself reads and writes there is no
// error. C code runs on the thread's stack and is looked at.
var goFrames = []string{"_cgo*", "crosscall*", "aeshashbody", "cmpbody", "indexbytebody", "memeqbody", "bytes.*", "context.*", "encoding/*", "errors.*", "fmt.*", "gogo*", "github.com/*", "internal/*", "io.*", "iter.*", "main.*", "maps.*",
	"math/*", "os.*", "reflect.*", "runtime.*", "runtime/*", "slices.*", "sort.*", "strconv.*", "strings.*", "sync.*", "sync/*", "syscall.*", "time.*", "type:*", "ulysses/*",
	"unicode/*"}

// suppressions is a file that names them to valgrind.
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

// heapUnderValgrind is the allocations of a run of the host, and the bytes that it left. Errors and
// lost memory fail the test.
func heapUnderValgrind(t *testing.T, exe string, calls int) (found [2]int) {
	t.Helper()
	out := output(t, 20*time.Minute, []string{"GODEBUG=asyncpreemptoff=1"}, "valgrind", "--leak-check=full", "--errors-for-leak-kinds=definite", "--undef-value-errors=no",
		"--suppressions="+suppressions(t), "--error-exitcode=9", exe, "soak", strconv.Itoa(calls))
	for i, text := range heapTexts {
		m := text.FindStringSubmatch(out)
		if m == nil {
			t.Fatalf("valgrind does not say %v:\n%s", text, out[max(0, len(out)-2000):])
		}
		found[i], _ = strconv.Atoi(strings.ReplaceAll(m[1], ",", ""))
	}
	return found
}

// residentAfter is the most memory a run of the host held, in KiB.
func residentAfter(t *testing.T, exe string, calls int) int64 {
	t.Helper()
	cmd := exec.Command(exe, "soak", strconv.Itoa(calls))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	return maxResident(cmd.ProcessState)
}

func TestABI(t *testing.T) {
	need.Tool(t, "g++", "run make deps-test")
	built(t)
	t.Log(output(t, time.Minute, nil, filepath.Join(root(t), "scripts", "check-abi.sh"), filepath.Join(root(t), "lib", "libulysses.so.0")))
}
