package cuda

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"ulysses/testkit/cudatest"
	"ulysses/testkit/need"
)

// launched has the kernels that the tests of loggedTests have launched, by their symbols in the
// emulated plug-in, and logged the tests that have run.
var (
	launched    = map[string]bool{}
	logged      = map[string]bool{}
	loggedTests = []string{"TestConformance", "TestConformanceOfKernels", "TestConformanceOfWarpgroups",
		"TestWideIndices", "TestGroups", "TestRankSum"}
)

// logLaunches adds the kernels that a test launches on the emulated device to `launched`.
func logLaunches(t *testing.T) {
	t.Helper()
	path := cudatest.Use(t)
	if !cudatest.Emulated() {
		return
	}
	log := filepath.Join(t.TempDir(), "launches")
	t.Setenv("ULYSSES_EMULATED_LAUNCHES", log)
	t.Cleanup(func() {
		for _, l := range readLaunches(t, log, path) {
			launched[l.symbol] = true
		}
		logged[t.Name()] = true
	})
}

// TestKernelsAreLaunched: the tests that compare results with references launch every kernel of the
// GPU build. It runs after them, because their files come before this one's in the order of names.
func TestKernelsAreLaunched(t *testing.T) {
	needEmulated(t)
	for _, name := range loggedTests {
		if !logged[name] {
			t.Skip("SKIPPED: the conformance tests did not run")
		}
	}
	need.File(t, "../build/cuda/ptx/kernels", "run make cuda")
	files, err := filepath.Glob("../build/cuda/ptx/kernels/*.ptx")
	if err != nil || len(files) == 0 {
		t.Fatal("no PTX", err)
	}
	var symbols []string
	entry := regexp.MustCompile(`\.entry (\w+)`)
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range entry.FindAllStringSubmatch(string(text), -1) {
			symbols = append(symbols, m[1])
		}
	}
	ran := map[string]bool{}
	for name := range maps.Values(demangled(t, slices.Collect(maps.Keys(launched)))) {
		ran[name] = true
	}
	var missing []string
	for name := range maps.Values(demangled(t, symbols)) {
		if !ran[name] {
			missing = append(missing, name)
		}
	}
	slices.Sort(missing)
	if missing = slices.Compact(missing); len(missing) > 0 {
		t.Errorf("%d of %d kernels are in no conformance test:\n%s", len(missing), len(symbols), strings.Join(missing, "\n"))
	}
}
