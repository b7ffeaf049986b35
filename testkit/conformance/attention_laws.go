package conformance

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// testAttentionLaws compares the bits of runs with each other, without a reference.
func testAttentionLaws(s *suite) {
	s.typed(func(d tensor.DType, suffix string) {
		for name, law := range map[string]func(*testing.T, tensor.DType){
			"a head is independent of the others": s.headsAlone, "a layout changes no bit": s.layoutsAgree,
			"no token sees the future or another document": s.causality,
			"NaN shows, in its document alone":             s.attentionNaN,
			"scores that overflow show":                    s.attentionOverflow,
		} {
			s.t.Run(name+suffix, func(t *testing.T) { law(t, d) })
		}
	})
}

// attentionWidths returns the bytes of a token in out, lse, dq, dk and dv.
func attentionWidths(d tensor.DType, g *ref.Attention) []int64 {
	n := d.Size()
	return []int64{n * g.Hq * g.Dv, 4 * g.Hq, n * g.Hq * g.D, n * g.Hkv * g.D, n * g.Hkv * g.Dv}
}

// headsAlone runs all heads, then each range of query heads alone. Because the bits are equal,
// sequence parallelism is exact for any number of ranks.
func (s *suite) headsAlone(t *testing.T, d tensor.DType) {
	for _, g := range []ref.Attention{
		{Hq: 6, Hkv: 4, D: 64, Dv: 64, CuQ: one(300), CuK: one(300), KVHead: []int64{0, 0, 1, 2, 2, 2}, Causal: true,
			Scale: 0.125},
		{Hq: 6, Hkv: 4, D: 33, Dv: 20, CuQ: bounds(50, 1, 0, 211), CuK: bounds(50, 1, 5, 260),
			KVHead: []int64{0, 0, 1, 2, 2, 2}, Scale: 0.2},
		{Hq: 6, Hkv: 4, D: 40, Dv: 48, CuQ: one(s.long(1200, 270)), CuK: one(s.long(1200, 270)),
			KVHead: []int64{0, 0, 1, 2, 2, 2}, Causal: true, Scale: 0.1},
		{Hq: 6, Hkv: 4, D: 256, Dv: 128, CuQ: one(s.long(300, 70)), CuK: one(s.long(300, 70)),
			KVHead: []int64{0, 0, 1, 2, 2, 2}, Causal: true, Scale: 0.05},
		{Hq: 6, Hkv: 4, D: 16, Dv: 16, CuQ: bounds(90, 210), CuK: bounds(90, 260), KVHead: []int64{0, 0, 1, 2, 2, 2},
			Window: &ref.Window{Left: 40, Right: 9}, Scale: 0.2},
	} {
		s.headsAloneOf(t, d, &g)
	}
}

// headsAloneOf is headsAlone for one case of 6 query heads on 4 key heads.
func (s *suite) headsAloneOf(t *testing.T, d tensor.DType, g *ref.Attention) {
	if !s.selected(d, g) {
		return
	}
	x := newAttentionInput(d, g, seeded(22, g.D))
	all := s.bits(t, func(b *bench) ([]*array, error) { return b.attention(g, x, dense, dense) })
	for kv, heads := range [][]int64{{0, 1}, {2}, {3, 4, 5}} {
		lo, n := heads[0], int64(len(heads))
		sub := *g
		sub.Hq, sub.Hkv, sub.KVHead = n, 1, nil
		sub.HeadAt += lo
		if g.Sinks != nil {
			sub.Sinks = g.Sinks[lo : lo+n]
		}
		if g.Slopes != nil {
			sub.Slopes = g.Slopes[lo : lo+n]
		}
		if g.Mask != nil {
			one := int64(len(g.Mask)) / g.Hq
			sub.Mask = g.Mask[lo*one : (lo+n)*one]
		}
		alone := s.bits(t, func(b *bench) ([]*array, error) {
			return b.attention(&sub, attentionInput{d: d,
				q: columns(x.q, g.Hq*g.D, lo*g.D, n*g.D), k: columns(x.k, g.Hkv*g.D, int64(kv)*g.D, g.D),
				v: columns(x.v, g.Hkv*g.Dv, int64(kv)*g.Dv, g.Dv), dout: columns(x.dout, g.Hq*g.Dv, lo*g.Dv, n*g.Dv)},
				headMajor, headMajor)
		})
		widths, names := attentionWidths(d, g), attentionResults
		if g.Sinks != nil {
			widths, names = append(widths, 4*g.Hq), append(slices.Clone(names), "dsinks")
		}
		if g.Slopes != nil {
			widths, names = append(widths, 4*g.Hq), append(slices.Clone(names), "dslopes")
		}
		for i, row := range widths {
			total, from, part := g.Hq, lo, n
			if i == 3 || i == 4 {
				total, from, part = g.Hkv, int64(kv), 1
			}
			if width := row / total; !bytes.Equal(columns(all[i], row, from*width, part*width), alone[i]) {
				t.Errorf("%s of query heads %v alone differs in bits from the run of %d heads (D %d)", names[i], heads,
					g.Hq, g.D)
			}
		}
	}
}

