package conformance

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// testAttentionOptions tests the options of attention beyond causal masks and windows: shifts,
// sinks, slopes, soft caps, dropout, block masks, carry, and F32 gradients of BF16.
func testAttentionOptions(s *suite) {
	s.typed(func(d tensor.DType, suffix string) {
		for i, g := range s.optionCases() {
			if s.selected(d, g) && (!s.few || i%5 == 0 || s.tiled && g.D > 128) {
				s.optionCase(d, suffix, i, g, false)
			}
		}
		if s.few {
			return
		}
		s.carryCases(d, suffix)
		if d == tensor.BF16 {
			for i, g := range s.optionCases() {
				if i%4 == 0 && s.selected(d, g) {
					s.optionCase(d, suffix+", gradients in F32", i, g, true)
				}
			}
		}
		s.t.Run("NaN shows, in its document alone"+suffix, func(t *testing.T) {
			cu := bounds(40, 100, 30)
			g := &ref.Attention{Hq: 2, Hkv: 2, D: 16, Dv: 16, CuQ: cu, CuK: cu, Causal: true, Scale: 0.25}
			s.attentionNaNOf(t, d, s.withOptions(g, 93, "sinks slopes cap dropout", 0, 0))
		})
		// the scores of this case are far beyond the cap, and its sinks far beyond the scores
		steep := &ref.Attention{Hq: 2, Hkv: 1, D: 16, Dv: 16, CuQ: one(70), CuK: one(70), Causal: true, Scale: 20,
			Softcap: 30, Sinks: []float64{45, -45}}
		if s.selected(d, steep) {
			s.optionCase(d, suffix+", steep", 90, steep, false)
		}
		if s.reproducible && !s.choosing {
			s.t.Run("a head is independent of the others"+suffix, func(t *testing.T) {
				for _, n := range []int64{s.long(700, 150), 90} {
					g := &ref.Attention{Hq: 6, Hkv: 4, D: 32, Dv: 16, CuQ: one(n), CuK: one(n),
						KVHead: []int64{0, 0, 1, 2, 2, 2}, Scale: 0.2, Causal: n > 100}
					s.withOptions(g, 91, "sinks slopes cap dropout heads", 16, 32)
					s.headsAloneOf(t, d, g)
				}
			})
		}
	})
}

// optionCase runs case i. With wide, gradients are in F32.
func (s *suite) optionCase(d tensor.DType, suffix string, i int, g *ref.Attention, wide bool) {
	layouts := [][2]layout{{headMajor, headMajor}, {dense, padded}, {padded, headMajor}, {shifted, dense}}
	l := layouts[i%4]
	if g.Scale == 0 {
		g.Scale = []float64{1, 0.7, 1.5, 0.3}[i%4] / math.Sqrt(float64(g.D))
	}
	x := newAttentionInput(d, g, seeded(28, int64(i)))
	x.wide = wide
	name := optionsName(g) + suffix
	s.check(name, attentionWant(fmt.Sprint("options ", i, name), g, x), func(b *bench) ([]*array, error) {
		return b.attention(g, x, l[0], l[1])
	})
}

// optionsName returns the name of a case.
func optionsName(g *ref.Attention) string {
	name := fmt.Sprintf("%d of %d heads, D %d %d, q %v, k %v, causal %v", g.Hq, g.Hkv, g.D, g.Dv, listed(g.CuQ),
		listed(g.CuK), g.Causal)
	add := func(set bool, text string, values ...any) {
		if set {
			name += ", " + fmt.Sprintf(text, values...)
		}
	}
	add(g.Shift != nil, "shift %v", g.Shift)
	if g.Window != nil {
		add(true, "window %d %d", g.Window.Left, g.Window.Right)
	}
	add(g.Sinks != nil, "sinks")
	add(g.Slopes != nil, "slopes")
	add(g.Softcap != 0, "cap %g", g.Softcap)
	add(g.Dropout != 0, "dropout %g", g.Dropout)
	add(g.Mask != nil, "%d blocks of %d by %d in sequences of %d by %d", len(g.Mask), g.BlockRows, g.BlockColumns,
		g.QuerySeq, g.KeySeq)
	return name
}

