package sp

import (
	"fmt"
	"runtime"
	"testing"

	"ulysses/cpu"
	"ulysses/device"
)

// ringSketch returns the plan and the batch of one rank, without communication.
func ringSketch(t *testing.T, d device.Device, rank, size int64, l Layer, s BatchSpec) (*Plan, *Batch) {
	t.Helper()
	p := newPlan(d, nil, l, rank, size)
	s.Ring = l.Ring
	b, err := newBatch(rank, size, s)
	if err != nil {
		t.Fatal(err)
	}
	return p, b
}

// The calls of all steps see each visible pair of a query and a key exactly once, with the keys
// that were received, and what a group receives is what the other group sends.
func TestRingSeesEveryPairOnce(t *testing.T) {
	d, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer d.Close()
	masks := []Layer{{}, {Causal: true}, {Causal: true, Window: &device.Window{Left: 6, Right: -1}},
		{Window: &device.Window{Left: 3, Right: 4}}, {Window: &device.Window{Left: -1, Right: 2}}}
	specs := []BatchSpec{{Batch: 1, Seq: 41}, {Batch: 2, Seq: 16}, {Batch: 1, Seq: 3}, {Batch: 2, Seq: 31, KVSeq: 47},
		{Batch: 1, Seq: 30, KVSeq: 7},
		{Batch: 1, Seq: 50, CuSeqlens: []int64{0, 1, 20, 21, 23, 48, 50}},
		{Batch: 2, Seq: 20, KVSeq: 10, CuSeqlens: []int64{0, 3, 20, 40}, CuSeqlensKV: []int64{0, 9, 10, 20}}}
	for _, l := range masks {
		for _, s := range specs {
			for ring := int64(2); ring <= 5; ring++ {
				for _, zigzag := range []bool{false, true} {
					for _, gather := range []bool{false, true} {
						l.Heads, l.KVHeads, l.Dim, l.VDim, l.Ring, l.Gather, s.Zigzag = 2, 2, 4, 4, ring, gather, zigzag
						t.Run(fmt.Sprintf("%v %v %+v ring %d zigzag %v gather %v", l.Causal, windowText(l.Window), s,
							ring, zigzag, gather), func(t *testing.T) {
							for _, placement := range []int{inOrder, inZigzag} {
								coverPairs(t, d, ring, l, s, placement)
							}
						})
					}
				}
			}
		}
	}
}

func coverPairs(t *testing.T, d device.Device, ring int64, l Layer, s BatchSpec, placement int) {
	seen := map[[3]int64]int{}
	moved := map[[2]int64]int64{}
	for rank := range ring {
		p, b := ringSketch(t, d, rank, ring, l, s)
		b.placement = placement
		sch := p.scheduleOf(b)
		for i, step := range sch.steps {
			for _, from := range step.from {
				for _, block := range from.blocks {
					if i > 0 {
						moved[[2]int64{from.group, rank}] += block.rows.n()
					}
					for _, c := range block.calls {
						countPairs(&l, &c, seen)
					}
				}
			}
			for _, to := range step.to {
				moved[[2]int64{rank, to.group}] -= to.rows()
			}
		}
	}
	for pair, rows := range moved {
		if rows != 0 {
			t.Errorf("groups %v: %d more rows are received than sent", pair, rows)
		}
	}
	_, b := ringSketch(t, d, 0, ring, l, s)
	visible := 0
	for n := range b.spec.Batch {
		for i := range b.queries.n {
			lo, hi := l.seenBy(b, n, i)
			for j := lo; j < hi; j++ {
				visible++
				if seen[[3]int64{n, n*b.queries.n + i, n*b.keys.n + j}] != 1 {
					t.Fatalf("placement %d: query %d and key %d of sequence %d are in %d calls", placement, i, j, n,
						seen[[3]int64{n, n*b.queries.n + i, n*b.keys.n + j}])
				}
			}
		}
	}
	if len(seen) != visible {
		t.Errorf("placement %d: %d pairs in calls, %d are visible", placement, len(seen), visible)
	}
}

// countPairs counts the pairs that a call computes, as device.Attention defines them.
func countPairs(l *Layer, c *ringCall, seen map[[3]int64]int) {
	left, right := l.Window.Sides(l.Causal)
	for d := range c.shift {
		for i := c.cuQ[d]; i < c.cuQ[d+1]; i++ {
			for j := c.cuK[d]; j < c.cuK[d+1]; j++ {
				if at := i + c.shift[d]; j >= at-left && j <= at+right {
					seen[[3]int64{c.sequence, c.queryAt + i, c.keyAt + j}]++
				}
			}
		}
	}
}