// columns returns a range of the columns of lines of a width.
func columns[T any](x []T, width, from, n int64) []T {
	var y []T
	for at := int64(0); at < int64(len(x)); at += width {
		y = append(y, x[at+from:at+from+n]...)
	}
	return y
}

func (s *suite) layoutsAgree(t *testing.T, d tensor.DType) {
	for _, g := range []*ref.Attention{
		{Hq: 4, Hkv: 2, D: 40, Dv: 24, CuQ: bounds(130, 7, 400), CuK: bounds(130, 7, 400), Causal: true, Scale: 0.2},
		// whole vectors in some layouts
		{Hq: 4, Hkv: 2, D: 48, Dv: 32, CuQ: bounds(130, 7, 40), CuK: bounds(130, 7, 40), Causal: true, Scale: 0.2},
	} {
		if !s.selected(d, g) {
			continue
		}
		x := newAttentionInput(d, g, seeded(23))
		first := s.bits(t, func(b *bench) ([]*array, error) { return b.attention(g, x, dense, dense) })
		for _, l := range []layout{shifted, padded, headMajor} {
			for i, bits := range s.bits(t, func(b *bench) ([]*array, error) { return b.attention(g, x, l, l) }) {
				if !bytes.Equal(bits, first[i]) {
					t.Errorf("%s of heads of %d and %d differs in bits in layout %v", attentionResults[i], g.D, g.Dv, l)
				}
			}
		}
	}
}

// causality changes q, k, v and dout of one token to large values. Results that must not depend on
// the token keep their bits: forward, results of queries that do not see the token; backward, also
// gradients of keys that no changed query sees.
func (s *suite) causality(t *testing.T, d tensor.DType) {
	cu := bounds(70, 1, 230, 99)
	for _, mask := range []ref.Attention{{Causal: true}, {}, {Window: &ref.Window{Left: 33, Right: 7}}} {
		g := &ref.Attention{Hq: 2, Hkv: 1, D: 32, Dv: 32, CuQ: cu, CuK: cu, Causal: mask.Causal, Window: mask.Window,
			Scale: 0.2}
		if !s.selected(d, g) {
			continue
		}
		x := newAttentionInput(d, g, seeded(24))
		before := s.bits(t, func(b *bench) ([]*array, error) { return b.attention(g, x, headMajor, headMajor) })
		tokens := []int64{0, 69, 70, 71, 150, 300, 301, 399}
		if s.emulated() {
			tokens = []int64{69, 70, 150, 301}
		}
		for _, token := range tokens {
			y := attentionInput{d: d, q: slices.Clone(x.q), k: slices.Clone(x.k), v: slices.Clone(x.v),
				dout: slices.Clone(x.dout)}
			for _, a := range []struct {
				x     []float64
				width int64
			}{{y.q, g.Hq * g.D}, {y.k, g.Hkv * g.D}, {y.v, g.Hkv * g.Dv}, {y.dout, g.Hq * g.Dv}} {
				for i := range a.width {
					a.x[token*a.width+i] += 50
				}
			}
			after := s.bits(t, func(b *bench) ([]*array, error) { return b.attention(g, y, headMajor, headMajor) })
			reaches := func(i int64) bool { lo, hi := g.Visible(i); return i == token || lo <= token && token < hi }
			// The gradient of key j has a term from every query that sees it; those that see the
			// token too have changed.
			reachesKey := func(j int64) bool {
				return g.Document(j) == g.Document(token)
			}
			for i, width := range attentionWidths(d, g) {
				for j := range g.Tq() {
					same := bytes.Equal(before[i][j*width:(j+1)*width], after[i][j*width:(j+1)*width])
					may := i < 3 && reaches(j) || i >= 3 && reachesKey(j)
					if !same && !may {
						t.Errorf("causal %v, window %v: token %d changes %s of token %d, which cannot see it", g.Causal,
							g.Window, token, attentionResults[i], j)
					}
					// these gradients are 0 in a document of one token
					if same && j == token && attentionResults[i] != "dq" && attentionResults[i] != "dk" {
						t.Errorf("causal %v, window %v: token %d has changed, its %s has not", g.Causal, g.Window,
							token, attentionResults[i])
					}
				}
			}
		}
		s.lastQuery(t, g, x, before)
	}
}

