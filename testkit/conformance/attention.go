package conformance

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// attentionInput has the values of a case, rounded to type d.
type attentionInput struct {
	d             tensor.DType
	q, k, v, dout []float64
	// what forward adds to: out and lse over other keys, rounded to F32; nil = no carry
	out, lse []float64
	wide     bool // gradients in F32
}

func newAttentionInput(d tensor.DType, g *ref.Attention, r *rand.Rand) attentionInput {
	n := func(n int64) []float64 { return normalAs(d, r, n) }
	return attentionInput{d: d, q: n(g.Tq() * g.Hq * g.D), k: n(g.Tk() * g.Hkv * g.D), v: n(g.Tk() * g.Hkv * g.Dv),
		dout: n(g.Tq() * g.Hq * g.Dv)}
}

// outType and gradType are the types of out and of the gradients.
func (x *attentionInput) outType() tensor.DType {
	if x.out != nil {
		return tensor.F32
	}
	return x.d
}

func (x *attentionInput) gradType() tensor.DType {
	if x.wide {
		return tensor.F32
	}
	return x.d
}

// attention runs forward and backward and returns out, lse, dq, dk, dv, and dsinks and dslopes if
// the case has them. lq is the layout of queries, lk of keys and values.
func (b *bench) attention(g *ref.Attention, x attentionInput, lq, lk layout) ([]*array, error) {
	q := b.in("q", x.d, lq, x.q, g.Tq(), g.Hq, g.D)
	k := b.in("k", x.d, lk, x.k, g.Tk(), g.Hkv, g.D)
	v := b.in("v", x.d, lk, x.v, g.Tk(), g.Hkv, g.Dv)
	out := b.inout("out", x.outType(), lq, x.out, g.Tq(), g.Hq, g.Dv)
	lse := b.inout("lse", tensor.F32, layout{order: []int{1, 0}, gap: 1, shift: 1}, x.lse, g.Tq(), g.Hq)
	a := &device.Attention{Q: q.Tensor, K: k.Tensor, V: v.Tensor, Out: out.Tensor, LSE: lse.Tensor, CuQ: g.CuQ,
		CuK: g.CuK, Shift: g.Shift, KVHead: g.KVHead, Causal: g.Causal, Scale: g.Scale, Softcap: g.Softcap,
		Dropout: g.Dropout, Seed: g.Seed, HeadAt: g.HeadAt, QueryAt: g.QueryAt, KeyAt: g.KeyAt, QuerySeq: g.QuerySeq,
		KeySeq:       g.KeySeq,
		BlockRows:    g.BlockRows,
		BlockColumns: g.BlockColumns,
		Carry:        x.out != nil}
	if w := g.Window; w != nil {
		a.Window = &device.Window{Left: w.Left, Right: w.Right}
	}
	if g.Sinks != nil && !a.Carry {
		a.Sinks = b.in("sinks", tensor.F32, shifted, g.Sinks, g.Hq).Tensor
	}
	if g.Slopes != nil {
		a.Slopes = b.in("slopes", tensor.F32, shifted, g.Slopes, g.Hq).Tensor
	}
	if g.Mask != nil {
		rows, columns := (g.QuerySeq+g.BlockRows-1)/g.BlockRows, (g.KeySeq+g.BlockColumns-1)/g.BlockColumns
		values := make([]float64, len(g.Mask))
		for i, m := range g.Mask {
			values[i] = float64(m)
		}
		a.BlockMask = b.in("block mask", tensor.U8, dense, values, int64(len(g.Mask))/(rows*columns), rows,
			columns).Tensor
	}
	a.Workspace = b.out("workspace", tensor.U8, dense, b.dev.AttentionWorkspace(a, false)).Tensor
	if err := b.dev.AttentionForward(b.stream, a); err != nil {
		return nil, err
	}
	results := []*array{out, lse}
	if x.dout != nil {
		dq := b.out("dq", x.gradType(), lq, g.Tq(), g.Hq, g.D)
		dk := b.out("dk", x.gradType(), lk, g.Tk(), g.Hkv, g.D)
		dv := b.out("dv", x.gradType(), lk, g.Tk(), g.Hkv, g.Dv)
		results = append(results, dq, dk, dv)
		da := &device.AttentionGrad{Attention: *a, DOut: b.in("dout", x.d, lq, x.dout, g.Tq(), g.Hq, g.Dv).Tensor,
			DQ: dq.Tensor, DK: dk.Tensor, DV: dv.Tensor}
		if g.Sinks != nil {
			dsinks := b.out("dsinks", tensor.F32, shifted, g.Hq)
			da.Sinks, da.DSinks, results = b.in("sinks of backward", tensor.F32, shifted, g.Sinks, g.Hq).Tensor,
				dsinks.Tensor, append(results, dsinks)
		}
		if g.Slopes != nil {
			dslopes := b.out("dslopes", tensor.F32, shifted, g.Hq)
			da.DSlopes, results = dslopes.Tensor, append(results, dslopes)
		}
		da.Workspace = b.out("workspace of backward", tensor.U8, dense,
			b.dev.AttentionWorkspace(&da.Attention, true)).Tensor
		if err := b.dev.AttentionBackward(b.stream, da); err != nil {
			return nil, err
		}
	}
	return results, nil
}

