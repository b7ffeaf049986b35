package train

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"ulysses/data"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/tensorfile"
)

// variant is settings that must not change the result: mesh, ZeRO stage, tiles, policies of
// activations, accumulation.
type variant struct {
	ulysses, data int
	zero          int
	tiles         model.Tiles
	memory        MemoryConfig
	accumulate    int64
}

// globalBatch is the number of sequences of an optimizer step.
const globalBatch = 12

func (r variant) String() string {
	return fmt.Sprintf("ulysses %d x data %d, zero %d, tiles %v, %+v, accumulate %d", r.ulysses, r.data, r.zero,
		r.tiles, r.memory, r.accumulate)
}

// variants returns all variants, or a sixteenth of them with every pair of a mesh and a stage.
func variants(all bool) (list []variant) {
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
								list = append(list, variant{ulysses, data, zero, tiles, memory, accumulate})
							}
						}
					}
				}
			}
		}
	}
	return list
}

// ignoredData returns sequences whose first quarter has no targets: the whole shard of the first of
// four ranks. Every fourth sequence has no targets at all: a whole micro-batch of a replica.
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
	return config(width,
		tensorfile.WriteTokens(t, filepath.Join(t.TempDir(), "a.safetensors"), n, width,
			map[string][]int64{"input_ids": ids, "labels": labels}))
}

func (r variant) train(t *testing.T, optimizer string, dataset data.Config) outcome {
	t.Helper()
	ranks := r.ulysses * r.data
	x := run{model: "deep", ranks: ranks, ulysses: r.ulysses, optimizer: optimizer, compute: tensor.F32, steps: 5,
		tiles: r.tiles, zero: r.zero, memory: r.memory}
	if optimizer == "sgd" {
		x.lr = 0.1
	}
	dataset.Accumulate, dataset.Batch = r.accumulate, globalBatch/r.accumulate/int64(r.data)
	return x.trainOn(t, dataset)
}

// Five steps of SGD give the losses and the weights of one rank that keeps all activations, and
// five steps of AdamW give the losses: on every mesh, with every ZeRO stage, with and without
// tiles, with any policy of activations, with and without accumulation, and with ranks without
// targets. ULYSSES_TEST_TABLE=all runs all variants.
func TestTable(t *testing.T) {
	dataset := ignoredData(t)
	for _, optimizer := range []string{"sgd", "adamw"} {
		want := variant{1, 1, 0, model.Tiles{MLP: model.TileOff, Loss: model.TileOff}, MemoryConfig{}, 1}.train(t,
			optimizer, dataset)
		if !(want.losses[4] < want.losses[0]) {
			t.Fatalf("the loss does not decrease: %v", want.losses)
		}
		for _, r := range variants(os.Getenv("ULYSSES_TEST_TABLE") == "all") {
			got := r.train(t, optimizer, dataset)
			for i, l := range want.losses {
				if !(math.Abs(got.losses[i]-l) <= 1e-5) {
					t.Errorf("%v, %s: loss %v at step %d, want %v", r, optimizer, got.losses[i], i+1, l)
				}
			}
			diff := make([]float64, len(want.weights))
			for i, w := range want.weights {
				diff[i] = math.Abs(float64(got.weights[i]) - float64(w))
				if v := got.weights[i]; w > 1 && (v == math.Nextafter32(w, 9) || v == math.Nextafter32(w, -9)) {
					diff[i] = min(diff[i], 1e-7) // the next number is 1.2e-7 away
				}
			}
			slices.Sort(diff)
			most, p99 := diff[len(diff)-1], diff[len(diff)*99/100]
			const lr = 3e-3 // of AdamW
			if optimizer == "sgd" && !(most <= 1e-7) || optimizer == "adamw" && !(p99 <= 1e-6 && most <= 0.1*lr) {
				t.Errorf("%v, %s: the weights differ by at most %.2g, 99 of 100 by at most %.2g", r, optimizer,
					most, p99)
			}
		}
	}
}
