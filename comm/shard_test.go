package comm

import (
	"math"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
)

func TestShardCoversEverythingOnce(t *testing.T) {
	for n := range int64(20) {
		for size := int64(1); size < 9; size++ {
			at := int64(0)
			for r := range size {
				lo, hi := Shard(n, size, r)
				more := int64(0)
				if r < n%size {
					more = 1
				}
				if lo != at || hi-lo != n/size+more {
					t.Fatalf("Shard(%d, %d, %d) is [%d, %d)", n, size, r, lo, hi)
				}
				at = hi
			}
			if at != n {
				t.Fatalf("shards of %d over %d end at %d", n, size, at)
			}
		}
	}
}

// Counts of rows whose sum exceeds 64 bits are refused.
func TestCountsOverflow(t *testing.T) {
	x, y, rows := newTensor(tensor.F32, 4), newTensor(tensor.F32, 4), []int64{1, 2, 1}
	for _, huge := range [][]int64{{1 << 62, 1 << 62, 1}, {math.MaxInt64, math.MaxInt64, 6}} {
		if err := CheckAllToAll(x, y, huge, rows, 3); status.Of(err) != status.InvalidArgument {
			t.Error(huge, err)
		}
		if err := CheckAllGather(x, y, huge, 2, 3); status.Of(err) != status.InvalidArgument {
			t.Error(huge, err)
		}
	}
	if err := CheckAllToAll(x, y, rows, rows, 3); err != nil {
		t.Error(err)
	}
}