var attentionResults = []string{"out", "lse", "dq", "dk", "dv"}

// attentionWants caches the references by case. They take long and are the same for every
// instruction set.
var attentionWants sync.Map

func attentionWant(name string, g *ref.Attention, x attentionInput) []want {
	if w, ok := attentionWants.Load(name); ok {
		return w.([]want)
	}
	f := ref.Convert[float32, float64]
	q, k, v, d := f(x.q), f(x.k), f(x.v), f(x.dout)
	plain := *g
	if x.d == tensor.BF16 { // a plain implementation in BF16 keeps scores and probabilities in it
		plain.Keep = func(v float64) float64 { return float64(tensor.BF16ToF32(tensor.F32ToBF16(float32(v)))) }
	}
	var out, lse []float64
	var out32, lse32 []float32
	if x.out != nil {
		out, lse, out32, lse32 = slices.Clone(x.out), slices.Clone(x.lse), f(x.out), f(x.lse)
		ref.AttentionCarry(g, x.q, x.k, x.v, out, lse)
		ref.AttentionCarry(&plain, q, k, v, out32, lse32)
	} else {
		out, lse = ref.AttentionForward(g, x.q, x.k, x.v)
		out32, lse32 = ref.AttentionForward(&plain, q, k, v)
	}
	// Backward reads out as forward writes it, rounded to the type of the case.
	o := x.outType()
	grad := ref.AttentionGradients(g, x.q, x.k, x.v, rounded(o, out), lse, x.dout)
	grad32 := ref.AttentionGradients(&plain, q, k, v, f(rounded(o, ref.Convert[float64](out32))), lse32, d)
	t := x.gradType()
	w := []want{both("out", out, out32).as(o), both("lse", lse, lse32), both("dq", grad.DQ, grad32.DQ).as(t),
		both("dk", grad.DK, grad32.DK).as(t), both("dv", grad.DV, grad32.DV).as(t)}
	// dP - delta, whose terms cancel for a query with a single key, times a key
	w[2].terms = g.Scale * rms(x.dout) * rms(x.v) * math.Sqrt(float64(g.Dv)) * rms(x.k)
	w[3].terms = w[2].terms
	// Score, scale, difference, exponential, dP - delta, product and sum have a unit each. The
	// logsumexp is an exponent: a unit of it is a unit of the probabilities for each 1 of its size.
	for i := range w {
		w[i].chain = ulp * max(8, 7+largestOf(lse))
		if w[i].gate = 2e-2; i == 0 {
			w[i].gate = 1e-2
		}
		if i != 1 && x.d == tensor.BF16 && !w[i].bf16 { // an F32 result of products that round to BF16
			w[i].bound = w[i].gate
		}
	}
	if g.Sinks != nil {
		w = append(w, sumOf("dsinks", x.d, grad.DSinks, grad32.DSinks, grad.SinkTerms))
	}
	if g.Slopes != nil {
		w = append(w, sumOf("dslopes", x.d, grad.DSlopes, grad32.DSlopes, grad.SlopeTerms))
	}
	attentionWants.Store(name, w)
	return w
}

// sumOf returns the want for a gradient [heads] that is a sum of many terms of both signs. Errors
// are relative to the largest of sizes, the sums of the magnitudes of a head's terms.
func sumOf(name string, d tensor.DType, ref64 []float64, ref32 []float32, sizes []float64) want {
	w := both(name, ref64, ref32)
	size, value := 0.0, 0.0
	for h := range sizes {
		size, value = max(size, sizes[h]), max(value, math.Abs(ref64[h]))
	}
	if value > 0 {
		plain, _ := deviation(w.plain, w.ref)
		if w.bound = min(largest*size/value, max(2*plain, 8*ulp*size/value)); d == tensor.BF16 {
			w.bound = 1e-2 * size / value
		}
	}
	return w
}