// With a zigzag, the work of the slowest group is within 5 % of the mean under a causal mask, also
// if tokens are in order on the ranks. Documents and windows stay where they are balanced anyway.
func TestZigzagBalances(t *testing.T) {
	d, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer d.Close()
	for _, c := range []struct {
		ring, seq int64
		layer     Layer
		zigzag    bool
		cu        []int64
		chosen    string
	}{
		{4, 4096, Layer{Causal: true}, true, nil, "zigzag"},
		{8, 4096, Layer{Causal: true}, true, nil, "zigzag"},
		{4, 4096, Layer{Causal: true}, false, nil, "zigzag"},
		{8, 4099, Layer{Causal: true}, false, nil, "zigzag"},
		{8, 4096, Layer{}, false, nil, "order"},
		{8, 4096, Layer{Causal: true}, false, []int64{0, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096}, "order"},
	} {
		c.layer.Heads, c.layer.KVHeads, c.layer.Dim, c.layer.VDim, c.layer.Ring = 1, 1, 4, 4, c.ring
		most, sum := 0.0, 0.0
		for rank := range c.ring {
			p, b := ringSketch(t, d, rank, c.ring, c.layer,
				BatchSpec{Batch: 1, Seq: c.seq, CuSeqlens: c.cu, Zigzag: c.zigzag})
			sch, pairs := p.scheduleOf(b), 0.0
			if inOrder := sch.queries == &b.queries.inOrder; !c.zigzag && inOrder != (c.chosen == "order") {
				t.Errorf("%+v: rows are in order: %v", c, inOrder)
			}
			for _, q := range sch.queries.attention[sch.group] {
				pairs += p.layer.pairs(b, 0, q)
			}
			seen := map[[3]int64]int{}
			if c.seq < 4097 && rank == 1 { // the formula is the number of pairs
				for _, step := range sch.steps {
					for _, from := range step.from {
						for _, block := range from.blocks {
							for _, call := range block.calls {
								countPairs(&p.layer, &call, seen)
							}
						}
					}
				}
				if float64(len(seen)) != pairs {
					t.Errorf("%+v: %v pairs, counted %d", c, pairs, len(seen))
				}
			}
			most, sum = max(most, pairs), sum+pairs
		}
		if mean := sum / float64(c.ring); !(most <= 1.05*mean) {
			t.Errorf("%+v: the slowest group has %.3f of the mean", c, most/mean)
		}
	}
}

// In a causal zigzag, a group sends both chunks of its keys to the groups below it, and one to the
// groups above it: 3/4 of all keys on average (docs/attention.md).
func TestZigzagSendsWhatIsSeen(t *testing.T) {
	d, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer d.Close()
	for _, ring := range []int64{2, 4, 8} {
		l, chunk, all := Layer{Causal: true, Heads: 1, KVHeads: 1, Dim: 4, VDim: 4, Ring: ring}, int64(16), int64(0)
		for rank := range ring {
			p, b := ringSketch(t, d, rank, ring, l, BatchSpec{Batch: 1, Seq: 2 * ring * chunk, Zigzag: true})
			sent, _ := p.scheduleOf(b).rowsMoved()
			if want := chunk*(ring-1-rank) + 2*chunk*rank; sent != want {
				t.Errorf("group %d of %d sends %d rows, want %d", rank, ring, sent, want)
			}
			all += sent
		}
		if want := ring * (ring - 1) * 2 * chunk * 3 / 4; all != want {
			t.Errorf("%d groups send %d rows, want %d", ring, all, want)
		}
	}
}

// The sizes of a rank need memory that grows with the number of ranks, not with its square: a plan
// computes them for each rank of a ring.
func TestSizesOfALongRing(t *testing.T) {
	d, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer d.Close()
	of := func(ring int64, gather bool) (bytes uint64) {
		p := newPlan(d, nil, Layer{Causal: true, Heads: 4, KVHeads: 2, Dim: 16, VDim: 16, Ring: ring, Gather: gather},
			ring/3, ring)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := p.MaxSizes(1, 100000, 100000); err != nil {
			t.Fatal(err)
		}
		if _, _, err := p.MaxSeparateSizes(1, 100000, 100000); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	for _, gather := range []bool{false, true} {
		if short, long := of(256, gather), of(1024, gather); long > 6*short || long > 3000*1024 {
			t.Errorf("gather %v: %d bytes for 256 ranks, %d for 1024", gather, short, long)
		}
	}
}
