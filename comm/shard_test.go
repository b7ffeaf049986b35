package comm

import "testing"

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
