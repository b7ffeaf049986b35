package job

import (
	"io"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// The error of verify is that of the rank that failed, not that of a rank that waits for it.
func TestVerifyOnFailedRank(t *testing.T) {
	t.Setenv("ULYSSES_FAULT", "fail:1:1")
	err := Verify(Options{Path: filepath.Join(goldens, "llama-sgd-packed", "job.toml"), Ranks: 2,
		Sets: []string{"parallel.ulysses=2"}, Stdout: io.Discard, Stderr: io.Discard})
	if status.Of(err) != status.Internal || !strings.Contains(err.Error(), "rank 1 on ") ||
		!strings.Contains(err.Error(), "error requested by ULYSSES_FAULT") {
		t.Errorf("%v: %v", status.Of(err), err)
	}
}
