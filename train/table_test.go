package train

import (
	"fmt"
	"math"
	"os"
	"slices"
	"testing"

	"ulysses/data"
	"ulysses/model"
	"ulysses/tensor"
)

// row is a way to train that must not matter: mesh, stage, tiles, what becomes of activations,
// accumulation.
type row struct {
	ulysses, data int
	zero          int
	tiles         model.Tiles
	memory        MemoryConfig
	accumulate    int64
}

// globalBatch is the rows of an optimizer step.
const globalBatch = 12

func (r row) String() string {
	return fmt.Sprintf("ulysses %d x data %d, zero %d, tiles %v, %+v, accumulate %d", r.ulysses, r.data, r.zero, r.tiles, r.memory, r.accumulate)
}

// rows are all of them, or a seeded tenth in which every pair of a mesh and a stage still comes up.
func rows(all bool) (rows []row) {
	kept := []MemoryConfig{
		{},
		{BlockInput: "recompute", Attention: "recompute", QKV: "recompute", MLP: "recompute"},
		{Attention: "keep", QKV: "recompute", MLP: "recompute", Segment: 3, BlockInput: "offload", HeadGroups: 2},
		{BlockInput: "offload", Attention: "offload", QKV: "offload", MLP: "offload"},
	}
	n := 0
	for _, ulysses := range []int{1, 2, 4} {
		for _, data := range []int{1, 2, 4} {
			for zero := range 4 {
				n++
				for i, tiles := range []model.Tiles{{MLP: model.TileOff, Loss: model.TileOff}, {MLP: 5, Loss: 7}} {
					for j, memory := range kept {
						for k, accumulate := range []int64{1, 3} {
							if all || (i+2*j+8*k+3*n)%16 == 0 {
								rows = append(rows, row{ulysses, data, zero, tiles, memory, accumulate})
							}
						}
					}
				}
			}
		}
	}
	return rows
}

// ignoredData is rows of which the first quarter, all that the first of four sequence ranks has,
// counts in no loss; in every fourth row nothing counts: all that a data rank has of a micro step.
func ignoredData(t *testing.T) data.Config {
	t.Helper()
	const n, width = 24, 32
	ids, labels := make([]int64, n*width), make([]int64, n*width)
	for i := range ids {
		ids[i] = int64(i*i+i/width) % 61
		if labels[i] = ids[i]; i%width < 9 || i/width%4 == 3 {
			labels[i] = data.Ignore
		}
	}
	return config(width, tokensFile(t, t.TempDir(), "a.safetensors", n, width, map[string][]int64{"input_ids": ids, "labels": labels}))
}

func (r row) train(t *testing.T, optimizer string, dataset data.Config) outcome {
	t.Helper()
	ranks := r.ulysses * r.data
	x := run{model: "deep", ranks: ranks, ulysses: r.ulysses, optimizer: optimizer, compute: tensor.F32, steps: 5, tiles: r.tiles, zero: r.zero, memory: r.memory, lr: 0.1}
	dataset.Accumulate, dataset.Batch = r.accumulate, globalBatch/r.accumulate/int64(r.data)
	return x.trainOn(t, dataset)
}

// Five steps of SGD give the losses and the weights of one rank that keeps everything, and five of
// AdamW the losses, on every mesh, in every stage, with tiles and without, whatever becomes of
// activations, with accumulation or in one go, with ranks whose tokens are all ignored.
// ULYSSES_TEST_TABLE=all runs the whole table.
func TestTable(t *testing.T) {
	dataset := ignoredData(t)
	for _, optimizer := range []string{"sgd", "adamw"} {
		want := row{1, 1, 0, model.Tiles{MLP: model.TileOff, Loss: model.TileOff}, MemoryConfig{}, 1}.train(t, optimizer, dataset)
		if !(want.losses[4] < want.losses[0]) {
			t.Fatalf("nothing is learnt: %v", want.losses)
		}
		for _, r := range rows(os.Getenv("ULYSSES_TEST_TABLE") == "all") {
			got := r.train(t, optimizer, dataset)
			for i, l := range want.losses {
				if !(math.Abs(got.losses[i]-l) <= 1e-5) {
					t.Errorf("%v, %s: loss %v at step %d, want %v", r, optimizer, got.losses[i], i+1, l)
				}
			}
			apart := make([]float64, len(want.weights))
			for i, w := range want.weights {
				apart[i] = math.Abs(float64(got.weights[i]) - float64(w))
				if v := got.weights[i]; w > 1 && (v == math.Nextafter32(w, 9) || v == math.Nextafter32(w, -9)) {
					apart[i] = min(apart[i], 1e-7) // the next number is 1.2e-7 away
				}
			}
			slices.Sort(apart)
			most, p99 := apart[len(apart)-1], apart[len(apart)*99/100]
			const lr = 3e-3 // of AdamW
			if optimizer == "sgd" && !(most <= 1e-7) || optimizer == "adamw" && !(p99 <= 1e-6 && most <= 0.1*lr) {
				t.Errorf("%v, %s: weights are off by %.2g at most, 99 of 100 by %.2g", r, optimizer, most, p99)
			}
		}
	}
}
