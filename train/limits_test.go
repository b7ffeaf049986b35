package train

import (
	"strings"
	"testing"

	"ulysses/internal/status"
)

// A plan that exceeds the limit of a control group names this limit: "the host has 0.3 GiB free" is
// hard to believe on a machine of 64.
func TestErrorNamesTheControlGroup(t *testing.T) {
	err := status.Errorf(status.OutOfMemory, "too much")
	for _, x := range []struct {
		free, limit int64
		named       bool
	}{{gib / 4, gib, true}, {gib, 0, false}, {gib, 64 * gib, false}, {2 * gib, gib, false}} {
		got := inGroup(err, x.free, func() (limit, total int64) { return x.limit, 64 * gib })
		if status.Of(got) != status.OutOfMemory || x.named != strings.Contains(got.Error(),
			"too much; the machine has 64.0 GiB, of which the control group of the job may use 1.0 GiB: raise that limit (--mem of Slurm") {
			t.Errorf("%+v: %v", x, got)
		}
	}
	if inGroup(nil, gib/4, func() (limit, total int64) { return gib, 64 * gib }) != nil {
		t.Error("an error without a reason")
	}
}