// withOptions sets options that are named in how: sinks, slopes, cap, dropout, and a block mask
// that is the same for all heads (blocks) or not (heads), for sequences as long as the call.
func (s *suite) withOptions(g *ref.Attention, seed int64, how string, rows, columns int64) *ref.Attention {
	r := seeded(29, seed)
	if strings.Contains(how, "sinks") {
		g.Sinks = normal(r, g.Hq)
	}
	if strings.Contains(how, "slopes") {
		g.Slopes = make([]float64, g.Hq)
		for h := range g.Slopes {
			g.Slopes[h] = math.Exp2(-float64(h + 1))
		}
	}
	if strings.Contains(how, "cap") {
		g.Softcap = 1.5
	}
	if strings.Contains(how, "dropout") {
		g.Dropout, g.Seed, g.HeadAt, g.QueryAt, g.KeyAt = 0.3, 77+seed, 5, 1<<33+seed, 3<<40
	}
	heads := int64(0)
	if strings.Contains(how, "blocks") {
		heads = 1
	} else if strings.Contains(how, "heads") {
		heads = g.Hq
	}
	if heads > 0 {
		if g.QuerySeq == 0 {
			g.QuerySeq, g.KeySeq = g.Tq(), g.Tk()
			// the first query of the call is the first of a sequence
			g.QueryAt, g.KeyAt = g.QueryAt/g.QuerySeq*g.QuerySeq, g.KeyAt/g.KeySeq*g.KeySeq
		}
		g.BlockRows, g.BlockColumns = rows, columns
		g.Mask = blockMask(r, heads, (g.QuerySeq+rows-1)/rows, (g.KeySeq+columns-1)/columns)
	}
	return g
}

// blockMask returns a mask that keeps a third of the blocks, in runs of various lengths. A line of
// blocks has none, and another line all.
func blockMask(r *rand.Rand, heads, rows, columns int64) []uint8 {
	m := make([]uint8, heads*rows*columns)
	for i := range m {
		if r.IntN(3) == 0 {
			m[i] = uint8(1 + r.IntN(255))
		}
		if i > 0 && r.IntN(3) == 0 {
			m[i] = m[i-1]
		}
	}
	for h := range heads {
		if rows > 2 {
			at := (h*rows + (h+1)%rows) * columns
			clear(m[at : at+columns])
			at = (h*rows + (h+2)%rows) * columns
			for i := range columns {
				m[at+i] = 1
			}
		}
	}
	return m
}

func (s *suite) optionCases() (cases []*ref.Attention) {
	packed, other := bounds(5, 1, 0, 64, 33, 1, s.long(100, 40), 0, 7),
		bounds(3, 4, 2, 50, 33, 0, s.long(130, 50), 3, 7)
	n := s.long(300, 100)
	seed := int64(0)
	add := func(q, k []int64, causal bool, how string, change func(g *ref.Attention)) {
		seed++
		g := &ref.Attention{Hq: 4, Hkv: 2, D: 16, Dv: 16, CuQ: q, CuK: k, Causal: causal}
		if seed%3 == 2 {
			g.D, g.Dv = 24, 40
		}
		if change != nil {
			change(g)
		}
		cases = append(cases, s.withOptions(g, seed, how, cmp.Or(g.BlockRows, 16), cmp.Or(g.BlockColumns, 16)))
	}
	shifts := func(g *ref.Attention) { g.Shift = []int64{-3, 4, 0, 2, 1000, -1000, -20, 1, 8} }
	// of scores of 500, the rounding of the logsumexp to F32 alone is larger than the tolerance
	near := func(g *ref.Attention) { g.Shift = []int64{-3, 4, 0, 2, 60, -60, -20, 1, 8} }
	for _, causal := range []bool{true, false} {
		add(packed, other, causal, "", shifts)
		add(packed, other, causal, "", func(g *ref.Attention) { shifts(g); g.Window = &ref.Window{Left: 9, Right: 3} })
		add(packed, other, causal, "sinks", nil)
		add(one(n), one(n), causal, "slopes", nil)
		add(packed, other, causal, "slopes", near)
		add(one(n), one(n), causal, "cap", nil)
		add(one(n), one(n), causal, "dropout", nil)
		add(one(n), one(s.long(500, 120)), causal, "blocks", nil)
		add(one(n), one(n), causal, "heads", func(g *ref.Attention) { g.BlockRows, g.BlockColumns = 64, 32 })
		// three sequences of several documents; the last block of a line is not whole
		add(bounds(50, 20, 70, 0, 69, 1), bounds(40, 43, 80, 3, 80, 3), causal, "blocks sinks", func(g *ref.Attention) {
			g.QuerySeq, g.KeySeq, g.BlockColumns = 70, 83, 33
		})
		add(one(n), one(n), causal, "heads", func(g *ref.Attention) {
			g.Window, g.Shift = &ref.Window{Left: 70, Right: 40}, []int64{5}
		})
		// In every second document, the mask hides all keys: kernels have tiles of queries and of
		// keys of which nothing is computed.
		eight := bounds(40, 30, 64, 33, 40, 40, 1, 40)
		add(eight, eight, causal, "blocks", func(g *ref.Attention) {
			g.D, g.Dv, g.BlockRows, g.BlockColumns = 32, 16, 1, 96
		})
		hidden := cases[len(cases)-1]
		for i := 1; i < len(eight)-1; i += 2 {
			columns := int64(len(hidden.Mask)) / hidden.Tq() // a line for each query
			clear(hidden.Mask[eight[i]*columns : eight[i+1]*columns])
		}
		// queries and keys of a rank of a ring: not the first of their sequences
		add(bounds(30, 53), bounds(44, 60), causal, "heads", func(g *ref.Attention) {
			g.QuerySeq, g.KeySeq, g.QueryAt, g.KeyAt, g.BlockRows, g.BlockColumns = 120, 170, 37+5*120, 61+3*170, 32, 24
			g.Shift = []int64{4, 19}
		})
		add(packed, other, causal, "sinks slopes cap dropout", near)
		add(one(n), one(n+9), causal, "sinks slopes cap dropout heads", func(g *ref.Attention) {
			g.BlockRows, g.BlockColumns = 64, 64
		})
	}
	// wider heads, for which kernels have other tiles
	for i, d := range [][2]int64{{112, 128}, {128, 80}, {256, 208}, {144, 256}} {
		causal := i%2 == 0
		wide := func(g *ref.Attention) { g.D, g.Dv, g.Hkv = d[0], d[1], 1+int64(i%2) }
		add(one(70), one(90), causal, "sinks", wide)
		add(bounds(40, 33), bounds(50, 40), causal, "sinks slopes cap dropout", wide)
		add(one(70), one(90), causal, "cap heads", wide)
	}
	// ranks without queries, keys or heads
	add(one(0), one(17), false, "sinks slopes", nil)
	add(one(17), one(0), false, "sinks slopes", nil)
	add(one(17), one(17), false, "sinks slopes", func(g *ref.Attention) { g.Hq, g.KVHead = 0, []int64{} })
	// windows wider than the call, of queries that are far from its keys, as on a rank of a ring
	for _, shift := range []int64{200, -200} {
		add(one(40), one(50), false, "", func(g *ref.Attention) {
			g.Window, g.Shift = &ref.Window{Left: 170, Right: 170}, []int64{shift}
		})
	}
	return cases
}

