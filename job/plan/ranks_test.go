package plan

import (
	"math"
	"testing"

	"ulysses/job/file"
)

// The product of large degrees does not overflow.
func TestRanksOfReplica(t *testing.T) {
	for _, x := range []struct {
		ulysses, ring int64
		want          int
	}{
		{0, 0, 1},
		{4, 3, 12},
		{4, 1 << 62, file.MaxPlanned},
		{1 << 33, 1 << 33, file.MaxPlanned},
		{math.MaxInt64, math.MaxInt64, file.MaxPlanned},
	} {
		j := &file.Job{}
		j.Parallel.Ulysses, j.Parallel.Ring = x.ulysses, x.ring
		if n := RanksOfReplica(j); n != x.want {
			t.Errorf("ulysses %d x ring %d: %d ranks, want %d", x.ulysses, x.ring, n, x.want)
		}
	}
}
