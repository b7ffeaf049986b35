package sp

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"ulysses/device"
)

// MaxSizes and MaxSeparateSizes of a ring are enough on every rank for each batch of at most these
// extents: for any documents, in both layouts of tokens, and in both placements of rows.
func TestMaxSizesOfARing(t *testing.T) {
	b := newBench()
	defer b.close()
	const seq = 96
	rng := rand.New(rand.NewPCG(1, 2))
	documents := func(n int64) []int64 {
		if rng.IntN(3) == 0 {
			return nil
		}
		cu := []int64{0}
		for cu[len(cu)-1] < n {
			cu = append(cu, min(n, cu[len(cu)-1]+1+rng.Int64N(n)))
		}
		return cu
	}
	var zigzags, inOrders int
	for _, l := range []Layer{{Causal: true}, {Causal: true, Window: &device.Window{Left: 20, Right: -1}}, {},
		{Causal: true, Sinks: true}, {Causal: true, BlockRows: 16, BlockColumns: 8}, {Causal: true, NoBackward: true}} {
		l.Heads, l.KVHeads, l.Dim, l.VDim = 4, 2, 16, 8
		for _, ring := range []int64{2, 3} {
			for _, each := range []int64{1, 2} {
				size := ring * each
				for i := range 2 * size {
					l.Ring, l.Gather = ring, i < size
					rank := i % size
					p := newPlan(b.dev, nil, l, rank, size)
					most, err := p.MaxSizes(1, seq, seq)
					must(err)
					saved, apart, err := p.MaxSeparateSizes(1, seq, seq)
					must(err)
					for range 24 {
						n := 1 + rng.Int64N(seq)
						if rng.IntN(2) == 0 {
							n = seq
						}
						x, err := newBatch(rank, size, BatchSpec{Batch: 1, Seq: n, CuSeqlens: documents(n), Ring: ring,
							Zigzag: rng.IntN(2) == 0})
						must(err)
						what := fmt.Sprintf("%+v, rank %d of %d, %d tokens, documents %v, zigzag %v", l, rank, size, n,
							x.queries.cu, x.Zigzag())
						if s := p.Sizes(x); s.Saved > most.Saved || s.Workspace > most.Workspace {
							t.Fatalf("%s: sizes %+v, at most %+v", what, s, most)
						}
						if s, lse := p.SeparateSizes(x); s > saved || lse > apart {
							t.Fatalf("%s: separate sizes %d and %d, at most %d and %d", what, s, lse, saved, apart)
						}
						if p.placed(x).queries == &x.queries.zigzag {
							zigzags++
						} else {
							inOrders++
						}
					}
				}
			}
		}
	}
	if min(zigzags, inOrders) == 0 {
		t.Errorf("%d batches with chunks of a zigzag, %d without", zigzags, inOrders)
	}
}