// carryCases add keys to a softmax over other keys: all queries have seen keys, or a sink, or some
// have seen none.
func (s *suite) carryCases(d tensor.DType, suffix string) {
	n := s.long(200, 70)
	for i, how := range []string{"", "sinks", "slopes cap dropout", "heads"} {
		for _, causal := range []bool{true, false} {
			dk, dv := int64(16), int64(24)
			if causal { // multiples of 16, for kernels on tensor cores, of each width of heads
				dk, dv = []int64{16, 128, 32, 64}[i], []int64{32, 112, 240, 16}[i]
			}
			g := s.withOptions(&ref.Attention{Hq: 4, Hkv: 2, D: dk, Dv: dv, CuQ: bounds(n, 30), CuK: bounds(n+20, 35),
				Causal: causal, Shift: []int64{-11, 3}, Scale: 0.3}, int64(80+i), how, 32, 16)
			if !s.selected(d, g) {
				continue
			}
			x := newAttentionInput(d, g, seeded(28, int64(80+i)))
			r := seeded(30, int64(i))
			x.out, x.lse = normal(r, g.Tq()*g.Hq*g.Dv), normal(r, g.Tq()*g.Hq)
			for row := range x.lse {
				if r.IntN(4) > 0 {
					continue
				}
				if x.lse[row] = math.Inf(-1); g.Sinks != nil { // an earlier call without visible keys
					x.lse[row] = g.Sinks[int64(row)%g.Hq]
				}
				clear(x.out[int64(row)*g.Dv:][:g.Dv])
			}
			x.wide = i%2 == 0
			name := "carry " + optionsName(g) + suffix
			s.check(name, attentionWant(name, g, x), func(b *bench) ([]*array, error) {
				return b.attention(g, x, dense, headMajor)
			})
		}
	}
	// Keys that no query sees change nothing: out and lse keep their bits.
	g := &ref.Attention{Hq: 2, Hkv: 2, D: 16, Dv: 16, CuQ: one(40), CuK: one(30), Causal: true, Shift: []int64{-15},
		Scale: 0.3}
	if !s.selected(d, g) {
		return
	}
	s.t.Run("carry without visible keys"+suffix, func(t *testing.T) {
		x := newAttentionInput(d, g, seeded(31))
		x.out, x.lse = normal(seeded(32), g.Tq()*g.Hq*g.Dv), normal(seeded(33), g.Tq()*g.Hq)
		x.dout = nil
		got := s.bits(t, func(b *bench) ([]*array, error) { return b.attention(g, x, dense, dense) })
		for i, want := range [][]float64{x.out[:15*g.Hq*g.Dv], x.lse[:15*g.Hq]} {
			for j, v := range want {
				if v != decode(tensor.F32, got[i][4*j:]) {
					t.Fatalf("%s of a query that sees no key of the call has changed", attentionResults[i])
				}
			}
		}
	})
}