// one returns the boundaries of one document of n tokens.
func one(n int64) []int64 { return []int64{0, n} }

// bounds returns the boundaries of documents of the given lengths.
func bounds(lengths ...int64) []int64 {
	c := []int64{0}
	for _, n := range lengths {
		c = append(c, c[len(c)-1]+n)
	}
	return c
}

// listed returns boundaries as text for the name of a case.
func listed(cu []int64) string {
	if n := len(cu) - 1; n > 20 {
		return fmt.Sprintf("%d in %d documents", cu[n], n)
	}
	return fmt.Sprint(cu)
}

func testAttention(s *suite) {
	var cases []ref.Attention
	add := func(g ref.Attention) { cases = append(cases, g) }
	for i, d := range []int64{1, 3, 16, 33, 64, 80, 128, 200} { // head sizes
		n := []int64{65, 100, 63}[i%3]
		add(ref.Attention{Hq: 2, Hkv: 2, D: d, Dv: d, CuQ: one(n), CuK: one(n), Causal: i%2 == 0})
		add(ref.Attention{Hq: 1, Hkv: 1, D: d, Dv: []int64{2, 64, 7, 128, 33, 1, 70, 64}[i], CuQ: one(n), CuK: one(n),
			Causal: i%2 == 1})
	}
	sizes := len(cases)
	// lengths, with several heads so that errors are not small by chance
	for _, n := range []int64{1, 2, 3, 7, 17, 63, 64, 65, s.long(257, 193)} {
		add(ref.Attention{Hq: 8, Hkv: 8, D: 16, Dv: 16, CuQ: one(n), CuK: one(n), Causal: true})
		add(ref.Attention{Hq: 8, Hkv: 8, D: 16, Dv: 16, CuQ: one(n), CuK: one(n)})
	}
	// queries and keys
	for _, n := range [][2]int64{{1, 257}, {257, 1}, {100, 3}, {3, 100}, {64, 200}, {200, 64}, {300, 257}, {17, 0},
		{0, 17}, {0, 0}} {
		for _, causal := range []bool{true, false} {
			add(ref.Attention{Hq: 2, Hkv: 1, D: 8, Dv: 8, CuQ: one(n[0]), CuK: one(n[1]), Causal: causal})
		}
	}
	packed := bounds(5, 1, 0, 64, 33, 1, 1, 100, 0, 7, 70)
	for _, causal := range []bool{true, false} { // documents
		add(ref.Attention{Hq: 2, Hkv: 2, D: 32, Dv: 32, CuQ: packed, CuK: packed, Causal: causal})
		add(ref.Attention{Hq: 3, Hkv: 1, D: 7, Dv: 9, CuQ: packed, CuK: bounds(3, 4, 2, 0, 50, 1, 0, 130, 0, 7, 64),
			Causal: causal})
		add(ref.Attention{Hq: 1, Hkv: 1, D: 20, Dv: 20, CuQ: bounds(0, 0, 200, 210), CuK: bounds(1, 0, 200, 210),
			Causal: causal})
	}
	lengths := make([]int64, 150) // many documents
	for i := range lengths {
		lengths[i] = int64(i % 4)
	}
	add(ref.Attention{Hq: 2, Hkv: 1, D: 6, Dv: 5, CuQ: bounds(lengths...), CuK: bounds(lengths...), Causal: true})
	// query heads of a key head
	for _, groups := range [][]int64{{0, 0, 0, 1}, {1, 1, 3}, {0, 1, 1, 1, 1, 2}, {2}} {
		n := int64(70)
		add(ref.Attention{Hq: int64(len(groups)), Hkv: 4, D: 24, Dv: 16, CuQ: one(n), CuK: one(n), KVHead: groups,
			Causal: true})
	}
	add(ref.Attention{Hq: 8, Hkv: 2, D: 64, Dv: 64, CuQ: one(129), CuK: one(129), Causal: true})
	// a rank without heads
	add(ref.Attention{Hq: 0, Hkv: 2, D: 64, Dv: 64, CuQ: one(9), CuK: one(9), KVHead: []int64{}, Causal: true})
	long := s.long(1100, 330)
	// several blocks of any size
	add(ref.Attention{Hq: 1, Hkv: 1, D: 8, Dv: 8, CuQ: one(long), CuK: one(long), Causal: true})
	add(ref.Attention{Hq: 2, Hkv: 1, D: 4, Dv: 4, CuQ: one(s.long(700, 210)), CuK: one(s.long(900, 270))})
	cases = append(cases, s.windows()...)
	for i := range cases {
		if s.few && i >= sizes && i%3 != 0 {
			continue
		}
		g := &cases[i]
		g.Scale = []float64{1, 0.7, 1.5, 0.3}[i%4] / math.Sqrt(float64(g.D))
		layouts := [][2]layout{{headMajor, headMajor}, {dense, padded}, {padded, headMajor}, {shifted, dense}}
		l := layouts[i%4]
		s.typed(func(d tensor.DType, suffix string) {
			if !s.selected(d, g) {
				return
			}
			x := newAttentionInput(d, g, seeded(20, int64(i)))
			name := fmt.Sprintf("%d of %d heads, D %d %d, q %v, k %v, kv %v, causal %v", g.Hq, g.Hkv, g.D, g.Dv,
				listed(g.CuQ), listed(g.CuK), g.KVHead, g.Causal)
			if w := g.Window; w != nil {
				name += fmt.Sprintf(", window %d %d", w.Left, w.Right)
			}
			name += suffix
			s.check(name, attentionWant(name, g, x), func(b *bench) ([]*array, error) {
				return b.attention(g, x, l[0], l[1])
			})
		})
	}
	s.typed(s.attentionScores)
}

