package cpu

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"ulysses/testkit/conformance"
)

// envDigests names a file of digests of the kernels' results.
const envDigests = "ULYSSES_KERNEL_DIGESTS"

// TestDigests compares the bits of every conformance case with those that another build of the
// kernels wrote: run it once before a change of the kernels or of the compiler's flags, with
// ULYSSES_KERNEL_DIGESTS naming a file that does not exist, and once afterwards. The file is not
// kept in the repository, because results depend on the compiler and on the C library.
func TestDigests(t *testing.T) {
	path := os.Getenv(envDigests)
	if path == "" {
		t.Skip("SKIPPED: " + envDigests + " names no file to write or to compare with")
	}
	var is []string
	for _, isa := range ISAs() {
		t.Run(isa, func(t *testing.T) {
			conformance.RunDigests(t, opener(isa), func(name string, hash uint64) {
				is = append(is, fmt.Sprintf("%s %016x", name, hash))
			})
		})
	}
	slices.Sort(is) // some cases run their calls in the order of a map
	want, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		if err := os.WriteFile(path, []byte(strings.Join(is, "\n")), 0o666); err != nil {
			t.Fatal(err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	was := strings.Split(string(want), "\n")
	if len(was) != len(is) {
		t.Errorf("%d digests, %s has %d", len(is), path, len(was))
	}
	for i := range min(len(was), len(is)) {
		if was[i] != is[i] {
			t.Fatalf("other bits: %s, %s has %s", is[i], path, was[i])
		}
	}
}
