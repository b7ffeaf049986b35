package sp

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/devicetest"
)

// TestLaunchesOfALayer: on a GPU, an all-to-all packs all tensors for all ranks in one launch, and
// unpacks them in one. On 8 ranks the attention of a layer has four all-to-alls, so each rank has 8
// launches besides attention itself. A launch for each tensor and rank would be about 120.
func TestLaunchesOfALayer(t *testing.T) {
	const ranks = 8
	kind := devicetest.CUDA(t, "cuda", false)
	if !cudatest.Emulated() {
		t.Skip("SKIPPED: the emulated plug-in counts launches")
	}
	// A launch takes 28 blocks; with two sequences, q, k and v are 40 in each direction.
	for batch, all := range map[int64]int{1: 8, 2: 10} {
		log := filepath.Join(t.TempDir(), "launches")
		err := comm.RunLocal(ranks, func(c comm.Comm) error {
			r := late(c, Layer{Heads: 16, KVHeads: 8, Dim: 16, VDim: 16, DType: tensor.BF16, Causal: true},
				BatchSpec{Batch: batch, Seq: 64}, kind)
			dense := func(dtype tensor.DType, shape ...int64) tensor.Tensor {
				x := tensor.Of(nil, dtype, shape...)
				return r.bytes(x.Bytes()).At(0, dtype, shape...)
			}
			n := r.x.Rows()
			q, k := []int64{batch, n, 16, 16}, []int64{batch, n, 8, 16}
			r.a.Q, r.a.Out, r.g.DOut, r.g.DQ = dense(tensor.BF16, q...), dense(tensor.BF16, q...),
				dense(tensor.BF16, q...), dense(tensor.BF16, q...)
			r.a.K, r.a.V, r.g.DK, r.g.DV = dense(tensor.BF16, k...), dense(tensor.BF16, k...), dense(tensor.BF16, k...),
				dense(tensor.BF16, k...)
			r.a.LSE, r.a.Cos, r.a.Sin = tensor.Tensor{}, dense(tensor.F32, batch*n, 8), dense(tensor.F32, batch*n, 8)
			must(r.stream.Sync())
			must(comm.Agree(c, nil))
			if c.Rank() == 0 {
				must(os.Setenv("ULYSSES_EMULATED_LAUNCHES", log))
			}
			must(comm.Agree(c, nil))
			must(r.run())
			must(r.stream.Sync())
			must(comm.Agree(c, nil))
			if c.Rank() == 0 {
				must(os.Unsetenv("ULYSSES_EMULATED_LAUNCHES"))
			}
			must(comm.Agree(c, nil))
			return r.close()
		})
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		times := map[string]int{}
		for line := range strings.Lines(string(text)) {
			name, _, _ := strings.Cut(line, "\t")
			if times[name]++; !attention(name) && !strings.Contains(name, "moves_kernel") {
				t.Errorf("batch of %d: a launch of %s", batch, name)
			}
		}
		if n := times["moves_kernel<bf16>"]; n != all*ranks {
			t.Errorf("batch of %d: %d launches of moves on %d ranks, want %d on each: %v", batch, n, ranks, all, times)
		}
	}
}

// attention reports whether a launch is of attention's kernels or of their tables of documents.
func attention(name string) bool {
	return strings.Contains(name, "attention") || name == "kernels.of_size[index]" || name == "tables_put"
}
