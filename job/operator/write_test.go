package operator

import (
	"os"
	"path/filepath"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/tensorfile"
)

// Shards are written in order for every size of blocks, also if a rank has an empty shard. A file
// that cannot be created is an error on all ranks, and no rank hangs.
func TestWriteSharded(t *testing.T) {
	const rows, width = 7, 3
	for _, ranks := range []int{1, 2, 3, 8} {
		for _, blockRows := range []int64{1, 2, 100} {
			for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "not", "there")} {
				path := filepath.Join(dir, "x.safetensors")
				err := comm.RunLocal(ranks, func(c comm.Comm) error {
					lo, hi := comm.Shard(rows, ranks, c.Rank())
					x, y := make([]float32, (hi-lo)*width), make([]float32, hi-lo)
					for i := range x {
						x[i] = float32(lo*width + int64(i))
					}
					for i := range y {
						y[i] = -float32(lo + int64(i))
					}
					err := writeSharded(c, nil, nil, path, nil, []shardedTensor{
						{"x", tensor.OfFloat32(x, 1, hi-lo, width), []int64{rows, width}},
						{"y", tensor.OfFloat32(y, 1, hi-lo), []int64{rows}},
					}, &finiteCheck{}, blockRows*width*4)
					if filepath.Base(dir) != "there" {
						return err
					}
					if status.Of(err) != status.IO {
						t.Errorf("rank %d of %d: %v, want an input/output error", c.Rank(), ranks, err)
					}
					return nil
				})
				if err != nil {
					t.Fatalf("%d ranks, blocks of %d rows: %v", ranks, blockRows, err)
				}
				if filepath.Base(dir) == "there" {
					if _, err := os.Stat(dir); err == nil {
						t.Error("a folder was created")
					}
					continue
				}
				x, _ := tensorfile.Read(t, path, "x")
				y, _ := tensorfile.Read(t, path, "y")
				for i, v := range x {
					if v != float32(i) || y[i/width] != -float32(i/width) {
						t.Fatalf("%d ranks, blocks of %d rows: %v, %v", ranks, blockRows, x, y)
					}
				}
			}
		}
	}
}