// windows returns cases of windows: one side, both, only a query's own key, wider than a tile and
// than the document, with a causal mask, with unequal lengths and with several documents.
func (s *suite) windows() (cases []ref.Attention) {
	add := func(q, k []int64, causal bool, left, right int64) {
		cases = append(cases,
			ref.Attention{Hq: 2, Hkv: 1, D: 16, Dv: 12, CuQ: q, CuK: k, Causal: causal,
				Window: &ref.Window{Left: left, Right: right}})
	}
	for _, w := range [][2]int64{{9, -1}, {-1, 5}, {7, 3}, {0, 0}, {0, -1}, {-1, 0}, {-1, -1}, {1 << 40, 1 << 40},
		{math.MaxInt64, 2}} {
		add(one(100), one(100), false, w[0], w[1])
	}
	for _, w := range [][2]int64{{9, -1}, {0, -1}, {70, 4}, {150, 0}} {
		add(one(300), one(300), true, w[0], w[1])
	}
	// queries before the first key see the keys inside the window
	for _, w := range [][2]int64{{5, 0}, {-1, 8}, {100, 100}, {0, 70}, {20, 20}} {
		for _, n := range [][2]int64{{40, 130}, {130, 40}, {3, 200}, {200, 3}, {17, 0}} {
			add(one(n[0]), one(n[1]), w[0] == 20, w[0], w[1])
		}
	}
	packed, other := bounds(5, 1, 0, 64, 33, 1, 1, 100, 0, 7, 70), bounds(3, 4, 2, 0, 50, 1, 0, 130, 0, 7, 64)
	for _, causal := range []bool{true, false} {
		add(packed, packed, causal, 10, -1)
		add(packed, packed, causal, 3, 5)
		add(packed, other, causal, 30, 20)
		// several blocks of any size, most of which a query does not reach
		add(one(s.long(700, 300)), one(s.long(900, 400)), causal, s.long(128, 40), s.long(64, 30))
	}
	return cases
}

// attentionScores has scores that differ much and are far from zero, to test the running maximum
// and its rescaling. Only the absolute bound applies: the logsumexp is saved in f32, and at scores
// of 100 its rounding is 4e-6 of every probability that backward computes from it. A plain
// implementation that saves the probabilities does not have this error.
func (s *suite) attentionScores(d tensor.DType, suffix string) {
	for _, causal := range []bool{true, false} {
		g := &ref.Attention{Hq: 2, Hkv: 1, D: 4, Dv: 6, CuQ: bounds(257, 40), CuK: bounds(257, 40), Scale: 1,
			Causal: causal}
		if !s.selected(d, g) {
			continue
		}
		x := newAttentionInput(d, g, seeded(21))
		for j := range g.Tk() { // rising along the keys, to scores near ±100
			for c := range g.D {
				x.k[j*g.D+c] = float64(float32(x.k[j*g.D+c] * float64(j%97) / 4))
			}
		}
		x.k = rounded(d, x.k)
		name := fmt.Sprint("steep scores, causal ", causal, suffix)
		wants := slices.Clone(attentionWant(name, g, x))
		for i := range wants {
			wants[i].plain = nil
		}
		s.check(name, wants, func(b *bench) ([]*array, error) { return b.attention(g, x, headMajor, headMajor) })
	}
}