// lastQuery changes dout of one query. Keys that the query does not see keep their gradients.
func (s *suite) lastQuery(t *testing.T, g *ref.Attention, x attentionInput, before [][]byte) {
	const token = 150
	y := x
	y.dout = slices.Clone(x.dout)
	for i := range g.Hq * g.Dv {
		y.dout[token*g.Hq*g.Dv+i] += 50
	}
	after := s.bits(t, func(b *bench) ([]*array, error) { return b.attention(g, y, headMajor, headMajor) })
	lo, hi := g.Visible(token)
	for i, width := range attentionWidths(x.d, g) {
		for j := range g.Tk() {
			same := i < 3 || bytes.Equal(before[i][j*width:(j+1)*width], after[i][j*width:(j+1)*width])
			if !same && (j < lo || j >= hi) {
				t.Errorf("causal %v, window %v: dout of query %d changes %s of key %d", g.Causal, g.Window, token,
					attentionResults[i], j)
			}
		}
	}
}

// attentionNaN runs attentionNaNOf with and without a causal mask.
func (s *suite) attentionNaN(t *testing.T, d tensor.DType) {
	cu := bounds(40, 100, 30)
	for _, causal := range []bool{true, false} {
		s.attentionNaNOf(t, d,
			&ref.Attention{Hq: 2, Hkv: 2, D: 16, Dv: 16, CuQ: cu, CuK: cu, Causal: causal, Scale: 0.25})
	}
}

// attentionNaNOf sets an element of each input to NaN, one after the other, in document 1. The
// results must have NaN where the reference has it. NaN may spread within the document, because
// whole tiles are multiplied, but not to other documents. Gradients of sinks and slopes are sums
// over all documents.
func (s *suite) attentionNaNOf(t *testing.T, d tensor.DType, g *ref.Attention) {
	const token = 60
	if !s.selected(d, g) {
		return
	}
	for input, name := range []string{"q", "k", "v", "dout"} {
		x := newAttentionInput(d, g, seeded(25))
		[][]float64{x.q, x.k, x.v, x.dout}[input][token*2*16+16+3] = math.NaN()
		out, lse := ref.AttentionForward(g, x.q, x.k, x.v)
		grad := ref.AttentionGradients(g, x.q, x.k, x.v, out, lse, x.dout)
		b := newBench(t, s.one)
		results, err := b.attention(g, x, headMajor, headMajor)
		if err != nil {
			t.Fatal(err)
		}
		b.finish()
		for i, want := range [][]float64{out, lse, grad.DQ, grad.DK, grad.DV} {
			got := results[i].values()
			width := int64(len(want)) / g.Tq()
			for at, v := range want {
				d := g.Document(int64(at) / width)
				if math.IsNaN(v) && !math.IsNaN(got[at]) || math.IsNaN(got[at]) && d != 1 {
					t.Errorf("causal %v, NaN in %s: %s of token %d is %v, want %v", g.Causal, name, attentionResults[i],
						int64(at)/width, got[at], v)
					break
				}
			}
		}
		for i, r := range results[5:] { // the NaN is in head 1
			if v := r.values(); math.IsNaN(v[0]) || !math.IsNaN(v[1]) {
				t.Errorf("NaN in %s of head 1: gradient %d of sinks and slopes is %v", name, i, v)
			}
		}
		b.close()
	}
}

// attentionOverflow has a document whose scores are all -inf in F32. Their softmax is NaN, not the
// mean of the values.
func (s *suite) attentionOverflow(t *testing.T, d tensor.DType) {
	cu := bounds(40, 100, 30)
	for _, causal := range []bool{true, false} {
		g := &ref.Attention{Hq: 2, Hkv: 2, D: 16, Dv: 16, CuQ: cu, CuK: cu, Causal: causal, Scale: 0.25}
		if !s.selected(d, g) {
			continue
		}
		x := newAttentionInput(d, g, seeded(27))
		for at := cu[1] * 2 * 16; at < cu[2]*2*16; at++ {
			x.q[at], x.k[at] = 0x1p100, -0x1p100
		}
		b := newBench(t, s.one)
		results, err := b.attention(g, x, headMajor, headMajor)
		if err != nil {
			t.Fatal(err)
		}
		b.finish()
		out, lse := results[0].values(), results[1].values()
		for at, v := range out {
			row := int64(at) / 16
			over := g.Document(row/2) == 1
			if over != math.IsNaN(v) || over == (lse[row]-lse[row] == 0) {
				t.Errorf("causal %v: out of token %d is %v, lse %v", causal, row/2, v, lse[row])
				break
			}
		}
		b.close()
	}
}
