// Package need is for tests that need a tool or a file that may be missing on a machine.
//
// Such a test is skipped if the tool is missing. If the environment variable CI is "true", it
// fails: CI installs all tools, and a skip would hide that nothing was tested. A test that cannot
// apply to a machine, for example one that needs a machine without a GPU, calls t.Skip itself.
package need

import (
	"bytes"
	"os"
	"os/exec"
	"testing"
)

// CI reports whether a missing tool fails the test instead of skipping it.
func CI() bool { return os.Getenv("CI") == "true" }

// Tool returns the path of a program on PATH. fix says how to install it.
func Tool(t testing.TB, name, fix string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Missing(t, "no "+name+" on PATH", fix)
	}
	return path
}

// File returns path if a file or folder is there. fix says how to make it.
func File(t testing.TB, path, fix string) string {
	t.Helper()
	if _, err := os.Stat(path); err != nil {
		Missing(t, err.Error(), fix)
	}
	return path
}

// Namespaces is for tests that mount file systems or have hostnames of their own, as root. Only
// containers that are started with this right have it.
func Namespaces(t testing.TB) {
	t.Helper()
	try := []string{"--uts", "--ipc", "--mount", "--propagation", "private", "sh", "-c",
		"hostname probe && mount -t tmpfs tmpfs /dev/shm"}
	if out, err := exec.Command("unshare", try...).CombinedOutput(); err != nil {
		Missing(t, "no right to make namespaces and mounts: "+string(bytes.TrimSpace(out)),
			"run the tests as root, in a container started with --privileged")
	}
}

// ExactAllocations is for tests that count Go's allocations. It skips them in instrumented code,
// which allocates where other code does not.
func ExactAllocations(t testing.TB) {
	t.Helper()
	if Instrumented {
		t.Skip("SKIPPED: instrumented code allocates where other code does not")
	}
}

// Missing skips the test, or fails it in CI. what is missing, and fix says how to get it.
func Missing(t testing.TB, what, fix string) {
	t.Helper()
	if CI() {
		t.Fatalf("%s, and CI=true: %s", what, fix)
	}
	t.Skipf("SKIPPED: %s: %s", what, fix)
}
