package conformance

import (
	"fmt"
	"math"
	"slices"

	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// testAttentionWide tests attention in BF16 with the memory layout of models: the tokens are
// aligned to 16 bytes, which kernels on tensor cores need. Few other cases have it. The lengths are
// around the tiles of these kernels; on other devices they are shorter.
func testAttentionWide(s *suite) {
	if !slices.Contains(s.one.Info().Compute, tensor.BF16) {
		s.t.Skip("SKIPPED: no BF16")
	}
	c := *s
	c.aligned = true
	s = &c
	long := s.tiles
	var cases []ref.Attention
	add := func(hq, hkv, d, dv int64, q, k []int64, causal bool, window *ref.Window) {
		cases = append(cases,
			ref.Attention{Hq: hq, Hkv: hkv, D: d, Dv: dv, CuQ: q, CuK: k, Causal: causal, Window: window})
	}
	d := long(64, 16)
	square := func(hq, hkv, d, dv int64, n []int64) {
		for _, causal := range []bool{true, false} {
			add(hq, hkv, d, dv, n, n, causal, nil)
		}
	}
	// lengths; with three heads, statistics are not aligned to 16 bytes
	for _, n := range []int64{1, 77, long(192, 96), long(1000, 130)} {
		square(3, 1, d, d, one(n))
	}
	// head sizes
	for _, w := range [][2]int64{{8, 8}, {72, 72}, {96, 96}, {128, 128}, {256, 256}, {192, 128}, {64, 128},
		{256, 128}} {
		square(2, 2, w[0], w[1], one(long(192, 33)))
	}
	// several tiles of the widest heads, and sums over query heads
	for _, d := range []int64{128, 256} {
		square(3, 1, d, d, one(long(300, 70)))
		add(2, 1, d, d, bounds(3, 40, 0, 30), bounds(5, 33, 4, 30), false, &ref.Window{Left: 20, Right: 6})
	}
	square(4, 2, d, d, bounds(64, 64, 64)) // documents of one length
	packed, other := bounds(5, 1, 0, 64, 33, 1, 1, long(300, 70), 7, long(129, 30)),
		bounds(9, 1, 0, 70, 33, 5, 1, long(400, 80), 7, long(129, 40))
	square(3, 1, d, d, packed)
	square(2, 2, 24, 40, packed)
	for _, causal := range []bool{true, false} {
		add(4, 2, d, d, packed, other, causal, nil)
		add(2, 1, d, d, one(long(130, 40)), one(long(520, 130)), causal, nil)
		add(2, 1, d, d, one(1), one(long(300, 90)), causal, nil)
		add(4, 2, d, d, packed, packed, causal, &ref.Window{Left: 20, Right: -1})
		add(4, 2, d, d, packed, other, causal, &ref.Window{Left: 20, Right: 0})
		add(2, 1, d, d, one(long(500, 100)), one(long(700, 120)), causal, &ref.Window{Left: long(128, 31), Right: 0})
		add(2, 1, d, d, one(long(500, 100)), one(long(500, 100)), causal, &ref.Window{Left: 0, Right: -1})
	}
	// heads of a rank whose shard begins or ends within a group
	for _, heads := range [][]int64{{0, 0, 0, 1}, {0, 1, 1, 1, 1, 2, 2}} {
		hq, hkv, from := int64(len(heads)), heads[len(heads)-1]+1, len(cases)
		square(hq, hkv, d, d, packed)
		square(hq, hkv, d, d, one(long(192, 66)))
		for i := range cases[from:] {
			cases[from+i].KVHead = heads
		}
	}
	// masks whose edge is one position before or behind the corner of a strip of 32 queries, or 32
	// keys, in a whole tile of 64 keys: such a tile is nearly all visible, or nearly all hidden
	for _, n := range [][2]int64{{100, 98}, {70, 100}, {70, 103}} {
		add(1, 1, d, d, one(n[0]), one(n[1]), true, nil)
	}
	add(1, 1, d, d, one(70), one(70), false, &ref.Window{Left: 30, Right: -1})
	if s.plain { // more tiles than buffers, also if only some of a block's queries see a tile
		for _, causal := range []bool{true, false} {
			add(2, 1, 64, 48, one(690), one(690), causal, nil)
			add(1, 1, 128, 128, one(200), one(720), causal, &ref.Window{Left: 150, Right: 30})
			add(1, 1, 256, 240, one(140), one(390), causal, nil)
			add(1, 1, 64, 64, bounds(10, 300, 130), bounds(700, 290, 0), causal, nil)
		}
	}
	layouts := []layout{dense, padded, headMajor}
	for i := range cases {
		g := &cases[i]
		if !s.selected(tensor.BF16, g) {
			continue
		}
		g.Scale = 1 / math.Sqrt(float64(g.D))
		x := newAttentionInput(tensor.BF16, g, seeded(25, int64(i)))
		name := fmt.Sprintf("%d of %d heads, D %d %d, q %v, k %v, kv %v, causal %v, window %v", g.Hq, g.Hkv, g.D, g.Dv,
			listed(g.CuQ), listed(g.CuK), g.KVHead, g.Causal, g.Window)
		s.check(name, attentionWant(name, g, x), func(b *bench) ([]*array, error) {
			return b.attention(g, x, layouts[i/2%3], layouts[i/2%3])
		})
	}
	s.attentionFarBelow()
}

// tiles returns n if the device may use kernels on tensor cores, otherwise few.
func (s *suite) tiles(n, few int64) int64 {
	if s.one.Info().Place == tensor.Host {
		return few
	}
	return s.long(n, few)
}

// attentionFarBelow has queries with all scores near -100, as in some heads of trained models. If a
// kernel treats positions after the end of a partial tile as scores of 0, their probabilities are
// exp(100): Inf, and NaN after a product with zero.
func (s *suite) attentionFarBelow() {
	for i, n := range [][2]int64{{64, 64}, {s.tiles(192, 66), s.tiles(192, 66)}, {s.tiles(1000, 70), s.tiles(1000, 70)},
		{s.tiles(128, 32), 77}, {1, 128}, {1, 64}, {30, s.tiles(320, 96)}} {
		for _, causal := range []bool{true, false} {
			if causal && n[0] > n[1] {
				continue
			}
			g := &ref.Attention{Hq: 4, Hkv: 2, D: 16, Dv: 16, CuQ: one(n[0]), CuK: one(n[1]), Scale: 0.25,
				Causal: causal}
			if !s.selected(tensor.BF16, g) {
				continue
			}
			x := newAttentionInput(tensor.BF16, g, seeded(26, int64(i)))
			for at := int64(0); at < int64(len(x.q)); at += g.D {
				x.q[at] = 400
			}
			for at := int64(0); at < int64(len(x.k)); at += g.D {
				x.k[at] = -1 // small: dq is a sum of keys that cancels where these are the same
			}
			name := fmt.Sprint("scores near -100, q ", n[0], ", k ", n[1], ", causal ", causal)
			wants := slices.Clone(attentionWant(name, g, x))
			for i := range wants { // see attentionScores
				wants[i].plain = nil
			}
			s.check(name, wants, func(b *bench) ([]*array, error) { return b.attention(g, x, dense, dense) })
		}
	}
}
